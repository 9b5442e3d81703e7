//! The route of an LMDeploy server: `/update_weights`, if all its conditions were tested and hold, else checkpoint-engine.
//!
//! What can be asked of the server is asked, never assumed: only the Ray executor has `/update_weights` (the others answer 500), and only a
//! server with `--enable-abort-handling` can end requests without sleeping.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};

use super::allowed::{self, Seen};
use super::tensors::{Tensors, update};
use super::{Lmdeploy, null, unsupported};
use crate::EngineError;
use crate::checkpoint_engine::Call;
use crate::device::DeviceRoute;
use crate::feed::{CheckpointEngine, Feed, FeedJob};
use crate::http::{Answer, Until};
use crate::record::UNKNOWN;
use crate::server::Server;
use weightsync_core::protocol::{KvCachePolicy, PausePolicy};
use weightsync_torch::lmdeploy_nothing;

/// Name of the route that needs no sleep.
const TENSORS: &str = "update_weights";
/// Why a server that could be fed awake sleeps.
const MIXES: &str = "it answers from a mixture of versions meanwhile, and spec.update.pause is not AbortAwake";
/// Name of the route of sleeping servers.
const CHECKPOINT_ENGINE: &str = "checkpoint-engine";

/// The properties of one start of a server.
#[derive(Debug)]
pub(super) struct Probed {
    start: String,
    interface: Option<Value>,
    /// UUIDs of the GPUs of its ranks.
    gpus: Vec<String>,
    checkpoint_engine: bool,
    /// Why it accepts no tensors, whatever the policy.
    no_tensors: Option<String>,
    /// Why it cannot end requests.
    no_abort: Option<String>,
}

impl Lmdeploy {
    /// `/openapi.json`; `None` if the server does not offer it.
    pub(super) async fn interface(&self, until: Until) -> Option<Value> {
        let answer = self.http.get("/openapi.json", until).await.ok()?.json().ok()?;
        Some(answer.value().clone())
    }

    pub(super) async fn choose_route(
        &self,
        pause: PausePolicy,
        kv_cache: KvCachePolicy,
        served: Option<&Path>,
        until: Until,
    ) -> Result<DeviceRoute, EngineError> {
        let process = self.process();
        let named = process.as_ref().and_then(|process| process.after("api_server")).map(Path::new);
        let config = served.or(named).and_then(|model| std::fs::read(model.join("config.json")).ok());
        let config: Option<Value> = config.and_then(|config| serde_json::from_slice(&config).ok());
        allowed::any_route(config.as_ref()).map_err(|why| unsupported(why, "serve a model in bfloat16 or float16"))?;
        let probed = self.probe_start(until).await?;
        let gpus = probed.gpus.clone();
        let seen =
            Seen { interface: probed.interface.as_ref(), ranks: gpus.len(), config: config.as_ref(), process: process.as_ref(), kv_cache };
        let why_not = match allowed::tensor_route(&seen) {
            Ok(()) => probed.no_tensors.clone().or_else(|| match pause {
                PausePolicy::AbortAwake => probed.no_abort.clone(),
                PausePolicy::External => None,
                _ => Some(MIXES.to_owned()),
            }),
            Err(why) => Some(why),
        };
        let Some(why_not) = why_not else {
            return Ok(DeviceRoute { name: TENSORS, gpus, gated: false, why_not_faster: None });
        };
        if pause == PausePolicy::External {
            let what = format!("{TENSORS} cannot be used ({why_not}), and every other way lets LMDeploy sleep, which ends its requests");
            return Err(unsupported(what, "set spec.update.pause to Abort for this pool"));
        }
        if !probed.checkpoint_engine {
            let what = format!("LMDeploy has no checkpoint-engine, and {TENSORS} cannot be used: {why_not}");
            return Err(unsupported(what, "install checkpoint-engine 0.4.2 next to LMDeploy"));
        }
        Ok(DeviceRoute { name: CHECKPOINT_ENGINE, gpus, gated: true, why_not_faster: Some(format!("{TENSORS}: {why_not}")) })
    }

    /// Tests this start once for properties that no file shows: by an empty update, and by the end of a request that does not exist.
    async fn probe_start(&self, until: Until) -> Result<Arc<Probed>, EngineError> {
        let known = self.probed.lock().clone();
        if let Some(known) = known.filter(|known| known.start != UNKNOWN)
            && self.fingerprint(until).await? == known.start
        {
            return Ok(known);
        }
        // This involves every worker, which takes 10 ms and more.
        let status = self.status(until).await?;
        let gpus = gpus(&status)?;
        let checkpoint_engine = status.value().get("checkpoint_engine_version").is_some_and(|version| !version.is_null());
        let start = self.fingerprint(until).await?;
        // One for each rank: a rank takes the entry of its number.
        let body = update(gpus.iter().map(|_| lmdeploy_nothing().pickle()).collect(), false);
        let reply = self.http.post("/update_weights", Some(&body), until).await?;
        let no_tensors = if reply.status() == 500 {
            Some("its executor does not take tensors: start LMDeploy with --distributed-executor-backend ray".to_owned())
        } else {
            null(reply)?;
            None
        };
        let reply = self.http.post("/abort_request", Some(&json!({"abort_all": false, "session_id": i32::MAX})), until).await?;
        let no_abort = (reply.status() == 501).then(|| "it cannot end requests: start LMDeploy with --enable-abort-handling".to_owned());
        let probed = Arc::new(Probed { start, interface: self.interface(until).await, gpus, checkpoint_engine, no_tensors, no_abort });
        *self.probed.lock() = Some(probed.clone());
        Ok(probed)
    }

    pub(super) async fn open(&self, feed: FeedJob<'_>, until: Until) -> Result<Box<dyn Feed>, EngineError> {
        let FeedJob { job, route, .. } = feed;
        if route.name == TENSORS {
            return Ok(Box::new(Tensors::new(self.http.clone(), job.layout.clone(), route.gpus.clone())));
        }
        self.ready(until).await?;
        let (http, whole) = (self.http.clone(), Until::new(job.terms.timeout));
        let call = move |handles| -> Call {
            Box::pin(async move {
                let body = json!({ "zmq_handles": Value::Object(handles) });
                http.post("/update_weights_from_ipc", Some(&body), whole).await?.json()?.must("success", &Value::Bool(true)).map(drop)
            })
        };
        Ok(Box::new(CheckpointEngine::open(self.http.url(), &feed, call).await?))
    }

    /// The check of LMDeploy itself before checkpoint-engine; made first, because LMDeploy otherwise reports it only in the middle.
    async fn ready(&self, until: Until) -> Result<(), EngineError> {
        let status = self.status(until).await?;
        status.must("ready", &Value::Bool(true)).map(drop)
    }
}

/// UUIDs in the order of ranks.
fn gpus(status: &Answer) -> Result<Vec<String>, EngineError> {
    let list = |name: &str| status.value().get(name).and_then(Value::as_array).cloned().unwrap_or_default();
    let (uuids, ranks) = (list("device_uuids"), list("worker_ranks"));
    let mut pairs: Vec<(u64, String)> = uuids
        .iter()
        .zip(&ranks)
        .filter_map(|(uuid, rank)| Some((rank.as_u64()?, uuid.as_str().filter(|uuid| uuid.starts_with("GPU-"))?.to_owned())))
        .collect();
    pairs.sort();
    pairs.dedup();
    if pairs.is_empty() || pairs.len() != uuids.len() {
        return Err(status.bad("its workers do not name their GPUs".into()));
    }
    Ok(pairs.into_iter().map(|(_, uuid)| uuid).collect())
}

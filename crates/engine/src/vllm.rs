//! vLLM 0.32 with `VLLM_SERVER_DEV_MODE=1`: weights by `reload_weights` from a directory, or by our own back end if it was started with it.
//!
//! Decides paths, bodies and which reply means success. All facts are from the wheel of 0.32.0 (`entrypoints/rl/online/api_router.py`,
//! `entrypoints/serve/dev`) and were seen on the running server (`tests/engine`). Two of them shape this file. After a reload that failed
//! in the middle, the next one replays what the first had buffered and fails or loads a mixture, until an empty reload closes it
//! (`model_executor/model_loader/reload/layerwise.py`). And `/health` returns 200 while the engine core is stuck.

mod backend;
mod buckets;
mod checksums;
mod device;
mod draft;
mod gpus;
mod group;
mod session;
mod sleep;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use serde_json::{Value, json};

use self::backend::Backend;
use super::adapter::Adapter;
use super::canary::{self, LogProbs};
use super::checksums::Checksums;
use super::descriptor::EngineDescriptor;
use super::device::DeviceRoute;
use super::draft::DraftWay;
use super::feed::{Feed, FeedJob};
use super::group::GroupServer;
use super::host::HostJob;
use super::host_feed::HostFeed;
use super::http::{Answer, EngineHttp, Reply, Until};
use super::server::{Server, Sleeps, no_host_route};
use super::{Engine, EngineConfig, EngineError, Holding};
use weightsync_core::protocol::{CanaryPolicy, EngineFacts, KvCachePolicy, PausePolicy};
use weightsync_core::weights::TensorSpec;

const KIND: &str = "vllm";
/// Wait between two tries to empty a cache that is still in use.
const CACHE_RETRY: Duration = Duration::from_millis(50);
/// Tokens of the probe's prompt. If its first work has fewer than 5 tokens, vLLM 0.32's worker on a processor with AMX dies of an illegal
/// instruction in bfloat16: its attention uses AMX, and only larger products request it from the kernel. At most one block of the cache, so
/// that no part of the prompt is found there.
const PROBE_TOKENS: usize = 16;

/// What is known of it before a server runs.
pub(super) const ENGINE: EngineDescriptor = EngineDescriptor {
    kind: KIND,
    api_kind: "VLLM",
    port: 8000,
    needs: "the OpenAI server, started with `VLLM_SERVER_DEV_MODE=1`",
    limits: &[],
    connect,
};

fn connect(config: EngineConfig) -> Result<Arc<dyn Engine>, EngineError> {
    let server = Vllm {
        http: Arc::new(EngineHttp::new(&config)?),
        unproven_routes: config.unproven_routes,
        backend: Mutex::default(),
        late: Mutex::default(),
        computed: Mutex::default(),
    };
    Ok(Arc::new(Adapter::new(server, config.served_model, config.record.as_deref(), config.processes)))
}

struct Vllm {
    http: Arc<EngineHttp>,
    unproven_routes: bool,
    /// Whether a start of the server, by its fingerprint, has our back end.
    backend: Mutex<Option<(String, bool)>>,
    /// A start of the server whose workers' replies are late.
    late: Mutex<Option<String>>,
    /// A start of the server that generated before its first canary.
    computed: Mutex<Option<String>>,
}

impl Vllm {
    async fn get(&self, path: &str, until: Until) -> Result<Answer, EngineError> {
        self.http.get(path, until).await?.json()
    }

    /// POST that must return 200 with `field` equal to `value`.
    async fn post(&self, path: &str, body: Option<&Value>, success: (&str, Value), until: Until) -> Result<(), EngineError> {
        self.http.post(path, body, until).await?.json()?.must(success.0, &success.1).map(drop)
    }

    /// The workers' own reload. vLLM 0.32 reads the replies of workers one after the other and stops at the first failure. From then on, it
    /// takes the remaining replies for those to later calls (`v1/executor/multiproc_executor.py`; seen). So with several ranks no success
    /// is accepted after a failure, until the server restarts.
    async fn reload_weights(&self, arguments: Value, until: Until) -> Result<(), EngineError> {
        let late = self.late.lock().clone();
        if let Some(late) = late
            && self.fingerprint(until).await? == late
        {
            let what = "after a failed call, vLLM takes the replies of its workers for those to later calls".to_owned();
            return Err(unsupported(
                what,
                "restart the server, or start it with WeightSync's back end, whose workers answer for themselves",
            ));
        }
        let done = of_all_workers(&self.http, &json!({"method": "reload_weights", "kwargs": arguments}), until).await;
        if matches!(done, Err(EngineError::Status { status: 500, .. })) && self.size(until).await? > 1 {
            let start = self.fingerprint(until).await?;
            *self.late.lock() = Some(start);
        }
        done
    }

    /// Name and path of the model that the server serves (`/v1/models`; adapters have a parent).
    async fn served(&self, until: Until) -> Result<(String, String), EngineError> {
        let reply = self.http.get("/v1/models", until).await?;
        if matches!(reply.status(), 401 | 403) {
            return Err(unsupported(
                format!("{} refuses the API key", self.http.url()),
                "give the key that the server was started with (--api-key) as the engine's apiKeySecretRef",
            ));
        }
        let answer = reply.json()?;
        let models = answer.field("data")?.as_array().into_iter().flatten();
        let model = models.into_iter().find(|model| model.get("parent").is_none_or(Value::is_null));
        let text = |name: &str| model.and_then(|model| model.get(name)).and_then(Value::as_str).map(str::to_owned);
        match (text("id"), text("root")) {
            (Some(id), Some(root)) => Ok((id, root)),
            _ => Err(answer.bad("it names no model".to_owned())),
        }
    }

    /// Whether the server was started with our own back end; requested once for each start, because other servers log a refusal as an
    /// error.
    async fn has_backend(&self, until: Until) -> Result<bool, EngineError> {
        let start = self.fingerprint(until).await?;
        let known = self.backend.lock().clone();
        if let Some((_, there)) = known.filter(|(of, _)| *of == start && start != "unknown") {
            return Ok(there);
        }
        let there = session::is_there(&self.http, until).await?;
        *self.backend.lock() = Some((start, there));
        Ok(there)
    }

    async fn size(&self, until: Until) -> Result<u32, EngineError> {
        let size = self.needed(self.http.get("/get_world_size?include_dp=true", until).await?, NEWER)?.json()?;
        let ranks = size.field("world_size")?.as_u64().and_then(|ranks| u32::try_from(ranks).ok()).filter(|ranks| *ranks > 0);
        ranks.ok_or_else(|| size.bad("its world size is no count of ranks".to_owned()))
    }

    /// Fails if a server without weight updates lacks the route.
    fn needed(&self, reply: Reply, option: &str) -> Result<Reply, EngineError> {
        match reply.status() {
            404 | 405 => Err(unsupported(format!("{} has no routes for weight updates", self.http.url()), option)),
            _ => Ok(reply),
        }
    }
}

/// `/collective_rpc`: one `null` for each worker, and at least one.
async fn of_all_workers(http: &EngineHttp, body: &Value, until: Until) -> Result<(), EngineError> {
    let answer = http.post("/collective_rpc", Some(body), until).await?.json()?;
    let results = answer.value().get("results").and_then(Value::as_array);
    let all_null = results.is_some_and(|results| !results.is_empty() && results.iter().all(Value::is_null));
    if all_null { Ok(()) } else { Err(answer.not_success()) }
}

fn unsupported(what: String, next_step: &str) -> EngineError {
    EngineError::Unsupported { what, next_step: next_step.to_owned() }
}

const DEV_MODE: &str = "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment";
const NEWER: &str = "use vLLM 0.32 or newer";
/// The route by our own back end, for status and logs.
const BACKEND: &str = "WeightSync's back end in vLLM's workers";
const DIRECTORY: &str = "it is fed from a directory";
#[async_trait]
impl Server for Vllm {
    fn descriptor(&self) -> &'static EngineDescriptor {
        &ENGINE
    }

    fn url(&self) -> &str {
        self.http.url()
    }

    async fn facts(&self, until: Until) -> Result<EngineFacts, EngineError> {
        self.http.get("/health", until).await?.ok()?;
        let version = self.needed(self.http.get("/version", until).await?, "give the address of a vLLM server")?;
        let server_version = version.json()?.string("version")?;
        self.served(until).await?;
        self.needed(self.http.get("/is_paused", until).await?, DEV_MODE)?.json()?;
        // Without a method the route returns 400 and does nothing; a server without dev mode returns 404.
        let probe = self.needed(self.http.post("/collective_rpc", Some(&json!({})), until).await?, DEV_MODE)?;
        if probe.status() != 400 {
            return Err(probe.into_status());
        }
        self.needed(self.http.get("/weight_info", until).await?, NEWER)?.json()?.string("weight_version")?;
        let size = self.size(until).await?;
        let delivery = if self.has_backend(until).await? { BACKEND } else { "reload_weights from a directory" };
        Ok(EngineFacts {
            kind: KIND.to_owned(),
            server_version,
            size,
            url: self.http.url().to_owned(),
            delivery: delivery.to_owned(),
            // `weight_versions` spans on /inference/v1/generate.
            answer_version: "token".to_owned(),
            unchecked: None,
            model_bytes: None,
            groups: None,
        })
    }

    async fn front(&self, until: Until) -> Result<(), EngineError> {
        self.http.get("/health", until).await?.ok()
    }

    async fn fingerprint(&self, until: Until) -> Result<String, EngineError> {
        self.front(until).await?;
        let reply = self.http.get("/metrics", until).await?;
        if reply.status() == 404 {
            return Ok("unknown".to_owned());
        }
        let metrics = reply.text()?;
        let started = metrics.lines().find_map(|line| line.strip_prefix("process_start_time_seconds "));
        Ok(started.map_or("unknown", str::trim).to_owned())
    }

    async fn sleeps(&self, until: Until) -> Result<Sleeps, EngineError> {
        let reply = self.http.get("/metrics", until).await?;
        if reply.status() == 404 { Ok(Sleeps::default()) } else { Ok(sleep::of_metrics(&reply.text()?)) }
    }

    async fn holding(&self, until: Until) -> Result<Holding, EngineError> {
        Ok(Holding::parse(&self.get("/weight_info", until).await?.string("weight_version")?))
    }

    async fn write(&self, holding: &Holding, until: Until) -> Result<(), EngineError> {
        let text = holding.text();
        let answer = self.http.post("/update_weight_version", Some(&json!({"new_version": text})), until).await?.json()?;
        answer.must("success", &Value::Bool(true))?.must("new_version", &Value::String(text)).map(drop)
    }

    async fn pause(&self, pause: PausePolicy, kv_cache: KvCachePolicy, until: Until) -> Result<(), EngineError> {
        // A kept request keeps its cache, which is emptied after the load. Caches of ended requests can be emptied at once.
        let path = match (pause, kv_cache) {
            (PausePolicy::Keep | PausePolicy::External, _) => "/pause?mode=keep&clear_cache=false",
            (PausePolicy::Drain, KvCachePolicy::Reset) => "/pause?mode=wait&clear_cache=true",
            (PausePolicy::Drain, KvCachePolicy::Keep) => "/pause?mode=wait&clear_cache=false",
            (PausePolicy::Abort | PausePolicy::AbortAwake, KvCachePolicy::Reset) => "/pause?mode=abort&clear_cache=true",
            (PausePolicy::Abort | PausePolicy::AbortAwake, KvCachePolicy::Keep) => "/pause?mode=abort&clear_cache=false",
        };
        self.post(path, None, ("status", json!("paused")), until).await
    }

    async fn is_paused(&self, until: Until) -> Result<bool, EngineError> {
        let answer = self.get("/is_paused", until).await?;
        answer.field("is_paused")?.as_bool().ok_or_else(|| answer.bad("\"is_paused\" is neither true nor false".to_owned()))
    }

    async fn unpause(&self, until: Until) -> Result<(), EngineError> {
        self.post("/resume", None, ("status", json!("resumed")), until).await
    }

    async fn load(&self, directory: &Path, until: Until) -> Result<(), EngineError> {
        self.reload_weights(json!({"weights_path": directory.to_string_lossy()}), until).await
    }

    /// Loads an empty list of weights. This drops what the failed reload had buffered, restores the old values of layers that it never
    /// reached, and repairs the loaders (`finalize_layerwise_reload`, which only a successful reload runs).
    async fn clear_failed_load(&self, until: Until) -> Result<(), EngineError> {
        self.reload_weights(json!({"weights_iterator": []}), until).await
    }

    async fn reset_cache(&self, until: Until) -> Result<(), EngineError> {
        // Kept requests are preempted and recomputed; caches of KV connectors are as stale as the local one.
        let path = "/reset_prefix_cache?reset_running_requests=true&reset_external=true";
        loop {
            match self.post(path, None, ("success", Value::Bool(true)), until).await {
                // Blocks still held, e.g. by an offload under way: "callers may retry".
                Err(EngineError::NotSuccess { .. } | EngineError::Status { status: 500, .. }) if until.left() > CACHE_RETRY => {
                    tokio::time::sleep(CACHE_RETRY).await;
                }
                done => return done,
            }
        }
    }

    async fn generate(&self, until: Until) -> Result<(), EngineError> {
        let (model, _) = self.served(until).await?;
        let body = json!({"model": model, "prompt": vec![0; PROBE_TOKENS], "max_tokens": 1, "temperature": 0, "logprobs": 0});
        let reply = self.http.post("/v1/completions", Some(&body), until).await?.unless_no_number()?;
        if matches!(reply.status(), 400 | 404 | 405 | 501) {
            // A server that generates no text, or allows no log-probs, shows nothing here.
            return Ok(());
        }
        let answer = reply.json()?;
        let choice = answer.value().pointer("/choices/0");
        let probability = choice.and_then(|choice| choice.pointer("/logprobs/token_logprobs/0")).and_then(Value::as_f64);
        if probability.is_some_and(f64::is_finite) {
            Ok(())
        } else {
            Err(answer.bad("it generated no token with a finite log-prob".to_owned()))
        }
    }

    async fn log_probs(&self, canary: &CanaryPolicy, until: Until) -> Result<LogProbs, EngineError> {
        let start = self.fingerprint(until).await?;
        // A user's short prompt as its first work may kill a worker: see `PROBE_TOKENS`.
        if self.computed.lock().as_ref() != Some(&start) {
            match self.generate(until).await {
                Ok(()) => *self.computed.lock() = Some(start),
                Err(error @ (EngineError::Unreachable { .. } | EngineError::Timeout { .. })) => return Err(error),
                // Only the answer to the question is judged, not this.
                Err(_) => {}
            }
        }
        let (model, _) = self.served(until).await?;
        let reply = self.http.post("/v1/completions", Some(&canary::question(&model, canary, 0)), until).await?.unless_no_number()?;
        canary::of_completions(reply, KIND, "serve a model that generates text, without --max-logprobs below 0")
    }

    async fn abort_all(&self, until: Until) -> Result<(), EngineError> {
        self.pause(PausePolicy::Abort, KvCachePolicy::Keep, until).await
    }

    async fn startup_checkpoint(&self, until: Until) -> Result<String, EngineError> {
        Ok(self.served(until).await?.1)
    }

    async fn device_route(
        &self,
        pause: PausePolicy,
        _: KvCachePolicy,
        served: Option<&Path>,
        until: Until,
    ) -> Result<DeviceRoute, EngineError> {
        device::route(self, pause, served, until).await
    }

    async fn takes_draft(&self, way: DraftWay, draft: Vec<TensorSpec>, until: Until) -> Result<(), EngineError> {
        draft::check(&self.http, way, draft, until).await
    }

    fn groups(&self) -> Option<Arc<dyn GroupServer>> {
        Some(Arc::new(group::VllmGroup { http: self.http.clone() }))
    }

    async fn open_feed(&self, job: FeedJob<'_>, until: Until) -> Result<Box<dyn Feed>, EngineError> {
        device::open(self, job, until).await
    }

    async fn checksums(&self, bytes: u64, until: Until) -> Result<Option<Checksums>, EngineError> {
        checksums::ask(&self.http, (bytes, self.size(until).await?), until).await
    }

    async fn host_route(&self, until: Until) -> Result<&'static str, EngineError> {
        if self.has_backend(until).await? { Ok(BACKEND) } else { Err(no_host_route(KIND)) }
    }

    async fn open_host_feed(&self, job: &HostJob, until: Until) -> Result<Box<dyn HostFeed>, EngineError> {
        self.host_route(until).await?;
        let ranks = self.size(until).await?;
        let opened = Backend::open(self.http.clone(), job, ranks, until).await;
        if matches!(opened, Err(EngineError::Unsupported { .. })) {
            // Checked again only after a restart.
            if let Some((_, there)) = self.backend.lock().as_mut() {
                *there = false;
            }
        }
        Ok(Box::new(opened?))
    }
}

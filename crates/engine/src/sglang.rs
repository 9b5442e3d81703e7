//! SGLang 0.5.23, unmodified: weights by `update_weights_from_disk`.
//!
//! Decides paths, bodies and which reply means success. All facts are from the wheel of 0.5.23 (`srt/entrypoints/http_server.py`,
//! `srt/managers/tokenizer_manager.py`, `srt/managers/scheduler.py`) and from a run on CPU (`tests/engine/sglang.sh`). The server "rolls
//! back" a failed load from the *new* path (`srt/model_executor/model_runner_components/weight_updater.py`: the path is replaced first). So
//! such a load counts as half an update all the same. The version is written by a separate call at the end, never with the load, and the
//! cache is flushed by a separate call as well.

mod checksums;
mod group;
mod tensors;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value, json};
use twox_hash::XxHash3_64;

use super::adapter::Adapter;
use super::canary::{self, LogProbs};
use super::checkpoint_engine::Call;
use super::checksums::Checksums;
use super::descriptor::{EngineDescriptor, Limit};
use super::device::DeviceRoute;
use super::draft::{DraftWay, none_there, untaken};
use super::feed::{self, CheckpointEngine, Feed, FeedJob};
use super::group::GroupServer;
use super::http::{Answer, EngineHttp, Until};
use super::server::Server;
use super::{Engine, EngineConfig, EngineError, Holding};
use weightsync_core::protocol::{CanaryPolicy, EngineFacts, KvCachePolicy, PausePolicy};
use weightsync_core::weights::TensorSpec;

const KIND: &str = "sglang";
/// Wait between two tries to empty a cache that is still in use, or to get a token after another client ended the request.
const RETRY: Duration = Duration::from_millis(50);

const KEY: &str = "give the key that the server was started with (--admin-api-key, or else --api-key) as the engine's apiKeySecretRef; \
                   where it has both, start it with the same value for both";

/// What is known of it before a server runs.
pub(super) const ENGINE: EngineDescriptor = EngineDescriptor {
    kind: KIND,
    api_kind: "SGLang",
    port: 30_000,
    needs: "its server",
    limits: &[Limit {
        in_groups: false,
        pauses: &[PausePolicy::Keep, PausePolicy::Abort, PausePolicy::AbortAwake, PausePolicy::External],
        kv_caches: Limit::ANY_KV_CACHE,
        cause: "SGLang has no pause that lets running requests end",
        next_step: "set update.pause to Keep, Abort, AbortAwake or External",
    }],
    connect,
};

fn connect(config: EngineConfig) -> Result<Arc<dyn Engine>, EngineError> {
    let server = Sglang { http: Arc::new(EngineHttp::new(&config)?), unproven_routes: config.unproven_routes };
    Ok(Arc::new(Adapter::new(server, config.served_model, config.record.as_deref(), config.processes)))
}

struct Sglang {
    http: Arc<EngineHttp>,
    unproven_routes: bool,
}

impl Sglang {
    /// Start-up configuration and live state; the scheduler responds, paused or not.
    async fn server_info(&self, until: Until) -> Result<Answer, EngineError> {
        let reply = self.http.get("/server_info", until).await?;
        match reply.status() {
            401 | 403 => Err(EngineError::Unsupported { what: format!("{} refuses the API key", self.http.url()), next_step: KEY.into() }),
            404 => Err(EngineError::Unsupported {
                what: format!("{} has no /server_info", self.http.url()),
                next_step: "use SGLang 0.5.23 or newer".into(),
            }),
            _ => reply.json(),
        }
    }

    /// Routes for weights take only the admin key if there is one; the others take only `--api-key` if there is one. An update needs both
    /// kinds. `/weights_checker` refuses this body before it asks the workers.
    async fn takes_key_for_weights(&self, until: Until) -> Result<(), EngineError> {
        let reply = self.http.post("/weights_checker", Some(&json!({"selector": "none"})), until).await?;
        if !matches!(reply.status(), 401 | 403) {
            return Ok(());
        }
        let what = format!("{} refuses the API key for updates of weights", self.http.url());
        Err(EngineError::Unsupported { what, next_step: KEY.into() })
    }

    async fn health(&self, until: Until) -> Result<(), EngineError> {
        self.http.get("/health", until).await?.ok()
    }

    async fn post_ok(&self, path: &str, body: &Value, success: (&str, Value), until: Until) -> Result<Answer, EngineError> {
        self.http.post(path, Some(body), until).await?.json()?.must(success.0, &success.1)
    }
}

/// Whether another client ended the request.
fn is_aborted(answer: &Answer) -> bool {
    answer.value().pointer("/meta_info/finish_reason/type").and_then(Value::as_str) == Some("abort")
}

/// Worker ranks of the server: as it reports them, otherwise tensor x pipeline x data (attention data parallelism is inside tensor).
fn world_size(info: &Answer) -> Result<u32, EngineError> {
    let count = |name: &str| match info.value().get(name) {
        None | Some(Value::Null) => Some(1),
        Some(value) => value.as_u64().filter(|count| *count > 0),
    };
    let attention = info.value().get("enable_dp_attention").and_then(Value::as_bool).unwrap_or(false);
    let computed = || {
        let data = if attention { 1 } else { count("dp_size")? };
        count("tp_size")?.checked_mul(count("pp_size")?)?.checked_mul(data)
    };
    let said = info.value().pointer("/internal_states/0/world_size").and_then(Value::as_u64).filter(|size| *size > 0);
    let size = said.or_else(computed).and_then(|size| u32::try_from(size).ok());
    size.ok_or_else(|| info.bad("its tp_size, pp_size and dp_size are no counts of ranks".to_owned()))
}

/// The xxh3-64 (seed 0) of a text, 16 lower-case hex digits.
fn short_digest(text: &str) -> String {
    format!("{:016x}", XxHash3_64::oneshot(text.as_bytes()))
}

#[async_trait]
impl Server for Sglang {
    fn descriptor(&self) -> &'static EngineDescriptor {
        &ENGINE
    }

    fn url(&self) -> &str {
        self.http.url()
    }

    async fn facts(&self, until: Until) -> Result<EngineFacts, EngineError> {
        let info = self.server_info(until).await?;
        let server_version = info.string("version")?;
        self.holding(until).await?;
        self.takes_key_for_weights(until).await?;
        Ok(EngineFacts {
            kind: KIND.to_owned(),
            server_version,
            size: world_size(&info)?,
            url: self.http.url().to_owned(),
            delivery: "update_weights_from_disk".to_owned(),
            // `meta_info.weight_version` spans of each answer.
            answer_version: "token".to_owned(),
            unchecked: None,
            model_bytes: None,
            groups: None,
        })
    }

    /// `/ping` returns a flag. It is 503 after another client called `/health` during a pause; during a load that is no failure.
    async fn front(&self, until: Until) -> Result<(), EngineError> {
        let reply = self.http.get("/ping", until).await?;
        if matches!(reply.status(), 200 | 503) { Ok(()) } else { Err(reply.into_status()) }
    }

    /// Start-up times and the seed from the scheduler's own report; SGLang draws the seed for each start unless it is set. While the
    /// scheduler loads, this call waits for it, like every call to it.
    async fn fingerprint(&self, until: Until) -> Result<String, EngineError> {
        let info = self.server_info(until).await?;
        let of_one_start = json!([info.value().get("startup_time"), info.value().get("random_seed"), info.value().get("launch_command")]);
        Ok(short_digest(&of_one_start.to_string()))
    }

    async fn holding(&self, until: Until) -> Result<Holding, EngineError> {
        let answer = self.http.get("/model_info", until).await?.json()?;
        Ok(Holding::parse(&answer.string("weight_version")?))
    }

    async fn write(&self, holding: &Holding, until: Until) -> Result<(), EngineError> {
        let text = holding.text();
        // Its default is to abort every request.
        let body = json!({"new_version": text, "abort_all_requests": false});
        let answer = self.post_ok("/update_weight_version", &body, ("success", Value::Bool(true)), until).await?;
        answer.must("new_version", &Value::String(text)).map(drop)
    }

    async fn pause(&self, pause: PausePolicy, kv_cache: KvCachePolicy, until: Until) -> Result<(), EngineError> {
        ENGINE.accepts(pause, kv_cache)?;
        // A request paused in place keeps its cache, and prevents a flush; a retracted one is recomputed.
        let mode = match (pause, kv_cache) {
            (PausePolicy::Abort | PausePolicy::AbortAwake, _) => "abort",
            (_, KvCachePolicy::Keep) => "in_place",
            (_, KvCachePolicy::Reset) => "retract",
        };
        self.post_ok("/pause_generation", &json!({"mode": mode}), ("status", json!("ok")), until).await.map(drop)
    }

    /// `/ready` is a flag: 200 if healthy and not paused. `/health` would wait for the end of the pause and then report the server as
    /// unhealthy.
    async fn is_paused(&self, until: Until) -> Result<bool, EngineError> {
        let reply = self.http.get("/ready", until).await?;
        match reply.status() {
            200 => Ok(false),
            503 => Ok(true),
            _ => Err(reply.into_status()),
        }
    }

    async fn unpause(&self, until: Until) -> Result<(), EngineError> {
        self.post_ok("/continue_generation", &json!({"torch_empty_cache": false}), ("status", json!("ok")), until).await?;
        if self.is_paused(until).await? {
            // Another client called /health during the pause: the server stays unhealthy until the next call.
            self.health(until).await?;
        }
        Ok(())
    }

    async fn load(&self, directory: &Path, until: Until) -> Result<(), EngineError> {
        let body = json!({
            "model_path": directory.to_string_lossy(),
            // Trainers often start servers with `--load-format dummy`, and null would mean that.
            "load_format": "safetensors",
            "abort_all_requests": false,
            "flush_cache": false,
            "weight_version": null,
        });
        self.post_ok("/update_weights_from_disk", &body, ("success", Value::Bool(true)), until).await.map(drop)
    }

    async fn clear_failed_load(&self, _: Until) -> Result<(), EngineError> {
        Ok(())
    }

    async fn reset_cache(&self, until: Until) -> Result<(), EngineError> {
        loop {
            match self.http.post("/flush_cache", None, until).await?.ok() {
                // Requests are still running or queued.
                Err(EngineError::Status { status: 400, .. }) if until.left() > RETRY => tokio::time::sleep(RETRY).await,
                done => return done,
            }
        }
    }

    /// `/health` checks no number: a server whose weights are NaN passes it (run), and it takes a second. It is asked only if no token comes
    /// in half of the time. It accepts a sign of any other request, so a long queue does not look like a stuck engine.
    async fn generate(&self, until: Until) -> Result<(), EngineError> {
        let body = json!({
            "input_ids": [0], "sampling_params": {"temperature": 0, "max_new_tokens": 1}, "return_logprob": true,
        });
        let half = until.at_most(until.left() / 2);
        loop {
            let reply = match self.http.post("/generate", Some(&body), half).await {
                Err(EngineError::Timeout { .. }) => return self.health(until).await,
                reply => reply?,
            };
            if matches!(reply.status(), 400 | 404 | 405 | 501) {
                // A server that generates no text.
                return self.health(until).await;
            }
            let answer = reply.json()?;
            let log_prob = answer.value().pointer("/meta_info/output_token_logprobs/0/0").and_then(Value::as_f64);
            if log_prob.is_some_and(f64::is_finite) {
                return Ok(());
            }
            if !is_aborted(&answer) || half.left() <= RETRY {
                return Err(answer.bad("it generated no token with a finite log-prob".to_owned()));
            }
            // Ended by another client, before a token.
            tokio::time::sleep(RETRY).await;
        }
    }

    /// The native route: it gives log-probs without an option of the server, as `[log-prob, token, text]`.
    async fn log_probs(&self, canary: &CanaryPolicy, until: Until) -> Result<LogProbs, EngineError> {
        const NEEDS: &str = "serve a model that generates text";
        let body = json!({
            "text": canary.prompt, "sampling_params": {"temperature": 0, "max_new_tokens": canary.max_tokens}, "return_logprob": true,
        });
        let answer = canary::answer(self.http.post("/generate", Some(&body), until).await?, KIND, NEEDS)?;
        let meta = answer.value().get("meta_info");
        let rows = meta.and_then(|meta| meta.get("output_token_logprobs")).and_then(Value::as_array);
        let log_probs = rows.map(|rows| rows.iter().map(|row| row.get(0).and_then(Value::as_f64)).collect());
        let aborted = is_aborted(&answer);
        canary::answered(answer, log_probs, aborted, KIND, NEEDS)
    }

    async fn abort_all(&self, until: Until) -> Result<(), EngineError> {
        self.post_ok("/pause_generation", &json!({"mode": "abort"}), ("status", json!("ok")), until).await.map(drop)
    }

    async fn startup_checkpoint(&self, until: Until) -> Result<String, EngineError> {
        // Not /model_info, whose path moves with every update.
        self.server_info(until).await?.string("model_path")
    }

    /// [`tensors`] if that is allowed, otherwise checkpoint-engine, if it is installed with the server: `/update_weights_from_ipc`, which
    /// needs no session. A server with a draft model would run the whole protocol a second time on the same address, with buckets that are
    /// gone by then (`srt/checkpoint_engine/checkpoint_engine_worker.py`).
    async fn device_route(
        &self,
        pause: PausePolicy,
        _: KvCachePolicy,
        served: Option<&Path>,
        until: Until,
    ) -> Result<DeviceRoute, EngineError> {
        let refuse = |what: &str| EngineError::Unsupported { what: what.to_owned(), next_step: "it is fed from a directory".into() };
        let info = self.server_info(until).await?;
        if info.value().get("device").and_then(Value::as_str).is_some_and(|device| device != "cuda") {
            return Err(refuse("SGLang does not compute on GPUs that CUDA knows"));
        }
        let is = |name: &str| info.value().get(name).is_some_and(|value| !value.is_null() && value != &json!(1));
        if info.value().get("speculative_algorithm").is_some_and(|algorithm| !algorithm.is_null()) {
            return Err(refuse("SGLang has a draft model, which checkpoint-engine would feed apart"));
        }
        if is("pp_size") || is("dp_size") {
            return Err(refuse("SGLang is fed from GPU memory without pipeline and data parallelism only"));
        }
        if feed::is_quantised(served) != Some(false) {
            return Err(refuse("only a model that is known not to be quantised is fed from GPU memory"));
        }
        if pause == PausePolicy::External {
            return Err(refuse("without a pause SGLang waits for its running requests and lets new ones wait"));
        }
        let tensors = tensors::UNPROVEN.allowed(&info.string("version")?, self.unproven_routes).is_ok();
        let name = if tensors { tensors::WAY } else { "checkpoint-engine" };
        Ok(DeviceRoute { name, gpus: Vec::new(), gated: true, why_not_faster: None })
    }

    /// Only an update from a group names the model that loads its tensors (`selector`). The server does not report the contents of the
    /// draft model's checkpoint (EAGLE's lacks what it shares), so nothing is compared.
    async fn takes_draft(&self, way: DraftWay, _: Vec<TensorSpec>, until: Until) -> Result<(), EngineError> {
        if way != DraftWay::Group {
            return Err(untaken(KIND, way));
        }
        let info = self.server_info(until).await?;
        // NGRAM drafts from the text itself.
        let drafts = info.value().get("speculative_algorithm").and_then(Value::as_str).is_some_and(|algorithm| algorithm != "NGRAM");
        if drafts { Ok(()) } else { Err(none_there("--speculative-algorithm and --speculative-draft-model-path")) }
    }

    async fn checksums(&self, _: u64, until: Until) -> Result<Option<Checksums>, EngineError> {
        checksums::ask(&self.http, until).await
    }

    fn groups(&self) -> Option<Arc<dyn GroupServer>> {
        Some(Arc::new(group::SglangGroup { http: self.http.clone() }))
    }

    async fn open_feed(&self, job: FeedJob<'_>, until: Until) -> Result<Box<dyn Feed>, EngineError> {
        if job.route.name == tensors::WAY {
            let ranks = world_size(&self.server_info(until).await?)?;
            return Ok(Box::new(tensors::Tensors::new(self.http.clone(), job.job.layout.clone(), job.gpus, ranks)?));
        }
        let (http, whole) = (self.http.clone(), Until::new(job.job.terms.timeout));
        let call = move |handles| -> Call {
            Box::pin(async move {
                let body = json!({"zmq_handles": Value::Object(handles), "flush_cache": false, "weight_version": null});
                http.post("/update_weights_from_ipc", Some(&body), whole).await?.json()?.must("success", &Value::Bool(true)).map(drop)
            })
        };
        Ok(Box::new(CheckpointEngine::open(self.http.url(), &job, call).await?))
    }
}

#[cfg(test)]
mod tests;

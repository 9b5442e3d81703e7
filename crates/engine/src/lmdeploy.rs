//! LMDeploy 0.18, unmodified, PyTorch backend: weights from GPU memory, by checkpoint-engine while it sleeps or by `/update_weights`.
//!
//! Decides paths, bodies and which reply means success. All facts are from the wheel of 0.18.0 (`serve/openai/endpoints/management.py`,
//! `pytorch/engine/model_agent/agent.py`, `serve/core/async_engine.py`) and were seen on the running server. Some shape this file. It
//! cannot load a directory. Its only pause is sleep, which ends all requests and empties every cache. It has no field for a version, so the
//! adapter keeps a record ([`super::record`]). `/health` reports healthy while a worker is stuck, so one token is generated from time to
//! time. And its POST routes require a JSON body even without content.

pub(super) mod allowed;
mod group;
mod route;
mod tensors;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::adapter::Adapter;
use super::canary::{self, LogProbs};
use super::descriptor::{EngineDescriptor, Limit};
use super::device::DeviceRoute;
use super::feed::{Feed, FeedJob};
use super::group::GroupServer;
use super::http::{Answer, EngineHttp, Reply, Until};
use super::process::{self, EngineProcess};
use super::record::{Record, UNKNOWN};
use super::server::{Server, Sleeps};
use super::{Engine, EngineConfig, EngineError, Holding};
use weightsync_core::protocol::{CanaryPolicy, EngineFacts, KvCachePolicy, PausePolicy};

const KIND: &str = "lmdeploy";
/// The default of `--server-port`.
const PORT: u16 = 23_333;
/// A generated token proves for so long that the engine works.
const LIFE: Duration = Duration::from_secs(10);
const NEWER: &str = "use LMDeploy 0.18 or newer with --backend pytorch";

/// What is known of it before a server runs.
pub(super) const ENGINE: EngineDescriptor = EngineDescriptor {
    kind: KIND,
    api_kind: "LMDeploy",
    port: 23_333,
    needs: "its server with the PyTorch backend; its agent must share its GPUs and see its processes, and `update.pause` must be `Abort`, `AbortAwake` or \
            `External`",
    limits: &[
        Limit {
            in_groups: false,
            pauses: &[PausePolicy::Abort, PausePolicy::AbortAwake, PausePolicy::External],
            kv_caches: Limit::ANY_KV_CACHE,
            cause: "LMDeploy has no pause that lets running requests wait or end",
            next_step: "set update.pause to Abort, AbortAwake or External",
        },
        Limit {
            in_groups: true,
            pauses: &[PausePolicy::Keep, PausePolicy::Drain, PausePolicy::AbortAwake, PausePolicy::External],
            kv_caches: Limit::ANY_KV_CACHE,
            cause: "an LMDeploy that joins a group answers while it loads",
            next_step: "set update.pause to AbortAwake or External, or delivery to Agent",
        },
    ],
    connect,
};

fn connect(config: EngineConfig) -> Result<Arc<dyn Engine>, EngineError> {
    let http = Arc::new(EngineHttp::new(&config)?);
    let server = Lmdeploy {
        http,
        record: Record::new(config.record.clone()),
        processes: config.processes.clone(),
        seen: Mutex::default(),
        probed: Mutex::default(),
        token: Mutex::new(None),
    };
    Ok(Arc::new(Adapter::new(server, config.served_model, config.record.as_deref(), config.processes)))
}

struct Lmdeploy {
    http: Arc<EngineHttp>,
    record: Record,
    processes: PathBuf,
    seen: Mutex<Option<EngineProcess>>,
    /// Properties of one start; requested once, because an update must not wait for them each time.
    probed: Mutex<Option<Arc<route::Probed>>>,
    /// When a token was last generated.
    token: Mutex<Option<Instant>>,
}

impl Lmdeploy {
    /// `GET /update_weights_from_ipc`: backend, workers and what sleeps.
    async fn status(&self, until: Until) -> Result<Answer, EngineError> {
        let reply = self.http.get("/update_weights_from_ipc", until).await?;
        match reply.status() {
            401 | 403 => Err(unsupported(
                format!("{} refuses the API key", self.http.url()),
                "give the key that the server was started with (--api-keys) as the engine's apiKeySecretRef",
            )),
            404 | 405 => Err(unsupported(format!("{} has no routes for weight updates", self.http.url()), NEWER)),
            _ => {
                let status = reply.json()?;
                match status.value().get("backend").and_then(Value::as_str) {
                    Some("pytorch") => Ok(status),
                    backend => Err(unsupported(
                        format!("{} runs the backend {}", self.http.url(), backend.unwrap_or("unknown")),
                        "start LMDeploy with --backend pytorch",
                    )),
                }
            }
        }
    }

    /// What sleeps: `weights`, `kv_cache`.
    async fn sleeping(&self, until: Until) -> Result<Vec<String>, EngineError> {
        let status = self.status(until).await?;
        let tags = status.field("sleeping_tags")?.as_array().map(|tags| tags.iter().filter_map(Value::as_str).map(str::to_owned).collect());
        tags.ok_or_else(|| status.bad("\"sleeping_tags\" is no list".into()))
    }

    /// Ends requests and empties caches. The weights return to the GPU at once, to be overwritten.
    async fn sleep(&self, path: &str, until: Until) -> Result<(), EngineError> {
        let mut sleeping = self.sleeping(until).await?;
        if !sleeping.iter().any(|tag| tag == "kv_cache") {
            self.post_empty(path, until).await?;
            sleeping = self.sleeping(until).await?;
        }
        if sleeping.iter().any(|tag| tag == "weights") {
            self.post_empty("/wakeup?tags=weights", until).await?;
        }
        Ok(())
    }

    /// POST of a route that returns 200 without a body.
    async fn post_empty(&self, path: &str, until: Until) -> Result<(), EngineError> {
        self.http.post(path, Some(&json!({})), until).await?.ok()
    }

    async fn model(&self, until: Until) -> Result<String, EngineError> {
        let answer = self.http.get("/v1/models", until).await?.json()?;
        let id = answer.value().pointer("/data/0/id").and_then(Value::as_str).map(str::to_owned);
        id.ok_or_else(|| answer.bad("it names no model".into()))
    }

    fn process(&self) -> Option<EngineProcess> {
        let mut seen = self.seen.lock();
        if let Some(process) = seen.as_ref().filter(|process| process.runs(&self.processes)) {
            return Some(process.clone());
        }
        let port = self.http.port().to_string();
        *seen = process::find(&self.processes, |process| {
            let serves = process.words.iter().any(|word| word == "api_server" || word.ends_with("/api_server"));
            serves && process.value("--server-port").map_or(port == PORT.to_string(), |named| named == port)
        });
        seen.clone()
    }

    /// Its HTTP front responds, and one token is generated from time to time: nothing else shows a worker that is stuck in a collective
    /// operation.
    async fn lives(&self, until: Until) -> Result<(), EngineError> {
        let paused = self.is_paused(until).await?;
        let proven = *self.token.lock();
        if proven.is_some_and(|at| at.elapsed() < LIFE) || paused {
            return Ok(());
        }
        self.generate(until).await
    }
}

fn unsupported(what: String, next_step: &str) -> EngineError {
    EngineError::Unsupported { what, next_step: next_step.to_owned() }
}

/// `null` with status 200, and nothing else (some proxies return `{"error": ...}` with 200).
fn null(reply: Reply) -> Result<(), EngineError> {
    let answer = reply.json()?;
    if answer.value().is_null() { Ok(()) } else { Err(answer.not_success()) }
}

#[async_trait]
impl Server for Lmdeploy {
    fn descriptor(&self) -> &'static EngineDescriptor {
        &ENGINE
    }

    fn url(&self) -> &str {
        self.http.url()
    }

    fn takes_directories(&self) -> Result<(), EngineError> {
        Err(unsupported("LMDeploy 0.18 cannot load weights from a directory".into(), "give its agent the engine's GPUs (docs/engines.md)"))
    }

    async fn facts(&self, until: Until) -> Result<EngineFacts, EngineError> {
        let status = self.status(until).await?;
        let workers = status.field("device_uuids")?.as_array().map_or(0, Vec::len);
        let size = u32::try_from(workers).ok().filter(|size| *size > 0);
        let size = size.ok_or_else(|| status.bad("it names no worker".into()))?;
        // A string that holds JSON.
        let info: Value =
            serde_json::from_str(self.http.get("/distserve/engine_info", until).await?.json()?.value().as_str().unwrap_or_default())
                .unwrap_or_default();
        let count = |name: &str| info.get(name).and_then(Value::as_u64).unwrap_or(1);
        if count("dp_size") == 1 && info.get("tp_size").and_then(Value::as_u64).is_some_and(|tensor| tensor != u64::from(size)) {
            return Err(status.bad(format!("it has {size} workers and says that it was started with --tp {}", count("tp_size"))));
        }
        let interface = self.interface(until).await;
        let version = interface.as_ref().filter(|interface| allowed::is_0_18(interface)).map_or(UNKNOWN, |_| "0.18.0");
        Ok(EngineFacts {
            kind: KIND.to_owned(),
            server_version: version.to_owned(),
            size,
            url: self.http.url().to_owned(),
            delivery: "GPU memory: update_weights, or checkpoint-engine while it sleeps".to_owned(),
            answer_version: "none".to_owned(),
            unchecked: None,
            model_bytes: None,
            groups: None,
        })
    }

    async fn front(&self, until: Until) -> Result<(), EngineError> {
        self.http.get("/is_sleeping", until).await?.json()?.field("is_sleeping").map(drop)
    }

    /// Identifies the start by its process, if it is visible, without a request: an update needs the fingerprint ten times, and
    /// [`Self::holding`] sends one. Otherwise by `/metrics`, which exists unless it was disabled.
    async fn fingerprint(&self, until: Until) -> Result<String, EngineError> {
        if let Some(process) = self.process() {
            return Ok(process.start);
        }
        self.front(until).await?;
        let reply = self.http.get("/metrics", until).await?;
        if reply.status() != 200 {
            return Ok(UNKNOWN.to_owned());
        }
        let metrics = reply.text()?;
        let started = metrics.lines().find_map(|line| line.strip_prefix("process_start_time_seconds "));
        Ok(started.map_or(UNKNOWN, str::trim).to_owned())
    }

    /// It reports neither the depth nor the number of its sleeps.
    async fn sleeps(&self, until: Until) -> Result<Sleeps, EngineError> {
        let now = self.is_paused(until).await? && self.sleeping(until).await?.iter().any(|tag| tag == "weights");
        Ok(Sleeps { now, ..Sleeps::default() })
    }

    async fn holding(&self, until: Until) -> Result<Holding, EngineError> {
        self.lives(until).await?;
        Ok(self.record.read(&self.fingerprint(until).await?))
    }

    async fn write(&self, holding: &Holding, until: Until) -> Result<(), EngineError> {
        let start = self.fingerprint(until).await?;
        self.record.write(&start, holding)
    }

    async fn pause(&self, _: PausePolicy, _: KvCachePolicy, until: Until) -> Result<(), EngineError> {
        self.sleep("/sleep?level=1", until).await
    }

    /// Skips the copy of the weights to the host and back: the server only frees space for new ones.
    async fn pause_mixture(&self, _: PausePolicy, _: KvCachePolicy, until: Until) -> Result<(), EngineError> {
        self.sleep("/sleep?level=2", until).await
    }

    async fn is_paused(&self, until: Until) -> Result<bool, EngineError> {
        let answer = self.http.get("/is_sleeping", until).await?.json()?;
        answer.field("is_sleeping")?.as_bool().ok_or_else(|| answer.bad("\"is_sleeping\" is neither true nor false".to_owned()))
    }

    async fn unpause(&self, until: Until) -> Result<(), EngineError> {
        let sleeping = self.sleeping(until).await?;
        if sleeping.is_empty() {
            return Ok(());
        }
        let tags: Vec<String> = sleeping.iter().map(|tag| format!("tags={tag}")).collect();
        self.post_empty(&format!("/wakeup?{}", tags.join("&")), until).await
    }

    async fn load(&self, _: &Path, _: Until) -> Result<(), EngineError> {
        self.takes_directories()
    }

    async fn clear_failed_load(&self, _: Until) -> Result<(), EngineError> {
        Ok(())
    }

    /// A sleeping engine has no cache. An awake one is fed only if it keeps none beyond a request (the allow-list ensures that), and
    /// requests were ended.
    async fn reset_cache(&self, _: Until) -> Result<(), EngineError> {
        Ok(())
    }

    async fn generate(&self, until: Until) -> Result<(), EngineError> {
        let model = self.model(until).await?;
        let body = json!({"model": model, "prompt": "a", "max_tokens": 1, "temperature": 0});
        let reply = self.http.post("/v1/completions", Some(&body), until).await?;
        let answer = reply.json()?;
        let generated = answer.value().pointer("/usage/completion_tokens").and_then(Value::as_u64);
        let reason = answer.value().pointer("/choices/0/finish_reason").and_then(Value::as_str);
        if generated.is_some_and(|tokens| tokens > 0) && reason != Some("error") {
            *self.token.lock() = Some(Instant::now());
            return Ok(());
        }
        if reason == Some("abort") {
            // An update or another client ended it: it responds, which is enough here.
            return Ok(());
        }
        Err(answer.bad("it generated no token".to_owned()))
    }

    async fn log_probs(&self, canary: &CanaryPolicy, until: Until) -> Result<LogProbs, EngineError> {
        let model = self.model(until).await?;
        let reply = self.http.post("/v1/completions", Some(&canary::question(&model, canary, 1)), until).await?;
        canary::of_completions(reply, KIND, "start LMDeploy with --logprobs-mode raw_logprobs")
    }

    async fn abort_all(&self, until: Until) -> Result<(), EngineError> {
        let reply = self.http.post("/abort_request", Some(&json!({"abort_all": true})), until).await?;
        match reply.status() {
            // Asleep, it has no requests.
            501 if self.is_paused(until).await? => Ok(()),
            501 => Err(unsupported("the server cannot end requests".into(), "start LMDeploy with --enable-abort-handling")),
            _ => reply.ok(),
        }
    }

    async fn startup_checkpoint(&self, until: Until) -> Result<String, EngineError> {
        match self.process().as_ref().and_then(|process| process.after("api_server")) {
            Some(model) if !model.starts_with('-') => Ok(model.to_owned()),
            _ => self.model(until).await,
        }
    }

    async fn device_route(
        &self,
        pause: PausePolicy,
        kv_cache: KvCachePolicy,
        served: Option<&Path>,
        until: Until,
    ) -> Result<DeviceRoute, EngineError> {
        self.choose_route(pause, kv_cache, served, until).await
    }

    fn groups(&self) -> Option<Arc<dyn GroupServer>> {
        Some(Arc::new(group::LmdeployGroup { http: self.http.clone() }))
    }

    async fn open_feed(&self, job: FeedJob<'_>, until: Until) -> Result<Box<dyn Feed>, EngineError> {
        self.open(job, until).await
    }
}

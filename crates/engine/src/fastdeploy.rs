//! FastDeploy 2.6 and newer, with `--dynamic-load-weight`: weights by the snapshot of its model directory (`--load_strategy ipc_snapshot`).
//!
//! Decides paths, bodies and which reply means success. Facts: `docs/features/weight_update.md` (25e866cc), `engine/common_engine.py`
//! (`_control_pause`, `_control_update_weights`, the 60 s of `_call_worker`), `worker/gpu_model_runner.py` (`sleep`, `wakeup`) and
//! `rl/dynamic_weight_manager.py` of PaddlePaddle/FastDeploy; no server was run. Four of them shape this file. A sleep or wake-up with two
//! tags ends at the first that has nothing to do, and reports success. A wake-up resumes the engine by itself. It checks neither that all
//! parameters came nor that a name is known. And after 60 s a control call returns an error while the workers continue. `POST
//! /v1/update_weights` moves weights by `checkpoint_transfer`, a library that is not public: it is called only if WeightSync's own replaces
//! that library, with steps in a folder ([`steps`]) or from the agent's memory ([`stream`]).

mod async_ipc;
pub(crate) mod snapshot;
mod started;
pub(crate) mod steps;
mod stream;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use serde_json::{Value, json};

use self::snapshot::Snapshot;
use self::started::{FLAG, Flag, START, Strategy, flag_unseen, no_way};
use self::steps::{By, Names, Step, Wanted};
use self::stream::Stream;
use super::adapter::Adapter;
use super::canary::{self, LogProbs};
use super::descriptor::{EngineDescriptor, Limit};
use super::device::DeviceRoute;
use super::feed::{Feed, FeedJob};
use super::fit::{self, Fit};
use super::host::HostJob;
use super::host_feed::HostFeed;
use super::http::{Answer, EngineHttp, Reply, Until};
use super::process::{self, EngineProcess};
use super::record::{Record, UNKNOWN};
use super::server::{Server, no_host_route};
use super::{Engine, EngineConfig, EngineError, Holding};
use weightsync_core::protocol::{CanaryPolicy, EngineFacts, KvCachePolicy, PausePolicy};
use weightsync_core::weights::{IgnoredTensors, TensorSpec};

const KIND: &str = "fastdeploy";
/// The default of `--port`.
const PORT: u16 = 8000;
const NEWER: &str = "use FastDeploy 2.6 or newer";
/// After this time the engine stops waiting for its workers and returns an error (`_call_worker(control_request, 60)`).
const WORKERS: Duration = Duration::from_secs(60);

/// What is known of it before a server runs.
pub(super) const ENGINE: EngineDescriptor = EngineDescriptor {
    kind: KIND,
    api_kind: "FastDeploy",
    port: PORT,
    needs: "the OpenAI server, started with `--dynamic-load-weight --load_strategy ipc_snapshot`; its agent must be able to write into its \
            model directory, `update.pause` must be `Abort` and `update.kvCache` `Reset`",
    limits: &[Limit {
        in_groups: false,
        pauses: &[PausePolicy::Abort],
        kv_caches: &[KvCachePolicy::Reset],
        cause: "FastDeploy's pause ends requests and empties caches, and it resumes by itself after an update",
        next_step: "set update.pause to Abort and update.kvCache to Reset",
    }],
    connect,
};

fn connect(config: EngineConfig) -> Result<Arc<dyn Engine>, EngineError> {
    let server = Fastdeploy {
        http: Arc::new(EngineHttp::new(&config)?),
        record: Record::new(config.record),
        processes: config.processes.clone(),
        model_directory: Mutex::new(config.served_model.clone()),
        seen: Mutex::default(),
        step: Mutex::default(),
        owner: config.owner,
    };
    Ok(Arc::new(Adapter::new(server, config.served_model, None, config.processes)))
}

struct Fastdeploy {
    http: Arc<EngineHttp>,
    record: Record,
    processes: PathBuf,
    /// As this process sees it.
    model_directory: Mutex<Option<PathBuf>>,
    seen: Mutex<Option<EngineProcess>>,
    /// The step that the next call of `/v1/update_weights` names.
    step: Mutex<Option<Step>>,
    /// Whose steps it lays.
    owner: String,
}

impl Fastdeploy {
    /// POST of a control route, which must report success explicitly.
    async fn control(&self, path: &str, until: Until) -> Result<(), EngineError> {
        success(self.http.url(), self.http.post(path, None, until).await?).map(drop)
    }

    fn process(&self) -> Option<EngineProcess> {
        let mut seen = self.seen.lock();
        if let Some(process) = seen.as_ref().filter(|process| process.runs(&self.processes)) {
            return Some(process.clone());
        }
        let port = self.http.port().to_string();
        *seen = process::find(&self.processes, |process| {
            // `python -m ...`, or the program of that name, started directly or by its interpreter.
            let module = process.words.iter().any(|word| word == "fastdeploy.entrypoints.openai.api_server");
            let program = process.words.iter().take(2).any(|word| word == "fastdeploy" || word.ends_with("/fastdeploy"));
            (module || program) && process.value("--port").map_or(port == PORT.to_string(), |named| named == port)
        });
        seen.clone()
    }

    fn strategy(&self) -> Strategy {
        self.strategy_of(self.process().as_ref())
    }

    fn strategy_of(&self, process: Option<&EngineProcess>) -> Strategy {
        let flag = process.map_or(Flag::Unseen, |process| Flag::of(process.variable(&self.processes, FLAG)));
        Strategy::of(process, flag)
    }

    fn ranks(&self) -> usize {
        self.process().as_ref().map_or(1, started::ranks)
    }

    /// Path of its model, as it reports or from the settings.
    async fn model_directory(&self, until: Until) -> Result<PathBuf, EngineError> {
        let known = self.model_directory.lock().clone();
        if let Some(known) = known {
            return Ok(known);
        }
        let (_, root) = self.served(until).await?;
        let root = PathBuf::from(root);
        if !root.is_absolute() || !root.is_dir() {
            return Err(unsupported(
                format!("the server's model directory {} is not seen from here, and its snapshot is to be written there", root.display()),
                "give the agent that directory (--model-dir, or a volume at the same path)",
            ));
        }
        *self.model_directory.lock() = Some(root.clone());
        Ok(root)
    }

    /// Name and directory of the model that it serves. It does not report them while it sleeps.
    async fn served(&self, until: Until) -> Result<(String, String), EngineError> {
        let answer = self.http.get("/v1/models", until).await?.json()?;
        let text = |name: &str| answer.value().pointer(&format!("/data/0/{name}")).and_then(Value::as_str).map(str::to_owned);
        match (text("id"), text("root")) {
            (Some(id), Some(root)) => Ok((id, root)),
            _ => Err(answer.bad("it names no model".into())),
        }
    }

    async fn of_snapshot<T: Send + 'static>(
        &self,
        until: Until,
        work: impl FnOnce(Snapshot) -> Result<T, EngineError> + Send + 'static,
    ) -> Result<T, EngineError> {
        let directory = self.model_directory(until).await?;
        of_files(directory.clone(), until, move || Snapshot::find(&directory).and_then(work)).await
    }

    /// Loads the last prepared step into every rank, or the server's start step where none is.
    async fn update(&self, names: Names, until: Until) -> Result<(), EngineError> {
        let url = self.http.url();
        let step = self.step.lock().clone();
        let name = step.as_ref().map(Step::name);
        let body = name.as_ref().map_or_else(|| json!({}), |name| json!({"version": name}));
        let answer = success(url, self.http.post("/v1/update_weights", Some(&body), until).await?)?;
        let tensors = step.as_ref().map(|step| step.tensors).filter(|_| names == Names::Checkpoint);
        let wanted = Wanted { name: name.as_deref(), tensors, ranks: self.ranks() };
        wanted.was_taken(answer.value()).map_err(|what| EngineError::NotSuccess { url: url.to_owned(), body: what })
    }

    /// Whether its weights are loaded and its workers run.
    async fn has_weights(&self, until: Until) -> Result<bool, EngineError> {
        let reply = self.http.get("/health", until).await?;
        match reply.status() {
            200 => Ok(true),
            304 => Ok(false),
            _ => Err(reply.into_status()),
        }
    }
}

/// Moves files on a thread that serves no other task.
async fn of_files<T: Send + 'static>(
    place: PathBuf,
    until: Until,
    work: impl FnOnce() -> Result<T, EngineError> + Send + 'static,
) -> Result<T, EngineError> {
    match tokio::time::timeout(until.left(), tokio::task::spawn_blocking(work)).await {
        Ok(done) => done.unwrap_or(Err(EngineError::Cancelled)),
        Err(_) => Err(EngineError::Timeout { url: place.display().to_string(), deadline: until.total() }),
    }
}

/// `{"status": "success"}` with 200. After an error about slow workers, the workers may continue.
fn success(url: &str, reply: Reply) -> Result<Answer, EngineError> {
    if reply.status() == 500 {
        let error = reply.into_status();
        return match &error {
            EngineError::Status { body, .. } if body.contains("Timeouted") => {
                Err(EngineError::Timeout { url: url.to_owned(), deadline: WORKERS })
            }
            _ => Err(error),
        };
    }
    reply.json()?.must("status", &json!("success"))
}

fn unsupported(what: String, next_step: &str) -> EngineError {
    EngineError::Unsupported { what, next_step: next_step.to_owned() }
}

#[async_trait]
impl Server for Fastdeploy {
    fn descriptor(&self) -> &'static EngineDescriptor {
        &ENGINE
    }

    fn url(&self) -> &str {
        self.http.url()
    }

    fn takes_directories(&self) -> Result<(), EngineError> {
        match self.strategy() {
            Strategy::Steps(steps) if steps.by == By::Memory => {
                Err(unsupported("FastDeploy was started for weights from its agent's memory".into(), "give the agent memory for a version"))
            }
            Strategy::Snapshot | Strategy::Steps(_) | Strategy::Unseen => Ok(()),
            Strategy::AsyncIpc(_) => {
                Err(unsupported("FastDeploy was started for weights from GPU memory".into(), "give its agent the engine's GPU"))
            }
            Strategy::StepsOrTrainers => Err(flag_unseen()),
            Strategy::Other(strategy) => Err(no_way(&strategy)),
        }
    }

    async fn facts(&self, until: Until) -> Result<EngineFacts, EngineError> {
        let control = self.http.get("/v1/is_paused", until).await?;
        match control.status() {
            401 | 403 => {
                return Err(unsupported(
                    format!("{} refuses the API key", self.http.url()),
                    "give the key that the server was started with (--api-key) as the engine's apiKeySecretRef",
                ));
            }
            404 | 405 => return Err(unsupported(format!("{} has no control routes", self.http.url()), NEWER)),
            _ => paused(control)?,
        };
        self.has_weights(until).await?;
        let process = self.process();
        if process.as_ref().is_some_and(|process| !process.has("--dynamic-load-weight")) {
            return Err(unsupported(format!("{} cannot change its weights", self.http.url()), START));
        }
        let ranks = process.as_ref().map_or(1, started::ranks);
        let delivery = match self.strategy_of(process.as_ref()) {
            Strategy::Other(strategy) => return Err(no_way(&strategy)),
            Strategy::StepsOrTrainers => return Err(flag_unseen()),
            Strategy::AsyncIpc(_) => "GPU memory: the asynchronous IPC message",
            Strategy::Steps(steps) if steps.names == Names::Own && ranks > 1 => {
                return Err(unsupported(
                    format!("{} has {ranks} ranks, and without {FLAG}=1 each takes parameters of its own shards", self.http.url()),
                    "start FastDeploy with that variable, or with --tensor-parallel-size 1",
                ));
            }
            Strategy::Steps(steps) if (steps.by == By::Folder || steps.names == Names::Own) && !steps.folder.is_dir() => {
                return Err(unsupported(
                    format!("the server reads steps from {}, which is not seen from here", steps.folder.display()),
                    "give the agent that folder at the same path (a volume that both mount)",
                ));
            }
            Strategy::Steps(steps) if steps.by == By::Memory => "update_weights, from the agent's memory",
            Strategy::Steps(_) => "update_weights, steps in a folder",
            Strategy::Snapshot | Strategy::Unseen if ranks > 1 => {
                return Err(unsupported(
                    format!("{} has {ranks} ranks, each of which reads a snapshot of its own shards", self.http.url()),
                    "run FastDeploy with --tensor-parallel-size 1",
                ));
            }
            Strategy::Snapshot | Strategy::Unseen => {
                self.of_snapshot(until, |_| Ok(())).await?;
                "ipc_snapshot, a file in its model directory"
            }
        };
        Ok(EngineFacts {
            kind: KIND.to_owned(),
            // It reports no version; its control routes came with 2.6.
            server_version: "2.6 or newer".to_owned(),
            size: u32::try_from(ranks).unwrap_or(u32::MAX),
            url: self.http.url().to_owned(),
            delivery: delivery.to_owned(),
            answer_version: "none".to_owned(),
            unchecked: None,
            model_bytes: None,
            groups: None,
        })
    }

    async fn front(&self, until: Until) -> Result<(), EngineError> {
        self.has_weights(until).await.map(drop)
    }

    async fn fingerprint(&self, until: Until) -> Result<String, EngineError> {
        self.front(until).await?;
        Ok(self.process().map_or_else(|| UNKNOWN.to_owned(), |process| process.start))
    }

    /// The request for its pause state goes through the engine.
    async fn holding(&self, until: Until) -> Result<Holding, EngineError> {
        self.is_paused(until).await?;
        Ok(self.record.read(&self.fingerprint(until).await?))
    }

    async fn write(&self, holding: &Holding, until: Until) -> Result<(), EngineError> {
        let start = self.fingerprint(until).await?;
        self.record.write(&start, holding)
    }

    async fn pause(&self, _: PausePolicy, _: KvCachePolicy, until: Until) -> Result<(), EngineError> {
        self.control("/v1/pause", until).await
    }

    async fn is_paused(&self, until: Until) -> Result<bool, EngineError> {
        paused(self.http.get("/v1/is_paused", until).await?)
    }

    async fn unpause(&self, until: Until) -> Result<(), EngineError> {
        self.control("/v1/resume", until).await
    }

    fn fits(&self, served: &Path, tensors: &[TensorSpec], ignored: &IgnoredTensors) -> Result<Fit, EngineError> {
        let parameters = match self.strategy() {
            Strategy::Steps(steps) if steps.names == Names::Own => steps.own_parameters(served)?,
            Strategy::AsyncIpc(_) | Strategy::Steps(_) => return fit::check(served, tensors, ignored),
            _ => Snapshot::find(served)?.specs()?,
        };
        fit::compare_parameters(&parameters, tensors, ignored)?;
        let other = tensors.iter().find(|tensor| parameters.iter().any(|each| each.name == tensor.name && each.dtype != tensor.dtype));
        match other {
            Some(tensor) => Err(unsupported(
                format!("{} comes as {:?}, and FastDeploy converts nothing", tensor.name, tensor.dtype),
                "publish each tensor in the element type of the server's parameter",
            )),
            None => Ok(Fit::WHOLE),
        }
    }

    fn readable(&self, served: &Path) -> Result<u64, String> {
        let parameters = match self.strategy() {
            Strategy::Steps(steps) if steps.names == Names::Own => steps.own_parameters(served),
            Strategy::AsyncIpc(_) | Strategy::Steps(_) => return fit::readable(served),
            _ => Snapshot::find(served).and_then(|snapshot| snapshot.specs()),
        };
        let parameters = parameters.map_err(|error| error.to_string())?;
        let bytes = |tensor: &TensorSpec| tensor.dtype.tensor_bytes(&tensor.shape).unwrap_or(0);
        Ok(parameters.iter().fold(0, |sum, tensor| sum.saturating_add(bytes(tensor))))
    }

    async fn stage(&self, from: &Path, until: Until) -> Result<Option<PathBuf>, EngineError> {
        let from = from.to_owned();
        if let Strategy::Steps(steps) = self.strategy() {
            if steps.by == By::Memory {
                // Only its start step is staged like this, and the server finds that by itself.
                *self.step.lock() = None;
                return Ok(None);
            }
            let (owner, folder) = (self.owner.clone(), steps.folder.clone());
            let lay = move || if from.parent() == Some(&folder) { Step::there(&from) } else { Step::lay(&folder, &owner, &from) };
            let step = of_files(steps.folder, until, lay).await?;
            *self.step.lock() = Some(step.clone());
            return Ok(Some(step.directory));
        }
        if self.model_directory(until).await? == from {
            return Ok(None);
        }
        self.of_snapshot(until, move |snapshot| snapshot.stage(&from)).await.map(Some)
    }

    /// The snapshot is replaced, and read. Both tags sleep one by one, then both wake in one call, because a call with two tags ends at the
    /// first that has nothing to do. The engine then resumes by itself, so it is paused at once, until it was checked.
    async fn load(&self, _: &Path, until: Until) -> Result<(), EngineError> {
        if let Strategy::Steps(steps) = self.strategy() {
            return self.update(steps.names, until).await;
        }
        let switched = self.of_snapshot(until, |snapshot| {
            snapshot
                .switch()
                .map_err(|cause| unsupported(format!("the snapshot cannot be replaced: {cause}"), "look at the model directory"))
        });
        switched.await?;
        self.control("/v1/sleep?tags=kv_cache", until).await?;
        self.control("/v1/sleep?tags=weight", until).await?;
        self.control("/v1/wakeup?tags=weight,kv_cache", until).await?;
        self.control("/v1/pause", until).await?;
        if self.has_weights(until).await? {
            return Ok(());
        }
        let body = "it reported that it woke up, but its workers have no weights".to_owned();
        Err(EngineError::NotSuccess { url: self.http.url().to_owned(), body })
    }

    async fn clear_failed_load(&self, _: Until) -> Result<(), EngineError> {
        Ok(())
    }

    /// A pause empties them, and sleep frees them.
    async fn reset_cache(&self, _: Until) -> Result<(), EngineError> {
        Ok(())
    }

    async fn generate(&self, until: Until) -> Result<(), EngineError> {
        let (model, _) = self.served(until).await?;
        let body = json!({"model": model, "prompt": "a", "max_tokens": 1, "temperature": 0});
        let answer = self.http.post("/v1/completions", Some(&body), until).await?.json()?;
        let generated = answer.value().pointer("/usage/completion_tokens").and_then(Value::as_u64);
        if generated.is_some_and(|tokens| tokens > 0) { Ok(()) } else { Err(answer.bad("it generated no token".to_owned())) }
    }

    async fn log_probs(&self, canary: &CanaryPolicy, until: Until) -> Result<LogProbs, EngineError> {
        let (model, _) = self.served(until).await?;
        let reply = self.http.post("/v1/completions", Some(&canary::question(&model, canary, 1)), until).await?;
        canary::of_completions(reply, KIND, "start FastDeploy with --enable-logprob")
    }

    async fn abort_all(&self, until: Until) -> Result<(), EngineError> {
        self.control("/v1/pause", until).await
    }

    /// The snapshot from before the first version, if it was kept; of a server that takes its own parameters, the step that it started with.
    async fn startup_checkpoint(&self, until: Until) -> Result<String, EngineError> {
        let directory = self.model_directory(until).await?;
        if let Strategy::Steps(steps) = self.strategy()
            && steps.names == Names::Own
        {
            return Ok(steps.start(&directory).to_string_lossy().into_owned());
        }
        let kept = snapshot::kept(&directory);
        Ok(if kept.is_dir() { kept } else { directory }.to_string_lossy().into_owned())
    }

    async fn device_route(&self, _: PausePolicy, _: KvCachePolicy, _: Option<&Path>, _: Until) -> Result<DeviceRoute, EngineError> {
        match self.strategy() {
            Strategy::AsyncIpc(_) => Ok(DeviceRoute { name: "ipc_async", gpus: Vec::new(), gated: true, why_not_faster: None }),
            Strategy::StepsOrTrainers => Err(flag_unseen()),
            Strategy::Other(strategy) => Err(no_way(&strategy)),
            Strategy::Steps(steps) if steps.by == By::Memory => {
                Err(unsupported("FastDeploy reads its agent's host memory as it was started".into(), "give the agent memory for a version"))
            }
            Strategy::Snapshot | Strategy::Steps(_) | Strategy::Unseen => {
                Err(unsupported("FastDeploy reads files as it was started".into(), "it is fed from a directory"))
            }
        }
    }

    async fn host_route(&self, _: Until) -> Result<&'static str, EngineError> {
        match self.strategy() {
            Strategy::Steps(steps) if steps.by == By::Memory => Ok("checkpoint_transfer"),
            _ => Err(no_host_route(KIND)),
        }
    }

    async fn open_host_feed(&self, job: &HostJob, _: Until) -> Result<Box<dyn HostFeed>, EngineError> {
        match self.strategy() {
            Strategy::Steps(steps) if steps.by == By::Memory => {
                Ok(Box::new(Stream::open(self.http.clone(), job, self.ranks(), steps.names == Names::Checkpoint)?))
            }
            _ => Err(no_host_route(KIND)),
        }
    }

    async fn open_feed(&self, job: FeedJob<'_>, until: Until) -> Result<Box<dyn Feed>, EngineError> {
        let Strategy::AsyncIpc(workers) = self.strategy() else {
            return Err(unsupported("FastDeploy was not started for weights from GPU memory".into(), START));
        };
        let served = self.model_directory(until).await?;
        Ok(Box::new(async_ipc::AsyncIpc::open(self.http.clone(), &job, &workers, &served, until).await?))
    }
}

/// `{"is_paused": bool}`, by itself or as the result of a control call.
fn paused(reply: Reply) -> Result<bool, EngineError> {
    let answer = reply.json()?;
    let found = answer.value().pointer("/result/is_paused").or_else(|| answer.value().get("is_paused")).and_then(Value::as_bool);
    found.ok_or_else(|| answer.bad("\"is_paused\" is neither true nor false".to_owned()))
}

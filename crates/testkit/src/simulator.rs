//! Engine simulators: servers with the endpoints, order rules, error replies and traps of one engine version, for demos, local runs and
//! tests. Not an engine: text is derived from a digest of the weights.
//!
//! A simulator really reads the directories that it must load, and everything it serves is computed from those bytes, so an update that did
//! not happen, happened by half, or was corrupted shows in its answers and in `GET /simulator/digest`.

mod backend;
mod completions;
mod core;
mod fastdeploy;
mod faults;
mod feed;
mod front;
mod group;
mod ipc;
mod lmdeploy;
mod memory;
mod model;
mod served;
mod sglang;
mod sglang_reply;
mod tensors;
#[cfg(test)]
mod tests;
mod unpickle;
mod vllm;
mod vllm_reply;
mod worker;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub use backend::WeightTransfer;
pub use fastdeploy::FastdeployOptions;
pub use faults::{Fault, FaultRule, Faults, LoadFault};
pub use group::GroupOptions;

use self::core::{Core, Kind};
use self::front::Front;
use self::group::Ranks;
use self::group::sglang::SglangGroups;
use self::group::torch::TorchGroups;
use self::memory::GpuMemory;
use self::served::Served;

#[derive(Debug, Clone)]
pub struct SimulatorOptions {
    /// `vllm`, `sglang`, `lmdeploy` or `fastdeploy`.
    pub engine: String,
    pub model: PathBuf,
    /// vLLM and SGLang: checkpoint of the model that drafts for it.
    pub draft: Option<PathBuf>,
    pub served_model_name: String,
    pub world_size: u32,
    /// Longest request in tokens.
    pub max_model_len: usize,
    pub api_key: Option<String>,
    /// vLLM's `VLLM_SERVER_DEV_MODE`.
    pub dev_mode: bool,
    /// SGLang's `SGLANG_HEALTH_CHECK_TIMEOUT`.
    pub health_timeout: Duration,
    /// UUIDs of the GPUs of its worker ranks. Those that are not named are made up.
    pub gpus: Vec<String>,
    /// Folder in which the stand-in driver of the tests keeps GPU memory; without it no memory of another process can be opened.
    pub gpu_memory: Option<PathBuf>,
    /// LMDeploy's and vLLM's `--distributed-executor-backend ray`.
    pub ray: bool,
    /// LMDeploy's `--enable-abort-handling`.
    pub abort_handling: bool,
    /// Whether checkpoint-engine is installed with it (vLLM: and its worker extension is chosen).
    pub checkpoint_engine: bool,
    pub fastdeploy: FastdeployOptions,
    /// vLLM's `--weight-transfer-config`.
    pub weight_transfer: Option<WeightTransfer>,
    /// How its ranks join groups; without it they have no GPU to join one with.
    pub groups: Option<GroupOptions>,
    pub faults: Faults,
}

#[derive(Debug, Clone)]
struct GpuOptions {
    uuids: Vec<String>,
    memory: GpuMemory,
    ray: bool,
    abort_handling: bool,
    checkpoint_engine: bool,
}

impl SimulatorOptions {
    /// One rank, no key, no faults.
    pub fn new(engine: &str, model: PathBuf) -> Self {
        Self {
            engine: engine.to_owned(),
            model,
            draft: None,
            served_model_name: "model".to_owned(),
            world_size: 1,
            max_model_len: 4096,
            api_key: None,
            dev_mode: true,
            health_timeout: Duration::from_secs(20),
            gpus: Vec::new(),
            gpu_memory: None,
            ray: true,
            abort_handling: true,
            checkpoint_engine: true,
            fastdeploy: FastdeployOptions::default(),
            weight_transfer: None,
            groups: None,
            faults: Faults::default(),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum SimulatorError {
    #[error("there is no simulator of the engine {engine:?}: use vllm, sglang, lmdeploy or fastdeploy")]
    UnknownEngine { engine: String },
    #[error("the model cannot be loaded: {cause}")]
    Model { cause: String },
    #[error("the server cannot be started: {0}")]
    Listen(#[from] std::io::Error),
}

/// A running simulator; dropping it ends it at once, as a crash would.
pub struct Simulator {
    address: SocketAddr,
    core: Arc<Core>,
    stop: CancellationToken,
    served: Option<JoinHandle<()>>,
}

impl Simulator {
    /// Loads the model and serves on the listener.
    pub async fn start(options: SimulatorOptions, listener: TcpListener) -> Result<Self, SimulatorError> {
        let kind = match options.engine.as_str() {
            "vllm" => Kind::Vllm,
            "sglang" => Kind::Sglang,
            "lmdeploy" => Kind::Lmdeploy,
            "fastdeploy" => Kind::Fastdeploy,
            _ => return Err(SimulatorError::UnknownEngine { engine: options.engine }),
        };
        let address = listener.local_addr()?;
        let ranks = options.world_size.max(1) as usize;
        let made_up = (options.gpus.len()..ranks).map(|rank| format!("GPU-fa4e0000-0000-4000-8000-{rank:012}"));
        let gpus = GpuOptions {
            uuids: options.gpus.iter().cloned().chain(made_up).take(ranks).collect(),
            memory: GpuMemory::new(options.gpu_memory),
            ray: options.ray,
            abort_handling: options.abort_handling,
            checkpoint_engine: options.checkpoint_engine,
        };
        if options.draft.is_some() && !matches!(kind, Kind::Vllm | Kind::Sglang) {
            return Err(SimulatorError::Model { cause: format!("{} is simulated without a draft model of its own", options.engine) });
        }
        let (model, draft, of_snapshot) =
            (options.model.clone(), options.draft.clone(), options.fastdeploy.load_strategy == "ipc_snapshot");
        let opened = tokio::task::spawn_blocking(move || {
            let served = match kind {
                // A server that waits for a trainer's memory begins with the checkpoint that it was given, so that it can be distinguished
                // from others.
                Kind::Fastdeploy if of_snapshot => {
                    let files = fastdeploy::start_from(&model)?;
                    Served::of_files(files.iter().map(PathBuf::as_path))
                }
                _ => Served::open(&model),
            };
            Ok::<_, String>((served?, draft.map(|draft| Served::open(&draft)).transpose()?))
        })
        .await;
        let ranks = Ranks::new(options.groups, gpus.uuids.clone(), gpus.memory.clone());
        let served = opened.map_err(|error| error.to_string()).and_then(|opened| opened);
        let (served, draft) = served.map_err(|cause| SimulatorError::Model { cause })?;
        let stop = CancellationToken::new();
        let core = Arc::new(Core::new(kind, served, draft, options.faults));
        let front = Arc::new(Front {
            core: core.clone(),
            model: options.served_model_name,
            model_directory: options.model.to_string_lossy().into_owned(),
            max_model_len: options.max_model_len,
            world_size: options.world_size,
            started: started(),
            api_key: options.api_key,
            guarded: match kind {
                Kind::Vllm => vllm::guarded,
                Kind::Sglang => sglang::guarded,
                Kind::Lmdeploy => lmdeploy::guarded,
                Kind::Fastdeploy => fastdeploy::guarded,
            },
            crash: stop.clone(),
        });
        if kind == Kind::Vllm && !gpus.ray {
            front.core.change(|state| state.late = Some(VecDeque::new()));
        }
        let routes = match kind {
            Kind::Fastdeploy => fastdeploy::routes(options.fastdeploy, gpus, options.model),
            Kind::Vllm => vllm::routes(options.dev_mode, gpus, (options.weight_transfer, options.draft), ranks),
            Kind::Sglang => sglang::routes(options.health_timeout, gpus, SglangGroups::new(TorchGroups::new(ranks))),
            Kind::Lmdeploy => lmdeploy::routes(gpus, TorchGroups::new(ranks)),
        };
        let served = tokio::spawn(front::serve(listener, front::around(routes, &front), stop.clone()));
        Ok(Self { address, core, stop, served: Some(served) })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// `http://HOST:PORT`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Ends it at once, as a crash would.
    pub fn kill(&self) {
        self.stop.cancel();
    }

    /// Whether it was ended, or ends by itself because its core broke. It may take connections for a moment more.
    pub fn is_over(&self) -> bool {
        self.stop.is_cancelled() || self.core.state().dead
    }

    /// Ends it at once, connections included, and waits until its port is free.
    pub async fn stop(mut self) {
        self.stop.cancel();
        self.ended().await;
    }

    /// Returns when it ended, by itself (a fault, a broken core) or not.
    pub async fn ended(&mut self) {
        if let Some(served) = &mut self.served {
            let _joined = served.await;
            self.served = None;
        }
    }
}

impl Drop for Simulator {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Seconds since 1970 with microseconds, as Python prints such a number.
fn started() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{}.{:06}", since.as_secs(), since.subsec_micros())
}

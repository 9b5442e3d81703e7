//! Engine simulators: servers with the endpoints, order rules, error replies and traps of one engine version, for demos, local runs and
//! tests. Not an engine: text is derived from a digest of the weights.
//!
//! A simulator really reads the directories that it is told to load, and everything it serves is computed from those bytes, so an update
//! that did not happen, happened by half, or was corrupted shows in its answers and in `GET /simulator/digest`.

mod completions;
mod core;
mod faults;
mod front;
mod model;
mod served;
mod sglang;
mod vllm;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub use faults::{Fault, FaultRule, Faults, LoadFault};

use self::core::{Core, Kind};
use self::front::Front;
use self::served::Served;
use super::ApiKey;

/// What to simulate.
#[derive(Debug, Clone)]
pub struct SimulatorOptions {
    /// `vllm` or `sglang`.
    pub engine: String,
    /// Checkpoint to start with.
    pub model: PathBuf,
    /// Name under which it is served.
    pub served_model_name: String,
    /// Ranks to report.
    pub world_size: u32,
    /// Longest request in tokens.
    pub max_model_len: usize,
    /// Key that the server wants.
    pub api_key: Option<ApiKey>,
    /// vLLM's `VLLM_SERVER_DEV_MODE`.
    pub dev_mode: bool,
    /// SGLang's `SGLANG_HEALTH_CHECK_TIMEOUT`.
    pub health_timeout: Duration,
    /// What goes wrong from the start.
    pub faults: Faults,
}

impl SimulatorOptions {
    /// One rank, no key, no faults.
    pub fn new(engine: &str, model: PathBuf) -> Self {
        Self {
            engine: engine.to_owned(),
            model,
            served_model_name: "model".to_owned(),
            world_size: 1,
            max_model_len: 4096,
            api_key: None,
            dev_mode: true,
            health_timeout: Duration::from_secs(20),
            faults: Faults::default(),
        }
    }
}

/// Why a simulator does not start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum SimulatorError {
    #[error("there is no simulator of the engine {engine:?}: use vllm or sglang")]
    UnknownEngine { engine: String },
    #[error("the model cannot be loaded: {cause}")]
    Model { cause: String },
    #[error("the server cannot be started: {0}")]
    Listen(#[from] std::io::Error),
}

/// A running simulator; dropping it ends it at once, as a crash would.
pub struct Simulator {
    address: SocketAddr,
    stop: CancellationToken,
    served: Option<JoinHandle<()>>,
}

impl Simulator {
    /// Loads the model and serves on the listener.
    pub async fn start(options: SimulatorOptions, listener: TcpListener) -> Result<Self, SimulatorError> {
        let kind = match options.engine.as_str() {
            "vllm" => Kind::Vllm,
            "sglang" => Kind::Sglang,
            _ => return Err(SimulatorError::UnknownEngine { engine: options.engine }),
        };
        let address = listener.local_addr()?;
        let model = options.model.clone();
        let opened = tokio::task::spawn_blocking(move || Served::open(&model)).await;
        let served = opened.map_err(|error| error.to_string()).and_then(|opened| opened);
        let served = served.map_err(|cause| SimulatorError::Model { cause })?;
        let stop = CancellationToken::new();
        let front = Arc::new(Front {
            core: Arc::new(Core::new(kind, served, options.faults)),
            model: options.served_model_name,
            model_directory: options.model.to_string_lossy().into_owned(),
            max_model_len: options.max_model_len,
            world_size: options.world_size,
            started: started(),
            api_key: options.api_key.map(|key| key.text().to_owned()),
            guarded: if kind == Kind::Vllm { vllm::guarded } else { sglang::guarded },
            crash: stop.clone(),
        });
        let routes = match kind {
            Kind::Vllm => vllm::routes(options.dev_mode),
            Kind::Sglang => sglang::routes(options.health_timeout),
        };
        let served = tokio::spawn(front::serve(listener, front::around(routes, &front), stop.clone()));
        Ok(Self { address, stop, served: Some(served) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// `http://HOST:PORT`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
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

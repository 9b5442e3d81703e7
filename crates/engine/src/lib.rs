//! How one inference engine is fed: one contract, one file for each engine.
//!
//! An adapter reports its server's properties, and switches it to a version that is complete and verified in a directory. It decides the
//! order of calls, which replies count as success, and the meaning of an incomplete switch. It never decides that a version is complete
//! (the agent's coverage gate does) and never resumes an engine that may hold half an update.
//!
//! Before an adapter changes an engine's weights, it writes a mark into the engine itself (see [`Holding`]). The last step removes the
//! mark. So a later request to the engine, even by a restarted agent, shows whether it holds a version, its start-up weights, or half an
//! update. Why a replica with half an update stays paused: `docs/decisions/0003-half-an-update.md`.

mod adapter;
mod canary;
mod checkpoint_engine;
mod checksums;
mod descriptor;
mod device;
pub mod draft;
mod evidence;
mod external;
mod fastdeploy;
mod feed;
mod fit;
mod group;
mod host;
mod host_feed;
mod http;
mod label;
mod lifeline;
mod lmdeploy;
mod localhost;
mod mixed;
mod process;
mod record;
mod secret;
mod served;
mod server;
mod sglang;
mod start;
mod unproven;
mod vllm;
mod workers;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

pub use descriptor::{Connect, EngineDescriptor, Limit};
pub use device::{DeviceBucket, DeviceInstall, DeviceJob, DevicePlace, DeviceRoute, Released};
pub use draft::DraftWay;
pub use external::{External, ExternalMark, ExternalProof};
pub use fit::{Fit, same_tensors};
pub use group::no_groups;
pub use group::{EngineGroup, GroupJoin, GroupJoined};
pub use host::{HostBucket, HostDigest, HostInstall, HostJob, HostMemory, HostTensor};
pub use label::Holding;
pub use localhost::LOCALHOST;
pub use secret::ApiKey;

use weightsync_core::protocol::{CanaryPolicy, EngineFacts, HeldVersion, KvCachePolicy, MixedWindow, PausePolicy};
use weightsync_core::weights::{IgnoredTensors, TensorSpec};

/// Why an engine call failed. Bodies of replies are cut to 512 bytes; API keys never appear.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum EngineError {
    #[error("{url} cannot be reached: {}", weightsync_net::https::root_cause(source))]
    Unreachable { url: String, source: reqwest::Error },
    #[error("{url} did not respond within {deadline:?}")]
    Timeout { url: String, deadline: Duration },
    #[error("{url} answered {status}: {body}")]
    Status { url: String, status: u16, body: String },
    #[error("{url} answered 200 but not success: {body}")]
    NotSuccess { url: String, body: String },
    #[error("{url}: invalid response: {what}")]
    BadReply { url: String, what: String },
    #[error("{what}; {next_step}")]
    Unsupported { what: String, next_step: String },
    #[error("the engine restarted in the middle of the install")]
    Restarted,
    #[error(
        "{url} is asleep, and not for an update: its weights are off the GPU; it takes part again when the client that put it to sleep wakes it"
    )]
    Asleep { url: String },
    #[error("the engine may hold half an update of version {}: it stays paused until it is fed in full", version.version)]
    HalfAnUpdate { version: HeldVersion },
    #[error("the canary refuses what it answers: {measured}")]
    CanaryRefused { measured: String },
    #[error("cancelled")]
    Cancelled,
}

impl EngineError {
    /// A tensor that torch cannot represent: the version cannot be installed in this way.
    pub(crate) fn no_form(error: &weightsync_torch::TorchError) -> Self {
        Self::Unsupported {
            what: error.to_string(),
            next_step: "publish tensors of plain element types, or feed this engine from a directory".into(),
        }
    }

    /// Whether the engine refused the request, for another reason than a lack of memory.
    pub fn is_refusal(&self) -> bool {
        let said_no = |body: &str| !body.to_ascii_lowercase().replace(' ', "").contains("outofmemory");
        match self {
            Self::Status { status, body, .. } => matches!(status, 400 | 409 | 422 | 500) && said_no(body),
            Self::NotSuccess { body: what, .. } | Self::BadReply { what, .. } => said_no(what),
            Self::Unreachable { .. }
            | Self::Timeout { .. }
            | Self::Unsupported { .. }
            | Self::Restarted
            | Self::Asleep { .. }
            | Self::HalfAnUpdate { .. }
            | Self::CanaryRefused { .. }
            | Self::Cancelled => false,
        }
    }
}

/// Identifies one start of an engine's process, from one sleep to the next: differs after a restart, however fast it was.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EngineStart(pub String);

impl EngineStart {
    /// Separator before the number of sleeps.
    const SLEEPS: char = '~';

    /// Whether both are of one process, which slept in between if they differ.
    pub fn is_same_process(&self, other: &Self) -> bool {
        let process = |start: &Self| start.0.split(Self::SLEEPS).next().map(str::to_owned);
        process(self) == process(other)
    }
}

/// The result of checking a live engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// The start that responded.
    pub start: EngineStart,
    /// Its reported version; `None` if it was not asked, because an install keeps it busy.
    pub holding: Option<Holding>,
}

/// The parameters of an install, whatever the route of the weights.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct InstallTerms {
    /// Written into the engine as its mark before its weights are touched; see [`mark`](Self::mark).
    pub version: HeldVersion,
    pub pause: PausePolicy,
    pub kv_cache: KvCachePolicy,
    /// The canary after the switch; without it, one token. Skipped where the trainer pauses the engine.
    pub canary: Option<CanaryPolicy>,
    /// Longest time of the whole install, and of its pause (unless the engine holds half an update).
    pub timeout: Duration,
    /// Ends the install early. One from a directory is completed once the engine began to load; the others then leave a mixture.
    pub cancel: CancellationToken,
}

impl InstallTerms {
    /// The version of an install whose manifest may not be known before the bytes: no version has that text.
    pub fn mark(version: u64, manifest: Option<String>) -> HeldVersion {
        HeldVersion { version, manifest: manifest.unwrap_or_else(|| "0".repeat(64)) }
    }
}

/// A version that is complete in a directory.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct InstallJob {
    pub terms: InstallTerms,
    /// Directory with `model.safetensors` (or shards and an index), config and tokenizer links, *as the engine sees it*.
    pub directory: PathBuf,
    /// The same directory as this process sees it: the adapter checks from here that the engine opens a weight file.
    pub local_directory: PathBuf,
}

/// An install that the engine confirmed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstallReport {
    /// The start of the engine that holds the version.
    pub start: EngineStart,
    /// Times of finished steps in ms: `stage` (before the pause), `pause`, `load`, `check`, `resume`, `probe` or `canary`.
    pub steps_ms: Vec<(String, u64)>,
    /// Whether the one token that shows that it computes must still be requested ([`Engine::see_owed_answer`]). An install does not wait
    /// for it if the engine was never paused, and generated after an earlier install by the same route.
    pub owes_answer: bool,
}

/// The engine's state after an install that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// It runs, or is still paused by a trainer, with its earlier contents.
    AsBefore,
    /// It may hold a mixture. It stays paused until it is fed in full ([`Engine::install`] again) or restored ([`Engine::put_back`]).
    Mixture,
    /// Its weights are complete. It was not confirmed which version they are, or that the engine runs: [`Engine::settle`] checks that.
    Unknown,
}

/// A failed install.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {source}")]
pub struct InstallError {
    /// The step that failed: `start`, `stage`, `pause`, `load`, `check`, `resume`, `probe`, `canary`.
    pub step: &'static str,
    /// The engine's state.
    pub left: Left,
    /// The cause.
    pub source: EngineError,
}

impl InstallError {
    /// An install that ended before it changed the engine.
    pub fn before_start(source: EngineError) -> Self {
        Self { step: "start", left: Left::AsBefore, source }
    }

    /// Whether the engine may hold a mixture.
    pub fn is_dirty(&self) -> bool {
        self.left == Left::Mixture
    }

    /// Whether the same weights would fail here again: the engine read and refused them, and not for lack of memory.
    pub fn repeats(&self) -> bool {
        match &self.source {
            EngineError::CanaryRefused { .. } | EngineError::Unsupported { .. } => true,
            source => matches!(self.step, "load" | "probe" | "canary") && source.is_refusal(),
        }
    }
}

/// How [`Engine::settle`] checks an engine.
#[derive(Debug, Clone)]
pub struct Settling {
    /// With [`PausePolicy::External`], a pause belongs to the trainer, and stays.
    pub pause: PausePolicy,
    /// The canary that it must pass before a version counts; without it, one token.
    pub canary: Option<CanaryPolicy>,
    /// Whether it must respond even if it was not paused: it was not seen to run since its last change.
    pub unproven: bool,
}

impl Settling {
    /// Ends a pause that an earlier incarnation of an agent may have left, for an object without a canary.
    pub const LEFT_PAUSED: Self = Self { pause: PausePolicy::Keep, canary: None, unproven: false };
}

/// The contents of an engine, and whether it runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    /// The start of the engine that responded.
    pub start: EngineStart,
    /// Its contents. With [`Holding::HalfAnUpdate`] it stays paused.
    pub holding: Holding,
    /// Whether it was paused, and now runs again.
    pub resumed: bool,
}

/// One engine server. All calls end within their deadline. A call that changes the engine waits for the previous one.
#[async_trait]
pub trait Engine: Send + Sync {
    /// `vllm`, `sglang`, `lmdeploy`, `fastdeploy`.
    fn kind(&self) -> &'static str;

    /// Requests the server's properties. Refuses a server that lacks something that an install needs, with the option that adds it.
    async fn probe(&self, deadline: Duration) -> Result<EngineFacts, EngineError>;

    /// Whether this kind of engine can be updated under these policies; checked before a byte moves. Sends no request.
    fn accepts(&self, pause: PausePolicy, kv_cache: KvCachePolicy) -> Result<(), EngineError>;

    /// Whether [`install`](Self::install) can work at all with this kind of engine; otherwise the obstacle. Sends no request.
    fn takes_directories(&self) -> Result<(), EngineError> {
        Ok(())
    }

    /// Whether all these tensors of a draft model could be loaded by that route; checked before a byte moves. Otherwise the remedy.
    async fn takes_draft(&self, way: DraftWay, _draft: Vec<TensorSpec>, _deadline: Duration) -> Result<(), EngineError> {
        Err(draft::untaken(self.kind(), way))
    }

    /// Tensors of these names are neither missing in a version nor unknown from now on.
    fn ignore(&self, _ignored: &IgnoredTensors) {}

    /// Whether a version of these tensors would replace all start-up tensors of the server, as far as they are known
    /// ([`EngineConfig::served_model`]); checked before a byte moves. Reads file headers only. Ignores tensors of a draft model.
    fn fits(&self, tensors: &[TensorSpec]) -> Result<Fit, EngineError>;

    /// Whether it runs and responds, its start, and its reported version. A pause by WeightSync is not a failure.
    async fn health(&self, deadline: Duration) -> Result<Health, EngineError>;

    /// Whether the process of this start still runs and was not replaced; known at once, without a request. False means that it is unknown
    /// until the next [`health`](Self::health), not that the process ended.
    fn is_still(&self, _start: &EngineStart) -> bool {
        true
    }

    /// [`EngineError::Asleep`] if another client had put it to sleep at its last health check. Its weights were off the GPU, and it is not
    /// proven which ones return when it wakes (huggingface/trl#5312). Such a sleep ends its version, like a restart.
    fn asleep(&self) -> Option<EngineError> {
        None
    }

    /// Returns when the process of the last health check may have ended; never if that cannot be seen without a request.
    async fn until_lost(&self) {
        std::future::pending::<()>().await;
    }

    /// Whether its HTTP front responds while the engine computes nothing until the deadline. A rank that waits in a collective operation
    /// without end looks like that, whatever its health endpoint reports. An engine that is gone is not stuck.
    async fn is_stuck(&self, _deadline: Duration) -> bool {
        false
    }

    /// Whether it responds to the canary's question now, whatever the response; false while that is unknown. An error names what it lacks.
    async fn answers(&self, _canary: &CanaryPolicy, _deadline: Duration) -> Result<bool, EngineError> {
        Err(EngineError::Unsupported {
            what: format!("{} cannot be asked for log-probs", self.kind()),
            next_step: "remove spec.canary".into(),
        })
    }

    /// Switches to a version. `Ok` means that the engine confirmed its last step and is running (with [`PausePolicy::External`]: still
    /// paused by the trainer); otherwise see [`InstallError::left`]. The install continues if the returned future is dropped. The directory
    /// must not change until the install ended; after a dirty end, until the next install or `put_back` ended.
    async fn install(&self, job: &InstallJob) -> Result<InstallReport, InstallError>;

    /// When it answered requests while its weights were a mixture: the last few windows, the oldest first. Empty for an engine that every
    /// install pauses, or that its trainer had paused.
    fn mixed_windows(&self) -> Vec<MixedWindow> {
        Vec::new()
    }

    /// Requests the pending token of an install of this version ([`InstallReport::owes_answer`]). An engine that fails to compute is paused
    /// and marked as by an install, unless something else changed it meanwhile. A busy or lost engine is not.
    async fn see_owed_answer(&self, _version: &HeldVersion, _deadline: Duration) -> Result<(), InstallError> {
        Ok(())
    }

    /// How it can be fed from GPU memory under these policies, checked before a byte moves; otherwise the obstacle.
    async fn device_route(&self, _pause: PausePolicy, _kv_cache: KvCachePolicy, _deadline: Duration) -> Result<DeviceRoute, EngineError> {
        Err(server::no_device_route(self.kind()))
    }

    /// The same server as a member of groups; `None` for a kind that joins none.
    fn group(&self) -> Option<Box<dyn EngineGroup>> {
        None
    }

    /// Begins an install from GPU memory. Nothing changes before the first bucket. Until the install is finished, abandoned or dropped, no
    /// other caller changes the engine.
    async fn begin_device(&self, _job: &DeviceJob) -> Result<Box<dyn DeviceInstall>, InstallError> {
        Err(InstallError::before_start(server::no_device_route(self.kind())))
    }

    /// Whether its workers read weights from shared host memory, checked before a byte moves: the name of the route, for status and logs;
    /// otherwise the obstacle.
    async fn host_route(&self, _deadline: Duration) -> Result<&'static str, EngineError> {
        Err(server::no_host_route(self.kind()))
    }

    /// Begins an install from shared memory. The engine serves until it begins to load. Until the install is finished, abandoned or
    /// dropped, no other caller changes it.
    async fn begin_host(&self, _job: &HostJob) -> Result<Box<dyn HostInstall>, InstallError> {
        Err(InstallError::before_start(server::no_host_route(self.kind())))
    }

    /// Reads the engine's version. Ends WeightSync's pause if the engine holds no half update, and then requests an answer. An engine that
    /// does not compute is paused and marked, as by an install.
    async fn settle(&self, how: &Settling, deadline: Duration) -> Result<Settled, InstallError>;

    /// The last resort for an engine with half an update that cannot be fed in time: loads the complete start-up weights and resumes it.
    /// Afterwards it is like a freshly started engine: complete, and at no WeightSync version. If that fails too, its requests are ended,
    /// so that no client waits without end. It then stays paused, and the error has the cause.
    async fn put_back(&self, deadline: Duration) -> Result<(), EngineError>;

    /// The contents that the server itself reports.
    async fn holding(&self, deadline: Duration) -> Result<Holding, EngineError>;

    /// How it is marked and proven if the user's own data plane feeds it.
    fn external(&self) -> Result<Arc<dyn External>, EngineError> {
        Err(EngineError::Unsupported {
            what: format!("{} cannot be watched while another data plane feeds it", self.kind()),
            next_step: "set delivery to Agent".into(),
        })
    }
}

/// Where an engine is, and how it is called.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// `vllm`, `sglang`, `lmdeploy`, `fastdeploy`.
    pub kind: String,
    /// `http://HOST:PORT`.
    pub url: String,
    /// Sent as a bearer token.
    pub api_key: Option<ApiKey>,
    /// The safetensors checkpoint with which the server was started, as this process sees it. Versions are compared with it, because the
    /// engines accept versions that lack tensors. `None`: the path that the server reports, if this process sees such a directory.
    pub served_model: Option<PathBuf>,
    /// File in which the adapter keeps the version of an engine without a version field; survives the agent. `None`: the version is known
    /// only while the agent runs.
    pub record: Option<PathBuf>,
    /// Who asks: the agent's pod and the port of the engine, the same in each life of both. It is in the names of what the adapter writes into
    /// a folder of the server, because other agents write there too. Letters, digits, `-` and `.`; anything else becomes `-`.
    pub owner: String,
    /// Directory of processes: `/proc`, or the mount of another process namespace's.
    pub processes: PathBuf,
    /// Whether routes from GPU memory may be used that never ran on a GPU: SGLang's `update_weights_from_tensor`, vLLM's `ipc` backend.
    pub unproven_routes: bool,
}

/// All engines, in the order of the documentation. To add one: a file, and a line here.
pub const ENGINES: &[&EngineDescriptor] = &[&vllm::ENGINE, &sglang::ENGINE, &lmdeploy::ENGINE, &fastdeploy::ENGINE];

/// Names of all engine kinds.
pub fn kinds() -> impl Iterator<Item = &'static str> {
    ENGINES.iter().map(|engine| engine.kind)
}

/// Makes the adapter of a server. Sends no request.
pub fn connect(config: EngineConfig) -> Result<Arc<dyn Engine>, EngineError> {
    connect_among(ENGINES, config)
}

fn connect_among(engines: &[&EngineDescriptor], config: EngineConfig) -> Result<Arc<dyn Engine>, EngineError> {
    match engines.iter().find(|engine| engine.kind == config.kind) {
        Some(engine) => (engine.connect)(config),
        None => Err(EngineError::Unsupported {
            what: format!("there is no engine of the kind {:?}", config.kind),
            next_step: format!("use one of: {}", engines.iter().map(|engine| engine.kind).collect::<Vec<_>>().join(", ")),
        }),
    }
}

#[cfg(test)]
mod tests;

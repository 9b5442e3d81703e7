//! How one inference engine is fed: one contract, one file an engine.
//!
//! An adapter says what its server is and can do, and switches it to a version that lies complete and verified in a directory.
//! It decides the order of calls, which replies count as success, and what a half-done switch means. It never decides that a version
//! is complete (the agent's coverage gate does) and never resumes an engine that may hold half an update.
//!
//! Before an adapter lets an engine touch its weights it writes a mark into the engine itself (see [`Holding`]), and takes it away with the
//! last step. So a later request to the engine, also by a restarted agent, shows whether it holds a version, its own start-up weights, or
//! half an update. Why a replica that holds half an update stays paused: `docs/decisions/0003-half-an-update.md`.

mod adapter;
mod canary;
mod checkpoint_engine;
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

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

pub use device::{DeviceBucket, DeviceInstall, DeviceJob, DevicePlace, DeviceRoute, Released};
pub use draft::DraftWay;
pub use external::{External, ExternalMark, ExternalProof};
pub use fit::{Fit, same_tensors};
pub use group::no_groups;
pub use group::{EngineGroup, GroupJoin, GroupJoined};
pub use host::{HostBucket, HostDigest, HostInstall, HostJob, HostMemory, HostTensor};
pub use label::Holding;
pub use secret::ApiKey;

use weightsync_core::protocol::{CanaryPolicy, EngineFacts, HeldVersion, KvCachePolicy, MixedWindow, PausePolicy};
use weightsync_core::weights::TensorSpec;

/// Why an engine call failed. Bodies of replies are cut to 512 bytes; API keys never appear.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum EngineError {
    #[error("{url} cannot be reached: {source}")]
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
    /// Whether the engine answered that it does not do it, and not for want of memory.
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
    /// What stands before the number of sleeps.
    const SLEEPS: char = '~';

    /// Whether both are of one process, which slept meanwhile if they differ.
    pub fn is_same_process(&self, other: &Self) -> bool {
        let process = |start: &Self| start.0.split(Self::SLEEPS).next().map(str::to_owned);
        process(self) == process(other)
    }
}

/// The result of checking a live engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// Which start of it answered.
    pub start: EngineStart,
    /// Its reported version; `None` if it was not asked, because an install keeps it busy.
    pub holding: Option<Holding>,
}

/// What an install is about, whichever way the weights come.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct InstallTerms {
    /// Written into the engine as its mark before its weights are touched; see [`mark`](Self::mark).
    pub version: HeldVersion,
    pub pause: PausePolicy,
    pub kv_cache: KvCachePolicy,
    /// The canary after the switch; without it, one token. Skipped where the trainer pauses the engine.
    pub canary: Option<CanaryPolicy>,
    /// The whole install ends, and the engine is not paused any more by us (unless it holds half an update), after this long.
    pub timeout: Duration,
    /// Ends the install early. One from a directory is carried to its end once the engine began to load; the others leave a mixture then.
    pub cancel: CancellationToken,
}

impl InstallTerms {
    /// The version of an install whose manifest may not be known before the bytes are: no version of that text exists then.
    pub fn mark(version: u64, manifest: Option<String>) -> HeldVersion {
        HeldVersion { version, manifest: manifest.unwrap_or_else(|| "0".repeat(64)) }
    }
}

/// A version that lies complete in a directory.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct InstallJob {
    pub terms: InstallTerms,
    /// Directory with `model.safetensors` (or shards and an index), config and tokenizer links, *as the engine sees it*.
    pub directory: PathBuf,
    /// The same directory as this process sees it: the adapter watches from here that the engine really opens every weight file.
    pub local_directory: PathBuf,
}

/// An install that the engine confirmed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstallReport {
    /// The start of the engine that holds the version.
    pub start: EngineStart,
    /// Times of finished steps in ms: `stage` (before the pause), `pause`, `load`, `check`, `resume`, `probe` or `canary`.
    pub steps_ms: Vec<(String, u64)>,
    /// Whether the one token that shows that it computes is still to be asked for ([`Engine::see_owed_answer`]): an engine that was never
    /// stopped, and that generated after an earlier install by the same route, is not waited for.
    pub owes_answer: bool,
}

/// What an install that did not end well left the engine with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// It runs, or is as paused as a trainer left it, with what it held before.
    AsBefore,
    /// It may hold a mixture. It stays paused until it is fed in full ([`Engine::install`] again) or put back ([`Engine::put_back`]).
    Mixture,
    /// Its weights are complete, but it was not confirmed which version they are or that the engine runs: [`Engine::settle`] checks that.
    Unknown,
}

/// An install that did not end well.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {source}")]
pub struct InstallError {
    /// The step that failed: `start`, `stage`, `pause`, `load`, `check`, `resume`, `probe`, `canary`.
    pub step: &'static str,
    /// What the engine is left with.
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

/// How an engine is asked what it holds.
#[derive(Debug, Clone)]
pub struct Settling {
    /// With [`PausePolicy::External`] a pause is a trainer's, and stays.
    pub pause: PausePolicy,
    /// What it must answer before a version counts; one token without it.
    pub canary: Option<CanaryPolicy>,
    /// Whether it must answer even if it was not paused: it was not seen to run since it was changed.
    pub unproven: bool,
}

impl Settling {
    /// Ends a pause that an earlier life of an agent may have left, of an engine that no object has a canary for.
    pub const LEFT_PAUSED: Self = Self { pause: PausePolicy::Keep, canary: None, unproven: false };
}

/// What an engine was found to hold, and to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    /// The start of the engine that was asked.
    pub start: EngineStart,
    /// What it holds. [`Holding::HalfAnUpdate`]: it stays as paused as it was.
    pub holding: Holding,
    /// Whether it was paused, and runs again.
    pub resumed: bool,
}

/// One engine server. All calls end within the time they are given, and one that changes the engine waits for the one before it.
#[async_trait]
pub trait Engine: Send + Sync {
    /// `vllm`, `sglang`, `lmdeploy`, `fastdeploy`.
    fn kind(&self) -> &'static str;

    /// Asks the server what it is and can do; refuses one that lacks what an install needs, naming the option that would help.
    async fn probe(&self, deadline: Duration) -> Result<EngineFacts, EngineError>;

    /// Whether this kind of engine can be updated under these policies; asked before a byte moves. Asks no server.
    fn accepts(&self, pause: PausePolicy, kv_cache: KvCachePolicy) -> Result<(), EngineError>;

    /// Whether [`install`](Self::install) can work at all with this kind of engine; else why not. Asks no server.
    fn takes_directories(&self) -> Result<(), EngineError> {
        Ok(())
    }

    /// Whether these tensors of a draft model, which would come that way, would all be taken; asked before a byte moves. Else what would help.
    async fn takes_draft(&self, way: DraftWay, _draft: Vec<TensorSpec>, _deadline: Duration) -> Result<(), EngineError> {
        Err(draft::untaken(self.kind(), way))
    }

    /// Whether a version of these tensors would replace all that the server was started with, as far as that can be seen from here
    /// ([`EngineConfig::served_model`]); asked before a byte moves. Reads file headers only. Tensors of a draft model are passed over.
    fn fits(&self, tensors: &[TensorSpec]) -> Result<Fit, EngineError>;

    /// Whether it lives and responds, its start, and its reported version. A pause by WeightSync is not a failure.
    async fn health(&self, deadline: Duration) -> Result<Health, EngineError>;

    /// Whether the process of this start still runs and was not replaced; known at once, without a request. False means that nothing is
    /// known before [`health`](Self::health) is asked again, not that it ended.
    fn is_still(&self, _start: &EngineStart) -> bool {
        true
    }

    /// [`EngineError::Asleep`] if another client had put it to sleep at its last health check. Its weights were off the GPU, and what
    /// returns with the wake-up is not proven (huggingface/trl#5312). Such a sleep ends its version, as a restart does.
    fn asleep(&self) -> Option<EngineError> {
        None
    }

    /// Returns when the process that was last asked for its health may have ended; never where that cannot be seen without asking it.
    async fn until_lost(&self) {
        std::future::pending::<()>().await;
    }

    /// Whether its front answers while the engine itself computes nothing, for as long as it is waited for: what a rank that waits in a
    /// collective operation for ever looks like from outside, whatever its health endpoint says. An engine that is gone is not stuck.
    async fn is_stuck(&self, _deadline: Duration) -> bool {
        false
    }

    /// Whether it answers the canary's question now, whatever it answers; false while that is not known. An error says what it lacks.
    async fn answers(&self, _canary: &CanaryPolicy, _deadline: Duration) -> Result<bool, EngineError> {
        Err(EngineError::Unsupported {
            what: format!("{} cannot be asked for log-probs", self.kind()),
            next_step: "remove spec.canary".into(),
        })
    }

    /// Switches to a version. `Ok` means that the engine confirmed its last step and is running (with [`PausePolicy::External`]: is as
    /// paused as the trainer left it); see [`InstallError::left`] otherwise. The install continues when the returned future is dropped. The
    /// directory must stay as it is until the install ended; when it ended dirty, until the next install or `put_back` ended.
    async fn install(&self, job: &InstallJob) -> Result<InstallReport, InstallError>;

    /// When it answered requests while its weights were a mixture, the oldest first; the last few. Empty for an engine that is paused by every
    /// install, or that its trainer had paused.
    fn mixed_windows(&self) -> Vec<MixedWindow> {
        Vec::new()
    }

    /// Asks for the token that an install of this version left owing ([`InstallReport::owes_answer`]). An engine that fails to compute is
    /// held and marked as by an install, unless something else changed it meanwhile; one that is merely busy, or gone, is not.
    async fn see_owed_answer(&self, _version: &HeldVersion, _deadline: Duration) -> Result<(), InstallError> {
        Ok(())
    }

    /// How it can be fed from GPU memory under these policies, asked before a byte moves; else why it cannot.
    async fn device_route(&self, _pause: PausePolicy, _kv_cache: KvCachePolicy, _deadline: Duration) -> Result<DeviceRoute, EngineError> {
        Err(server::no_device_route(self.kind()))
    }

    /// The same server as a member of groups; none for a kind that joins none.
    fn group(&self) -> Option<Box<dyn EngineGroup>> {
        None
    }

    /// Begins an install from GPU memory. Nothing is changed before the first bucket; until the install is finished, abandoned or dropped,
    /// no other caller changes the engine.
    async fn begin_device(&self, _job: &DeviceJob) -> Result<Box<dyn DeviceInstall>, InstallError> {
        Err(InstallError::before_start(server::no_device_route(self.kind())))
    }

    /// Whether its workers read weights from shared memory of the host, asked before a byte moves: the name of the way, for status and logs;
    /// else why not.
    async fn host_route(&self, _deadline: Duration) -> Result<&'static str, EngineError> {
        Err(server::no_host_route(self.kind()))
    }

    /// Begins an install from shared memory. The engine serves on until it begins to load; until the install is finished, abandoned or
    /// dropped, no other caller changes it.
    async fn begin_host(&self, _job: &HostJob) -> Result<Box<dyn HostInstall>, InstallError> {
        Err(InstallError::before_start(server::no_host_route(self.kind())))
    }

    /// Reads the engine's version. Ends WeightSync's pause if the engine holds no half update, and then requests an answer: one that does
    /// not compute is held and marked, as by an install.
    async fn settle(&self, how: &Settling, deadline: Duration) -> Result<Settled, InstallError>;

    /// The last resort for an engine that holds half an update and cannot be fed in time: loads the weights that the server started with,
    /// whole, and lets it run. It is then like a freshly started engine: complete, and not at any WeightSync version. When that fails too,
    /// the requests that it holds are ended so that no client waits for ever, it stays paused, and the error says why.
    async fn put_back(&self, deadline: Duration) -> Result<(), EngineError>;

    /// What the server itself says that it holds.
    async fn holding(&self, deadline: Duration) -> Result<Holding, EngineError>;

    /// How it is marked and proven when the user's own data plane feeds it.
    fn external(&self) -> Result<Arc<dyn External>, EngineError> {
        Err(EngineError::Unsupported {
            what: format!("{} cannot be watched while another data plane feeds it", self.kind()),
            next_step: "set delivery to Agent".into(),
        })
    }
}

/// Where an engine is and how to speak to it.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// `vllm`, `sglang`, `lmdeploy`, `fastdeploy`.
    pub kind: String,
    /// `http://HOST:PORT`.
    pub url: String,
    /// Shown as a bearer token.
    pub api_key: Option<ApiKey>,
    /// The safetensors checkpoint that the server was started with, as this process sees it: versions are compared with it, because the
    /// engines accept one that lacks tensors. None: the path that the server names, where this process sees such a directory.
    pub served_model: Option<PathBuf>,
    /// File in which the adapter of an engine that has no field for a version keeps what it wrote; survives the agent. None: it is known
    /// only as long as the agent lives.
    pub record: Option<PathBuf>,
    /// Where processes are seen: `/proc`, or the place at which another process namespace's is mounted.
    pub processes: PathBuf,
    /// Whether ways from GPU memory may be used that were never seen on a GPU: SGLang's `update_weights_from_tensor`, vLLM's `ipc` backend.
    pub unproven_routes: bool,
}

type Connect = fn(EngineConfig) -> Result<Arc<dyn Engine>, EngineError>;

/// All engines. To add one: a file, and a line here.
const ENGINES: &[(&str, Connect)] =
    &[("vllm", vllm::connect), ("sglang", sglang::connect), ("lmdeploy", lmdeploy::connect), ("fastdeploy", fastdeploy::connect)];

/// Names of all kinds of engine.
pub fn kinds() -> impl Iterator<Item = &'static str> {
    ENGINES.iter().map(|(kind, _)| *kind)
}

/// Makes the adapter for a server. Asks nothing of the server yet.
pub fn connect(config: EngineConfig) -> Result<Arc<dyn Engine>, EngineError> {
    match ENGINES.iter().find(|(kind, _)| *kind == config.kind) {
        Some((_, connect)) => connect(config),
        None => Err(EngineError::Unsupported {
            what: format!("there is no engine of the kind {:?}", config.kind),
            next_step: format!("use one of: {}", kinds().collect::<Vec<_>>().join(", ")),
        }),
    }
}

#[cfg(test)]
mod tests;

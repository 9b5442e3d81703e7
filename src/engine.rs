//! How one inference engine is fed: one contract, one file an engine.
//!
//! An adapter says what its server is and can do, and switches it to a version that lies complete and verified in a directory.
//! It decides the order of calls, which replies count as success, and what a half-done switch means. It never decides that a version
//! is complete (the agent's coverage gate does) and never resumes an engine that may hold half an update.

use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

use crate::protocol::{EngineFacts, HeldVersion, KvCachePolicy, PausePolicy};

/// Why an engine call failed. Bodies of replies are cut to 512 bytes; API keys never appear.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum EngineError {
    #[error("{url} cannot be reached: {source}")]
    Unreachable { url: String, source: reqwest::Error },
    #[error("{url} gave no answer within {deadline:?}")]
    Timeout { url: String, deadline: Duration },
    #[error("{url} answered {status}: {body}")]
    Status { url: String, status: u16, body: String },
    #[error("{url} answered 200 but not success: {body}")]
    NotSuccess { url: String, body: String },
    #[error("{url}: the answer makes no sense: {what}")]
    BadReply { url: String, what: String },
    #[error("{what}; {next_step}")]
    Unsupported { what: String, next_step: String },
    #[error("the engine started anew in the middle of the install")]
    Restarted,
    #[error("cancelled")]
    Cancelled,
}

/// Identifies one start of an engine's process: differs after a restart, however fast it was.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EngineStart(pub String);

/// What to install, how, and how long it may take.
pub struct InstallJob {
    /// The version and the digest of its manifest.
    pub version: HeldVersion,
    /// Directory with `model.safetensors` (or shards and an index), config and tokenizer links, *as the engine sees it*.
    pub directory: PathBuf,
    /// What happens to running requests.
    pub pause: PausePolicy,
    /// What happens to the KV and prefix cache.
    pub kv_cache: KvCachePolicy,
    /// The whole install ends, and the engine is not paused any more by us, after this long.
    pub timeout: Duration,
    /// Ends the install early.
    pub cancel: CancellationToken,
}

/// An install that the engine confirmed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstallReport {
    /// The start of the engine that holds the version.
    pub start: EngineStart,
    /// Times of finished steps in ms: `pause`, `load`, `check`, `resume`.
    pub steps_ms: Vec<(String, u64)>,
}

/// An install that did not end well.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {source}")]
pub struct InstallError {
    /// The step that failed.
    pub step: &'static str,
    /// Whether the engine may hold a mixture: it stays paused (or is kept from serving) until it is fed in full.
    pub dirty: bool,
    /// The cause.
    pub source: EngineError,
}

/// One engine server. All calls end within the time they are given.
#[async_trait]
pub trait Engine: Send + Sync {
    /// `vllm`, `sglang`.
    fn kind(&self) -> &'static str;

    /// Asks the server what it is and can do; refuses one that lacks what an install needs, naming the option that would help.
    async fn probe(&self, deadline: Duration) -> Result<EngineFacts, EngineError>;

    /// Whether it lives and answers, and which start of it. A pause of ours is not ill health.
    async fn health(&self, deadline: Duration) -> Result<EngineStart, EngineError>;

    /// Switches to a version. `Ok` means that the engine confirmed its last step and is running; see [`InstallError::dirty`] otherwise.
    async fn install(&self, job: &InstallJob) -> Result<InstallReport, InstallError>;

    /// Undoes a pause that an earlier life of the agent left behind, when the engine holds no half update; tells whether it was paused.
    async fn resume(&self, deadline: Duration) -> Result<bool, EngineError>;

    /// The version that the server itself reports to hold, where it can.
    async fn reported_version(&self, deadline: Duration) -> Result<Option<String>, EngineError>;
}

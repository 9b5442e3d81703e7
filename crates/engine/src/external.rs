//! An engine that the user's own data plane feeds (`delivery: External`): the mark before the transfer, and the proof after it.
//!
//! No agent sees these bytes, so nothing here proves that the weights are right. It proves three things: it is the same start of the engine
//! that was marked; the engine reports the announced version (if it reports one); and it generates a token.

use std::time::Duration;

use async_trait::async_trait;

use super::{EngineError, EngineStart, Holding, InstallError, InstallReport};
use weightsync_core::protocol::HeldVersion;

/// An engine that was marked for an update by the user's data plane.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct ExternalMark {
    pub start: EngineStart,
    /// Text from the server that distinguishes that start.
    pub(super) fingerprint: String,
    pub(super) before: Holding,
    pub version: HeldVersion,
}

#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct ExternalProof {
    pub mark: ExternalMark,
    /// The expected weight version; `None` if the data plane writes none.
    pub engine_version: Option<String>,
    pub timeout: Duration,
}

/// Marks and proves. It never pauses, resumes or loads: the data plane does that.
#[async_trait]
pub trait External: Send + Sync {
    /// Writes the mark of a half update, before the data plane touches the engine.
    async fn mark(&self, version: &HeldVersion, deadline: Duration) -> Result<ExternalMark, EngineError>;

    /// Whether the marked start still responds. [`EngineError::Timeout`] shows nothing: an engine in a collective may be busy.
    async fn alive(&self, mark: &ExternalMark, deadline: Duration) -> Result<(), EngineError>;

    /// Proves what can be proven. Afterwards the engine carries the version's text, or the data plane's own.
    async fn prove(&self, proof: &ExternalProof) -> Result<InstallReport, InstallError>;

    /// Removes the mark: the data plane never changed the engine.
    async fn take_back(&self, mark: &ExternalMark, deadline: Duration) -> Result<(), EngineError>;
}

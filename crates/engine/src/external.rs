//! An engine that the user's own data plane feeds (`delivery: External`): the mark before, and the proof after the transfer.
//!
//! No agent sees these bytes, so nothing here proves that the weights are right. What can be proven: that it is the same start of the
//! engine that was marked, that the engine reports the version that the trainer announced (where it says so), and that it generates a
//! token.

use std::time::Duration;

use async_trait::async_trait;

use super::{EngineError, EngineStart, Holding, InstallError, InstallReport};
use weightsync_core::protocol::HeldVersion;

/// An engine that was marked for an update by the user's data plane.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct ExternalMark {
    pub start: EngineStart,
    /// What distinguishes that start, in the server's words.
    pub(super) fingerprint: String,
    pub(super) before: Holding,
    pub version: HeldVersion,
}

#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct ExternalProof {
    pub mark: ExternalMark,
    /// What it must report as its weight version; none when the data plane writes nothing there.
    pub engine_version: Option<String>,
    pub timeout: Duration,
}

/// Marks and proves. It never pauses, resumes or loads: that is the data plane's business.
#[async_trait]
pub trait External: Send + Sync {
    /// Writes the mark of a half update, before the data plane touches the engine.
    async fn mark(&self, version: &HeldVersion, deadline: Duration) -> Result<ExternalMark, EngineError>;

    /// Whether the marked start still answers. [`EngineError::Timeout`] says nothing: an engine in a collective may be busy.
    async fn alive(&self, mark: &ExternalMark, deadline: Duration) -> Result<(), EngineError>;

    /// Proves what can be proven; the engine then carries the version's text, or what the data plane wrote.
    async fn prove(&self, proof: &ExternalProof) -> Result<InstallReport, InstallError>;

    /// Takes the mark back: the data plane never touched the engine.
    async fn take_back(&self, mark: &ExternalMark, deadline: Duration) -> Result<(), EngineError>;
}

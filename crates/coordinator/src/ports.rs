//! The outside interfaces of a coordinator: a store for the epoch, and a sink for Events. The controller implements them with Kubernetes,
//! `weightsync local` with a file and the terminal.

use async_trait::async_trait;

use weightsync_core::protocol::{EpochId, MemberName, Reason};

/// Why an epoch was not written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum PersistError {
    /// Another leader wrote it: this one must stop.
    #[error("another leader wrote the epoch: {0}")]
    Conflict(String),
    /// The result of the write is not known, or no write is possible now.
    #[error("the epoch cannot be written: {0}")]
    Other(String),
}

/// Writes the highest epoch of an object, before any agent receives it.
#[async_trait]
pub trait EpochStore: Send + Sync {
    /// Writes `id.epoch` by compare-and-swap. Succeeds if the same epoch was written already: the response to a first try may be lost.
    async fn persist(&self, id: &EpochId) -> Result<(), PersistError>;
}

/// An Event for users.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct CoordinatorEvent {
    pub reason: Reason,
    pub message: String,
    pub member: Option<MemberName>,
    pub warning: bool,
}

/// Publishes Events, best effort.
pub trait EventSink: Send + Sync {
    /// Must not block; drops an Event that cannot be sent.
    fn publish(&self, event: CoordinatorEvent);
}

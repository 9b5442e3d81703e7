//! The outside interfaces of a coordinator: a store for the epoch, and a sink for Events. The controller implements them with Kubernetes,
//! `weightsync local` with a file and the terminal.

use async_trait::async_trait;

use weightsync_core::protocol::{EpochId, MemberName, Reason};

/// Why an epoch was not written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum PersistError {
    /// Another leader wrote: this one must stop.
    #[error("another leader wrote the epoch: {0}")]
    Conflict(String),
    /// Nothing is known of the write, or it cannot be done now.
    #[error("the epoch cannot be written: {0}")]
    Other(String),
}

/// Writes the highest epoch of an object, before any agent hears of it.
#[async_trait]
pub trait EpochStore: Send + Sync {
    /// Writes `id.epoch` by compare-and-swap. Having written the same epoch already is success: the answer of a first try may be lost.
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

/// Tells people, best effort.
pub trait EventSink: Send + Sync {
    /// Must not block; an Event that cannot be sent is dropped.
    fn publish(&self, event: CoordinatorEvent);
}

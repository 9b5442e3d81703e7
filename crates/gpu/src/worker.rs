//! A GPU with a child process: the agent's handle of it, and the child's own loop.
//!
//! Everything that touches libcuda, libnccl or libnixl_capi happens in the child (`weightsync worker`, [`serve`]), so that a call that
//! hangs, aborts or corrupts costs one process: the agent kills it and starts another. The agent's side ([`Worker`]) is async and knows no
//! driver. Every request has a deadline on both sides. A worker that does not answer within a grace period after its deadline is killed. A
//! worker that ends fails all requests with the cause; only its owner starts it again.
//!
//! What a request uses (a slot, mapped or imported memory, an event) is held until its answer, even if the caller stopped waiting: a slot
//! is not given out again while a broadcast may still write into it.

mod asks;
mod fabric;
mod handle;
mod held;
mod nccl_log;
mod peer;
mod pending;
mod process;
mod ring;
mod serve;
mod wire;

pub use asks::{Broadcast, Copy, Joined, Read, Sums};
pub use fabric::Region;
pub use handle::Worker;
pub use held::{Event, HostMemory, ImportedMemory, Span};
pub use peer::Peer;
pub use process::WorkerStart;
pub use ring::{Ring, Slot};
pub use serve::serve;

use std::time::Duration;

use weightsync_core::protocol::worker::WorkerFault;

/// A worker that did not answer this long after the deadline of a request hangs, and is killed.
pub const GRACE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, thiserror::Error)]
#[allow(missing_docs)]
pub enum WorkerError {
    #[error("the GPU worker cannot be started: {cause}")]
    Start { cause: String },
    #[error("the GPU worker could not {what}: {fault}")]
    Fault { what: &'static str, fault: WorkerFault },
    #[error("no slot of the ring came free in {within:?}")]
    NoSlot { within: Duration },
    #[error("the GPU worker is gone ({cause})")]
    Gone { cause: String },
    #[error("the GPU worker answered \"{what}\" with something else")]
    Nonsense { what: &'static str },
}

#[cfg(test)]
mod tests;

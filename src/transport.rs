//! How buckets travel between members: one contract, one file a transport.
//!
//! A leader opens a chain and sends each bucket once; every member stores it and forwards it while it still arrives.
//! This room decides how bytes move and who is named when they do not. It never decides membership, never retries, and never
//! judges a version: a digest that disagrees is reported to the store, which alone says what is complete.

mod carrier;
mod intake;
pub mod memory;
pub mod tcp;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::protocol::{BucketHeader, DataHello, MemberName, Refusal, StreamFailure};
use crate::worker::{Event, ImportedMemory, Slot, Span, Worker};

/// The bytes of one bucket, where they lie. Dropping it gives their memory back to whoever lent it.
#[derive(Clone)]
pub enum Payload {
    /// In memory of this process.
    Host(Bytes),
    /// In memory of a GPU.
    Device(DevicePayload),
}

/// Bytes in memory of a GPU that a worker of ours can read.
#[derive(Clone)]
pub struct DevicePayload {
    /// The worker.
    pub worker: Worker,
    /// The memory.
    pub memory: DeviceMemory,
    /// First byte in it.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Event that whoever writes the bytes records behind them; the GPU waits for it before they are read.
    pub after: Option<Event>,
    /// Dropped when the bytes are not read any more: tells whoever lent the memory.
    pub lent: Option<Arc<dyn Send + Sync>>,
}

/// Memory of a GPU.
#[derive(Clone)]
pub enum DeviceMemory {
    /// A slot of the worker's ring.
    Slot(Slot),
    /// Another process's allocation.
    Imported(ImportedMemory),
}

impl DeviceMemory {
    /// From `offset` on.
    pub fn at(&self, offset: u64) -> Span {
        match self {
            Self::Slot(slot) => slot.at(offset),
            Self::Imported(memory) => memory.at(offset),
        }
    }
}

impl Payload {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        match self {
            Self::Host(bytes) => bytes.len() as u64,
            Self::Device(device) => device.bytes,
        }
    }

    /// The bytes themselves, where this process can read them.
    pub fn host(&self) -> Option<&Bytes> {
        match self {
            Self::Host(bytes) => Some(bytes),
            Self::Device(_) => None,
        }
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Never shows contents.
impl std::fmt::Debug for Payload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host(bytes) => write!(f, "{} bytes", bytes.len()),
            Self::Device(device) => write!(f, "{} bytes on a GPU", device.bytes),
        }
    }
}

impl From<Bytes> for Payload {
    fn from(bytes: Bytes) -> Self {
        Self::Host(bytes)
    }
}

/// Why bytes did not arrive.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TransportError {
    #[error("{peer} cannot be reached: {cause}")]
    Unreachable { peer: MemberName, cause: String },
    #[error("{peer} refused: {}", refusal.message)]
    Refused { peer: MemberName, refusal: Refusal },
    #[error("{peer} was lost in the middle: {cause}")]
    Lost { peer: MemberName, cause: String },
    #[error("{peer} moved no byte for {silence:?}")]
    Silent { peer: MemberName, silence: Duration },
    #[error("{peer} received bucket {sequence} with a wrong digest")]
    Corrupt { peer: MemberName, sequence: u32 },
    #[error("no byte moved between the GPUs for {silence:?}, and every worker lives")]
    Stalled { silence: Duration },
    #[error("cancelled")]
    Cancelled,
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
}

impl TransportError {
    /// The member at fault, where it is one.
    pub fn peer(&self) -> Option<&MemberName> {
        match self {
            Self::Unreachable { peer, .. }
            | Self::Refused { peer, .. }
            | Self::Lost { peer, .. }
            | Self::Silent { peer, .. }
            | Self::Corrupt { peer, .. } => Some(peer),
            Self::Stalled { .. } | Self::Cancelled | Self::Io { .. } => None,
        }
    }
}

impl TransportError {
    /// Payloads on a GPU were given to a transport that has no way to them.
    fn on_a_gpu() -> Self {
        Self::Io { what: "sending a bucket".into(), source: std::io::Error::other("its bytes lie on a GPU, and go over connections here") }
    }
}

impl From<StreamFailure> for TransportError {
    fn from(failure: StreamFailure) -> Self {
        match failure {
            StreamFailure::Unreachable { peer, cause } => Self::Unreachable { peer, cause },
            StreamFailure::Refused { peer, refusal } => Self::Refused { peer, refusal },
            StreamFailure::Lost { peer, cause } => Self::Lost { peer, cause },
            StreamFailure::Silent { peer, silence_ms } => Self::Silent { peer, silence: Duration::from_millis(silence_ms) },
            StreamFailure::Corrupt { peer, sequence } => Self::Corrupt { peer, sequence },
            StreamFailure::Stalled { silence_ms } => Self::Stalled { silence: Duration::from_millis(silence_ms) },
            StreamFailure::Cancelled => Self::Cancelled,
        }
    }
}

/// A way to move buckets. Listens from its construction on, so that its address is bound before it is told to anyone.
#[async_trait]
pub trait Transport: Send + Sync {
    /// `tcp` or `memory`; shown in status.
    fn name(&self) -> &'static str;

    /// Where this member can be reached (`IP:PORT`, or a name in the memory transport).
    fn address(&self) -> String;

    /// Opens the chain that `hello` describes; its first member is `hello.to` at `first`. Returns when the whole chain admitted it.
    /// Ends with an error that names the member at fault after `hello.silence_ms` without a sign of life.
    async fn open(&self, hello: DataHello, first: &str) -> Result<Box<dyn BucketSink>, TransportError>;
}

/// The leader's end of an open chain. Dropping it ends the chain: every member's store is told that it broke, nobody is blamed.
/// While the leader has nothing to send, its transport shows the chain that it lives: a slow trainer is not a silent one.
#[async_trait]
pub trait BucketSink: Send {
    /// Sends one bucket with its xxh3-128; returns when the next may be given (several are in flight). `header.bytes` is the length
    /// of `data`. After an error the chain is over: every later call gives the same error.
    async fn send(&mut self, header: BucketHeader, data: Payload, digest: u128) -> Result<(), TransportError>;

    /// Whether it hashes what it sends by itself: the digest given to [`send`](Self::send) is not looked at then.
    fn hashes(&self) -> bool {
        false
    }

    /// Waits until the chain fails; pending while it lives. Lets a leader that waits for its trainer hear at once of a lost member.
    async fn failed(&mut self) -> TransportError;

    /// Ends the stream and waits until every member of the chain confirmed that it stored all of it.
    async fn finish(self: Box<Self>) -> Result<(), TransportError>;
}

/// Decides which incoming streams are let in; implemented by the agent. Called on a task of the runtime: must not block.
pub trait Admission: Send + Sync {
    /// Checks epoch, secret, receiver and the use of TLS, and answers where the stream's buckets go. Probes get a store that keeps nothing.
    fn admit(&self, hello: &DataHello) -> Result<Arc<dyn BucketStore>, Refusal>;
}

/// Takes what arrives; implemented by the agent. Calls come in order from one task, and may block for a memory copy only: a call that
/// blocks longer than the silence of the hello makes this member the silent one. After an `Err`, and after `end`, nothing follows.
pub trait BucketStore: Send + Sync {
    /// A part of a bucket, at its place in the stream of the layout, while the bucket still arrives; a few hundred KiB at most.
    /// Its bytes are proven only when `complete` follows for its bucket.
    fn write(&self, offset: u64, part: &[u8]) -> Result<(), Refusal>;

    /// A whole bucket arrived; `digest` is what was computed here and already agrees with what the sender said.
    fn complete(&self, header: &BucketHeader, digest: u128) -> Result<(), Refusal>;

    /// The stream ended as it should. What becomes of members further down the chain is the leader's matter.
    fn end(&self) -> Result<(), Refusal>;

    /// The stream broke; `peer` is who is at fault, as far as can be told; none when the leader gave it up.
    fn broken(&self, peer: Option<&MemberName>, cause: &str);
}

#[cfg(test)]
mod tests;

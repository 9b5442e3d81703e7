//! How buckets travel between members: one contract, one file for each transport.
//!
//! A leader opens a chain and sends each bucket once; every member stores it and forwards it while it still arrives. This crate decides how
//! bytes move, and which member is named if they do not. It never decides membership, never retries, and never judges a version. It reports
//! a wrong digest to the store, which alone decides what is complete.

mod announced;
mod carrier;
mod digest;
pub mod gdr;
mod intake;
pub mod nccl;
mod outgoing;
mod pieces;
pub mod tcp;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::BoxFuture;

use weightsync_core::protocol::worker::Part;
use weightsync_core::protocol::{BucketHeader, DataHello, MemberName, Refusal, StreamFailure, TransportKind};
use weightsync_core::weights::DigestPart;
use weightsync_gpu::worker::{Event, ImportedMemory, Slot, Span, Worker, WorkerError};
use weightsync_net::identity::PeerIdentity;

pub use digest::{TensorDigests, digest, hashes_on_several_cores};

/// The bytes of one bucket. Dropping it returns their memory to the lender.
#[derive(Clone)]
pub enum Payload {
    /// In memory of this process.
    Host(Bytes),
    /// In memory of a GPU.
    Device(DevicePayload),
}

/// Bytes in GPU memory that one of our workers can read.
#[derive(Clone)]
#[allow(missing_docs)]
pub struct DevicePayload {
    pub worker: Worker,
    pub memory: DeviceMemory,
    pub offset: u64,
    pub bytes: u64,
    /// Event that the writer of the bytes records after them; the GPU waits for it before it reads.
    pub after: Option<Event>,
    /// Dropped when the bytes are no longer read: notifies the lender of the memory.
    pub lent: Option<Arc<dyn Send + Sync>>,
}

impl DevicePayload {
    /// Shares of its digests, computed by the GPU.
    pub async fn digest(&self, parts: &[DigestPart], within: Duration) -> Result<Vec<u64>, WorkerError> {
        let parts = parts.iter().map(|part| Part { offset: part.offset, bytes: part.bytes, first_word: part.first_word }).collect();
        Ok(self.worker.digest(self.memory.at(self.offset), parts, self.after.clone(), within).await?.sums)
    }

    /// A copy in pinned memory of this host.
    pub async fn to_host(&self, staging: Option<&nccl::Staging>, within: Duration) -> Result<Bytes, WorkerError> {
        let staging = staging.filter(|staging| staging.worker().is(&self.worker));
        let staging = staging.cloned().unwrap_or_else(|| nccl::Staging::new(self.worker.clone()));
        staging.copy_out(self.memory.at(self.offset), self.bytes, self.after.clone(), within).await
    }
}

#[derive(Clone)]
#[allow(missing_docs)]
pub enum DeviceMemory {
    Slot(Slot),
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

    /// The bytes themselves, if this process can read them.
    pub fn host(&self) -> Option<&Bytes> {
        match self {
            Self::Host(bytes) => Some(bytes),
            Self::Device(_) => None,
        }
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl From<DevicePayload> for Payload {
    fn from(device: DevicePayload) -> Self {
        Self::Device(device)
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
    #[error("the communicator between the GPUs failed: {cause}")]
    Communicator { cause: String },
    #[error("cancelled")]
    Cancelled,
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
}

impl TransportError {
    /// The member at fault, if a member is.
    pub fn peer(&self) -> Option<&MemberName> {
        match self {
            Self::Unreachable { peer, .. }
            | Self::Refused { peer, .. }
            | Self::Lost { peer, .. }
            | Self::Silent { peer, .. }
            | Self::Corrupt { peer, .. } => Some(peer),
            Self::Communicator { .. } | Self::Cancelled | Self::Io { .. } => None,
        }
    }
}

impl TransportError {
    /// A transport without GPU support received payloads on a GPU.
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
            StreamFailure::Communicator { cause } => Self::Communicator { cause },
            StreamFailure::Cancelled => Self::Cancelled,
        }
    }
}

/// A way to move buckets. It listens once it is constructed, so that its address is bound before other members request it.
#[async_trait]
pub trait Transport: Send + Sync {
    /// `tcp`, `nccl` or `gdr`, for logs.
    fn name(&self) -> &'static str;

    /// Address of this member (`IP:PORT`).
    fn address(&self) -> String;

    /// Opens the chain that `hello` describes; its first member is `hello.to` at `first`. Returns when the whole chain admitted it.
    /// Ends with an error that names the member at fault after `hello.silence_ms` without a sign of life.
    async fn open(&self, hello: DataHello, first: &str) -> Result<Box<dyn BucketSink>, TransportError>;
}

/// The leader's end of an open chain. Dropping it ends the chain: every member's store is notified that it broke, without a member at
/// fault. While the leader sends nothing, its transport sends signs of life: a slow trainer is not a silent one.
#[async_trait]
pub trait BucketSink: Send {
    /// Sends one bucket with its [`weightsync_core::weights::bucket_digest`]; returns when the next may be sent (several are in flight).
    /// `header.bytes` is the length of `data`. After an error the chain has ended: every later call returns the same error.
    async fn send(&mut self, header: BucketHeader, data: Payload, digest: u128) -> Result<(), TransportError>;

    /// Whether it hashes what it sends: it then ignores the digest given to [`send`](Self::send).
    fn hashes(&self) -> bool {
        false
    }

    /// Whether it sends [`Payload::Device`]; otherwise payloads on a GPU must be copied to this process first.
    fn takes_device(&self) -> bool {
        false
    }

    /// Waits until the chain fails; pending while it works. So a leader that waits for its trainer learns at once of a lost member.
    async fn failed(&mut self) -> TransportError;

    /// Ends the stream and waits until every member of the chain confirmed that it stored all of it.
    async fn finish(self: Box<Self>) -> Result<(), TransportError>;
}

/// Decides which incoming streams are admitted; the agent implements it. Called on a task of the runtime: must not block.
pub trait Admission: Send + Sync {
    /// Checks epoch, secret, receiver, sender and the use of TLS, and returns the store of the stream's buckets. Probes get a store that
    /// keeps nothing. `peer` is the identity in the connection's certificate; `None` without TLS.
    fn admit(&self, hello: &DataHello, peer: Option<&PeerIdentity>) -> Result<Arc<dyn BucketStore>, Refusal>;

    /// Whether a member of the group has that address: its connections take precedence over those of strangers.
    fn expects(&self, _from: IpAddr) -> bool {
        false
    }
}

/// What a store requires of a stream whose payloads travel between GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Wants {
    /// Its bytes, by [`BucketStore::write`].
    #[default]
    Bytes,
    /// The memory of this member's GPUs that contains the buckets, by [`BucketStore::device`].
    Device,
    /// Nothing: the member only takes part.
    Nothing,
}

/// A complete bucket in memory of this member's GPUs, whose digest agrees with the leader's.
pub struct DeviceBucket {
    /// Its place in the stream.
    pub header: BucketHeader,
    /// One slot for each GPU, in the order of the member's ranks; each holds all of it. Dropping them frees them: while a store keeps them,
    /// fewer buckets can be in flight.
    pub slots: Vec<Slot>,
    /// gsum64 of the parts from [`BucketStore::digest_parts`], computed on the first GPU.
    pub shares: Vec<u64>,
}

/// The transfer of a whole stream to one member, as it measured it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// The member that sent it; `None` if all ranks receive from the leader at once.
    pub from: Option<MemberName>,
    /// How the bytes travelled.
    pub by: TransportKind,
    /// Bytes of all buckets.
    pub bytes: u64,
    /// From the head of the first bucket to the proof of the last one.
    pub took: Duration,
}

/// Most bytes that a transport writes into a store after the store reported room.
pub const MOST_AT_ONCE: u64 = 1 << 20;

/// Stores what arrives; the agent implements it. Calls come in order from one task, and may block for a memory copy only: a call that
/// blocks longer than the silence of the hello makes this member the silent one. No call follows an `Err` or `end`.
pub trait BucketStore: Send + Sync {
    /// A part of a bucket, at its place in the stream of the layout, while the bucket still arrives; a few hundred KiB at most. Its bytes
    /// are proven only by `complete` for its bucket.
    fn write(&self, offset: u64, part: &[u8]) -> Result<(), Refusal>;

    /// Returns when the next [`MOST_AT_ONCE`] bytes can be written. A transport calls this before it writes more, and lets its sender wait
    /// meanwhile. A store that must not wait without end refuses the next bytes instead.
    fn room(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    /// Its requirement for payloads that travel between GPUs; constant during a stream.
    fn wants(&self) -> Wants {
        Wants::Bytes
    }

    /// Parts of a bucket that the GPU must digest, in addition to the bucket itself, for a store that requires [`Wants::Device`].
    fn digest_parts(&self, _header: &BucketHeader) -> Vec<DigestPart> {
        Vec::new()
    }

    /// Takes a complete bucket in GPU memory; `complete` follows at once. Must not block.
    fn device(&self, bucket: DeviceBucket) -> Result<(), Refusal> {
        let message = format!("bucket {} came in GPU memory, which is not used here", bucket.header.sequence);
        Err(Refusal { code: weightsync_core::protocol::RefusalCode::Internal, message })
    }

    /// A complete bucket arrived; `digest` was computed here and agrees with the sender's.
    fn complete(&self, header: &BucketHeader, digest: u128) -> Result<(), Refusal>;

    /// The transfer of the whole stream; called once, just before [`end`](Self::end).
    fn measured(&self, _transfer: &Transfer) {}

    /// The stream ended normally. Later members of the chain are the leader's responsibility.
    fn end(&self) -> Result<(), Refusal>;

    /// The stream broke.
    fn broken(&self, fault: Fault<'_>, cause: &str);
}

/// The cause of a broken stream, as far as this member knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault<'a> {
    /// No member: the leader cancelled the stream, or a communicator failed.
    NoOne,
    /// This member refused the stream or a part of it. It still runs.
    Refused(&'a MemberName),
    /// This member could not be reached, closed its connection, was silent, or received other bytes than were sent.
    Lost(&'a MemberName),
}

impl<'a> Fault<'a> {
    /// The member, if there is one.
    pub fn peer(self) -> Option<&'a MemberName> {
        match self {
            Self::NoOne => None,
            Self::Refused(peer) | Self::Lost(peer) => Some(peer),
        }
    }
}

#[cfg(test)]
mod tests;

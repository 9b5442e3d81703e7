//! How buckets travel between members: one contract, one file a transport.
//!
//! A leader opens a chain and sends each bucket once; every member stores it and forwards it while it still arrives.
//! This room decides how bytes move and who is named when they do not. It never decides membership, never retries, and never
//! judges a version: a digest that disagrees is reported to the store, which alone says what is complete.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::protocol::{BucketHeader, DataHello, MemberName, Refusal};

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
    #[error("cancelled")]
    Cancelled,
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
}

/// A way to move buckets. Listens from its construction on, so that its address is bound before it is told to anyone.
#[async_trait]
pub trait Transport: Send + Sync {
    /// `tcp` or `memory`; shown in status.
    fn name(&self) -> &'static str;

    /// Where this member can be reached (`IP:PORT`, or a name in the memory transport).
    fn address(&self) -> String;

    /// Opens the chain that `hello` describes; its first member is `hello.to` at `first`. Returns when the whole chain admitted it.
    /// Ends with an error that names the member at fault after `silence` without a byte or an answer.
    async fn open(&self, hello: DataHello, first: &str, silence: Duration) -> Result<Box<dyn BucketSink>, TransportError>;
}

/// The leader's end of an open chain. Dropping it ends the chain: every member sees its stream break.
#[async_trait]
pub trait BucketSink: Send {
    /// Sends one bucket with its xxh3-128; returns when the next may be given (several are in flight).
    async fn send(&mut self, header: BucketHeader, data: Bytes, digest: u128) -> Result<(), TransportError>;

    /// Ends the stream and waits until every member of the chain confirmed that it stored all of it.
    async fn finish(self: Box<Self>) -> Result<(), TransportError>;
}

/// Decides which incoming streams are let in; implemented by the agent.
pub trait Admission: Send + Sync {
    /// Checks epoch, secret and receiver, and answers where the stream's buckets go. Probes get a store that keeps nothing.
    fn admit(&self, hello: &DataHello) -> Result<Arc<dyn BucketStore>, Refusal>;
}

/// Takes what arrives; implemented by the agent. Calls come in order from one task, and may block for a memory copy only.
pub trait BucketStore: Send + Sync {
    /// A part of a bucket, at its place in the stream of the layout, while the bucket still arrives. An error ends the stream.
    fn write(&self, offset: u64, part: &[u8]) -> Result<(), Refusal>;

    /// A whole bucket arrived; `digest` is what was computed here and already agrees with what the sender said.
    fn complete(&self, header: &BucketHeader, digest: u128) -> Result<(), Refusal>;

    /// The stream ended as it should.
    fn end(&self) -> Result<(), Refusal>;

    /// The stream broke; `peer` is who is at fault, as far as can be told. Nothing follows.
    fn broken(&self, peer: Option<&MemberName>, cause: &str);
}

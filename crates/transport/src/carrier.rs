//! The seam between a chain of connections and whatever carries payloads beside it.
//!
//! The chain says what comes and what it must hash to, and finds members that are lost; the carrier brings the bytes of the buckets that
//! were announced. Decides nothing by itself: a carrier that fails names the member at fault, and the chain ends for all.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

use super::{BucketStore, DeviceBucket};
use weightsync_core::protocol::{BucketHeader, DataHello, LentPiece, Refusal, StreamFailure};

pub(super) trait Carriers: Send + Sync {
    /// Gets ready for the payloads of a stream that was admitted into `store`; a refusal says why this member cannot take part.
    fn receive(&self, hello: &DataHello, store: &Arc<dyn BucketStore>) -> Result<Box<dyn Carrier>, Refusal>;
}

/// The payloads of one stream into one member. Dropping it before [`ended`](Self::ended) gives the stream up.
#[async_trait]
pub(super) trait Carrier: Send {
    /// A bucket was announced; its bytes begin to come. Several may be announced before the first is whole.
    fn head(&mut self, header: BucketHeader);

    /// The next bytes of the bucket that was announced last lie there, in memory that was lent.
    fn lent(&mut self, piece: LentPiece);

    /// What the leader says that the first bucket without a digest hashes to (gsum64).
    fn digest(&mut self, said: u128);

    /// What happened next; waits while nothing is announced. Dropping the future loses nothing.
    async fn next(&mut self) -> Carried;

    /// Whether every bucket that was announced was given out.
    fn idle(&self) -> bool;

    /// The stream ended as it should.
    fn ended(&mut self);
}

pub(super) enum Carried {
    /// Bytes of a bucket, at their place in the stream of the layout.
    Part(u64, Bytes),
    /// A bucket in memory of GPUs, whose digest agrees.
    Device(DeviceBucket),
    /// A lent piece was copied: its slot may be written again.
    Taken(u32),
    /// All of the bucket was given out.
    Whole(BucketHeader, u128),
    Failed(StreamFailure),
}

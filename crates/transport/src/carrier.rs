//! The interface between a chain of connections and the carrier of payloads outside of them.
//!
//! The chain announces the buckets and their digests, and finds lost members; the carrier brings the announced bytes. Decides nothing by
//! itself: a failing carrier names the member at fault, and the chain ends for all.

use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::mpsc;

use super::{BucketStore, DeviceBucket};
use weightsync_core::protocol::{BucketHeader, CarriedBy, DataHello, LentPiece, OfferedSlots, Refusal, StreamFailure};

pub(super) trait Carriers: Send + Sync {
    /// Prepares for the payloads of a stream that was admitted into `store`. A refusal has the reason why this member cannot take part.
    fn receive(&self, hello: &DataHello, store: &Arc<dyn BucketStore>) -> Result<Box<dyn Carrier>, Refusal>;
}

/// The carriers of a member, by transport. Each is set once, before the first stream can come.
#[derive(Default)]
pub(super) struct Carrying {
    broadcasts: OnceLock<Arc<dyn Carriers>>,
    reads: OnceLock<Arc<dyn Carriers>>,
}

impl Carrying {
    /// Sets the carrier of broadcasts between GPUs, and of copies on one GPU.
    pub(super) fn broadcasts(&self, carriers: Arc<dyn Carriers>) {
        let _ = self.broadcasts.set(carriers);
    }

    /// Sets the carrier of reads from the previous member's memory.
    pub(super) fn reads(&self, carriers: Arc<dyn Carriers>) {
        let _ = self.reads.set(carriers);
    }

    pub(super) fn of(&self, carried: &CarriedBy) -> Option<&dyn Carriers> {
        let carriers = if carried.fabric.is_some() { &self.reads } else { &self.broadcasts };
        carriers.get().map(Arc::as_ref)
    }
}

/// The payloads of one stream into one member. Dropping it before [`ended`](Self::ended) gives the stream up.
#[async_trait]
pub(super) trait Carrier: Send {
    /// A bucket was announced; its bytes begin to come. Several may be announced before the first is complete.
    fn head(&mut self, header: BucketHeader);

    /// Place of the next bytes of the bucket that was announced last, in lent memory.
    fn lent(&mut self, piece: LentPiece);

    /// The slots from which the next member reads the payloads, if every member reads from the previous one. The carrier then gives the
    /// messages to the next member by [`Carried::Relay`], and this member forwards nothing itself.
    fn offers(&self) -> Option<OfferedSlots> {
        None
    }

    /// Source of the numbers of offered pieces that the next member has read.
    fn taken(&mut self, _taken: mpsc::UnboundedReceiver<u32>) {}

    /// The leader's digest (gsum64) of the first bucket without one.
    fn digest(&mut self, said: u128);

    /// The next event; pending while nothing is announced. Dropping the future loses nothing.
    async fn next(&mut self) -> Carried;

    /// Whether every announced bucket was passed on.
    fn idle(&self) -> bool;

    /// The stream ended normally.
    fn ended(&mut self);
}

pub(super) enum Carried {
    /// Bytes of a bucket, at their place in the stream of the layout.
    Part(u64, Bytes),
    /// A bucket in GPU memory, whose digest agrees.
    Device(DeviceBucket),
    /// A lent piece was copied: its slot may be reused.
    Taken(u32),
    /// A message to the next member, which reads payloads from this one.
    Relay(Relayed),
    /// All of the bucket was passed on.
    Whole(BucketHeader, u128),
    Failed(StreamFailure),
}

/// A message to the next member of a chain about payloads that it reads from this one.
pub(super) enum Relayed {
    Head(BucketHeader),
    Lent(LentPiece),
    Digest(u128),
}

//! The seam between a chain of connections and whatever carries payloads next to it.
//!
//! The chain says what comes and what it must hash to, and finds members that are lost; the carrier brings the bytes of the buckets that
//! were announced. Decides nothing by itself: a carrier that fails names the member at fault, and the chain ends for all.

use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::mpsc;

use super::{BucketStore, DeviceBucket};
use weightsync_core::protocol::{BucketHeader, CarriedBy, DataHello, LentPiece, OfferedSlots, Refusal, StreamFailure};

pub(super) trait Carriers: Send + Sync {
    /// Gets ready for the payloads of a stream that was admitted into `store`; a refusal says why this member cannot take part.
    fn receive(&self, hello: &DataHello, store: &Arc<dyn BucketStore>) -> Result<Box<dyn Carrier>, Refusal>;
}

/// What brings payloads into this member, by how they travel. Each is set once, before the first stream can come.
#[derive(Default)]
pub(super) struct Carrying {
    broadcasts: OnceLock<Arc<dyn Carriers>>,
    reads: OnceLock<Arc<dyn Carriers>>,
}

impl Carrying {
    /// Brings what is broadcast between GPUs, or copied on one.
    pub(super) fn broadcasts(&self, carriers: Arc<dyn Carriers>) {
        let _ = self.broadcasts.set(carriers);
    }

    /// Brings what is read from the memory of the member before.
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
    /// A bucket was announced; its bytes begin to come. Several may be announced before the first is whole.
    fn head(&mut self, header: BucketHeader);

    /// The next bytes of the bucket that was announced last lie there, in memory that was lent.
    fn lent(&mut self, piece: LentPiece);

    /// What the next member needs to read the payloads from here, where every member reads them from the one before. The carrier says then by
    /// [`Carried::Relay`] what the next member is to hear, and this member passes nothing on by itself.
    fn offers(&self) -> Option<OfferedSlots> {
        None
    }

    /// Where the numbers of offered pieces come from that the next member has read.
    fn taken(&mut self, _taken: mpsc::UnboundedReceiver<u32>) {}

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
    /// For the next member, where payloads are read from this one.
    Relay(Relayed),
    /// All of the bucket was given out.
    Whole(BucketHeader, u128),
    Failed(StreamFailure),
}

/// What the next member of a chain hears of payloads that it reads from this one.
pub(super) enum Relayed {
    Head(BucketHeader),
    Lent(LentPiece),
    Digest(u128),
}

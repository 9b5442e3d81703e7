//! Takes the stream of one attempt into a ring of shared memory, from which the engine's own workers load while later bytes still travel.
//!
//! For a machine without room for a version in files. Decides what arrived (order, coverage, digests, as [`super::receive`] does for
//! files), cuts the stream again between tensors, and describes a bucket to the workers only when its bytes are proven. The engine serves
//! until the ring is full; from then on it is paused and loads. Nothing is kept: others are fed by members that have the version.

mod feeding;

use std::collections::VecDeque;
use std::sync::Arc;

use futures::future::BoxFuture;
use tokio::sync::Notify;

use super::receive::{cut_as_laid_out, in_order, invalid};
use super::receiver::EngineReceiver;
use super::ring::Ring;
use crate::group::refusal;
use crate::locks::lock;
use weightsync_core::protocol::{BucketHeader, Refusal, RefusalCode};
use weightsync_core::weights::{Bucket, Coverage, DigestAlgorithm, Layout, PartHasher, digest_hex};
use weightsync_engine::{HostBucket, HostDigest, HostInstall, HostTensor};
use weightsync_net::memfd::SharedMemory;
use weightsync_transport::{BucketStore, Fault, MOST_AT_ONCE, TensorDigests, Transfer};

pub(super) type MemoryReceiver = EngineReceiver<FromMemory>;

/// An install whose workers read the ring.
pub(super) struct FromMemory(Box<dyn HostInstall>);

pub(super) enum Order {
    /// The workers may read this.
    Bucket(HostBucket),
    /// The ring is full: the engine must take more than so many.
    Room(u32),
}

pub(super) struct Arrived {
    /// How the workers want digests.
    digest: HostDigest,
    /// Wakes a stream that waits for room.
    freed: Arc<Notify>,
    hasher: TensorDigests,
    coverage: Coverage,
    memory: SharedMemory,
    ring: Ring,
    /// Buckets between tensors that have no place yet.
    to_come: VecDeque<Bucket>,
    /// Those that have one and are not proven, with its first byte.
    open: VecDeque<(Bucket, u64)>,
    /// How many were announced to the workers, and how many of those were taken.
    reported: u32,
    taken: u32,
    asked: bool,
    /// Whether places are used more than once.
    goes_round: bool,
}

/// What a ring must hold so that a stream never waits for itself: a bucket of the wire is proven only when all of it is there, and buckets
/// between tensors lie across its ends.
fn least_ring(wire: &Layout, cut: &Layout) -> u64 {
    let regions = cut.largest_bucket().saturating_mul(3);
    wire.largest_bucket().saturating_add(MOST_AT_ONCE).saturating_add(regions).min(cut.total_bytes).max(64)
}

impl Arrived {
    /// Gives places to buckets as far as the next write may go; false when there is no room.
    fn make_room(&mut self) -> bool {
        let wanted = self.hasher.position().saturating_add(MOST_AT_ONCE);
        while let Some(bucket) = self.to_come.front().copied().filter(|bucket| bucket.offset < wanted) {
            let Some(start) = self.ring.take(bucket.bytes.next_multiple_of(64)) else { return false };
            self.to_come.pop_front();
            self.open.push_back((bucket, start));
        }
        true
    }

    fn copy(&mut self, offset: u64, part: &[u8]) -> Option<()> {
        let end = offset.checked_add(part.len() as u64)?;
        let mut at = offset;
        for (bucket, start) in &self.open {
            let bucket_end = bucket.offset.checked_add(bucket.bytes)?;
            if at >= end || bucket_end <= at {
                continue;
            }
            let until = end.min(bucket_end);
            let piece = part.get(usize::try_from(at - offset).ok()?..usize::try_from(until - offset).ok()?)?;
            let place = usize::try_from(start.checked_add(at.checked_sub(bucket.offset)?)?).ok()?;
            self.memory.bytes_mut(place..place.checked_add(piece.len())?)?.copy_from_slice(piece);
            at = until;
        }
        (at >= end).then_some(())
    }
}

impl MemoryReceiver {
    fn take(&self, offset: u64, part: &[u8]) -> Result<(), Refusal> {
        let mut arrived = lock(&self.arrived);
        let Some(arrived) = arrived.as_mut() else {
            let over = || refusal(RefusalCode::WrongPhase, "the attempt is over here");
            return Err(self.failed().map_or_else(over, |why| refusal(RefusalCode::EngineRefused, why)));
        };
        in_order(&mut arrived.coverage, arrived.hasher.position(), offset, part.len() as u64)?;
        let room = arrived.make_room();
        arrived.hasher.update(part).map_err(invalid)?;
        let copied = arrived.copy(offset, part).filter(|()| room || part.len() as u64 <= MOST_AT_ONCE);
        copied.ok_or_else(|| refusal(RefusalCode::Internal, "more bytes came than there was room for"))
    }

    /// Describes the buckets that are proven up to that byte.
    fn proven(&self, until: u64) -> Result<(), Refusal> {
        let mut arrived = lock(&self.arrived);
        let Some(arrived) = arrived.as_mut() else { return Ok(()) };
        while let Some((bucket, start)) = arrived.open.front().copied().filter(|(bucket, _)| bucket.offset + bucket.bytes <= until) {
            let tensors = self.tensors(arrived, &bucket, start).map_err(|what| refusal(RefusalCode::Internal, what))?;
            arrived.open.pop_front();
            let reported = HostBucket { sequence: arrived.reported, copy: arrived.goes_round, tensors };
            arrived.reported += 1;
            self.order(Order::Bucket(reported));
        }
        Ok(())
    }

    /// The tensors of a bucket as they lie in the ring, compared with what was received.
    fn tensors(&self, arrived: &mut Arrived, bucket: &Bucket, start: u64) -> Result<Vec<HostTensor>, String> {
        let mut tensors = Vec::new();
        let ended = arrived.hasher.ended().map_err(|error| error.to_string())?;
        for part in self.layout.parts(bucket.offset, bucket.bytes) {
            let offset = start + part.in_range;
            let place = usize::try_from(offset).ok().zip(usize::try_from(offset + part.bytes).ok());
            let bytes = place.and_then(|(first, end)| arrived.memory.bytes(first..end)).ok_or("a bucket lies outside of the ring")?;
            let name = part.entry.tensor.full_name();
            let known = ended.get(part.index).copied().ok_or_else(|| format!("tensor {name} is not whole"))?;
            let differs = || format!("tensor {name} is not what was received");
            let digest = match (arrived.digest, self.algorithm) {
                (HostDigest::Xxh3_128, DigestAlgorithm::Xxh3_128) => digest_hex(known),
                (HostDigest::Blake3, DigestAlgorithm::Blake3) => {
                    let reported = arrived.digest.of(bytes);
                    // The manifest has the first half of it.
                    reported.starts_with(&digest_hex(known)).then_some(reported).ok_or_else(differs)?
                }
                _ => {
                    let mut hasher = PartHasher::new(self.algorithm);
                    hasher.update(bytes);
                    (hasher.take() == known).then(|| arrived.digest.of(bytes)).ok_or_else(differs)?
                }
            };
            tensors.push(HostTensor { spec: part.entry.tensor.clone(), offset, bytes: part.bytes, digest });
        }
        Ok(tensors)
    }

    /// So many buckets were taken by the engine: their places are free.
    fn taken(&self, buckets: u32) {
        let freed = lock(&self.arrived).as_mut().map(|arrived| {
            while arrived.taken < buckets.min(arrived.reported) {
                arrived.ring.give_back();
                arrived.taken += 1;
            }
            arrived.asked = false;
            arrived.freed.clone()
        });
        // The stream waited for the engine, not the leader for us.
        self.listener.moving();
        if let Some(freed) = freed {
            freed.notify_one();
        }
    }

    /// What to wait for where there is no room, which the engine is asked for; none where there is, or the attempt is over.
    fn lacks_room(&self) -> Option<Arc<Notify>> {
        let mut arrived = lock(&self.arrived);
        let arrived = arrived.as_mut()?;
        if arrived.make_room() {
            return None;
        }
        if !std::mem::replace(&mut arrived.asked, true) {
            self.order(Order::Room(arrived.taken));
        }
        Some(arrived.freed.clone())
    }
}

impl BucketStore for MemoryReceiver {
    fn write(&self, offset: u64, part: &[u8]) -> Result<(), Refusal> {
        self.take(offset, part)?;
        self.listener.moving();
        Ok(())
    }

    fn room(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            while let Some(freed) = self.lacks_room() {
                freed.notified().await;
            }
        })
    }

    fn complete(&self, header: &BucketHeader, _digest: u128) -> Result<(), Refusal> {
        let end = header.offset.saturating_add(header.bytes);
        cut_as_laid_out(&self.layout, header)?;
        self.proven(end)?;
        self.listener.received(&self.update, end);
        Ok(())
    }

    fn measured(&self, transfer: &Transfer) {
        self.listener.measured(&self.update, transfer);
    }

    fn end(&self) -> Result<(), Refusal> {
        self.streamed()
    }

    fn broken(&self, fault: Fault<'_>, cause: &str) {
        self.listener.broken(&self.update, fault, cause);
    }
}

//! Takes the stream of one attempt into a ring of shared memory, out of which the engine's own workers load while later bytes still travel.
//!
//! For a machine that has no room for a version in files. Decides what arrived (order, coverage, digests, as [`super::receive`] does for
//! files), cuts the stream anew between tensors, and tells the workers of a bucket only when its bytes are proven. The engine serves until
//! the ring is full; from then on it is paused and loads. Nothing is kept: others are fed by members that have the version.

mod feeding;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::{Instant, timeout};

use super::receive::{Listener, agree, cut_as_laid_out};
use super::ring::Ring;
use crate::core::lock;
use crate::group::refusal;
use weightsync_core::protocol::{BucketHeader, FinishRequest, HeldVersion, Refusal, RefusalCode, UpdateId};
use weightsync_core::weights::{Bucket, Coverage, DigestAlgorithm, Layout, PartHasher, digest_hex};
use weightsync_engine::{HostBucket, HostDigest, HostTensor};
use weightsync_net::memfd::SharedMemory;
use weightsync_transport::{BucketStore, Fault, MOST_AT_ONCE, TensorDigests};

/// What the task that feeds the engine is told, in order.
enum Order {
    /// The workers may read this.
    Bucket(HostBucket),
    /// The ring is full: the engine must take more than so many.
    Room(u32),
    /// Say when all before this was told.
    Settle(oneshot::Sender<()>),
    /// The version is what its manifest says: the engine takes its last step.
    Finish(HeldVersion),
    GiveUp(String),
}

pub struct MemoryReceiver {
    update: UpdateId,
    layout: Arc<Layout>,
    algorithm: DigestAlgorithm,
    digest: HostDigest,
    begun: Instant,
    silence: Duration,
    listener: Box<dyn Listener>,
    arriving: Mutex<Option<Arriving>>,
    freed: Notify,
    /// Why the engine took no more.
    failed: Mutex<Option<String>>,
    orders: mpsc::UnboundedSender<Order>,
}

struct Arriving {
    hasher: TensorDigests,
    coverage: Coverage,
    memory: SharedMemory,
    ring: Ring,
    /// Buckets between tensors that have no place yet.
    to_come: VecDeque<Bucket>,
    /// Those that have one and are not proven, with its first byte.
    open: VecDeque<(Bucket, u64)>,
    /// How many the workers were told of, and how many of those were taken.
    told: u32,
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

impl Arriving {
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
    /// Nothing is taken any more, and the engine's install is given up.
    pub(super) fn discard(&self, reason: &str) {
        lock(&self.arriving).take();
        self.freed.notify_one();
        // The task is gone when the engine failed before, or finished.
        let _gone = self.orders.send(Order::GiveUp(reason.to_owned()));
    }

    /// Has the engine take its last step. False when there is nobody to do so any more.
    pub(super) fn finish(&self, held: HeldVersion) -> bool {
        self.orders.send(Order::Finish(held)).is_ok()
    }

    /// Waits until the workers were told of every bucket, and compares coverage and digests with what the leader sent.
    pub(super) async fn conclude(&self, request: &FinishRequest) -> Result<HeldVersion, String> {
        let (done, settled) = oneshot::channel();
        let sent = self.orders.send(Order::Settle(done)).is_ok();
        let settled = sent && timeout(self.silence, settled).await.is_ok_and(|settled| settled.is_ok());
        if let Some(reason) = lock(&self.failed).clone() {
            return Err(reason);
        }
        if !settled {
            return Err(format!("the engine's workers were not told of all buckets within {:?}", self.silence));
        }
        let Some(arrived) = lock(&self.arriving).take() else { return Err("nothing was received".into()) };
        let manifest = agree(&self.update, &self.layout, self.algorithm, || arrived.hasher.finish(), &arrived.coverage, request)?;
        Ok(HeldVersion { version: self.update.version, manifest: manifest.digest() })
    }

    fn take(&self, offset: u64, part: &[u8]) -> Result<(), Refusal> {
        let mut arriving = lock(&self.arriving);
        let Some(arriving) = arriving.as_mut() else {
            let why = lock(&self.failed).clone();
            let over = || refusal(RefusalCode::WrongPhase, "the attempt is over here");
            return Err(why.map_or_else(over, |why| refusal(RefusalCode::EngineRefused, why)));
        };
        let invalid = |what: String| refusal(RefusalCode::Invalid, what);
        if offset != arriving.hasher.position() {
            let expected = arriving.hasher.position();
            return Err(invalid(format!("bytes from {offset} on came, those from {expected} on were expected")));
        }
        let room = arriving.make_room();
        arriving.coverage.record(offset, part.len() as u64).map_err(|error| invalid(error.to_string()))?;
        arriving.hasher.update(part).map_err(|error| invalid(error.to_string()))?;
        let copied = arriving.copy(offset, part).filter(|()| room || part.len() as u64 <= MOST_AT_ONCE);
        copied.ok_or_else(|| refusal(RefusalCode::Internal, "more bytes came than there was room for"))
    }

    /// Tells of the buckets that are proven up to that byte.
    fn proven(&self, until: u64) -> Result<(), Refusal> {
        let mut arriving = lock(&self.arriving);
        let Some(arriving) = arriving.as_mut() else { return Ok(()) };
        while let Some((bucket, start)) = arriving.open.front().copied().filter(|(bucket, _)| bucket.offset + bucket.bytes <= until) {
            let tensors = self.tensors(arriving, &bucket, start).map_err(|what| refusal(RefusalCode::Internal, what))?;
            arriving.open.pop_front();
            let told = HostBucket { sequence: arriving.told, copy: arriving.goes_round, tensors };
            arriving.told += 1;
            // A task that is gone said why; the next part finds nothing arriving.
            let _gone = self.orders.send(Order::Bucket(told));
        }
        Ok(())
    }

    /// The tensors of a bucket as they lie in the ring, compared with what was received.
    fn tensors(&self, arriving: &mut Arriving, bucket: &Bucket, start: u64) -> Result<Vec<HostTensor>, String> {
        let mut tensors = Vec::new();
        let ended = arriving.hasher.ended().map_err(|error| error.to_string())?;
        for part in self.layout.parts(bucket.offset, bucket.bytes) {
            let offset = start + part.in_range;
            let place = usize::try_from(offset).ok().zip(usize::try_from(offset + part.bytes).ok());
            let bytes = place.and_then(|(first, end)| arriving.memory.bytes(first..end)).ok_or("a bucket lies outside of the ring")?;
            let name = part.entry.tensor.full_name();
            let known = ended.get(part.index).copied().ok_or_else(|| format!("tensor {name} is not whole"))?;
            let differs = || format!("tensor {name} is not what was received");
            let digest = match (self.digest, self.algorithm) {
                (HostDigest::Xxh3_128, DigestAlgorithm::Xxh3_128) => digest_hex(known),
                (HostDigest::Blake3, DigestAlgorithm::Blake3) => {
                    let told = self.digest.of(bytes);
                    // The manifest has the first half of it.
                    told.starts_with(&digest_hex(known)).then_some(told).ok_or_else(differs)?
                }
                _ => {
                    let mut hasher = PartHasher::new(self.algorithm);
                    hasher.update(bytes);
                    (hasher.take() == known).then(|| self.digest.of(bytes)).ok_or_else(differs)?
                }
            };
            tensors.push(HostTensor { spec: part.entry.tensor.clone(), offset, bytes: part.bytes, digest });
        }
        Ok(tensors)
    }

    /// So many buckets were taken by the engine: their places are free.
    fn taken(&self, buckets: u32) {
        if let Some(arriving) = lock(&self.arriving).as_mut() {
            while arriving.taken < buckets.min(arriving.told) {
                arriving.ring.give_back();
                arriving.taken += 1;
            }
            arriving.asked = false;
        }
        // The stream waited for the engine, not the leader for us.
        self.listener.moving();
        self.freed.notify_one();
    }

    /// Whether there is room, or nobody needs it any more; asks the engine to take more when there is not.
    fn has_room(&self) -> bool {
        let mut arriving = lock(&self.arriving);
        let Some(arriving) = arriving.as_mut() else { return true };
        let room = arriving.make_room();
        if !room && !arriving.asked {
            arriving.asked = true;
            let _gone = self.orders.send(Order::Room(arriving.taken));
        }
        room
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
            while !self.has_room() {
                self.freed.notified().await;
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

    fn end(&self) -> Result<(), Refusal> {
        let took_ms = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.listener.streamed(&self.update, took_ms)
    }

    fn broken(&self, fault: Fault<'_>, cause: &str) {
        self.listener.broken(&self.update, fault, cause);
    }
}

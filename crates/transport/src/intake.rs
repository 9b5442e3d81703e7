//! The handling of a stream by one member: the order of its parts, the digest after each bucket, and exactly one end for the store.
//!
//! Every transport feeds it. Decides whether the arriving data is a valid stream; never moves a byte, never waits. The store receives
//! exactly one end, even if the task of the stream is dropped.

use std::sync::Arc;

use futures::future::BoxFuture;
use tokio::time::Instant;

use super::{BucketStore, DeviceBucket, Fault, Transfer};
use weightsync_core::protocol::{BucketHeader, DataHello, MemberName, Refusal, RefusalCode, StreamFailure, TransportKind};
use weightsync_core::weights::BucketHasher;

/// A stream into one member's store.
pub(super) struct Intake {
    me: MemberName,
    store: Arc<dyn BucketStore>,
    hasher: BucketHasher,
    open: Option<Open>,
    state: State,
    measure: Measure,
}

/// When the first bucket began and the last one was proven, and the bytes of all buckets.
struct Measure {
    from: Option<MemberName>,
    by: TransportKind,
    begun: Option<Instant>,
    proven: Option<Instant>,
    bytes: u64,
}

impl Measure {
    fn begins(&mut self) {
        self.begun.get_or_insert_with(Instant::now);
    }

    fn proves(&mut self, bytes: u64) {
        self.proven = Some(Instant::now());
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// `None` without a bucket.
    fn transfer(&self) -> Option<Transfer> {
        let took = self.proven?.saturating_duration_since(self.begun?);
        Some(Transfer { from: self.from.clone(), by: self.by, bytes: self.bytes, took })
    }
}

struct Open {
    header: BucketHeader,
    received: u64,
    /// The hashed bytes among them, here or with their block.
    hashed: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    /// `end` was called and answered with `Ok`.
    Ended,
    /// The store refused, or was notified that the stream broke.
    Over,
}

impl Intake {
    /// The stream that the hello opens.
    pub(super) fn new(hello: &DataHello, store: Arc<dyn BucketStore>) -> Self {
        let by = match &hello.carried {
            None => TransportKind::Tcp,
            Some(carried) if carried.fabric.is_some() => TransportKind::Gdr,
            Some(_) => TransportKind::Nccl,
        };
        let from = (by != TransportKind::Nccl).then(|| hello.from.clone());
        let measure = Measure { from, by, begun: None, proven: None, bytes: 0 };
        Self { me: hello.to.clone(), store, hasher: BucketHasher::new(), open: None, state: State::Running, measure }
    }

    /// Waits until the store has room for the result of one read.
    pub(super) fn room(&self) -> BoxFuture<'static, ()> {
        let store = self.store.clone();
        Box::pin(async move { store.room().await })
    }

    /// Whether every bucket came and the store accepted the end.
    pub(super) fn ended(&self) -> bool {
        self.state == State::Ended
    }

    pub(super) fn head(&mut self, header: BucketHeader) -> Result<(), StreamFailure> {
        self.running("a bucket")?;
        if header.flags != 0 || !sound(&header) || self.open.is_some() {
            return Err(self.nonsense("the head of a bucket makes no sense"));
        }
        self.measure.begins();
        self.open = Some(Open { header, received: 0, hashed: 0 });
        Ok(())
    }

    pub(super) fn part(&mut self, part: &[u8]) -> Result<(), StreamFailure> {
        self.take(part, true)
    }

    /// The next bytes of the bucket, whose digest comes by [`Intake::block`].
    pub(super) fn hashed_part(&mut self, part: &[u8]) -> Result<(), StreamFailure> {
        self.take(part, false)
    }

    /// The digest of the hashed parts since the previous block.
    pub(super) fn block(&mut self, digest: u128) -> Result<(), StreamFailure> {
        self.running("a block")?;
        match self.open.as_mut().filter(|open| open.hashed < open.received) {
            None => Err(self.nonsense("a block without bytes")),
            Some(open) => {
                open.hashed = open.received;
                self.hasher.block(digest);
                Ok(())
            }
        }
    }

    fn take(&mut self, part: &[u8], hash: bool) -> Result<(), StreamFailure> {
        self.running("bytes")?;
        let Some(Open { header, received, hashed }) = self.open.as_mut() else { return Err(self.nonsense("bytes outside of a bucket")) };
        let offset = header.offset.saturating_add(*received);
        *received = received.saturating_add(part.len() as u64);
        if *received > header.bytes {
            return Err(self.nonsense("a bucket is longer than its head says"));
        }
        if hash {
            // While the bytes are in the cache.
            self.hasher.update(part);
            *hashed = *received;
        }
        let written = self.store.write(offset, part);
        self.stored(written)
    }

    /// Ends the bucket; `said` is the leader's digest of it.
    pub(super) fn digest(&mut self, said: u128) -> Result<(), StreamFailure> {
        self.running("a digest")?;
        let Some(Open { header, received, hashed }) = self.open.take() else { return Err(self.nonsense("a digest outside of a bucket")) };
        if received != header.bytes {
            return Err(self.nonsense("a bucket is shorter than its head says"));
        }
        if hashed != received {
            return Err(self.nonsense("a digest before the end of a block"));
        }
        let computed = self.hasher.take();
        if computed != said {
            let failure = StreamFailure::Corrupt { peer: self.me.clone(), sequence: header.sequence };
            self.broken(&failure);
            return Err(failure);
        }
        self.measure.proves(header.bytes);
        let completed = self.store.complete(&header, computed);
        self.stored(completed)
    }

    /// Begins a bucket whose bytes come outside of the connection. More may begin before it is complete.
    pub(super) fn carried_head(&mut self, header: BucketHeader) -> Result<(), StreamFailure> {
        self.running("a bucket")?;
        if header.flags != BucketHeader::CARRIED || !sound(&header) || self.open.is_some() {
            return Err(self.nonsense("the head of a bucket makes no sense"));
        }
        self.measure.begins();
        Ok(())
    }

    /// The next bytes of such a bucket, at their place in the stream of the layout.
    pub(super) fn carried_part(&mut self, offset: u64, part: &[u8]) -> Result<(), StreamFailure> {
        self.running("bytes")?;
        let written = self.store.write(offset, part);
        self.stored(written)
    }

    /// Such a bucket, in GPU memory.
    pub(super) fn carried_device(&mut self, bucket: DeviceBucket) -> Result<(), StreamFailure> {
        self.running("a bucket")?;
        let taken = self.store.device(bucket);
        self.stored(taken)
    }

    /// Such a bucket was proven and passed to the store completely.
    pub(super) fn carried_whole(&mut self, header: &BucketHeader, digest: u128) -> Result<(), StreamFailure> {
        self.running("a digest")?;
        self.measure.proves(header.bytes);
        let completed = self.store.complete(header, digest);
        self.stored(completed)
    }

    pub(super) fn end(&mut self) -> Result<(), StreamFailure> {
        self.running("an end")?;
        if self.open.is_some() {
            return Err(self.nonsense("the stream ended in the middle of a bucket"));
        }
        if let Some(transfer) = self.measure.transfer() {
            self.store.measured(&transfer);
        }
        let ended = self.store.end();
        self.stored(ended)?;
        self.state = State::Ended;
        Ok(())
    }

    /// Ends a broken stream. Sends nothing to a store that has ended, refused, or was notified before.
    pub(super) fn broken(&mut self, failure: &StreamFailure) {
        if self.state == State::Running {
            self.state = State::Over;
            let (fault, cause) = blame(failure);
            self.store.broken(fault, &cause);
        }
    }

    fn running(&mut self, what: &str) -> Result<(), StreamFailure> {
        if self.state == State::Running { Ok(()) } else { Err(self.nonsense(&format!("{what} after the end of the stream"))) }
    }

    fn nonsense(&mut self, what: &str) -> StreamFailure {
        let refusal = Refusal { code: RefusalCode::Invalid, message: what.to_owned() };
        let failure = StreamFailure::Refused { peer: self.me.clone(), refusal };
        self.broken(&failure);
        failure
    }

    fn stored(&mut self, answer: Result<(), Refusal>) -> Result<(), StreamFailure> {
        answer.map_err(|refusal| {
            self.state = State::Over;
            StreamFailure::Refused { peer: self.me.clone(), refusal }
        })
    }
}

impl Drop for Intake {
    fn drop(&mut self) {
        self.broken(&StreamFailure::Lost { peer: self.me.clone(), cause: "it closed its transport".to_owned() });
    }
}

/// Whether the numbers of a head are possible.
fn sound(header: &BucketHeader) -> bool {
    header.sequence != u32::MAX && header.bytes > 0 && header.offset.checked_add(header.bytes).is_some()
}

/// The member at fault and the cause, for a store.
fn blame(failure: &StreamFailure) -> (Fault<'_>, String) {
    match failure {
        StreamFailure::Unreachable { peer, cause } => (Fault::Lost(peer), format!("cannot be reached: {cause}")),
        StreamFailure::Refused { peer, refusal } => (Fault::Refused(peer), format!("refused: {}", refusal.message)),
        StreamFailure::Lost { peer, cause } => (Fault::Lost(peer), format!("lost in the middle: {cause}")),
        StreamFailure::Silent { peer, silence_ms } => (Fault::Lost(peer), format!("no sign of life for {silence_ms} ms")),
        StreamFailure::Corrupt { peer, sequence } => (Fault::Lost(peer), format!("received bucket {sequence} with a wrong digest")),
        StreamFailure::Communicator { cause } => (Fault::NoOne, format!("the communicator failed: {cause}")),
        StreamFailure::Cancelled => (Fault::NoOne, "the leader gave the stream up".to_owned()),
    }
}

//! What one member does with a stream: the order of its parts, the digest after each bucket, and one word to the store at the end.
//!
//! Every transport feeds it. Decides whether what arrives is a stream; never moves a byte, never waits. The store is reported exactly one
//! end, even when the task that owned the stream is dropped.

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

/// When the first bucket began, when the last one was proven, and how many bytes both and those between have.
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

    /// None where no bucket came.
    fn transfer(&self) -> Option<Transfer> {
        let took = self.proven?.saturating_duration_since(self.begun?);
        Some(Transfer { from: self.from.clone(), by: self.by, bytes: self.bytes, took })
    }
}

struct Open {
    header: BucketHeader,
    received: u64,
    /// Those of them that were hashed, here or with their block.
    hashed: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    /// `end` was called and answered with `Ok`.
    Ended,
    /// The store said no, or was informed that the stream broke.
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

    /// Waits until the store has room for what one read may bring.
    pub(super) fn room(&self) -> BoxFuture<'static, ()> {
        let store = self.store.clone();
        Box::pin(async move { store.room().await })
    }

    /// Whether every bucket came and the store took the end.
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

    /// The digest of the hashed parts since the block before.
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

    /// The bucket is over; `said` is what the leader says it hashes to.
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

    /// A bucket begins whose bytes come another way; more may begin before it is whole.
    pub(super) fn carried_head(&mut self, header: BucketHeader) -> Result<(), StreamFailure> {
        self.running("a bucket")?;
        if header.flags != BucketHeader::CARRIED || !sound(&header) || self.open.is_some() {
            return Err(self.nonsense("the head of a bucket makes no sense"));
        }
        self.measure.begins();
        Ok(())
    }

    /// The next bytes of a bucket that came another way, at their place in the stream of the layout.
    pub(super) fn carried_part(&mut self, offset: u64, part: &[u8]) -> Result<(), StreamFailure> {
        self.running("bytes")?;
        let written = self.store.write(offset, part);
        self.stored(written)
    }

    /// A bucket that came another way and lies in memory of GPUs.
    pub(super) fn carried_device(&mut self, bucket: DeviceBucket) -> Result<(), StreamFailure> {
        self.running("a bucket")?;
        let taken = self.store.device(bucket);
        self.stored(taken)
    }

    /// A bucket that came another way was proven, and all of it was given to the store.
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

    /// The stream broke. Says nothing to a store that ended, that said no by itself, or that was informed before.
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

/// Whether the numbers of a head can be true.
fn sound(header: &BucketHeader) -> bool {
    header.sequence != u32::MAX && header.bytes > 0 && header.offset.checked_add(header.bytes).is_some()
}

/// Who is at fault and what happened, for a store.
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

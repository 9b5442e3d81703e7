//! The payloads of one stream into one member: a broadcast (or, on the source's GPU, copies from its ring) for every bucket that the chain
//! announced, and its bytes or slots to the store.
//!
//! Two tasks: `enter` takes a slot on each GPU and has the workers enter the broadcasts, in the order of the announcements, as far ahead
//! as slots allow; `give` waits for them in that order, compares digests, and gives out. A bucket longer than a slot travels in pieces.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use futures::future::BoxFuture;
use tokio::sync::{OwnedMutexGuard, mpsc};
use tokio::time::{sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::communicator::{Communicator, patience};
use super::pieces;
use super::staging::AREA;
use crate::carrier::{Carried, Carrier};
use crate::{BucketStore, DeviceBucket, Wants};
use weightsync_core::protocol::worker::Part;
use weightsync_core::protocol::{BucketHeader, LentPiece, Refusal, RefusalCode, StreamFailure};
use weightsync_gpu::worker::{Broadcast, Copy, Slot, Sums, WorkerError};

/// Buckets that were given out and that the chain has not taken yet.
const GIVEN: usize = 2;

enum Announced {
    Head(BucketHeader),
    /// Where the next bytes of that bucket lie, in the source's ring.
    Lent(LentPiece),
}

/// A piece on its way into slots of ours.
struct Entered {
    header: BucketHeader,
    /// First byte of the piece in its bucket, and its length.
    offset: u64,
    bytes: u64,
    slots: Vec<Slot>,
    sums: Vec<BoxFuture<'static, Result<Sums, WorkerError>>>,
}

/// What both tasks know.
struct Stream {
    communicator: Arc<Communicator>,
    store: Arc<dyn BucketStore>,
    root: u32,
    silence: Duration,
    /// Numbers of lent pieces that were copied.
    taken: mpsc::UnboundedSender<u32>,
}

pub(super) struct Receiver {
    communicator: Arc<Communicator>,
    heads: mpsc::UnboundedSender<Announced>,
    said: mpsc::UnboundedSender<u128>,
    given: mpsc::Receiver<Carried>,
    taken: mpsc::UnboundedReceiver<u32>,
    /// Buckets announced and not given out.
    open: usize,
    ended: bool,
    _stream: OwnedMutexGuard<()>,
    _tasks: [AbortOnDropHandle<()>; 2],
}

impl Receiver {
    /// Gets ready for a stream; refused while another one runs.
    pub(super) fn start(
        communicator: Arc<Communicator>,
        store: Arc<dyn BucketStore>,
        root: u32,
        silence: Duration,
    ) -> Result<Self, Refusal> {
        let busy = || Refusal { code: RefusalCode::WrongPhase, message: "the communicator carries another stream".into() };
        let lock = communicator.stream().ok_or_else(busy)?;
        let (heads, to_enter) = mpsc::unbounded_channel();
        let (said, to_compare) = mpsc::unbounded_channel();
        let (entered, to_give) = mpsc::unbounded_channel();
        let (give, given) = mpsc::channel(GIVEN);
        let (take, taken) = mpsc::unbounded_channel();
        let stream = Arc::new(Stream { communicator: communicator.clone(), store, root, silence, taken: take });
        let entering = tokio::spawn(enter(stream.clone(), to_enter, entered, give.clone()));
        let giving = tokio::spawn(give_out(stream, to_give, to_compare, give));
        let tasks = [AbortOnDropHandle::new(entering), AbortOnDropHandle::new(giving)];
        Ok(Self { communicator, heads, said, given, taken, open: 0, ended: false, _stream: lock, _tasks: tasks })
    }
}

#[async_trait]
impl Carrier for Receiver {
    fn head(&mut self, header: BucketHeader) {
        self.open += 1;
        // A task that ended has said why.
        let _ = self.heads.send(Announced::Head(header));
    }

    fn lent(&mut self, piece: LentPiece) {
        let _ = self.heads.send(Announced::Lent(piece));
    }

    fn digest(&mut self, said: u128) {
        let _ = self.said.send(said);
    }

    async fn next(&mut self) -> Carried {
        let carried = tokio::select! {
            biased;
            // While others wait for slots.
            Some(number) = self.taken.recv() => return Carried::Taken(number),
            carried = self.given.recv() => carried,
            failure = self.communicator.breaks() => Some(Carried::Failed(failure)),
        };
        if matches!(carried, Some(Carried::Whole(..))) {
            self.open = self.open.saturating_sub(1);
        }
        match carried {
            Some(carried) => carried,
            None => Carried::Failed(self.communicator.breaks().await),
        }
    }

    fn idle(&self) -> bool {
        self.open == 0
    }

    fn ended(&mut self) {
        self.ended = true;
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        if !self.ended {
            self.communicator.stream_failed(StreamFailure::Cancelled);
        }
    }
}

impl Stream {
    /// Tells the chain what went wrong. What nobody here did is told only when nobody else was named meanwhile.
    async fn fail(&self, error: &WorkerError, give: &mpsc::Sender<Carried>) {
        let failure = if let Some(failure) = self.communicator.blame(error) {
            failure
        } else {
            sleep(patience(self.silence).1).await;
            StreamFailure::Communicator { cause: error.to_string() }
        };
        let _ = give.send(Carried::Failed(failure)).await;
    }
}

async fn enter(
    stream: Arc<Stream>,
    mut heads: mpsc::UnboundedReceiver<Announced>,
    entered: mpsc::UnboundedSender<Entered>,
    give: mpsc::Sender<Carried>,
) {
    let slot_bytes = stream.communicator.slot_bytes();
    let mut lent: Option<(BucketHeader, u64)> = None;
    while let Some(announced) = heads.recv().await {
        let begun = match announced {
            Announced::Head(header) => match stream.check(&header, slot_bytes) {
                Ok(()) if stream.communicator.lender().is_some() => {
                    lent = Some((header, 0));
                    Ok(())
                }
                Ok(()) => stream.broadcasts(header, slot_bytes, &entered).await,
                Err(failure) => Err(Stopped::Failure(failure)),
            },
            Announced::Lent(piece) => match lent.as_mut().filter(|(header, at)| follows(header, *at, &piece)) {
                Some((header, at)) => {
                    *at = piece.offset.saturating_add(piece.bytes);
                    stream.copies(*header, piece, &entered).await
                }
                None => Err(Stopped::Failure(stream.refused("a piece of lent memory makes no sense"))),
            },
        };
        match begun {
            Ok(()) => {}
            Err(Stopped::Failure(failure)) => return drop(give.send(Carried::Failed(failure)).await),
            Err(Stopped::Worker(error)) => return stream.fail(&error, &give).await,
            Err(Stopped::Over) => return,
        }
    }
}

/// Whether a piece is the next one of its bucket.
fn follows(header: &BucketHeader, at: u64, piece: &LentPiece) -> bool {
    piece.offset == at && piece.offset.checked_add(piece.bytes).is_some_and(|end| end <= header.bytes)
}

enum Stopped {
    Failure(StreamFailure),
    Worker(WorkerError),
    /// Nobody takes it any more.
    Over,
}

impl Stream {
    fn refused(&self, what: &str) -> StreamFailure {
        let refusal = Refusal { code: RefusalCode::Invalid, message: what.to_owned() };
        StreamFailure::Refused { peer: self.communicator.me().clone(), refusal }
    }

    fn check(&self, header: &BucketHeader, slot_bytes: u64) -> Result<(), StreamFailure> {
        if self.store.wants() != Wants::Device || header.bytes <= slot_bytes {
            return Ok(());
        }
        let message = format!("bucket {} has {} bytes, a slot on the GPU has {slot_bytes}", header.sequence, header.bytes);
        let refusal = Refusal { code: RefusalCode::OutOfSpace, message };
        Err(StreamFailure::Refused { peer: self.communicator.me().clone(), refusal })
    }

    async fn slots(&self) -> Result<Vec<Slot>, Stopped> {
        let mut slots = Vec::new();
        for seat in self.communicator.seats() {
            // Slots that our own store holds for too long make us the silent one.
            match seat.ring.take(self.silence).await {
                Ok(slot) => slots.push(slot),
                Err(WorkerError::NoSlot { .. }) => {
                    let silence_ms = u64::try_from(self.silence.as_millis()).unwrap_or(u64::MAX);
                    return Err(Stopped::Failure(StreamFailure::Silent { peer: self.communicator.me().clone(), silence_ms }));
                }
                Err(error) => return Err(Stopped::Worker(error)),
            }
        }
        Ok(slots)
    }

    /// What is digested of a piece: all of it, and what the store asks for.
    fn parts(&self, header: &BucketHeader, offset: u64, bytes: u64) -> Vec<Part> {
        let mut parts = vec![Part { offset: 0, bytes, first_word: offset / 8 }];
        if self.store.wants() == Wants::Device {
            let more = self.store.digest_parts(header).into_iter();
            parts.extend(more.map(|part| Part { offset: part.offset, bytes: part.bytes, first_word: part.first_word }));
        }
        parts
    }

    async fn broadcasts(&self, header: BucketHeader, slot_bytes: u64, entered: &mpsc::UnboundedSender<Entered>) -> Result<(), Stopped> {
        let communicator = &self.communicator;
        let (within, _) = patience(self.silence);
        for (offset, bytes) in pieces(header.bytes, slot_bytes) {
            let slots = self.slots().await?;
            let parts = self.parts(&header, offset, bytes);
            let enter = |(seat, slot): (&super::Seat, &Slot)| -> BoxFuture<'static, Result<Sums, WorkerError>> {
                let broadcast =
                    Broadcast { group: communicator.group(), root: self.root, at: slot.at(0), bytes, parts: parts.clone(), after: None };
                Box::pin(seat.worker.broadcast_now(broadcast, within))
            };
            let sums = communicator.seats().iter().zip(&slots).map(enter).collect();
            entered.send(Entered { header, offset, bytes, slots, sums }).map_err(|_| Stopped::Over)?;
        }
        Ok(())
    }

    /// Copies a piece from the source's ring; says so at once when it is done, whatever this member's engine still does with earlier ones.
    async fn copies(&self, header: BucketHeader, piece: LentPiece, entered: &mpsc::UnboundedSender<Entered>) -> Result<(), Stopped> {
        let from = self.communicator.lender().and_then(|lender| lender.at(&piece));
        let from = from.ok_or_else(|| Stopped::Failure(self.refused("a piece lies beyond the memory that was lent")))?;
        let slots = self.slots().await?;
        let (Some(slot), Some(seat)) = (slots.first(), self.communicator.seats().first()) else { return Err(Stopped::Over) };
        let LentPiece { number, offset, bytes, .. } = piece;
        let (to, parts, (within, _)) = (slot.at(0), self.parts(&header, offset, bytes), patience(self.silence));
        let (worker, taken, at) = (seat.worker.clone(), self.taken.clone(), slot.at(0));
        let copying = AbortOnDropHandle::new(tokio::spawn(async move {
            worker.copy_now(Copy { from, to, bytes, after: None, then: None }, within).await?;
            // Nobody listens when the stream is over.
            let _ = taken.send(number);
            worker.digest(at, parts, None, within).await
        }));
        let ended = |ended: tokio::task::JoinError| WorkerError::Gone { cause: format!("copying ended early: {ended}") };
        let sums: Vec<BoxFuture<'static, _>> = vec![Box::pin(async move { copying.await.unwrap_or_else(|error| Err(ended(error))) })];
        entered.send(Entered { header, offset, bytes, slots, sums }).map_err(|_| Stopped::Over)
    }
}

async fn give_out(
    stream: Arc<Stream>,
    mut entered: mpsc::UnboundedReceiver<Entered>,
    mut said: mpsc::UnboundedReceiver<u128>,
    give: mpsc::Sender<Carried>,
) {
    let mut pieces = VecDeque::new();
    let mut total = 0u64;
    while let Some(piece) = entered.recv().await {
        let Entered { header, offset, bytes, slots, sums } = piece;
        let sums = match stream.landed(sums).await {
            Ok(sums) => sums,
            Err(error) => return stream.fail(&error, &give).await,
        };
        let Some((sum, shares)) = agreed(&sums) else {
            let failure = StreamFailure::Corrupt { peer: stream.communicator.me().clone(), sequence: header.sequence };
            _ = give.send(Carried::Failed(failure)).await;
            return;
        };
        total = if offset == 0 { sum } else { total.wrapping_add(sum) };
        let last = offset + bytes >= header.bytes;
        if stream.store.wants() == Wants::Bytes {
            // As over TCP: the bytes are proven when the bucket is complete.
            if let Err(error) = stream.give_bytes(&header, offset, bytes, &slots, &give).await {
                return stream.fail(&error, &give).await;
            }
        }
        pieces.push_back(slots);
        if !last {
            pieces.clear();
            continue;
        }
        let digest = match timeout(stream.silence, said.recv()).await {
            Ok(Some(digest)) => digest,
            Ok(None) => return,
            Err(_) => {
                let error = WorkerError::NoSlot { within: stream.silence };
                tracing::warn!(sequence = header.sequence, %error, "the leader said no digest");
                let cause = format!("bucket {} arrived and its digest did not", header.sequence);
                _ = give.send(Carried::Failed(StreamFailure::Communicator { cause })).await;
                return;
            }
        };
        if digest != u128::from(total) {
            let failure = StreamFailure::Corrupt { peer: stream.communicator.me().clone(), sequence: header.sequence };
            _ = give.send(Carried::Failed(failure)).await;
            return;
        }
        if stream.store.wants() == Wants::Device {
            let slots = pieces.pop_back().unwrap_or_default();
            if give.send(Carried::Device(DeviceBucket { header, slots, shares: shares.to_vec() })).await.is_err() {
                return;
            }
        }
        pieces.clear();
        if give.send(Carried::Whole(header, digest)).await.is_err() {
            return;
        }
    }
}

impl Stream {
    /// Waits for the broadcast on every GPU of ours.
    async fn landed(&self, sums: Vec<BoxFuture<'static, Result<Sums, WorkerError>>>) -> Result<Vec<Sums>, WorkerError> {
        futures::future::try_join_all(sums).await
    }

    async fn give_bytes(
        &self,
        header: &BucketHeader,
        offset: u64,
        bytes: u64,
        slots: &[Slot],
        give: &mpsc::Sender<Carried>,
    ) -> Result<(), WorkerError> {
        let (Some(slot), Some(seat)) = (slots.first(), self.communicator.seats().first()) else { return Ok(()) };
        let first = header.offset.saturating_add(offset);
        // The next area is filled while this one is read.
        let fetches = pieces(bytes, AREA).map(|(at, length)| {
            let fetched = seat.staging.fetch(slot.at(at), length, self.silence);
            async move { (first.saturating_add(at), fetched.await) }
        });
        let mut fetches = futures::stream::iter(fetches).buffered(2);
        while let Some((place, fetched)) = fetches.next().await {
            if give.send(Carried::Part(place, fetched?)).await.is_err() {
                break;
            }
        }
        Ok(())
    }
}

/// The digest of the piece and the shares that the store asked for, when the same bytes landed on all our GPUs.
fn agreed(sums: &[Sums]) -> Option<(u64, &[u64])> {
    let (first, shares) = sums.first()?.sums.split_first()?;
    sums.iter().all(|other| other.sums.first() == Some(first)).then_some((*first, shares))
}

//! The payloads of one stream into the GPUs of one member, for every bucket that the chain announced: a broadcast, or copies from the source's
//! ring where both are on one GPU, or reads from the member before. Gives bytes or slots to the store.
//!
//! Two tasks: `enter` takes a slot on each GPU and has the workers enter the broadcasts, in the order of the announcements, as far ahead
//! as slots allow; `give` waits for them in that order, compares digests, and gives out. A bucket longer than a slot travels in pieces.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use futures::future::{BoxFuture, try_join_all};
use tokio::sync::{OwnedMutexGuard, mpsc};
use tokio::time::{sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::communicator::{Communicator, patience};
use super::pieces;
use super::staging::AREA;
use crate::announced::{Announcements, Disorder};
use crate::carrier::{Carried, Carrier, Relayed};
use crate::gdr::{GpuReads, next_taken};
use crate::{BucketStore, DeviceBucket, Wants};
use weightsync_core::protocol::worker::{Part, WorkerFaultCode};
use weightsync_core::protocol::{BucketHeader, LentPiece, OfferedSlots, Refusal, RefusalCode, StreamFailure};
use weightsync_gpu::worker::{Broadcast, Copy, Slot, Sums, WorkerError};

/// Buckets that were given out and that the chain has not taken yet.
const GIVEN: usize = 2;

enum Announced {
    /// A bucket that is broadcast.
    Head(BucketHeader),
    /// A bucket that comes in pieces.
    Pieces(BucketHeader),
    /// Where the next bytes of a bucket lie: in the source's ring, or in that of the member before.
    Lent(BucketHeader, LentPiece),
    /// What was announced makes no sense.
    Wrong(Disorder),
}

/// A piece on its way into slots of ours.
struct Entered {
    header: BucketHeader,
    /// First byte of the piece in its bucket, and its length.
    offset: u64,
    bytes: u64,
    slots: Vec<Slot>,
    /// One for each GPU, when the piece is there.
    sums: BoxFuture<'static, Result<Vec<Sums>, WorkerError>>,
}

/// What both tasks know.
struct Stream {
    communicator: Arc<Communicator>,
    store: Arc<dyn BucketStore>,
    root: u32,
    silence: Duration,
    /// In an epoch of reads: the members before and after this one.
    reads: Option<GpuReads>,
    /// Numbers of lent pieces that were copied.
    taken: mpsc::UnboundedSender<u32>,
}

pub(crate) struct Receiver {
    stream: Arc<Stream>,
    communicator: Arc<Communicator>,
    announced: mpsc::UnboundedSender<Announced>,
    so_far: Announcements,
    /// What buckets hash to. It overtakes what was announced before it: that may wait for slots that are free when a digest was compared.
    said: mpsc::UnboundedSender<u128>,
    given: mpsc::Receiver<Carried>,
    taken: mpsc::UnboundedReceiver<u32>,
    /// Pieces that the next member has read, in an epoch of reads.
    taken_by_next: Option<mpsc::UnboundedReceiver<u32>>,
    /// Buckets announced and not given out.
    open: usize,
    ended: bool,
    _one_stream: OwnedMutexGuard<()>,
    _tasks: [AbortOnDropHandle<()>; 2],
}

impl Receiver {
    /// Gets ready for a stream; refused while another one runs.
    pub(crate) fn start(
        communicator: Arc<Communicator>,
        store: Arc<dyn BucketStore>,
        root: u32,
        silence: Duration,
        reads: Option<GpuReads>,
    ) -> Result<Self, Refusal> {
        let busy = || Refusal { code: RefusalCode::WrongPhase, message: "the communicator carries another stream".into() };
        let lock = communicator.stream().ok_or_else(busy)?;
        let (announced, to_enter) = mpsc::unbounded_channel();
        let (said, to_compare) = mpsc::unbounded_channel();
        let (entered, to_give) = mpsc::unbounded_channel();
        let (give, given) = mpsc::channel(GIVEN);
        let (take, taken) = mpsc::unbounded_channel();
        let stream = Arc::new(Stream { communicator: communicator.clone(), store, root, silence, reads, taken: take });
        let entering = tokio::spawn(enter(stream.clone(), to_enter, entered, give.clone()));
        let giving = tokio::spawn(give_out(stream.clone(), to_give, to_compare, give));
        let tasks = [AbortOnDropHandle::new(entering), AbortOnDropHandle::new(giving)];
        let (so_far, taken_by_next, open, ended) = (Announcements::default(), None, 0, false);
        Ok(Self {
            stream,
            communicator,
            announced,
            so_far,
            said,
            given,
            taken,
            taken_by_next,
            open,
            ended,
            _one_stream: lock,
            _tasks: tasks,
        })
    }
}

#[async_trait]
impl Carrier for Receiver {
    fn head(&mut self, header: BucketHeader) {
        self.open += 1;
        let announced = if self.stream.comes_in_pieces() {
            self.so_far.head(header).map_or_else(Announced::Wrong, |()| Announced::Pieces(header))
        } else {
            self.so_far.whole();
            Announced::Head(header)
        };
        // A task that ended has reported why.
        let _ = self.announced.send(announced);
    }

    fn lent(&mut self, piece: LentPiece) {
        let announced = self.so_far.piece(&piece).map_or_else(Announced::Wrong, |header| Announced::Lent(header, piece));
        let _ = self.announced.send(announced);
    }

    fn digest(&mut self, said: u128) {
        let _ = match self.so_far.digest() {
            Ok(()) => self.said.send(said).is_ok(),
            Err(disorder) => self.announced.send(Announced::Wrong(disorder)).is_ok(),
        };
    }

    fn offers(&self) -> Option<OfferedSlots> {
        self.stream.reads.as_ref().map(|reads| reads.memory().clone())
    }

    fn taken(&mut self, taken: mpsc::UnboundedReceiver<u32>) {
        self.taken_by_next = Some(taken);
    }

    async fn next(&mut self) -> Carried {
        let carried = loop {
            tokio::select! {
                biased;
                // While others wait for slots.
                Some(number) = next_taken(&mut self.taken_by_next) => {
                    if let Some(reads) = &self.stream.reads {
                        reads.offered.taken(number);
                    }
                }
                Some(number) = self.taken.recv() => return Carried::Taken(number),
                carried = self.given.recv() => break carried,
                failure = self.communicator.breaks() => break Some(Carried::Failed(failure)),
            }
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
    /// Reports the failure to the chain. Reports a failure that this member did not cause only if no culprit is known by then.
    async fn fail(&self, error: &WorkerError, give: &mpsc::Sender<Carried>) {
        let failure = if let Some(failure) = self.unread(error).or_else(|| self.communicator.blame(error)) {
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
    mut announced: mpsc::UnboundedReceiver<Announced>,
    entered: mpsc::UnboundedSender<Entered>,
    give: mpsc::Sender<Carried>,
) {
    while let Some(announced) = announced.recv().await {
        match stream.enter(announced, &entered).await {
            Ok(()) => {}
            Err(Stopped::Failure(failure)) => return drop(give.send(Carried::Failed(failure)).await),
            Err(Stopped::Worker(error)) => return stream.fail(&error, &give).await,
            Err(Stopped::Over) => return,
        }
    }
}

enum Stopped {
    Failure(StreamFailure),
    Worker(WorkerError),
    /// No one takes it any more.
    Over,
}

impl Stream {
    /// Whether buckets come in pieces that are announced one by one; else they are broadcast.
    fn comes_in_pieces(&self) -> bool {
        self.reads.is_some() || self.communicator.lender().is_some()
    }

    async fn enter(&self, announced: Announced, entered: &mpsc::UnboundedSender<Entered>) -> Result<(), Stopped> {
        let slot_bytes = self.communicator.slot_bytes();
        match announced {
            Announced::Head(header) => {
                self.check(&header, slot_bytes).map_err(Stopped::Failure)?;
                self.broadcasts(header, slot_bytes, entered).await
            }
            Announced::Pieces(header) => self.check(&header, slot_bytes).map_err(Stopped::Failure),
            Announced::Lent(header, piece) => self.copies(header, piece, entered).await,
            Announced::Wrong(disorder) => Err(Stopped::Failure(self.refused(&disorder.to_string()))),
        }
    }

    fn refused(&self, what: &str) -> StreamFailure {
        let refusal = Refusal { code: RefusalCode::Invalid, message: what.to_owned() };
        StreamFailure::Refused { peer: self.communicator.me().clone(), refusal }
    }

    /// The member before, where a read of its memory failed.
    fn unread(&self, error: &WorkerError) -> Option<StreamFailure> {
        let reads = self.reads.as_ref()?;
        let WorkerError::Fault { fault, .. } = error else { return None };
        let theirs = matches!(fault.code, WorkerFaultCode::Fabric | WorkerFaultCode::Late);
        theirs.then(|| StreamFailure::Lost { peer: reads.before.clone(), cause: error.to_string() })
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
        for local in self.communicator.locals() {
            // Slots that the next member, or else our own store, holds for too long make it the silent one.
            match local.ring.take(self.silence).await {
                Ok(slot) => slots.push(slot),
                Err(WorkerError::NoSlot { .. }) => {
                    let silence_ms = u64::try_from(self.silence.as_millis()).unwrap_or(u64::MAX);
                    let next = self.reads.as_ref().and_then(|reads| reads.offered.keeper());
                    let peer = next.unwrap_or_else(|| self.communicator.me()).clone();
                    return Err(Stopped::Failure(StreamFailure::Silent { peer, silence_ms }));
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
            let enter = |(local, slot): (&super::LocalRank, &Slot)| {
                let broadcast =
                    Broadcast { group: communicator.group(), root: self.root, at: slot.at(0), bytes, parts: parts.clone(), after: None };
                local.worker.broadcast_now(broadcast, within)
            };
            let sums = Box::pin(try_join_all(communicator.locals().iter().zip(&slots).map(enter)));
            entered.send(Entered { header, offset, bytes, slots, sums }).map_err(|_| Stopped::Over)?;
        }
        Ok(())
    }

    /// Brings a lent piece into slots of ours; says so at once when it is there, whatever this member's engine still does with earlier ones.
    async fn copies(&self, header: BucketHeader, piece: LentPiece, entered: &mpsc::UnboundedSender<Entered>) -> Result<(), Stopped> {
        let beyond = || Stopped::Failure(self.refused("a piece lies beyond the memory that was lent"));
        let (within, _) = patience(self.silence);
        let slots = self.slots().await?;
        let LentPiece { number, offset, bytes, .. } = piece;
        let locals = self.communicator.locals();
        let arriving: Vec<BoxFuture<'static, Result<(), WorkerError>>> = if let Some(reads) = &self.reads {
            let reads = reads.begin(&piece, locals, &slots, within).await.map_err(Stopped::Worker)?;
            reads.ok_or_else(beyond)?
        } else {
            let from = self.communicator.lender().and_then(|lender| lender.at(&piece)).ok_or_else(beyond)?;
            let copy = |(local, slot): (&super::LocalRank, &Slot)| -> BoxFuture<'static, _> {
                Box::pin(local.worker.copy_now(Copy { from: from.clone(), to: slot.at(0), bytes, after: None, then: None }, within))
            };
            locals.iter().zip(&slots).map(copy).collect()
        };
        let (parts, taken) = (self.parts(&header, offset, bytes), self.taken.clone());
        let places: Vec<_> = locals.iter().zip(&slots).map(|(local, slot)| (local.worker.clone(), slot.at(0))).collect();
        let bringing = AbortOnDropHandle::new(tokio::spawn(async move {
            try_join_all(arriving).await?;
            // No task listens when the stream is over.
            let _ = taken.send(number);
            try_join_all(places.into_iter().map(|(worker, at)| {
                let parts = parts.clone();
                async move { worker.digest(at, parts, None, within).await }
            }))
            .await
        }));
        let ended = |ended: tokio::task::JoinError| WorkerError::Gone { cause: format!("copying ended early: {ended}") };
        let sums = Box::pin(async move { bringing.await.unwrap_or_else(|error| Err(ended(error))) });
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
        let sums = match sums.await {
            Ok(sums) => sums,
            Err(error) => return stream.fail(&error, &give).await,
        };
        if stream.offer(&header, offset, bytes, &slots, &give).await.is_none() {
            return;
        }
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
        if stream.reads.is_some() && give.send(Carried::Relay(Relayed::Digest(digest))).await.is_err() {
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
    /// Offers a piece to the next member, in an epoch of reads. None when the chain takes no more.
    async fn offer(&self, header: &BucketHeader, offset: u64, bytes: u64, slots: &[Slot], give: &mpsc::Sender<Carried>) -> Option<()> {
        let (Some(reads), Some(slot)) = (&self.reads, slots.first()) else { return Some(()) };
        if offset == 0 {
            give.send(Carried::Relay(Relayed::Head(*header))).await.ok()?;
        }
        let number = reads.offered.offer(slot.clone());
        give.send(Carried::Relay(Relayed::Lent(LentPiece { number, slot: slot.index(), offset, bytes }))).await.ok()
    }

    async fn give_bytes(
        &self,
        header: &BucketHeader,
        offset: u64,
        bytes: u64,
        slots: &[Slot],
        give: &mpsc::Sender<Carried>,
    ) -> Result<(), WorkerError> {
        let (Some(slot), Some(local)) = (slots.first(), self.communicator.locals().first()) else { return Ok(()) };
        let first = header.offset.saturating_add(offset);
        // The next area is filled while this one is read.
        let fetches = pieces(bytes, AREA).map(|(at, length)| {
            let fetched = local.staging.fetch(slot.at(at), length, self.silence);
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

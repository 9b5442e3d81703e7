//! The payloads of one stream into one member's host memory: each piece that the member before announced is read into a slot of ours, offered
//! to the next member from there, summed, and given to the store.
//!
//! Two tasks: `enter` takes slots and begins reads, as far ahead as slots allow; `give_out` waits for them in the order of the announcements.
//! Decides that bytes are whole only by the digest (gsum64) of their bucket.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::task::AbortOnDropHandle;

use super::offered::{Offered, next_taken};
use super::ring::{FabricRing, Slot};
use crate::announced::{Announcements, Disorder};
use crate::carrier::{Carried, Carrier, Relayed};
use weightsync_core::protocol::{BucketHeader, LentPiece, MemberName, OfferedSlots, Refusal, RefusalCode, StreamFailure};
use weightsync_core::weights::gsum64_from;
use weightsync_gpu::worker::{Peer, WorkerError};

/// Buckets that were given out and that the chain has not taken yet.
const GIVEN: usize = 2;

/// An announcement of the previous member.
enum Announced {
    Lent(BucketHeader, LentPiece),
    /// It makes no sense.
    Wrong(Disorder),
}

/// A piece whose read was begun.
struct Entered {
    header: BucketHeader,
    piece: LentPiece,
    reading: JoinHandle<Result<Slot, WorkerError>>,
}

/// Whom a stream comes from, and who reads it from here.
#[allow(missing_docs)]
pub(super) struct Neighbours {
    pub before: MemberName,
    pub memory: OfferedSlots,
    /// None at the end of the chain.
    pub next: Option<MemberName>,
    pub silence: Duration,
}

/// What both tasks know.
struct Stream {
    ring: Arc<FabricRing>,
    neighbours: Neighbours,
    offered: Offered<Bytes>,
    /// Numbers of pieces that were read.
    read: mpsc::UnboundedSender<u32>,
}

pub(super) struct Receiver {
    stream: Arc<Stream>,
    announced: mpsc::UnboundedSender<Announced>,
    so_far: Announcements,
    /// What buckets hash to. It overtakes pieces that wait for slots.
    said: mpsc::UnboundedSender<u128>,
    given: mpsc::Receiver<Carried>,
    read: mpsc::UnboundedReceiver<u32>,
    /// Pieces that the next member has read.
    taken: Option<mpsc::UnboundedReceiver<u32>>,
    /// Buckets announced and not given out.
    open: usize,
    _tasks: [AbortOnDropHandle<()>; 2],
}

impl Receiver {
    pub(super) fn start(ring: Arc<FabricRing>, neighbours: Neighbours) -> Self {
        let (announced, to_enter) = mpsc::unbounded_channel();
        let (said, to_compare) = mpsc::unbounded_channel();
        let (entered, to_give) = mpsc::unbounded_channel();
        let (give, given) = mpsc::channel(GIVEN);
        let (read, was_read) = mpsc::unbounded_channel();
        let offered = Offered::to(neighbours.next.clone());
        let stream = Arc::new(Stream { ring, neighbours, offered, read });
        let entering = tokio::spawn(enter(stream.clone(), to_enter, entered, give.clone()));
        let giving = tokio::spawn(give_out(stream.clone(), to_give, to_compare, give));
        let tasks = [AbortOnDropHandle::new(entering), AbortOnDropHandle::new(giving)];
        Self { stream, announced, so_far: Announcements::default(), said, given, read: was_read, taken: None, open: 0, _tasks: tasks }
    }
}

#[async_trait]
impl Carrier for Receiver {
    fn head(&mut self, header: BucketHeader) {
        self.open += 1;
        // A task that ended has reported why.
        if let Err(disorder) = self.so_far.head(header) {
            let _ = self.announced.send(Announced::Wrong(disorder));
        }
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
        Some(self.stream.ring.memory().clone())
    }

    fn taken(&mut self, taken: mpsc::UnboundedReceiver<u32>) {
        self.taken = Some(taken);
    }

    async fn next(&mut self) -> Carried {
        loop {
            let carried = tokio::select! {
                biased;
                Some(number) = next_taken(&mut self.taken) => {
                    self.stream.offered.taken(number);
                    continue;
                }
                Some(number) = self.read.recv() => return Carried::Taken(number),
                carried = self.given.recv() => carried,
            };
            if matches!(carried, Some(Carried::Whole(..))) {
                self.open = self.open.saturating_sub(1);
            }
            return match carried {
                Some(carried) => carried,
                // Both tasks ended, and one of them reported why before.
                None => std::future::pending().await,
            };
        }
    }

    fn idle(&self) -> bool {
        self.open == 0
    }

    fn ended(&mut self) {}
}

async fn enter(
    stream: Arc<Stream>,
    mut announced: mpsc::UnboundedReceiver<Announced>,
    entered: mpsc::UnboundedSender<Entered>,
    give: mpsc::Sender<Carried>,
) {
    let failure = match stream.enter(&mut announced, &entered).await {
        Ok(()) => return,
        Err(failure) => failure,
    };
    let _ = give.send(Carried::Failed(failure)).await;
}

async fn give_out(
    stream: Arc<Stream>,
    mut entered: mpsc::UnboundedReceiver<Entered>,
    mut said: mpsc::UnboundedReceiver<u128>,
    give: mpsc::Sender<Carried>,
) {
    if let Err(failure) = stream.give_out(&mut entered, &mut said, &give).await {
        let _ = give.send(Carried::Failed(failure)).await;
    }
}

impl Stream {
    /// Begins the read of each piece, until no more is announced.
    async fn enter(
        &self,
        announced: &mut mpsc::UnboundedReceiver<Announced>,
        entered: &mpsc::UnboundedSender<Entered>,
    ) -> Result<(), StreamFailure> {
        let Neighbours { memory, silence, .. } = &self.neighbours;
        let mut peer: Option<Peer> = None;
        while let Some(announced) = announced.recv().await {
            let (header, piece) = match announced {
                Announced::Lent(header, piece) => (header, piece),
                Announced::Wrong(disorder) => return Err(self.refused(&disorder.to_string())),
            };
            let Some(place) = memory.at(piece.slot, piece.bytes) else {
                return Err(self.refused("an announced piece lies outside of the sender's memory"));
            };
            let peer = if let Some(peer) = &peer {
                peer.clone()
            } else {
                let found = self.ring.peer(memory, *silence).await.map_err(|error| self.unread(&error))?;
                peer.insert(found).clone()
            };
            let mut slot = self.ring.take(*silence).await.map_err(|error| self.no_slot(&error))?;
            let (within, bytes, read, number) = (*silence, piece.bytes, self.read.clone(), piece.number);
            // A task of its own keeps the slot until the worker's answer, also when the stream is over.
            let reading = tokio::spawn(async move {
                slot.read(&peer, place, bytes, within).await?;
                // The member before may use its slot again, whatever this one's store does. No task listens when the stream is over.
                let _ = read.send(number);
                Ok(slot)
            });
            if entered.send(Entered { header, piece, reading }).is_err() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Gives out what was read, in order, until no more comes or the chain takes no more.
    async fn give_out(
        &self,
        entered: &mut mpsc::UnboundedReceiver<Entered>,
        said: &mut mpsc::UnboundedReceiver<u128>,
        give: &mpsc::Sender<Carried>,
    ) -> Result<(), StreamFailure> {
        let mut sum = 0u64;
        while let Some(Entered { header, piece, reading }) = entered.recv().await {
            let ended = |ended: tokio::task::JoinError| WorkerError::Gone { cause: format!("reading ended early: {ended}") };
            let slot = reading.await.map_err(ended).and_then(|read| read).map_err(|error| self.unread(&error))?;
            let (index, bytes) = (slot.index(), slot.freeze());
            let number = self.offered.offer(bytes.clone());
            let head = (piece.offset == 0).then_some(Carried::Relay(Relayed::Head(header)));
            let lent = Carried::Relay(Relayed::Lent(LentPiece { number, slot: index, ..piece }));
            let share = self.sum(piece.offset / 8, bytes.clone());
            for relayed in head.into_iter().chain([lent]) {
                if give.send(relayed).await.is_err() {
                    return Ok(());
                }
            }
            let share = share.await?;
            sum = if piece.offset == 0 { share } else { sum.wrapping_add(share) };
            if give.send(Carried::Part(header.offset.saturating_add(piece.offset), bytes)).await.is_err() {
                return Ok(());
            }
            if piece.offset.saturating_add(piece.bytes) < header.bytes {
                continue;
            }
            let Some(digest) = self.digest_of(&header, said).await? else { return Ok(()) };
            if digest != u128::from(sum) {
                return Err(StreamFailure::Corrupt { peer: self.ring.me().clone(), sequence: header.sequence });
            }
            for carried in [Carried::Relay(Relayed::Digest(digest)), Carried::Whole(header, digest)] {
                if give.send(carried).await.is_err() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// What the leader says that a bucket hashes to; none when the stream is over.
    async fn digest_of(&self, header: &BucketHeader, said: &mut mpsc::UnboundedReceiver<u128>) -> Result<Option<u128>, StreamFailure> {
        tokio::time::timeout(self.neighbours.silence, said.recv()).await.map_err(|_| {
            let cause = format!("bucket {} arrived and its digest did not", header.sequence);
            StreamFailure::Lost { peer: self.neighbours.before.clone(), cause }
        })
    }

    /// The share of a piece in its bucket's gsum64.
    fn sum(&self, first_word: u64, bytes: Bytes) -> impl Future<Output = Result<u64, StreamFailure>> {
        let summed = tokio::task::spawn_blocking(move || gsum64_from(first_word, &bytes));
        async move { summed.await.map_err(|ended| self.unread(&WorkerError::Gone { cause: format!("summing ended early: {ended}") })) }
    }

    fn refused(&self, what: &str) -> StreamFailure {
        let refusal = Refusal { code: RefusalCode::Invalid, message: what.to_owned() };
        StreamFailure::Refused { peer: self.ring.me().clone(), refusal }
    }

    /// Who keeps the slots: the next member, as long as any is offered to it, else this member's store.
    fn no_slot(&self, error: &WorkerError) -> StreamFailure {
        if !matches!(error, WorkerError::NoSlot { .. }) {
            return self.unread(error);
        }
        let peer = self.offered.keeper().unwrap_or_else(|| self.ring.me()).clone();
        StreamFailure::Silent { peer, silence_ms: u64::try_from(self.neighbours.silence.as_millis()).unwrap_or(u64::MAX) }
    }

    /// A read failed: at this member where its worker is gone, else at the member whose memory was read.
    fn unread(&self, error: &WorkerError) -> StreamFailure {
        let peer = match error {
            WorkerError::Fault { .. } => self.neighbours.before.clone(),
            WorkerError::Start { .. } | WorkerError::NoSlot { .. } | WorkerError::Gone { .. } | WorkerError::Nonsense { .. } => {
                self.ring.me().clone()
            }
        };
        StreamFailure::Lost { peer, cause: error.to_string() }
    }
}

//! The payloads of one stream into one member: each piece that the member before announced is read into a slot of ours, offered to the next
//! member from there, hashed, and given to the store.
//!
//! Two tasks: `enter` takes slots and begins reads, as far ahead as slots allow; `give_out` waits for them in the order of the announcements.
//! Decides that bytes are whole only by the digest of their bucket.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::task::AbortOnDropHandle;

use super::ring::{FabricRing, Slot};
use crate::carrier::{Carried, Carrier, Relayed};
use weightsync_core::protocol::{BucketHeader, LentPiece, MemberName, OfferedSlots, Refusal, RefusalCode, StreamFailure};
use weightsync_core::weights::BucketHasher;
use weightsync_gpu::worker::{Peer, WorkerError};

/// Buckets that were given out and that the chain has not taken yet.
const GIVEN: usize = 2;

/// What the member before said.
enum Announced {
    Head(BucketHeader),
    Lent(LentPiece),
    Digest(u128),
}

/// The same, with the read that was begun for a piece.
enum Entered {
    Head(BucketHeader),
    Piece(LentPiece, JoinHandle<Result<Slot, WorkerError>>),
    Digest(u128),
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
    /// Slots that the next member may still read, by the numbers that they were offered with.
    out: Mutex<BTreeMap<u32, Bytes>>,
    /// Numbers of pieces that were read.
    read: mpsc::UnboundedSender<u32>,
}

pub(super) struct Receiver {
    stream: Arc<Stream>,
    announced: mpsc::UnboundedSender<Announced>,
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
        let (entered, to_give) = mpsc::unbounded_channel();
        let (give, given) = mpsc::channel(GIVEN);
        let (read, was_read) = mpsc::unbounded_channel();
        let stream = Arc::new(Stream { ring, neighbours, out: Mutex::default(), read });
        let entering = tokio::spawn(enter(stream.clone(), to_enter, entered, give.clone()));
        let giving = tokio::spawn(give_out(stream.clone(), to_give, give));
        let tasks = [AbortOnDropHandle::new(entering), AbortOnDropHandle::new(giving)];
        Self { stream, announced, given, read: was_read, taken: None, open: 0, _tasks: tasks }
    }
}

#[async_trait]
impl Carrier for Receiver {
    fn head(&mut self, header: BucketHeader) {
        self.open += 1;
        // A task that ended has said why.
        let _ = self.announced.send(Announced::Head(header));
    }

    fn lent(&mut self, piece: LentPiece) {
        let _ = self.announced.send(Announced::Lent(piece));
    }

    fn digest(&mut self, said: u128) {
        let _ = self.announced.send(Announced::Digest(said));
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
                    self.stream.out.lock().remove(&number);
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
                // Both tasks ended, and one of them said why before.
                None => std::future::pending().await,
            };
        }
    }

    fn idle(&self) -> bool {
        self.open == 0
    }

    fn ended(&mut self) {}
}

async fn next_taken(taken: &mut Option<mpsc::UnboundedReceiver<u32>>) -> Option<u32> {
    match taken {
        Some(taken) => taken.recv().await,
        None => None,
    }
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

async fn give_out(stream: Arc<Stream>, mut entered: mpsc::UnboundedReceiver<Entered>, give: mpsc::Sender<Carried>) {
    if let Err(failure) = stream.give_out(&mut entered, &give).await {
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
        let mut expected: Option<(BucketHeader, u64)> = None;
        while let Some(announced) = announced.recv().await {
            let next = match announced {
                Announced::Head(header) => {
                    expected = Some((header, 0));
                    Entered::Head(header)
                }
                Announced::Digest(digest) => Entered::Digest(digest),
                Announced::Lent(piece) => {
                    let follows = expected.as_mut().filter(|(header, at)| follows(header, *at, &piece));
                    let Some((_, at)) = follows else {
                        return Err(self.refused("a bucket is longer than its head says, or a piece does not follow the one before"));
                    };
                    let Some(place) = memory.at(piece.slot, piece.bytes) else {
                        return Err(self.refused("an announced piece lies outside of the sender's memory"));
                    };
                    *at = piece.offset.saturating_add(piece.bytes);
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
                    Entered::Piece(piece, reading)
                }
            };
            if entered.send(next).is_err() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Gives out what was read, in order, until no more comes or the chain takes no more.
    async fn give_out(&self, entered: &mut mpsc::UnboundedReceiver<Entered>, give: &mpsc::Sender<Carried>) -> Result<(), StreamFailure> {
        let mut header: Option<BucketHeader> = None;
        let mut hasher = BucketHasher::new();
        let mut received = 0;
        let mut number = 0;
        while let Some(entered) = entered.recv().await {
            let next = match entered {
                Entered::Head(head) => {
                    (header, received) = (Some(head), 0);
                    Carried::Relay(Relayed::Head(head))
                }
                Entered::Piece(piece, reading) => {
                    let ended = |ended: tokio::task::JoinError| WorkerError::Gone { cause: format!("reading ended early: {ended}") };
                    let slot = reading.await.map_err(ended).and_then(|read| read).map_err(|error| self.unread(&error))?;
                    let Some(header) = header else { return Err(self.refused("a piece outside of a bucket")) };
                    let offered = LentPiece { number, slot: slot.index(), ..piece };
                    let bytes = slot.freeze();
                    if self.neighbours.next.is_some() {
                        self.out.lock().insert(number, bytes.clone());
                    }
                    number = number.wrapping_add(1);
                    if give.send(Carried::Relay(Relayed::Lent(offered))).await.is_err() {
                        return Ok(());
                    }
                    hasher = self.hash(hasher, bytes.clone()).await?;
                    received = piece.offset.saturating_add(piece.bytes);
                    Carried::Part(header.offset.saturating_add(piece.offset), bytes)
                }
                Entered::Digest(said) => {
                    let Some(header) = header.take().filter(|header| header.bytes == received) else {
                        return Err(self.refused("a bucket is shorter than its head says"));
                    };
                    if hasher.take() != said {
                        return Err(StreamFailure::Corrupt { peer: self.ring.me().clone(), sequence: header.sequence });
                    }
                    if give.send(Carried::Relay(Relayed::Digest(said))).await.is_err() {
                        return Ok(());
                    }
                    Carried::Whole(header, said)
                }
            };
            if give.send(next).await.is_err() {
                return Ok(());
            }
        }
        Ok(())
    }

    async fn hash(&self, mut hasher: BucketHasher, bytes: Bytes) -> Result<BucketHasher, StreamFailure> {
        let hashed = tokio::task::spawn_blocking(move || {
            hasher.update(&bytes);
            hasher
        });
        hashed.await.map_err(|ended| self.unread(&WorkerError::Gone { cause: format!("hashing ended early: {ended}") }))
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
        let next = self.neighbours.next.as_ref().filter(|_| !self.out.lock().is_empty());
        let peer = next.unwrap_or_else(|| self.ring.me()).clone();
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

/// Whether a piece is the next one of its bucket.
fn follows(header: &BucketHeader, at: u64, piece: &LentPiece) -> bool {
    piece.offset == at && piece.bytes > 0 && piece.offset.checked_add(piece.bytes).is_some_and(|end| end <= header.bytes)
}

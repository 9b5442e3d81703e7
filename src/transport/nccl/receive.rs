//! The payloads of one stream into one member: a broadcast for every bucket that the chain announced, and its bytes or slots to the store.
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
use crate::protocol::worker::Part;
use crate::protocol::{BucketHeader, Refusal, RefusalCode, StreamFailure};
use crate::transport::carrier::{Carried, Carrier};
use crate::transport::{BucketStore, DeviceBucket, Wants};
use crate::worker::{Broadcast, Slot, Sums, WorkerError};

/// Buckets that were given out and that the chain has not taken yet.
const GIVEN: usize = 2;

/// A broadcast of one piece that our workers entered.
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
}

/// See [`Carrier`].
pub(super) struct Receiver {
    communicator: Arc<Communicator>,
    heads: mpsc::UnboundedSender<BucketHeader>,
    said: mpsc::UnboundedSender<u128>,
    given: mpsc::Receiver<Carried>,
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
        let stream = Arc::new(Stream { communicator: communicator.clone(), store, root, silence });
        let entering = tokio::spawn(enter(stream.clone(), to_enter, entered, give.clone()));
        let giving = tokio::spawn(give_out(stream, to_give, to_compare, give));
        let tasks = [AbortOnDropHandle::new(entering), AbortOnDropHandle::new(giving)];
        Ok(Self { communicator, heads, said, given, open: 0, ended: false, _stream: lock, _tasks: tasks })
    }
}

#[async_trait]
impl Carrier for Receiver {
    fn head(&mut self, header: BucketHeader) {
        self.open += 1;
        // A task that ended has said why.
        let _ = self.heads.send(header);
    }

    fn digest(&mut self, said: u128) {
        let _ = self.said.send(said);
    }

    async fn next(&mut self) -> Carried {
        let carried = tokio::select! {
            biased;
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
            self.communicator.break_off(StreamFailure::Cancelled);
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
    mut heads: mpsc::UnboundedReceiver<BucketHeader>,
    entered: mpsc::UnboundedSender<Entered>,
    give: mpsc::Sender<Carried>,
) {
    let communicator = &stream.communicator;
    let (within, _) = patience(stream.silence);
    while let Some(header) = heads.recv().await {
        let slot_bytes = communicator.slot_bytes();
        if stream.store.wants() == Wants::Device && header.bytes > slot_bytes {
            let message = format!("bucket {} has {} bytes, a slot on the GPU has {slot_bytes}", header.sequence, header.bytes);
            let refusal = Refusal { code: RefusalCode::OutOfSpace, message };
            let failure = StreamFailure::Refused { peer: communicator.me().clone(), refusal };
            _ = give.send(Carried::Failed(failure)).await;
            return;
        }
        for (offset, bytes) in pieces(header.bytes, slot_bytes) {
            let mut slots = Vec::new();
            for seat in communicator.seats() {
                // Slots that our own store holds for too long make us the silent one.
                match seat.ring.take(stream.silence).await {
                    Ok(slot) => slots.push(slot),
                    Err(WorkerError::NoSlot { .. }) => {
                        let silence_ms = u64::try_from(stream.silence.as_millis()).unwrap_or(u64::MAX);
                        let failure = StreamFailure::Silent { peer: communicator.me().clone(), silence_ms };
                        _ = give.send(Carried::Failed(failure)).await;
                        return;
                    }
                    Err(error) => return stream.fail(&error, &give).await,
                }
            }
            let mut parts = vec![Part { offset: 0, bytes, first_word: offset / 8 }];
            if stream.store.wants() == Wants::Device {
                let more = stream.store.digest_parts(&header).into_iter();
                parts.extend(more.map(|part| Part { offset: part.offset, bytes: part.bytes, first_word: part.first_word }));
            }
            let enter = |(seat, slot): (&super::Seat, &Slot)| -> BoxFuture<'static, Result<Sums, WorkerError>> {
                let broadcast =
                    Broadcast { group: communicator.group(), root: stream.root, at: slot.at(0), bytes, parts: parts.clone(), after: None };
                Box::pin(seat.worker.broadcast_now(broadcast, within))
            };
            let sums = communicator.seats().iter().zip(&slots).map(enter).collect();
            if entered.send(Entered { header, offset, bytes, slots, sums }).is_err() {
                return;
            }
        }
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

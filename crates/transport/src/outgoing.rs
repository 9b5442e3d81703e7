//! The leader's end of a stream whose payloads travel outside of the chain: cuts buckets into pieces, announces them, and says each bucket's
//! digest when it is known.
//!
//! Decides the order: a piece is in place before its bucket is announced, and a stream ends only when all digests were announced. The first failure
//! ends it for all members. How a piece travels, and who is at fault when it does not, each [`Outgoing`] decides.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::pin;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::BoxFuture;
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::pieces::pieces;
use crate::tcp::{Downstream, millis};
use crate::{BucketSink, Payload, TransportError};
use weightsync_core::protocol::{BucketHeader, LentPiece, MemberName, StreamFailure};
use weightsync_gpu::worker::WorkerError;

/// A part of a bucket that fits into a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// First byte in the bucket.
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// Whether it is the bucket's last.
    pub(super) last: bool,
}

impl Piece {
    /// Number of its first word of 8 bytes in the bucket.
    pub(super) fn first_word(self) -> u64 {
        self.offset / 8
    }

    /// With its part in the gsum64 of the bucket.
    pub(super) fn summed(self, sum: u64) -> PieceSum {
        PieceSum { first: self.offset == 0, last: self.last, sum }
    }
}

/// The digest of one piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PieceSum {
    first: bool,
    last: bool,
    sum: u64,
}

/// gsum64 of the bucket whose pieces end now: sums of pieces add up.
#[derive(Debug, Default)]
struct BucketSum(u64);

impl BucketSum {
    /// Adds the next piece; gives the bucket's sum with its last one.
    fn add(&mut self, piece: PieceSum) -> Option<u64> {
        self.0 = if piece.first { piece.sum } else { self.0.wrapping_add(piece.sum) };
        piece.last.then_some(self.0)
    }
}

/// Why a stream cannot go on.
pub(super) enum Trouble {
    Failed(StreamFailure),
    Worker(WorkerError),
}

/// Who is at fault for an error of a worker.
pub(super) struct Blame {
    pub(super) failure: StreamFailure,
    /// So long the chain may name another member, which is then at fault.
    pub(super) unless_named_within: Duration,
}

impl Blame {
    pub(super) fn certain(failure: StreamFailure) -> Self {
        Self { failure, unless_named_within: Duration::ZERO }
    }
}

/// Slots that the next member may still read, by the numbers of their pieces. `S` is what keeps one of them.
pub(super) struct Lent<S> {
    slots: BTreeMap<u32, S>,
    taken: mpsc::UnboundedReceiver<u32>,
    next: u32,
    reader: MemberName,
}

impl<S> Lent<S> {
    /// Over an open chain to `reader`; none when its answers go elsewhere.
    pub(super) fn new(chain: &mut Downstream, reader: MemberName) -> Option<Self> {
        Some(Self { slots: BTreeMap::new(), taken: chain.taken()?, next: 0, reader })
    }

    /// Announces a piece that lies in the slot of this index, and keeps `slot` until it was read.
    pub(super) fn lend(&mut self, chain: &mut Downstream, piece: Piece, index: u32, slot: S) {
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        chain.lent(LentPiece { number, slot: index, offset: piece.offset, bytes: piece.bytes });
        self.slots.insert(number, slot);
    }

    /// Gives slots back as they are read; never ends. Dropping the future loses nothing.
    pub(super) async fn give_back(&mut self) -> Infallible {
        while let Some(number) = self.taken.recv().await {
            self.slots.remove(&number);
        }
        std::future::pending().await
    }

    /// Where no slot came back for `silence`: the reader keeps them.
    pub(super) fn kept(&self, error: &WorkerError, silence: Duration) -> Option<Blame> {
        let kept = matches!(error, WorkerError::NoSlot { .. }) && !self.slots.is_empty();
        kept.then(|| Blame::certain(StreamFailure::Silent { peer: self.reader.clone(), silence_ms: millis(silence) }))
    }
}

/// How the payloads of one stream leave the leader.
#[async_trait]
pub(super) trait Outgoing: Send {
    /// A piece where it can leave from.
    type Placed: Send;

    /// Bytes of the longest piece.
    fn slot_bytes(&self) -> u64;

    /// Whether it sends [`Payload::Device`].
    fn takes_device(&self) -> bool {
        true
    }

    /// Brings a piece to where it leaves from; waits for a slot. It must end by itself.
    fn place(&self, payload: &Payload, piece: Piece) -> BoxFuture<'static, Result<Self::Placed, WorkerError>>;

    /// Lets a piece go whose bucket was announced. Gives its digest, where that is known already; else [`progress`](Self::progress) does.
    fn go(&mut self, chain: &mut Downstream, placed: Self::Placed, piece: Piece) -> Option<PieceSum>;

    /// The digest of the next piece; pending while there is none to come. Dropping the future loses nothing.
    async fn progress(&mut self) -> Result<PieceSum, Trouble>;

    /// Whether no digest is to come.
    fn is_idle(&self) -> bool;

    fn blame(&self, error: &WorkerError) -> Blame;

    /// The stream is over for all members.
    fn failed(&mut self, _failure: &StreamFailure) {}

    /// Every member has all of it.
    fn ended(&mut self) {}
}

/// A chain and what carries its payloads.
pub(super) struct OutgoingSink<O> {
    chain: Downstream,
    outgoing: O,
    /// Of the bucket whose digests end now.
    sum: BucketSum,
    failure: Option<StreamFailure>,
}

impl<O: Outgoing> OutgoingSink<O> {
    pub(super) fn new(chain: Downstream, outgoing: O) -> Self {
        Self { chain, outgoing, sum: BucketSum::default(), failure: None }
    }

    /// Waits for `work` while digests end and the chain is listened to.
    async fn during<T>(&mut self, work: impl Future<Output = T>) -> Result<T, StreamFailure> {
        let mut work = pin!(work);
        loop {
            let progressed = tokio::select! {
                biased;
                failure = self.chain.failed() => return Err(failure),
                progressed = self.outgoing.progress() => progressed,
                done = &mut work => return Ok(done),
            };
            self.progressed(progressed).await?;
        }
    }

    async fn progressed(&mut self, progressed: Result<PieceSum, Trouble>) -> Result<(), StreamFailure> {
        match progressed {
            Ok(sum) => self.summed(sum),
            Err(Trouble::Failed(failure)) => return Err(failure),
            Err(Trouble::Worker(error)) => return Err(self.cause_of(&error).await),
        }
        Ok(())
    }

    fn summed(&mut self, sum: PieceSum) {
        if let Some(sum) = self.sum.add(sum) {
            self.chain.digest(sum.into());
        }
    }

    async fn cause_of(&mut self, error: &WorkerError) -> StreamFailure {
        let Blame { failure, unless_named_within } = self.outgoing.blame(error);
        timeout(unless_named_within, self.chain.failed()).await.unwrap_or(failure)
    }

    fn fail(&mut self, failure: StreamFailure) -> TransportError {
        let failure = self.failure.get_or_insert(failure).clone();
        self.chain.abort(failure.clone());
        self.outgoing.failed(&failure);
        failure.into()
    }

    async fn bucket(&mut self, header: BucketHeader, payload: &Payload) -> Result<(), StreamFailure> {
        // What is there is sent: a member refuses a head that says something else.
        let length = match payload {
            Payload::Host(bytes) => bytes.len() as u64,
            Payload::Device(_) => header.bytes,
        };
        for (offset, bytes) in pieces(length, self.outgoing.slot_bytes()) {
            let piece = Piece { offset, bytes, last: offset.saturating_add(bytes) >= length };
            let place = self.outgoing.place(payload, piece);
            let placed = match self.during(place).await? {
                Ok(placed) => placed,
                Err(error) => return Err(self.cause_of(&error).await),
            };
            if offset == 0 {
                self.chain.head(BucketHeader { flags: header.flags | BucketHeader::CARRIED, ..header });
            }
            if let Some(sum) = self.outgoing.go(&mut self.chain, placed, piece) {
                self.summed(sum);
            }
        }
        Ok(())
    }

    async fn end(&mut self) -> Result<(), StreamFailure> {
        while !self.outgoing.is_idle() {
            let progressed = tokio::select! {
                biased;
                failure = self.chain.failed() => return Err(failure),
                progressed = self.outgoing.progress() => progressed,
            };
            self.progressed(progressed).await?;
        }
        self.chain.end();
        let progressed = tokio::select! {
            biased;
            done = self.chain.done() => return done,
            progressed = self.outgoing.progress() => progressed,
        };
        // All digests were announced: only trouble comes now.
        self.progressed(progressed).await
    }
}

#[async_trait]
impl<O: Outgoing> BucketSink for OutgoingSink<O> {
    async fn send(&mut self, header: BucketHeader, payload: Payload, _digest: u128) -> Result<(), TransportError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone().into());
        }
        if matches!(payload, Payload::Device(_)) && !self.outgoing.takes_device() {
            return Err(TransportError::on_a_gpu());
        }
        let sent = self.bucket(header, &payload).await;
        sent.map_err(|failure| self.fail(failure))
    }

    fn hashes(&self) -> bool {
        true
    }

    fn takes_device(&self) -> bool {
        self.outgoing.takes_device()
    }

    async fn failed(&mut self) -> TransportError {
        if let Some(failure) = &self.failure {
            return failure.clone().into();
        }
        let failure = match self.during(std::future::pending::<StreamFailure>()).await {
            Ok(failure) | Err(failure) => failure,
        };
        self.fail(failure)
    }

    async fn finish(mut self: Box<Self>) -> Result<(), TransportError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone().into());
        }
        self.end().await.map_err(|failure| self.fail(failure))?;
        self.outgoing.ended();
        Ok(())
    }
}

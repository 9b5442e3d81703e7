//! The leader's end of a stream from the ring on its GPU, into a member that opened this ring by CUDA IPC or reads it through NIXL. Each
//! piece is put into a slot and announced. The slot is reused when the member reported that it has the bytes.
//!
//! Decides how many pieces are in flight: as many as there are slots. A member that keeps them all for too long is the silent one. A lost
//! member may still read, which does no harm: its copy is not trusted. It never touches the communicator: a failed stream of copies leaves
//! no rank in a collective.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::{BoxFuture, try_join_all};
use futures::stream::{FuturesOrdered, StreamExt};
use tokio::sync::mpsc;

use super::communicator::{Communicator, LocalRank, patience};
use super::{BucketSum, PieceSum, cut, pieces};
use crate::tcp::Downstream;
use crate::{BucketSink, Payload, TransportError};
use weightsync_core::protocol::worker::Part;
use weightsync_core::protocol::{BucketHeader, LentPiece, MemberName, StreamFailure};
use weightsync_gpu::worker::{Copy, Slot, Sums, WorkerError};

pub(crate) struct Lending {
    chain: Downstream,
    communicator: Arc<Communicator>,
    local: LocalRank,
    borrower: MemberName,
    silence: Duration,
    /// Slots that the borrower may still read, by the numbers of their pieces.
    out: BTreeMap<u32, Slot>,
    taken: mpsc::UnboundedReceiver<u32>,
    next: u32,
    digests: FuturesOrdered<BoxFuture<'static, Result<PieceSum, WorkerError>>>,
    /// Of the bucket whose digests end now.
    sum: BucketSum,
    failure: Option<StreamFailure>,
}

impl Lending {
    /// Over a chain whose first member takes the pieces; none without a GPU.
    pub(crate) fn new(mut chain: Downstream, communicator: Arc<Communicator>, borrower: MemberName, silence: Duration) -> Option<Self> {
        let local = communicator.locals().first()?.clone();
        let taken = chain.taken()?;
        let (out, digests) = (BTreeMap::new(), FuturesOrdered::new());
        Some(Self { chain, communicator, local, borrower, silence, out, taken, next: 0, digests, sum: BucketSum::default(), failure: None })
    }

    /// Waits for `work` while slots come back, digests end, and the chain is listened to.
    async fn during<T>(&mut self, work: impl Future<Output = T>) -> Result<T, StreamFailure> {
        let mut work = pin!(work);
        let communicator = self.communicator.clone();
        let mut breaks = pin!(communicator.breaks());
        loop {
            tokio::select! {
                biased;
                failure = self.chain.failed() => return Err(failure),
                failure = &mut breaks => return Err(failure),
                Some(number) = self.taken.recv() => drop(self.out.remove(&number)),
                Some(digested) = self.digests.next() => match digested {
                    Ok(digested) => self.digested(&digested),
                    Err(error) => return Err(self.cause_of(&error)),
                },
                done = &mut work => return Ok(done),
            }
        }
    }

    fn digested(&mut self, digested: &PieceSum) {
        if let Some(sum) = self.sum.add(digested) {
            self.chain.digest(sum.into());
        }
    }

    fn cause_of(&self, error: &WorkerError) -> StreamFailure {
        if matches!(error, WorkerError::NoSlot { .. }) && !self.out.is_empty() {
            let silence_ms = u64::try_from(self.silence.as_millis()).unwrap_or(u64::MAX);
            return StreamFailure::Silent { peer: self.borrower.clone(), silence_ms };
        }
        self.communicator.blame(error).unwrap_or_else(|| StreamFailure::Communicator { cause: error.to_string() })
    }

    fn fail(&mut self, failure: StreamFailure) -> TransportError {
        let failure = self.failure.get_or_insert(failure).clone();
        self.chain.abort(failure.clone());
        failure.into()
    }

    async fn bucket(&mut self, header: BucketHeader, payload: Payload) -> Result<(), StreamFailure> {
        let header = BucketHeader { flags: BucketHeader::CARRIED, ..header };
        for (offset, bytes) in pieces(header.bytes, self.communicator.slot_bytes()) {
            let put = put(self.local.clone(), payload.clone(), offset, bytes, self.silence);
            let slot = match self.during(put).await? {
                Ok(slot) => slot,
                Err(error) => return Err(self.cause_of(&error)),
            };
            let (first, last) = (offset == 0, offset.saturating_add(bytes) >= header.bytes);
            if first {
                self.chain.head(header);
            }
            let number = self.next;
            self.next = self.next.wrapping_add(1);
            self.chain.lent(LentPiece { number, slot: slot.index(), offset, bytes });
            let (worker, at) = (self.local.worker.clone(), slot.at(0));
            self.out.insert(number, slot);
            let (part, (within, _)) = (Part { offset: 0, bytes, first_word: offset / 8 }, patience(self.silence));
            self.digests.push_back(Box::pin(async move {
                let Sums { sums, .. } = worker.digest(at, vec![part], None, within).await?;
                let sum = sums.first().copied().ok_or(WorkerError::Nonsense { what: "digest" })?;
                Ok(PieceSum { first, last, sum })
            }));
        }
        Ok(())
    }
}

/// Puts a piece into a free slot; returns when it is there.
async fn put(local: LocalRank, payload: Payload, offset: u64, bytes: u64, silence: Duration) -> Result<Slot, WorkerError> {
    let slot = local.ring.take(silence).await?;
    let (within, _) = patience(silence);
    match payload {
        Payload::Device(device) if device.worker.is(&local.worker) => {
            let from = device.memory.at(device.offset.saturating_add(offset));
            local.worker.copy_now(Copy { from, to: slot.at(0), bytes, after: device.after.clone(), then: None }, within).await?;
        }
        Payload::Device(_) => return Err(WorkerError::Gone { cause: "the bytes lie in memory of another worker".into() }),
        Payload::Host(all) => {
            let copies = local.staging.bring_all(&cut(&all, offset, bytes), &slot, 0, within).await?;
            try_join_all(copies).await?;
        }
    }
    Ok(slot)
}

#[async_trait]
impl BucketSink for Lending {
    async fn send(&mut self, header: BucketHeader, payload: Payload, _digest: u128) -> Result<(), TransportError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone().into());
        }
        let sent = self.bucket(header, payload).await;
        sent.map_err(|failure| self.fail(failure))
    }

    fn hashes(&self) -> bool {
        true
    }

    fn takes_device(&self) -> bool {
        true
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
        while let Some(digested) = self.digests.next().await {
            match digested {
                Ok(digested) => self.digested(&digested),
                Err(error) => {
                    let failure = self.cause_of(&error);
                    return Err(self.fail(failure));
                }
            }
        }
        self.chain.end();
        let communicator = self.communicator.clone();
        let done = tokio::select! {
            biased;
            done = self.chain.done() => done,
            failure = communicator.breaks() => Err(failure),
        };
        done.map_err(|failure| self.fail(failure))
    }
}

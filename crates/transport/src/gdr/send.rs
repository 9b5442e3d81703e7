//! The leader's end of a stream whose payloads the next member reads from host memory through NIXL: each piece is put into a slot and summed,
//! announced on the chain, and the slot is used again when the next member has read it.
//!
//! Decides how many pieces are out: as many as there are slots. A member that keeps them all for too long is the silent one.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::mpsc;

use super::ring::{FabricRing, Slot};
use crate::pieces::{cut, pieces};
use crate::tcp::Downstream;
use crate::{BucketSink, Payload, TransportError};
use weightsync_core::protocol::{BucketHeader, LentPiece, MemberName, StreamFailure};
use weightsync_core::weights::gsum64_from;
use weightsync_gpu::worker::WorkerError;

pub(super) struct Sink {
    chain: Downstream,
    ring: Arc<FabricRing>,
    next_member: MemberName,
    silence: Duration,
    /// Slots that the next member may still read, by the numbers of their pieces.
    out: BTreeMap<u32, Bytes>,
    taken: mpsc::UnboundedReceiver<u32>,
    next: u32,
    failure: Option<StreamFailure>,
}

impl Sink {
    /// Over an open chain; none when its answers go elsewhere.
    pub(super) fn new(mut chain: Downstream, ring: Arc<FabricRing>, next_member: MemberName, silence: Duration) -> Option<Self> {
        let taken = chain.taken()?;
        Some(Self { chain, ring, next_member, silence, out: BTreeMap::new(), taken, next: 0, failure: None })
    }

    /// Waits for `work` while slots come back and the chain is listened to.
    async fn during<T>(&mut self, work: impl Future<Output = T>) -> Result<T, StreamFailure> {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                biased;
                failure = self.chain.failed() => return Err(failure),
                Some(number) = self.taken.recv() => drop(self.out.remove(&number)),
                done = &mut work => return Ok(done),
            }
        }
    }

    fn cause_of(&self, error: &WorkerError) -> StreamFailure {
        if matches!(error, WorkerError::NoSlot { .. }) && !self.out.is_empty() {
            let silence_ms = u64::try_from(self.silence.as_millis()).unwrap_or(u64::MAX);
            return StreamFailure::Silent { peer: self.next_member.clone(), silence_ms };
        }
        StreamFailure::Lost { peer: self.ring.me().clone(), cause: error.to_string() }
    }

    fn fail(&mut self, failure: StreamFailure) -> TransportError {
        let failure = self.failure.get_or_insert(failure).clone();
        self.chain.abort(failure.clone());
        failure.into()
    }

    async fn bucket(&mut self, header: BucketHeader, bytes: &Bytes) -> Result<(), StreamFailure> {
        let mut sum = 0u64;
        self.chain.head(BucketHeader { flags: header.flags | BucketHeader::CARRIED, ..header });
        for (offset, length) in pieces(bytes.len() as u64, self.ring.memory().slot_bytes) {
            let put = put(self.ring.clone(), cut(bytes, offset, length), offset / 8, self.silence);
            let (slot, share) = match self.during(put).await? {
                Ok(put) => put,
                Err(error) => return Err(self.cause_of(&error)),
            };
            sum = sum.wrapping_add(share);
            let number = self.next;
            self.next = self.next.wrapping_add(1);
            self.chain.lent(LentPiece { number, slot: slot.index(), offset, bytes: length });
            self.out.insert(number, slot.freeze());
        }
        self.chain.digest(sum.into());
        Ok(())
    }
}

/// Puts bytes into a free slot; gives their share in the gsum64 of their bucket too.
async fn put(ring: Arc<FabricRing>, bytes: Bytes, first_word: u64, silence: Duration) -> Result<(Slot, u64), WorkerError> {
    let mut slot = ring.take(silence).await?;
    let written = tokio::task::spawn_blocking(move || {
        slot.write(&bytes);
        (slot, gsum64_from(first_word, &bytes))
    });
    written.await.map_err(|ended| WorkerError::Gone { cause: format!("copying ended early: {ended}") })
}

#[async_trait]
impl BucketSink for Sink {
    async fn send(&mut self, header: BucketHeader, payload: Payload, _digest: u128) -> Result<(), TransportError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone().into());
        }
        let Payload::Host(bytes) = payload else { return Err(TransportError::on_a_gpu()) };
        let sent = self.bucket(header, &bytes).await;
        sent.map_err(|failure| self.fail(failure))
    }

    fn hashes(&self) -> bool {
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
        self.chain.end();
        let done = self.chain.done().await;
        done.map_err(|failure| self.fail(failure))
    }
}

//! Payloads that leave the leader from the ring on its GPU: a member that opened this ring by CUDA IPC copies them, or one that reads it
//! through NIXL. A slot is used again when the member reported that it has the bytes.
//!
//! Decides how many pieces are in flight: as many as there are slots. A member that keeps them all for too long is the silent one. A lost
//! member may still read, which does no harm: its copy is not trusted. It never touches the communicator: a failed stream of copies leaves
//! no rank in a collective.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::{BoxFuture, try_join_all};
use futures::stream::{FuturesOrdered, StreamExt};

use super::communicator::{Communicator, LocalRank, patience};
use super::cut;
use crate::Payload;
use crate::outgoing::{Blame, Lent, Outgoing, OutgoingSink, Piece, PieceSum, Trouble};
use crate::tcp::Downstream;
use weightsync_core::protocol::worker::Part;
use weightsync_core::protocol::{MemberName, StreamFailure};
use weightsync_gpu::worker::{Copy, Slot, Sums, WorkerError};

pub(crate) struct Lending {
    communicator: Arc<Communicator>,
    local: LocalRank,
    silence: Duration,
    lent: Lent<Slot>,
    digests: FuturesOrdered<BoxFuture<'static, Result<PieceSum, WorkerError>>>,
}

impl Lending {
    /// Over a chain whose first member takes the pieces; none without a GPU.
    pub(crate) fn sink(
        mut chain: Downstream,
        communicator: Arc<Communicator>,
        borrower: MemberName,
        silence: Duration,
    ) -> Option<OutgoingSink<Self>> {
        let local = communicator.locals().first()?.clone();
        let lent = Lent::new(&mut chain, borrower)?;
        Some(OutgoingSink::new(chain, Self { communicator, local, silence, lent, digests: FuturesOrdered::new() }))
    }
}

/// Puts a piece into a free slot; returns when it is there.
async fn put(local: LocalRank, payload: Payload, piece: Piece, silence: Duration) -> Result<Slot, WorkerError> {
    let slot = local.ring.take(silence).await?;
    let (within, _) = patience(silence);
    match payload {
        Payload::Device(device) if device.worker.is(&local.worker) => {
            let from = device.memory.at(device.offset.saturating_add(piece.offset));
            local
                .worker
                .copy_now(Copy { from, to: slot.at(0), bytes: piece.bytes, after: device.after.clone(), then: None }, within)
                .await?;
        }
        Payload::Device(_) => return Err(WorkerError::Gone { cause: "the bytes lie in memory of another worker".into() }),
        Payload::Host(all) => {
            let copies = local.staging.bring_all(&cut(&all, piece.offset, piece.bytes), &slot, 0, within).await?;
            try_join_all(copies).await?;
        }
    }
    Ok(slot)
}

#[async_trait]
impl Outgoing for Lending {
    type Placed = Slot;

    fn slot_bytes(&self) -> u64 {
        self.communicator.slot_bytes()
    }

    fn place(&self, payload: &Payload, piece: Piece) -> BoxFuture<'static, Result<Slot, WorkerError>> {
        Box::pin(put(self.local.clone(), payload.clone(), piece, self.silence))
    }

    fn go(&mut self, chain: &mut Downstream, slot: Slot, piece: Piece) -> Option<PieceSum> {
        let (worker, at) = (self.local.worker.clone(), slot.at(0));
        self.lent.lend(chain, piece, slot.index(), slot);
        let part = Part { offset: 0, bytes: piece.bytes, first_word: piece.first_word() };
        let (within, _) = patience(self.silence);
        self.digests.push_back(Box::pin(async move {
            let Sums { sums, .. } = worker.digest(at, vec![part], None, within).await?;
            sums.first().map(|sum| piece.summed(*sum)).ok_or(WorkerError::Nonsense { what: "digest" })
        }));
        None
    }

    async fn progress(&mut self) -> Result<PieceSum, Trouble> {
        tokio::select! {
            biased;
            failure = self.communicator.breaks() => Err(Trouble::Failed(failure)),
            never = self.lent.give_back() => match never {},
            Some(digested) = self.digests.next() => digested.map_err(Trouble::Worker),
        }
    }

    fn is_idle(&self) -> bool {
        self.digests.is_empty()
    }

    fn blame(&self, error: &WorkerError) -> Blame {
        let named = || self.communicator.blame(error).unwrap_or_else(|| StreamFailure::Communicator { cause: error.to_string() });
        self.lent.kept(error, self.silence).unwrap_or_else(|| Blame::certain(named()))
    }
}

//! Payloads that the next member reads from this member's host memory through NIXL: each piece is put into a slot and summed, and the slot
//! is used again when the next member has read it.
//!
//! Decides how many pieces are out: as many as there are slots. A member that keeps them all for too long is the silent one.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::BoxFuture;

use super::ring::{FabricRing, Slot};
use crate::Payload;
use crate::outgoing::{Blame, Lent, Outgoing, OutgoingSink, Piece, PieceSum, Trouble};
use crate::pieces::cut;
use crate::tcp::Downstream;
use weightsync_core::protocol::{MemberName, StreamFailure};
use weightsync_core::weights::gsum64_from;
use weightsync_gpu::worker::WorkerError;

pub(super) struct Offering {
    ring: Arc<FabricRing>,
    silence: Duration,
    lent: Lent<Bytes>,
}

impl Offering {
    /// Over an open chain; none when its answers go elsewhere.
    pub(super) fn sink(
        mut chain: Downstream,
        ring: Arc<FabricRing>,
        next_member: MemberName,
        silence: Duration,
    ) -> Option<OutgoingSink<Self>> {
        let lent = Lent::new(&mut chain, next_member)?;
        Some(OutgoingSink::new(chain, Self { ring, silence, lent }))
    }
}

/// Puts bytes into a free slot; gives their part in the gsum64 of their bucket too.
async fn put(ring: Arc<FabricRing>, bytes: Bytes, first_word: u64, silence: Duration) -> Result<(Slot, u64), WorkerError> {
    let mut slot = ring.take(silence).await?;
    let written = tokio::task::spawn_blocking(move || {
        slot.write(&bytes);
        (slot, gsum64_from(first_word, &bytes))
    });
    written.await.map_err(|ended| WorkerError::Gone { cause: format!("copying ended early: {ended}") })
}

#[async_trait]
impl Outgoing for Offering {
    type Placed = (Slot, u64);

    fn slot_bytes(&self) -> u64 {
        self.ring.memory().slot_bytes
    }

    fn takes_device(&self) -> bool {
        false
    }

    fn place(&self, payload: &Payload, piece: Piece) -> BoxFuture<'static, Result<Self::Placed, WorkerError>> {
        let (ring, silence) = (self.ring.clone(), self.silence);
        match payload {
            Payload::Host(all) => Box::pin(put(ring, cut(all, piece.offset, piece.bytes), piece.first_word(), silence)),
            Payload::Device(_) => Box::pin(async { Err(WorkerError::Gone { cause: "the bytes lie on a GPU".into() }) }),
        }
    }

    fn go(&mut self, chain: &mut Downstream, (slot, sum): (Slot, u64), piece: Piece) -> Option<PieceSum> {
        self.lent.lend(chain, piece, slot.index(), slot.freeze());
        Some(piece.summed(sum))
    }

    async fn progress(&mut self) -> Result<PieceSum, Trouble> {
        match self.lent.give_back().await {}
    }

    fn is_idle(&self) -> bool {
        true
    }

    fn blame(&self, error: &WorkerError) -> Blame {
        let lost = || StreamFailure::Lost { peer: self.ring.me().clone(), cause: error.to_string() };
        self.lent.kept(error, self.silence).unwrap_or_else(|| Blame::certain(lost()))
    }
}

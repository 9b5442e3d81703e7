//! The slots of one epoch in memory of this member's GPUs: its rings, which other members may read through NIXL.
//!
//! Decides where a piece of the member before lies, and reads it into a slot on each GPU. Other members read the first GPU's ring. The rings
//! stay when the epoch is over; the registration does not. Nothing here lets another member write.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, try_join_all};

use super::offered::Offered;
use super::receive::Neighbours;
use super::ring::CLOSE;
use crate::nccl::{Communicator, LocalRank};
use weightsync_core::protocol::worker::FabricMetadata;
use weightsync_core::protocol::{EpochId, LentPiece, MemberName, OfferedSlots, StreamFailure};
use weightsync_gpu::worker::{Peer, Read, Region, Slot, WorkerError};

/// What the rings are registered for.
#[allow(missing_docs)]
pub struct GpuSlotsWanted {
    pub epoch: EpochId,
    pub me: MemberName,
    /// One for each GPU, at least one; the fabric of each worker is open. The rings have equal shapes.
    pub locals: Vec<LocalRank>,
    /// Time for all of it.
    pub within: Duration,
}

/// The registered rings of a member in one epoch.
pub struct GpuSlots {
    communicator: Arc<Communicator>,
    /// In the order of the GPUs.
    regions: Vec<Region>,
    memory: OfferedSlots,
    /// Members whose memory the workers can read, by their metadata: a peer for each worker.
    peers: tokio::sync::Mutex<HashMap<FabricMetadata, Vec<Peer>>>,
}

impl GpuSlots {
    /// Registers the rings.
    ///
    /// # Errors
    /// A registration that a worker refused; its text says what to change.
    pub async fn register(wanted: GpuSlotsWanted) -> Result<Arc<Self>, WorkerError> {
        let GpuSlotsWanted { epoch, me, locals, within } = wanted;
        let regions = try_join_all(locals.iter().map(|local| local.worker.register_ring(&local.ring, within))).await?;
        let nonsense = || WorkerError::Nonsense { what: "say where registered memory lies" };
        let (local, region) = locals.first().zip(regions.first()).ok_or_else(nonsense)?;
        let memory = OfferedSlots {
            metadata: region.metadata().clone(),
            first: region.at(0).ok_or_else(nonsense)?,
            slots: local.ring.slots(),
            slot_bytes: local.ring.slot_bytes(),
        };
        let communicator = Communicator::of_reads(epoch, me, locals);
        Ok(Arc::new(Self { communicator, regions, memory, peers: tokio::sync::Mutex::default() }))
    }

    /// The member's GPUs and rings.
    pub(super) fn communicator(&self) -> &Arc<Communicator> {
        &self.communicator
    }

    /// What others need to read from it. Secret: it holds keys.
    pub(super) fn memory(&self) -> &OfferedSlots {
        &self.memory
    }

    /// Ends streams and registrations: when it returns, no member reads its slots any more.
    pub(super) async fn close(&self) -> Result<(), WorkerError> {
        self.communicator.break_off(StreamFailure::Cancelled);
        try_join_all(self.regions.iter().map(|region| region.close(CLOSE))).await.map(drop)
    }

    /// Ends the workers, and the registrations with them.
    pub(super) fn kill(&self, cause: &str) {
        for local in self.communicator.locals() {
            local.worker.kill(cause);
        }
    }

    /// A peer for each worker.
    async fn peers(&self, memory: &OfferedSlots, within: Duration) -> Result<Vec<Peer>, WorkerError> {
        let mut peers = self.peers.lock().await;
        if let Some(peers) = peers.get(&memory.metadata) {
            return Ok(peers.clone());
        }
        let locals = self.communicator.locals().iter().zip(&self.regions);
        let added = try_join_all(locals.map(|(local, region)| local.worker.add_peer(region, &memory.metadata, within))).await?;
        peers.insert(memory.metadata.clone(), added.clone());
        Ok(added)
    }
}

/// The members before and after this one in a stream into its GPUs.
pub(crate) struct GpuReads {
    slots: Arc<GpuSlots>,
    pub(crate) before: MemberName,
    from: OfferedSlots,
    pub(crate) offered: Offered<Slot>,
}

impl GpuReads {
    pub(super) fn new(slots: Arc<GpuSlots>, neighbours: Neighbours) -> Self {
        let Neighbours { before, memory, next, silence: _ } = neighbours;
        Self { slots, before, from: memory, offered: Offered::to(next) }
    }

    /// What the next member reads.
    pub(crate) fn memory(&self) -> &OfferedSlots {
        self.slots.memory()
    }

    /// Begins the reads of a piece into a slot on each GPU; none when it lies outside of the memory of the member before.
    pub(crate) async fn begin(
        &self,
        piece: &LentPiece,
        locals: &[LocalRank],
        to: &[Slot],
        within: Duration,
    ) -> Result<Option<Vec<BoxFuture<'static, Result<(), WorkerError>>>>, WorkerError> {
        let fits = to.iter().all(|slot| piece.bytes <= slot.ring().slot_bytes());
        let Some(from) = self.from.at(piece.slot, piece.bytes).filter(|_| fits) else { return Ok(None) };
        let peers = self.slots.peers(&self.from, within).await?;
        let reads = locals.iter().zip(peers).zip(to).map(|((local, peer), slot)| -> BoxFuture<'static, _> {
            Box::pin(local.worker.read_now(Read { peer, from, to: slot.at(0), bytes: piece.bytes }, within))
        });
        Ok(Some(reads.collect()))
    }
}

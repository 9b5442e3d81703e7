//! The slots of one epoch: host memory that this process and its worker share, and that other members may read through NIXL.
//!
//! Decides when a slot is free again: when the last holder of its bytes dropped them. Dropping the ring ends the registration, so keys of an
//! epoch that is over fail. Nothing here lets another member write.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use weightsync_core::protocol::worker::{FabricMetadata, RemotePlace};
use weightsync_core::protocol::{EpochId, FabricPlan, MemberName, OfferedSlots};
use weightsync_gpu::worker::{Peer, Read, Region, Span, Worker, WorkerError};
use weightsync_net::memfd::SharedMemory;

/// Longest time in which the end of a registration is awaited; a worker that takes longer is killed.
pub(super) const CLOSE: Duration = Duration::from_secs(5);

/// What a ring is made for.
#[allow(missing_docs)]
pub struct RingWanted {
    pub epoch: EpochId,
    pub me: MemberName,
    /// Its fabric is open.
    pub worker: Worker,
    pub plan: FabricPlan,
    /// Time for all of it.
    pub within: Duration,
}

/// The registered slots of a member in one epoch.
pub struct FabricRing {
    epoch: EpochId,
    me: MemberName,
    worker: Worker,
    region: Region,
    memory: OfferedSlots,
    free: Mutex<Vec<Place>>,
    permits: Arc<Semaphore>,
    /// Members whose memory the worker can read, by their metadata.
    peers: tokio::sync::Mutex<HashMap<FabricMetadata, Peer>>,
}

/// One slot's memory, as this process sees it, and where it lies in the worker's mapping.
struct Place {
    index: u32,
    memory: SharedMemory,
    span: Span,
}

impl FabricRing {
    /// Allocates the slots and registers them.
    ///
    /// # Errors
    /// No memory, or a registration that the worker refused; its text says what to change.
    pub async fn register(wanted: RingWanted) -> Result<Arc<Self>, WorkerError> {
        let RingWanted { epoch, me, worker, plan, within } = wanted;
        let FabricPlan { slots, slot_bytes, .. } = plan;
        let memory = allocate(plan.bytes()).await?;
        let host = worker.map_host(memory.fd(), plan.bytes(), within).await?;
        let region = worker.register_host(&host, within).await?;
        let first = region.at(0).ok_or(WorkerError::Nonsense { what: "say where registered memory lies" })?;
        let mut free = Vec::new();
        // The lowest number goes out first.
        for index in (0..slots).rev() {
            let offset = u64::from(index).saturating_mul(slot_bytes);
            let part =
                usize::try_from(offset).ok().zip(usize::try_from(slot_bytes).ok()).map(|(offset, length)| memory.part(offset, length));
            let memory = part.ok_or(WorkerError::Nonsense { what: "map a slot" })?.map_err(|error| no_memory(slot_bytes, &error))?;
            free.push(Place { index, memory, span: host.at(offset) });
        }
        let memory = OfferedSlots { metadata: region.metadata().clone(), first, slots, slot_bytes };
        let permits = Arc::new(Semaphore::new(free.len()));
        Ok(Arc::new(Self { epoch, me, worker, region, memory, free: Mutex::new(free), permits, peers: tokio::sync::Mutex::default() }))
    }

    /// Ends the registration, also while slots are held: when it returns, no member reads them any more.
    pub(super) async fn close(&self) -> Result<(), WorkerError> {
        self.region.close(CLOSE).await
    }

    /// Ends the worker, and the registration with it.
    pub(super) fn kill(&self, cause: &str) {
        self.worker.kill(cause);
    }

    pub(super) fn epoch(&self) -> &EpochId {
        &self.epoch
    }

    pub(super) fn me(&self) -> &MemberName {
        &self.me
    }

    /// What others need to read from it. Secret: it holds keys.
    pub fn memory(&self) -> &OfferedSlots {
        &self.memory
    }

    /// Takes a slot; waits for one that long.
    pub(super) async fn take(self: &Arc<Self>, within: Duration) -> Result<Slot, WorkerError> {
        let permit = tokio::time::timeout(within, Arc::clone(&self.permits).acquire_owned()).await;
        let permit = permit.ok().and_then(Result::ok).ok_or(WorkerError::NoSlot { within })?;
        let place = self.free.lock().pop().ok_or(WorkerError::NoSlot { within })?;
        Ok(Slot { ring: self.clone(), place: Some(place), length: 0, _permit: permit })
    }

    /// The member whose memory that is, for reads.
    pub(super) async fn peer(&self, memory: &OfferedSlots, within: Duration) -> Result<Peer, WorkerError> {
        let mut peers = self.peers.lock().await;
        if let Some(peer) = peers.get(&memory.metadata) {
            return Ok(peer.clone());
        }
        let peer = self.worker.add_peer(&self.region, &memory.metadata, within).await?;
        peers.insert(memory.metadata.clone(), peer.clone());
        Ok(peer)
    }
}

async fn allocate(bytes: u64) -> Result<SharedMemory, WorkerError> {
    let length = usize::try_from(bytes).map_err(|error| no_memory(bytes, &error))?;
    let made = tokio::task::spawn_blocking(move || SharedMemory::create("weightsync-fabric", length)).await;
    made.map_err(|ended| no_memory(bytes, &ended))?.map_err(|error| no_memory(bytes, &error))
}

fn no_memory(bytes: u64, cause: &dyn std::fmt::Display) -> WorkerError {
    WorkerError::Start { cause: format!("no {bytes} bytes of host memory: {cause}") }
}

/// A slot that is lent out; dropping it frees it.
pub(super) struct Slot {
    ring: Arc<FabricRing>,
    place: Option<Place>,
    length: usize,
    _permit: OwnedSemaphorePermit,
}

impl Slot {
    pub(super) fn index(&self) -> u32 {
        self.place.as_ref().map_or(u32::MAX, |place| place.index)
    }

    /// Copies bytes into it. Blocks for the copy.
    pub(super) fn write(&mut self, bytes: &[u8]) {
        let to = self.place.as_mut().and_then(|place| place.memory.bytes_mut(0..bytes.len()));
        if let Some(to) = to {
            to.copy_from_slice(bytes);
            self.length = bytes.len();
        }
    }

    /// Reads bytes of another member into it.
    pub(super) async fn read(&mut self, peer: &Peer, from: RemotePlace, bytes: u64, within: Duration) -> Result<(), WorkerError> {
        let lost = || WorkerError::Nonsense { what: "lend a slot" };
        let to = self.place.as_ref().ok_or_else(lost)?.span.clone();
        let read = Read { peer: peer.clone(), from, to, bytes };
        self.ring.worker.read(read, within).await?;
        self.length = usize::try_from(bytes).map_err(|_| lost())?;
        Ok(())
    }

    /// Its bytes. The slot is free when the last cut of them is dropped.
    pub(super) fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Slot {
    fn as_ref(&self) -> &[u8] {
        self.place.as_ref().and_then(|place| place.memory.bytes(0..self.length)).unwrap_or_default()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // Before the permit goes, so that the next holder of the permit finds a place.
        if let Some(place) = self.place.take() {
            self.ring.free.lock().push(place);
        }
    }
}

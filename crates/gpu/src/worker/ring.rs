//! The ring of a worker: one block on its GPU, cut into slots that are lent out one by one.
//!
//! Decides when a slot is free again: when the last clone of its guard is dropped, which a request under way holds too.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::held::{Held, Resource, Span};
use super::{Worker, WorkerError};
use weightsync_core::protocol::worker::{IpcHandle, Place};

/// A ring. Clones share it; the block is freed when the last one and all slots are dropped.
#[derive(Clone)]
pub struct Ring(Arc<Block>);

struct Block {
    worker: Worker,
    number: u64,
    slots: u32,
    slot_bytes: u64,
    handle: IpcHandle,
    free: Mutex<Vec<u32>>,
    permits: Arc<Semaphore>,
    _resource: Resource,
}

#[allow(missing_docs)]
impl Ring {
    pub(super) fn new(worker: Worker, number: u64, slots: u32, slot_bytes: u64, handle: IpcHandle, resource: Resource) -> Self {
        let permits = Arc::new(Semaphore::new(slots as usize));
        // The lowest number goes out first.
        let free = Mutex::new((0..slots).rev().collect());
        Self(Arc::new(Block { worker, number, slots, slot_bytes, handle, free, permits, _resource: resource }))
    }

    pub fn worker(&self) -> &Worker {
        &self.0.worker
    }

    pub(super) fn number(&self) -> u64 {
        self.0.number
    }

    pub fn slots(&self) -> u32 {
        self.0.slots
    }

    pub fn slot_bytes(&self) -> u64 {
        self.0.slot_bytes
    }

    /// Length of the block in bytes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.0.slots) * self.0.slot_bytes
    }

    /// The whole block, for other processes on this host; slot `i` begins at `i * slot_bytes`.
    pub fn handle(&self) -> &IpcHandle {
        &self.0.handle
    }

    pub fn free(&self) -> usize {
        self.0.permits.available_permits()
    }

    /// Takes a slot; waits for one that long.
    pub async fn take(&self, within: Duration) -> Result<Slot, WorkerError> {
        let permit = tokio::time::timeout(within, Arc::clone(&self.0.permits).acquire_owned()).await;
        let permit = permit.ok().and_then(Result::ok).ok_or(WorkerError::NoSlot { within })?;
        self.lend(permit).ok_or(WorkerError::NoSlot { within })
    }

    /// Takes a slot if one is free.
    pub fn try_take(&self) -> Option<Slot> {
        self.lend(Arc::clone(&self.0.permits).try_acquire_owned().ok()?)
    }

    fn lend(&self, permit: OwnedSemaphorePermit) -> Option<Slot> {
        let index = self.0.free.lock().pop()?;
        Some(Slot(Arc::new(Lent { ring: self.clone(), index, _permit: permit })))
    }
}

/// A slot that is lent out. Clones share it; dropping the last one frees it.
#[derive(Clone)]
pub struct Slot(Arc<Lent>);

struct Lent {
    ring: Ring,
    index: u32,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Lent {
    fn drop(&mut self) {
        // Before the permit goes, so that anyone who gets the permit finds a number.
        self.ring.0.free.lock().push(self.index);
    }
}

impl Slot {
    /// Its ring.
    pub fn ring(&self) -> &Ring {
        &self.0.ring
    }

    /// Its number in the ring.
    pub fn index(&self) -> u32 {
        self.0.index
    }

    /// First byte in the ring's block: what another process adds to the address that it got for the ring's handle.
    pub fn offset(&self) -> u64 {
        u64::from(self.0.index) * self.0.ring.slot_bytes()
    }

    /// From `offset` on.
    pub fn at(&self, offset: u64) -> Span {
        let place = Place::Slot { ring: self.0.ring.0.number, slot: self.0.index, offset };
        Span { place, held: Held::Slot(self.clone()) }
    }
}

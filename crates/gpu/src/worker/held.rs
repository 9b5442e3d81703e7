//! What an agent holds of a worker: mapped host memory, imported memory, events. Given up when the last clone is dropped and no request
//! uses it any more.

use std::sync::Arc;

use super::{Ring, Slot, Worker};
use weightsync_core::protocol::worker::{IpcHandle, Place, WorkerResource};

/// Something of a worker that is given up when dropped. Clones share it.
#[derive(Clone)]
pub(super) struct Resource(Arc<Owned>);

struct Owned {
    worker: Worker,
    what: WorkerResource,
}

impl Resource {
    pub(super) fn new(worker: &Worker, what: WorkerResource) -> Self {
        Self(Arc::new(Owned { worker: worker.clone(), what }))
    }

    pub(super) fn worker(&self) -> &Worker {
        &self.0.worker
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.worker.release(self.what);
    }
}

/// A memfd that the worker mapped.
#[derive(Clone)]
pub struct HostMemory {
    pub(super) number: u64,
    pub(super) unpinned: Option<Arc<str>>,
    pub(super) resource: Resource,
}

impl HostMemory {
    /// Why it is not registered with the driver, when it is not: copies are slower then.
    pub fn unpinned(&self) -> Option<&str> {
        self.unpinned.as_deref()
    }

    /// From `offset` on.
    pub fn at(&self, offset: u64) -> Span {
        Span { place: Place::Host { host: self.number, offset }, held: Held::Resource(self.resource.clone()) }
    }
}

/// GPU memory of another process that the worker opened.
#[derive(Clone)]
pub struct ImportedMemory {
    pub(super) number: u64,
    pub(super) bytes: u64,
    pub(super) resource: Resource,
}

impl ImportedMemory {
    /// Length of the whole allocation that its handle names.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// From `offset` on.
    pub fn at(&self, offset: u64) -> Span {
        Span { place: Place::Memory { memory: self.number, offset }, held: Held::Resource(self.resource.clone()) }
    }
}

/// An event on the GPU, made by the worker or imported.
#[derive(Clone)]
pub struct Event {
    pub(super) number: u64,
    pub(super) handle: Option<IpcHandle>,
    pub(super) resource: Resource,
}

impl Event {
    /// For other processes, when the worker made it.
    pub fn handle(&self) -> Option<&IpcHandle> {
        self.handle.as_ref()
    }

    pub(super) fn held(&self) -> Held {
        Held::Resource(self.resource.clone())
    }
}

/// What a request keeps from being given up until its answer.
#[derive(Clone)]
#[allow(dead_code, reason = "held, never read")]
pub(super) enum Held {
    Slot(Slot),
    Ring(Ring),
    Resource(Resource),
}

/// A place from some byte on, and what it belongs to.
#[derive(Clone)]
pub struct Span {
    pub(super) place: Place,
    pub(super) held: Held,
}

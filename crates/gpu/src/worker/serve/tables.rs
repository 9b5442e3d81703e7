//! What the agent may name by number: rings, host memory, imported memory, events; and what uses each slot.
//!
//! Decides whether a place exists, a range lies inside it, and no READ may still write there.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::{Incoming, Server, invalid, late};
use crate::{Device, Event, GpuError, Memory, Span, Stream};
use weightsync_core::protocol::worker::{FabricMemory, IpcHandle, Place, WorkerAnswer, WorkerFault, WorkerRequest, WorkerResource};

/// Slots begin at multiples of this, as tensors in a layout do.
const SLOT_ALIGNMENT: u64 = 64;

struct RingBlock {
    memory: Memory,
    slots: u32,
    slot_bytes: u64,
}

#[derive(Default)]
pub(super) struct Tables {
    next: u64,
    rings: HashMap<u64, RingBlock>,
    hosts: HashMap<u64, Memory>,
    memories: HashMap<u64, Memory>,
    events: HashMap<u64, Arc<Event>>,
    uses: HashMap<SlotKey, Uses>,
    /// READs that have not ended, by their request: what they may write.
    reads: HashMap<u64, (WorkerResource, Range<u64>)>,
    /// What is being freed aside: a ring that is asked for after it may need that memory.
    freeing: Vec<Weak<()>>,
}

/// A slot: ring and index.
pub(super) type SlotKey = (u64, u32);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    Read,
    Write,
}

/// What was given to the GPU for a slot last: what wrote it, and what has read it since.
#[derive(Default)]
struct Uses {
    written: Option<Arc<Event>>,
    read: Vec<Arc<Event>>,
}

/// A range that a request names, and the slot that it lies in.
pub(super) struct Named {
    pub span: Span,
    pub slot: Option<SlotKey>,
    /// Its block, and the bytes of the block.
    pub block: WorkerResource,
    pub range: Range<u64>,
}

impl Tables {
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn ring_bytes(&self) -> u64 {
        self.rings.values().map(|ring| ring.memory.bytes()).sum()
    }

    /// Memory that can be registered.
    pub(super) fn memory(&self, what: FabricMemory) -> Result<Memory, WorkerFault> {
        let memory = match what {
            FabricMemory::Host(number) => self.hosts.get(&number),
            FabricMemory::Ring(number) => self.rings.get(&number).map(|ring| &ring.memory),
        };
        memory.cloned().ok_or_else(|| invalid(format!("there is no {what:?}")))
    }

    /// READs that have not ended.
    pub(super) fn reads(&self) -> usize {
        self.reads.len()
    }

    /// Enters a READ: what it writes is no one else's until it has ended.
    pub(super) fn begin_read(&mut self, id: u64, to: Place, bytes: u64) -> Result<Named, WorkerFault> {
        let named = self.named(to, bytes)?;
        self.reads.insert(id, (named.block, named.range.clone()));
        Ok(named)
    }

    pub(super) fn end_read(&mut self, id: u64) {
        self.reads.remove(&id);
    }

    /// The range that begins at a place.
    pub(super) fn named(&self, place: Place, bytes: u64) -> Result<Named, WorkerFault> {
        let (memory, offset, slot, block) = match place {
            Place::Slot { ring, slot, offset } => {
                let block = self.rings.get(&ring).ok_or_else(|| invalid(format!("there is no ring {ring}")))?;
                if slot >= block.slots {
                    return Err(invalid(format!("ring {ring} has {} slots, slot {slot} is none", block.slots)));
                }
                if offset.checked_add(bytes).is_none_or(|end| end > block.slot_bytes) {
                    return Err(invalid(format!("bytes {offset} to {offset} + {bytes} of a slot of {}", block.slot_bytes)));
                }
                (&block.memory, u64::from(slot) * block.slot_bytes + offset, Some((ring, slot)), WorkerResource::Ring(ring))
            }
            Place::Host { host, offset } => {
                let memory = self.hosts.get(&host).ok_or_else(|| invalid(format!("there is no host memory {host}")))?;
                (memory, offset, None, WorkerResource::Host(host))
            }
            Place::Memory { memory, offset } => {
                let imported = self.memories.get(&memory).ok_or_else(|| invalid(format!("there is no imported memory {memory}")))?;
                (imported, offset, None, WorkerResource::Memory(memory))
            }
        };
        let span = memory.span(offset, bytes).map_err(|error| error.fault())?;
        let range = offset..offset + bytes;
        let overlaps = |written: &Range<u64>| written.start < range.end && range.start < written.end;
        if self.reads.values().any(|(other, written)| *other == block && overlaps(written)) {
            return Err(invalid("a READ may still write there: wait until it has ended"));
        }
        Ok(Named { span, slot, block, range })
    }

    pub(super) fn event(&self, number: Option<u64>) -> Result<Option<Arc<Event>>, WorkerFault> {
        let find = |number: u64| self.events.get(&number).cloned().ok_or_else(|| invalid(format!("there is no event {number}")));
        number.map(find).transpose()
    }

    /// What work on this slot must wait for. Readers do not wait for each other: a broadcast that waited for the copy of its bucket to the host
    /// was as slow as the host's bus.
    pub(super) fn before(&self, slot: Option<SlotKey>, use_: Use) -> Vec<Arc<Event>> {
        let Some(uses) = slot.and_then(|slot| self.uses.get(&slot)) else { return Vec::new() };
        let readers = uses.read.iter().filter(|_| use_ == Use::Write);
        uses.written.iter().chain(readers).cloned().collect()
    }

    /// Whatever follows, the slot is in use until `event`.
    pub(super) fn used(&mut self, slot: Option<SlotKey>, use_: Use, event: &Arc<Event>) {
        let Some(slot) = slot else { return };
        let uses = self.uses.entry(slot).or_default();
        match use_ {
            Use::Write => *uses = Uses { written: Some(Arc::clone(event)), read: Vec::new() },
            Use::Read => {
                // What ended need not be waited for; an event that cannot be asked is.
                uses.read.retain(|read| !matches!(read.fired(), Ok(true)));
                uses.read.push(Arc::clone(event));
            }
        }
    }

    fn take_out(&mut self, what: WorkerResource) -> Result<Box<dyn Send>, WorkerFault> {
        let gone: Option<Box<dyn Send>> = match what {
            WorkerResource::Ring(number) => {
                self.uses.retain(|(ring, _), _| *ring != number);
                self.rings.remove(&number).map(|ring| Box::new(ring.memory) as Box<dyn Send>)
            }
            WorkerResource::Host(number) => self.hosts.remove(&number).map(|memory| Box::new(memory) as Box<dyn Send>),
            WorkerResource::Memory(number) => self.memories.remove(&number).map(|memory| Box::new(memory) as Box<dyn Send>),
            WorkerResource::Event(number) => self.events.remove(&number).map(|event| Box::new(event) as Box<dyn Send>),
            WorkerResource::Region(_) | WorkerResource::Peer(_) => None,
        };
        gone.ok_or_else(|| invalid(format!("there is no {what:?}")))
    }
}

impl Server {
    /// Runs `make` aside, numbers what it made, and answers.
    fn make<T: Send + 'static>(
        &mut self,
        id: u64,
        make: impl FnOnce(&Device) -> Result<T, GpuError> + Send + 'static,
        keep: impl FnOnce(&mut Tables, u64, T) -> WorkerAnswer + Send + 'static,
    ) {
        self.aside(make, move |server, made| {
            let result = made.map(|made| {
                let number = server.tables.number();
                keep(&mut server.tables, number, made)
            });
            server.answer(id, result.map_err(|error| error.fault()));
        });
    }

    pub(super) fn make_ring(&mut self, id: u64, slots: u32, slot_bytes: u64, end: Instant) {
        let bytes = slot_bytes.checked_mul(u64::from(slots)).filter(|bytes| *bytes > 0 && slot_bytes.is_multiple_of(SLOT_ALIGNMENT));
        let Some(bytes) = bytes else {
            let what = format!("no ring of {slots} slots of {slot_bytes} bytes: both above 0, bytes a multiple of {SLOT_ALIGNMENT}");
            return self.answer(id, Err(invalid(what)));
        };
        let begun = Instant::now();
        let freeing = self.tables.freeing.clone();
        self.make(
            id,
            move |device| {
                while freeing.iter().any(|under_way| under_way.strong_count() > 0) {
                    if Instant::now() > end {
                        return Err(GpuError::Invalid { what: late("waiting for memory that is being freed", begun).message });
                    }
                    std::thread::sleep(Duration::from_micros(200));
                }
                let memory = Memory::allocate(device, bytes)?;
                // What lay there before was somebody's.
                let stream = Stream::new(device)?;
                stream.fill(&memory.span(0, bytes)?, 0)?;
                let filled = stream.record_new()?;
                while !filled.fired()? {
                    if Instant::now() > end {
                        return Err(GpuError::Invalid { what: late("filling a ring with zeros", begun).message });
                    }
                    std::thread::sleep(Duration::from_micros(200));
                }
                let handle = memory.handle()?;
                Ok((memory, handle))
            },
            move |tables, ring, (memory, handle)| {
                tables.rings.insert(ring, RingBlock { memory, slots, slot_bytes });
                WorkerAnswer::Ring { ring, handle, bytes }
            },
        );
    }

    /// What goes with and without a GPU.
    pub(super) fn take_for_memory(&mut self, incoming: Incoming) {
        match incoming.request {
            WorkerRequest::MapHost { bytes } => self.map_host(incoming.id, incoming.descriptor, bytes),
            WorkerRequest::Release { what: WorkerResource::Region(region) } => self.release_region(incoming.id, region),
            WorkerRequest::Release { what: WorkerResource::Peer(peer) } => self.release_peer(incoming.id, peer),
            WorkerRequest::Release { what } => self.release(incoming.id, what),
            _ => self.answer(incoming.id, Err(invalid("not about memory"))),
        }
    }

    fn map_host(&mut self, id: u64, memfd: Option<OwnedFd>, bytes: u64) {
        let Some(memfd) = memfd else { return self.answer(id, Err(invalid("no descriptor came with the request"))) };
        let device = self.device();
        let map = move || {
            if let Some(device) = &device {
                device.bind()?;
            }
            Memory::map(device.as_deref(), memfd, bytes)
        };
        self.apart(map, move |server, mapped| {
            let result = mapped.map(|(memory, unpinned)| {
                let host = server.tables.number();
                server.tables.hosts.insert(host, memory);
                WorkerAnswer::Host { host, unpinned: unpinned.map(|error| error.to_string()) }
            });
            server.answer(id, result.map_err(|error| error.fault()));
        });
    }

    pub(super) fn import(&mut self, id: u64, handle: IpcHandle, least: u64) {
        self.make(
            id,
            move |device| Memory::import(device, &handle, least),
            |tables, memory, imported| {
                let bytes = imported.bytes();
                tables.memories.insert(memory, imported);
                WorkerAnswer::Memory { memory, bytes }
            },
        );
    }

    pub(super) fn import_event(&mut self, id: u64, handle: IpcHandle) {
        self.make(
            id,
            move |device| Event::import(device, &handle),
            |tables, event, imported| {
                tables.events.insert(event, Arc::new(imported));
                WorkerAnswer::Event { event, handle: None }
            },
        );
    }

    pub(super) fn new_event(&mut self, id: u64) {
        self.make(id, Event::shared, |tables, event, (made, handle)| {
            tables.events.insert(event, Arc::new(made));
            WorkerAnswer::Event { event, handle: Some(handle) }
        });
    }

    /// Freeing waits for the GPU, so it happens aside. Work under way holds what it uses.
    fn release(&mut self, id: u64, what: WorkerResource) {
        let gone = match self.tables.take_out(what) {
            Ok(gone) => gone,
            Err(fault) => return self.answer(id, Err(fault)),
        };
        let under_way = Arc::new(());
        self.tables.freeing.retain(|other| other.strong_count() > 0);
        self.tables.freeing.push(Arc::downgrade(&under_way));
        let device = self.device();
        let free = move || {
            if let Some(device) = device {
                device.bind()?;
            }
            drop(gone);
            drop(under_way);
            Ok(())
        };
        self.apart(free, move |server, _| server.answer(id, Ok(WorkerAnswer::Done)));
    }
}

//! Work on the GPU: broadcasts, digests and copies, given to streams in the order in which they were asked for, and answered when the event
//! after them fired.
//!
//! Work on a slot waits, on the GPU, for the work on it before. A request whose time passed is answered so at once; its work is still held
//! until its event fires, because the GPU may still read and write what it names.

use std::sync::Arc;
use std::time::Instant;

use super::groups::Enqueued;
use super::tables::{Named, Tables, Use};
use super::{Gpu, Incoming, Server, invalid, late, milliseconds_since};
use crate::{Device, Digester, Digesting, Event, GpuError, Scratch, Stream};
use weightsync_core::protocol::worker::{Part, Place, WorkerAnswer, WorkerFault, WorkerRequest};

/// Scratch for so many parts is made when the GPU is opened: making one later could wait for the GPU.
const PARTS: usize = 4096;
/// Pieces of scratch made then.
const SCRATCHES: usize = 8;

pub(super) struct Works {
    digester: Digester,
    digests: Stream,
    to_gpu: Stream,
    from_gpu: Stream,
    within_gpu: Stream,
    scratches: Vec<Scratch>,
    under_way: Vec<Work>,
    /// A broadcast that NCCL has not put into its stream yet.
    enqueueing: Option<Enqueueing>,
}

struct Work {
    id: u64,
    what: &'static str,
    group: Option<u64>,
    begun: Instant,
    end: Instant,
    done: Arc<Event>,
    digesting: Option<Digesting>,
    answered: bool,
    _held: Vec<Named>,
}

pub(super) struct Enqueueing {
    pub id: u64,
    pub group: u64,
    pub begun: Instant,
    pub end: Instant,
    at: Named,
    use_: Use,
    parts: Vec<Part>,
}

impl Works {
    pub(super) fn new(device: &Device) -> Result<Self, GpuError> {
        let scratches = (0..SCRATCHES).map(|_| Scratch::new(device, Digester::scratch_bytes(PARTS)));
        Ok(Self {
            digester: Digester::load(device)?,
            digests: Stream::new(device)?,
            to_gpu: Stream::new(device)?,
            from_gpu: Stream::new(device)?,
            within_gpu: Stream::new(device)?,
            scratches: scratches.collect::<Result<_, _>>()?,
            under_way: Vec::new(),
            enqueueing: None,
        })
    }

    pub(super) fn is_busy(&self) -> bool {
        !self.under_way.is_empty() || self.enqueueing.is_some()
    }

    pub(super) fn under_way(&self) -> u32 {
        u32::try_from(self.under_way.len() + usize::from(self.enqueueing.is_some())).unwrap_or(u32::MAX)
    }

    pub(super) fn take_scratch(&mut self, device: &Device, parts: usize) -> Result<Scratch, GpuError> {
        let bytes = Digester::scratch_bytes(parts);
        let fitting = self.scratches.iter().position(|scratch| scratch.bytes() >= bytes);
        match fitting {
            Some(at) => Ok(self.scratches.swap_remove(at)),
            None => Scratch::new(device, bytes.max(Digester::scratch_bytes(PARTS))),
        }
    }

    pub(super) fn give_back(&mut self, scratch: Scratch) {
        // Freeing could wait for the GPU: it is kept, and its number is bounded by the work under way at once.
        self.scratches.push(scratch);
    }
}

impl Server {
    pub(super) fn take_for_gpu(&mut self, incoming: Incoming) {
        let Incoming { id, begun, end, .. } = incoming;
        match incoming.request {
            WorkerRequest::Ring { slots, slot_bytes } => self.make_ring(id, slots, slot_bytes, end),
            WorkerRequest::Import { handle, bytes } => self.import(id, handle, bytes),
            WorkerRequest::ImportEvent { handle } => self.import_event(id, handle),
            WorkerRequest::NewEvent => self.new_event(id),
            WorkerRequest::UniqueId => self.unique_id(id),
            request @ WorkerRequest::Join { .. } => self.join(id, &request, begun, end),
            WorkerRequest::Abort { group } => self.abort(id, group),
            WorkerRequest::Shrink { group, into, without, revoke } => self.shrink(id, group, into, without, revoke, begun, end),
            WorkerRequest::Broadcast { .. } | WorkerRequest::Digest { .. } | WorkerRequest::Copy { .. } => self.issue_in_order(incoming),
            _ => self.answer(id, Err(invalid("not a request for the GPU"))),
        }
    }

    /// Issues a request when those before it were issued.
    pub(super) fn issue_in_order(&mut self, incoming: Incoming) {
        let Some(gpu) = self.gpu.as_mut() else { return };
        gpu.waiting.push_back(incoming);
        self.issue_waiting();
    }

    /// Gives waiting requests to the GPU as long as NCCL does not hold one back.
    fn issue_waiting(&mut self) {
        while let Some(gpu) = self.gpu.as_mut() {
            if gpu.works.enqueueing.is_some() {
                return;
            }
            let Some(incoming) = gpu.waiting.pop_front() else { return };
            let Incoming { id, begun, end, .. } = incoming;
            let issued = match incoming.request {
                WorkerRequest::Broadcast { group, root, at, bytes, parts, after } => {
                    self.issue_broadcast((id, begun, end), group, root, (at, bytes), parts, after)
                }
                WorkerRequest::Digest { at, parts, after } => gpu.issue_digest(&mut self.tables, (id, begun, end), at, &parts, after),
                WorkerRequest::Copy { from, to, bytes, after, then } => {
                    gpu.issue_copy(&mut self.tables, (id, begun, end), from, to, bytes, after, then)
                }
                request @ WorkerRequest::Read { .. } => self.issue_read((id, begun, end), request),
                _ => Err(invalid("not work for the GPU")),
            };
            if let Err(fault) = issued {
                self.answer(id, Err(fault));
            }
        }
    }

    fn issue_broadcast(
        &mut self,
        (id, begun, end): (u64, Instant, Instant),
        group: u64,
        root: u32,
        (at, bytes): (Place, u64),
        parts: Vec<Part>,
        after: Option<u64>,
    ) -> Result<(), WorkerFault> {
        let Some(gpu) = self.gpu.as_mut() else { return Err(invalid("no GPU was opened")) };
        let tables = &self.tables;
        let begin = |gpu: &mut Gpu| -> Result<(Named, Use, Enqueued), WorkerFault> {
            let named = tables.named(at, bytes)?;
            let after = tables.event(after)?;
            let use_ = gpu.groups.use_of(group, root);
            let waits = tables.before(named.slot, use_);
            let enqueued = gpu.groups.broadcast(group, &named.span, root, after.iter().chain(&waits))?;
            Ok((named, use_, enqueued))
        };
        match begin(gpu) {
            Ok((at, use_, enqueued)) => {
                gpu.works.enqueueing = Some(Enqueueing { id, group, begun, end, at, use_, parts });
                if enqueued == Enqueued::Yes {
                    self.finish_enqueueing();
                }
                Ok(())
            }
            Err(fault) => {
                // The others broadcast: a group of which one rank skipped a broadcast is of no use.
                self.fail_group(group, &fault.message);
                Err(fault)
            }
        }
    }

    /// The broadcast is in its stream: an event and the digest go after it.
    fn finish_enqueueing(&mut self) {
        let Some(gpu) = self.gpu.as_mut() else { return };
        let Some(Enqueueing { id, group, begun, end, at, use_, parts }) = gpu.works.enqueueing.take() else { return };
        if let Err(error) = gpu.behind_broadcast(&mut self.tables, (id, begun, end), group, (at, use_), &parts) {
            self.fail_group(group, &error.to_string());
            self.answer(id, Err(error.fault()));
        }
    }

    /// Looks at everything that was given to the GPU; whether something moved.
    pub(super) fn poll_works(&mut self) -> bool {
        let mut moved = self.poll_enqueueing();
        let Some(gpu) = self.gpu.as_mut() else { return moved };
        let (mut left, mut failed) = (Vec::new(), gpu.groups.broken());
        let now = Instant::now();
        for mut work in std::mem::take(&mut gpu.works.under_way) {
            let fault = match work.done.fired() {
                Ok(true) => {
                    moved = true;
                    self.finish(work);
                    continue;
                }
                Ok(false) if work.answered || now <= work.end => None,
                Ok(false) => Some(late(work.what, work.begun)),
                Err(error) => Some(error.fault()),
            };
            if let Some(fault) = fault.filter(|_| !work.answered) {
                moved = true;
                if let Some(group) = work.group {
                    failed.push((group, fault.message.clone()));
                }
                work.answered = true;
                self.answer(work.id, Err(fault));
            }
            left.push(work);
        }
        if let Some(gpu) = self.gpu.as_mut() {
            gpu.works.under_way.append(&mut left);
        }
        for (group, why) in failed {
            moved = true;
            self.fail_group(group, &why);
        }
        moved
    }

    fn poll_enqueueing(&mut self) -> bool {
        let Some(gpu) = self.gpu.as_mut() else { return false };
        let Some(enqueueing) = &gpu.works.enqueueing else {
            return false;
        };
        let (id, group, begun, end) = (enqueueing.id, enqueueing.group, enqueueing.begun, enqueueing.end);
        match gpu.groups.enqueued(group) {
            Ok(Enqueued::Yes) => self.finish_enqueueing(),
            Ok(Enqueued::NotYet) if Instant::now() <= end => return false,
            fault => {
                gpu.works.enqueueing = None;
                let fault = fault.err().unwrap_or_else(|| late("a broadcast", begun));
                self.fail_group(group, &fault.message);
                self.answer(id, Err(fault));
            }
        }
        self.issue_waiting();
        true
    }

    fn finish(&mut self, work: Work) {
        let sums = match work.digesting.map(Digesting::finish) {
            None => Ok(Vec::new()),
            Some(Ok((sums, scratch))) => {
                if let Some(gpu) = self.gpu.as_mut() {
                    gpu.works.give_back(scratch);
                }
                Ok(sums)
            }
            Some(Err(error)) => Err(error.fault()),
        };
        if work.answered {
            return;
        }
        let ms = milliseconds_since(work.begun);
        let answer = sums.map(|sums| if work.what == COPY { WorkerAnswer::Done } else { WorkerAnswer::Sums { sums, ms } });
        self.answer(work.id, answer);
    }

    /// Everything under way in a group fails with the reason for which it was aborted.
    pub(super) fn fail_works(&mut self, group: u64, fault: &WorkerFault) {
        let Some(gpu) = self.gpu.as_mut() else { return };
        let mut failed: Vec<u64> = Vec::new();
        if let Some(enqueueing) = gpu.works.enqueueing.take_if(|enqueueing| enqueueing.group == group) {
            failed.push(enqueueing.id);
        }
        for work in gpu.works.under_way.iter_mut().filter(|work| work.group == Some(group) && !work.answered) {
            work.answered = true;
            failed.push(work.id);
        }
        for id in failed {
            self.answer(id, Err(fault.clone()));
        }
    }
}

const COPY: &str = "a copy";

impl Gpu {
    fn behind_broadcast(
        &mut self,
        tables: &mut Tables,
        (id, begun, end): (u64, Instant, Instant),
        group: u64,
        (at, use_): (Named, Use),
        parts: &[Part],
    ) -> Result<(), GpuError> {
        let sent = self.groups.record(group)?;
        tables.used(at.slot, use_, &sent);
        let digesting = match parts {
            [] => None,
            parts => {
                let scratch = self.works.take_scratch(&self.device, parts.len())?;
                self.works.digests.wait_for(&sent)?;
                Some(self.works.digester.start(&self.works.digests, &at.span, parts, scratch)?)
            }
        };
        let done = digesting.as_ref().map_or(sent, |digesting| Arc::clone(&digesting.done));
        tables.used(at.slot, Use::Read, &done);
        let (what, group) = ("a broadcast", Some(group));
        self.works.under_way.push(Work { id, what, group, begun, end, done, digesting, answered: false, _held: vec![at] });
        Ok(())
    }

    fn issue_digest(
        &mut self,
        tables: &mut Tables,
        (id, begun, end): (u64, Instant, Instant),
        at: Place,
        parts: &[Part],
        after: Option<u64>,
    ) -> Result<(), WorkerFault> {
        if parts.is_empty() {
            return Err(invalid("no parts to digest"));
        }
        let bytes = parts.iter().map(|part| part.offset.saturating_add(part.bytes)).max().unwrap_or(0);
        let named = tables.named(at, bytes)?;
        let after = tables.event(after)?;
        let scratch = self.works.take_scratch(&self.device, parts.len()).map_err(|error| error.fault())?;
        let start = || -> Result<Digesting, GpuError> {
            let stream = &self.works.digests;
            for event in after.iter().chain(&tables.before(named.slot, Use::Read)) {
                stream.wait_for(event)?;
            }
            self.works.digester.start(stream, &named.span, parts, scratch)
        };
        let digesting = start().map_err(|error| error.fault())?;
        let done = Arc::clone(&digesting.done);
        tables.used(named.slot, Use::Read, &done);
        let (what, digesting) = ("a digest", Some(digesting));
        self.works.under_way.push(Work { id, what, group: None, begun, end, done, digesting, answered: false, _held: vec![named] });
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn issue_copy(
        &mut self,
        tables: &mut Tables,
        (id, begun, end): (u64, Instant, Instant),
        from: Place,
        to: Place,
        bytes: u64,
        after: Option<u64>,
        then: Option<u64>,
    ) -> Result<(), WorkerFault> {
        let (from, to) = (tables.named(from, bytes)?, tables.named(to, bytes)?);
        let (after, then) = (tables.event(after)?, tables.event(then)?);
        let stream = match (from.span.in_host_memory(), to.span.in_host_memory()) {
            (true, _) => &self.works.to_gpu,
            (_, true) => &self.works.from_gpu,
            (false, false) => &self.works.within_gpu,
        };
        let start = || -> Result<Arc<Event>, GpuError> {
            let (read, written) = (tables.before(from.slot, Use::Read), tables.before(to.slot, Use::Write));
            for event in after.iter().chain(&read).chain(&written) {
                stream.wait_for(event)?;
            }
            stream.copy(&to.span, &from.span)?;
            if let Some(then) = &then {
                stream.record(then)?;
            }
            stream.record_new()
        };
        let done = start().map_err(|error| error.fault())?;
        tables.used(from.slot, Use::Read, &done);
        tables.used(to.slot, Use::Write, &done);
        let held = vec![from, to];
        self.works.under_way.push(Work { id, what: COPY, group: None, begun, end, done, digesting: None, answered: false, _held: held });
        Ok(())
    }
}

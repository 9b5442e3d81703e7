//! A group on its way: initialised without blocking, proven by a broadcast of one element, then ready; or given up and aborted.
//!
//! The broadcast proves it for every rank: who receives compares the byte. It also makes NCCL's connections, which it puts off until they are
//! needed, so that the first bucket does not pay for them. Engines that join by themselves enter another operation first, or none: that is what
//! the group is proven with then.

use std::io::Write as _;
use std::sync::Arc;
use std::time::Instant;

use super::{Gpu, Server, invalid, late, milliseconds_since};
use crate::worker::nccl_log;
use crate::{Communicator, Event, GpuError, Progress, Scratch, Shrinking, Stream};
use weightsync_core::protocol::worker::{Proof, WorkerAnswer, WorkerFault, WorkerFaultCode, WorkerRequest};

/// What rank 0 sends to prove a group.
const PROOF: u8 = 0xA7;
/// One 32-bit float.
const FLOAT: u64 = 4;

/// A group that was joined.
pub(super) struct Group {
    pub communicator: Communicator,
    pub stream: Stream,
}

pub(super) struct Joining {
    pub id: u64,
    pub group: u64,
    begun: Instant,
    end: Instant,
    proof: Proof,
    /// The group that it shrinks, until it is joined.
    old: Option<Communicator>,
    state: State,
}

enum State {
    /// The old group is being revoked; then it goes on without these ranks.
    Revoking(Vec<u32>),
    /// The new handle is not there yet.
    Shrinking(Shrinking),
    /// NCCL connects.
    Initialising(Communicator),
    /// The broadcast of one element is not in its stream yet.
    Enqueueing(WarmUp),
    /// It is.
    Proving(WarmUp, Arc<Event>),
}

struct WarmUp {
    communicator: Communicator,
    stream: Stream,
    scratch: Scratch,
    proof: Proof,
    init_ms: f64,
    begun: Instant,
}

enum Step {
    Wait(State),
    Joined(WarmUp),
    /// Also what to abort.
    Failed(WorkerFault, Option<Communicator>),
}

impl Joining {
    fn step(&mut self, gpu: &mut Gpu, state: State) -> Step {
        match state {
            State::Revoking(without) => self.old_step(|old| match old.progress()? {
                Progress::UnderWay => Ok(State::Revoking(without)),
                Progress::Ready => old.shrink(&without, true).map(State::Shrinking),
            }),
            State::Shrinking(shrinking) => self.old_step(|old| match old.shrunk(&shrinking)? {
                None => Ok(State::Shrinking(shrinking)),
                Some(communicator) => Ok(State::Initialising(communicator)),
            }),
            State::Initialising(communicator) => match communicator.progress() {
                Ok(Progress::UnderWay) => Step::Wait(State::Initialising(communicator)),
                Ok(Progress::Ready) => self.warm_up(gpu, communicator),
                Err(error) => Step::Failed(error.fault(), Some(communicator)),
            },
            State::Enqueueing(warm_up) => match warm_up.communicator.progress() {
                Ok(Progress::UnderWay) => Step::Wait(State::Enqueueing(warm_up)),
                Ok(Progress::Ready) => behind_warm_up(warm_up),
                Err(error) => warm_up.failed(error.fault()),
            },
            State::Proving(warm_up, fired) => match (fired.fired(), warm_up.communicator.progress()) {
                (Ok(false), Ok(_)) => Step::Wait(State::Proving(warm_up, fired)),
                (Ok(true), Ok(_)) => warm_up.proven(),
                (Err(error), _) | (_, Err(error)) => warm_up.failed(error.fault()),
            },
        }
    }

    fn old_step(&mut self, step: impl FnOnce(&mut Communicator) -> Result<State, GpuError>) -> Step {
        let Some(old) = self.old.as_mut() else { return Step::Failed(invalid("there is no group to shrink"), None) };
        match step(old) {
            Ok(state) => Step::Wait(state),
            Err(error) => Step::Failed(error.fault(), None),
        }
    }

    fn warm_up(&self, gpu: &mut Gpu, mut communicator: Communicator) -> Step {
        let (init_ms, proof) = (milliseconds_since(self.begun), self.proof);
        let mut begin = |communicator: &mut Communicator| -> Result<(Stream, Scratch, Progress), GpuError> {
            let stream = Stream::urgent(&gpu.device)?;
            let scratch = gpu.works.take_scratch(&gpu.device, 1)?;
            let progress = match proof {
                Proof::Broadcast => {
                    let byte = scratch.device(0, 1)?;
                    stream.fill(&byte, if communicator.rank() == 0 { PROOF } else { !PROOF })?;
                    communicator.broadcast(&byte, 0, &stream)?
                }
                Proof::AllReduce => {
                    let float = scratch.device(0, FLOAT)?;
                    stream.fill(&float, 0)?;
                    communicator.sum_floats(&float, &stream)?
                }
                Proof::Nothing => Progress::Ready,
            };
            Ok((stream, scratch, progress))
        };
        match begin(&mut communicator) {
            Ok((stream, scratch, progress)) => {
                let warm_up = WarmUp { communicator, stream, scratch, proof, init_ms, begun: Instant::now() };
                match progress {
                    Progress::UnderWay => Step::Wait(State::Enqueueing(warm_up)),
                    Progress::Ready => behind_warm_up(warm_up),
                }
            }
            Err(error) => Step::Failed(error.fault(), Some(communicator)),
        }
    }
}

/// The byte comes back to the host after the broadcast.
fn behind_warm_up(warm_up: WarmUp) -> Step {
    let back = || -> Result<Arc<Event>, GpuError> {
        warm_up.stream.copy(&warm_up.scratch.host(0, 1)?, &warm_up.scratch.device(0, 1)?)?;
        warm_up.stream.record_new()
    };
    match back() {
        Ok(event) => Step::Wait(State::Proving(warm_up, event)),
        Err(error) => warm_up.failed(error.fault()),
    }
}

impl WarmUp {
    fn proven(self) -> Step {
        if self.proof != Proof::Broadcast {
            return Step::Joined(self);
        }
        match self.scratch.read(0, 1) {
            Ok(byte) if byte == [PROOF] => Step::Joined(self),
            Ok(byte) => {
                let message = format!("the broadcast of one element gave {byte:02x?} instead of {PROOF:02x}");
                self.failed(WorkerFault { code: WorkerFaultCode::Nccl, message })
            }
            Err(error) => self.failed(error.fault()),
        }
    }

    /// The stream and the scratch are not used again: the GPU may still write there. There is an end to that when the process ends, and
    /// a failed warm-up is rare.
    fn failed(self, fault: WorkerFault) -> Step {
        let Self { communicator, stream, scratch, .. } = self;
        std::mem::forget((stream, scratch));
        Step::Failed(fault, Some(communicator))
    }
}

/// Writes that a group is joined, after all that NCCL wrote of it: the agent reads the log up to this line.
fn say_joined(group: u64) {
    crate::nccl::flush_log();
    let mut out = std::io::stdout().lock();
    // Without the line the network stays unknown.
    let _ = writeln!(out, "{}", nccl_log::joined(group)).and_then(|()| out.flush());
}

impl Server {
    pub(super) fn join(&mut self, id: u64, request: &WorkerRequest, begun: Instant, end: Instant) {
        let WorkerRequest::Join { group, id: nccl_id, rank, world, proof } = request else { return };
        let (group, rank, world, proof) = (*group, *rank, *world, *proof);
        let Some(gpu) = self.gpu.as_mut() else { return };
        let begin = |gpu: &mut Gpu| -> Result<Communicator, WorkerFault> {
            gpu.check_new(group)?;
            if rank >= world {
                return Err(invalid(format!("rank {rank} in a group of {world}")));
            }
            let nccl = gpu.nccl.as_ref().map_err(GpuError::fault)?;
            Communicator::begin(nccl, nccl_id, rank, world).map_err(|error| error.fault())
        };
        match begin(gpu) {
            Ok(communicator) => {
                let state = State::Initialising(communicator);
                self.go_on(Joining { id, group, begun, end, proof, old: None, state: State::Revoking(Vec::new()) }, state);
            }
            Err(fault) => self.answer(id, Err(fault)),
        }
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn shrink(&mut self, id: u64, group: u64, into: u64, without: Vec<u32>, revoke: bool, begun: Instant, end: Instant) {
        let Some(gpu) = self.gpu.as_mut() else { return };
        let taken = gpu
            .check_new(into)
            .and_then(|()| gpu.groups.ready.remove(&group).ok_or_else(|| invalid(format!("group {group} was not joined, or was aborted"))));
        let Group { mut communicator, stream } = match taken {
            Ok(taken) => taken,
            Err(fault) => return self.answer(id, Err(fault)),
        };
        let why = format!("it shrinks into group {into}");
        gpu.groups.remember(group, &why);
        self.fail_works(group, &super::groups::aborted(group, &why));
        let begun_with = if revoke {
            communicator.revoke().map(|_| State::Revoking(without))
        } else {
            communicator.shrink(&without, false).map(State::Shrinking)
        };
        // Its kernels end with the abort inside; the stream goes when the old communicator does.
        std::mem::drop(stream);
        match begun_with {
            Ok(state) => {
                let joining = Joining {
                    id,
                    group: into,
                    begun,
                    end,
                    proof: Proof::Broadcast,
                    old: Some(communicator),
                    state: State::Revoking(Vec::new()),
                };
                self.go_on(joining, state);
            }
            Err(error) => {
                self.abort_aside(group, vec![communicator], Vec::new());
                self.answer(id, Err(error.fault()));
            }
        }
    }

    /// Looks at every group on its way; whether one moved on.
    pub(super) fn poll_joins(&mut self) -> bool {
        let Some(gpu) = self.gpu.as_mut() else { return false };
        let joins = std::mem::take(&mut gpu.groups.joining);
        let mut moved = false;
        for mut joining in joins {
            if Instant::now() > joining.end {
                let (id, fault) = (joining.id, late("joining a group", joining.begun));
                self.give_up_joining(joining);
                self.answer(id, Err(fault));
                moved = true;
                continue;
            }
            let state = std::mem::replace(&mut joining.state, State::Revoking(Vec::new()));
            moved |= self.go_on(joining, state);
        }
        moved
    }

    /// One step of a join; whether it ended.
    fn go_on(&mut self, mut joining: Joining, state: State) -> bool {
        let Some(gpu) = self.gpu.as_mut() else { return false };
        match joining.step(gpu, state) {
            Step::Wait(state) => {
                joining.state = state;
                gpu.groups.joining.push(joining);
                return false;
            }
            Step::Joined(WarmUp { communicator, stream, scratch, init_ms, begun, .. }) => {
                gpu.works.give_back(scratch);
                let (rank, world) = (communicator.rank(), communicator.world());
                gpu.groups.ready.insert(joining.group, Group { communicator, stream });
                if let Some(old) = joining.old.take() {
                    self.abort_aside(joining.group, vec![old], Vec::new());
                }
                say_joined(joining.group);
                self.answer(joining.id, Ok(WorkerAnswer::Joined { rank, world, init_ms, warm_up_ms: milliseconds_since(begun) }));
            }
            Step::Failed(fault, communicator) => {
                let all: Vec<_> = communicator.into_iter().chain(joining.old.take()).collect();
                self.abort_aside(joining.group, all, Vec::new());
                self.answer(joining.id, Err(fault));
            }
        }
        true
    }

    pub(super) fn give_up_joining(&mut self, joining: Joining) {
        let communicator = match joining.state {
            State::Revoking(_) | State::Shrinking(_) => None,
            State::Initialising(communicator) => Some(communicator),
            State::Enqueueing(warm_up) | State::Proving(warm_up, _) => match warm_up.failed(invalid("")) {
                Step::Failed(_, communicator) => communicator,
                Step::Wait(_) | Step::Joined(_) => None,
            },
        };
        let all: Vec<_> = communicator.into_iter().chain(joining.old).collect();
        self.abort_aside(joining.group, all, Vec::new());
    }
}

impl Gpu {
    /// A number that no group has.
    fn check_new(&self, group: u64) -> Result<(), WorkerFault> {
        let taken = self.groups.ready.contains_key(&group) || self.groups.joining.iter().any(|joining| joining.group == group);
        if taken { Err(invalid(format!("group {group} is joined already"))) } else { Ok(()) }
    }
}

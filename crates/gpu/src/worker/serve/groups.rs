//! Groups: communicators that were proven, on streams of their own; broadcasts into them; and their only end, an abort.
//!
//! An abort takes long where a peer is gone (0.5 s, NCCL 2.28.9), so it runs in a thread of its own: requests under way in the group fail at
//! once, and a new group can be joined meanwhile.

use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::sync::Arc;

use super::joining::{Group, Joining};
use super::tables::Use;
use super::{Server, invalid};
use crate::{Communicator, Event, GpuError, Progress, Span, Stream};
use weightsync_core::protocol::worker::{WorkerAnswer, WorkerFault, WorkerFaultCode};

/// Ended groups whose reason is remembered.
const REMEMBERED: usize = 16;

#[derive(Default)]
pub(super) struct Groups {
    pub(super) ready: HashMap<u64, Group>,
    pub(super) joining: Vec<Joining>,
    /// Groups that are being aborted, and the requests that wait for it.
    aborting: Vec<(u64, Vec<u64>)>,
    ended: VecDeque<(u64, String)>,
}

/// Whether NCCL has put a broadcast into its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Enqueued {
    Yes,
    NotYet,
}

impl From<Progress> for Enqueued {
    fn from(progress: Progress) -> Self {
        match progress {
            Progress::Ready => Self::Yes,
            Progress::UnderWay => Self::NotYet,
        }
    }
}

impl Groups {
    pub(super) fn is_busy(&self) -> bool {
        !self.joining.is_empty()
    }

    pub(super) fn joined(&self) -> u32 {
        u32::try_from(self.ready.len()).unwrap_or(u32::MAX)
    }

    fn get(&mut self, group: u64) -> Result<&mut Group, WorkerFault> {
        let why = self.ended.iter().rev().find(|(ended, _)| *ended == group).map(|(_, why)| why.clone());
        self.ready.get_mut(&group).ok_or_else(|| match why {
            Some(why) => aborted(group, &why),
            None => invalid(format!("group {group} was not joined")),
        })
    }

    /// What a broadcast does with our memory: who sends it reads it.
    pub(super) fn use_of(&self, group: u64, root: u32) -> Use {
        let sends = self.ready.get(&group).is_some_and(|group| group.communicator.rank() == root);
        if sends { Use::Read } else { Use::Write }
    }

    pub(super) fn broadcast<'a>(
        &mut self,
        group: u64,
        at: &Span,
        root: u32,
        after: impl Iterator<Item = &'a Arc<Event>>,
    ) -> Result<Enqueued, WorkerFault> {
        let Group { communicator, stream } = self.get(group)?;
        let begin = || -> Result<Progress, GpuError> {
            for event in after {
                stream.wait_for(event)?;
            }
            communicator.broadcast(at, root, stream)
        };
        begin().map(Enqueued::from).map_err(|error| error.fault())
    }

    /// Whether the broadcast that was begun last is in the stream.
    pub(super) fn enqueued(&mut self, group: u64) -> Result<Enqueued, WorkerFault> {
        let group = self.get(group)?;
        group.communicator.progress().map(Enqueued::from).map_err(|error| error.fault())
    }

    /// An event after all broadcasts of the group so far.
    pub(super) fn record(&mut self, group: u64) -> Result<Arc<Event>, GpuError> {
        let group = self.ready.get(&group).ok_or_else(|| GpuError::Invalid { what: format!("group {group} was not joined") })?;
        group.stream.record_new()
    }

    /// Groups in which NCCL met an error in its own threads.
    pub(super) fn broken(&self) -> Vec<(u64, String)> {
        let errors = self.ready.iter().filter_map(|(number, group)| Some((*number, group.communicator.progress().err()?.to_string())));
        errors.collect()
    }

    pub(super) fn remember(&mut self, group: u64, why: &str) {
        if self.ended.len() == REMEMBERED {
            self.ended.pop_front();
        }
        self.ended.push_back((group, why.to_owned()));
    }
}

pub(super) fn aborted(group: u64, why: &str) -> WorkerFault {
    WorkerFault { code: WorkerFaultCode::Aborted, message: format!("group {group} was aborted: {why}") }
}

impl Server {
    pub(super) fn unique_id(&mut self, id: u64) {
        let Some(gpu) = self.gpu.as_ref() else { return };
        let made = gpu.nccl.as_ref().map_err(Clone::clone).and_then(|nccl| nccl.unique_id());
        self.answer(id, made.map(|id| WorkerAnswer::UniqueId { id }).map_err(|error| error.fault()));
    }

    /// Answers an abort when it is done; one that was done before is no error.
    pub(super) fn abort(&mut self, id: u64, group: u64) {
        self.fail_group(group, "it was asked for");
        let waits = self.gpu.as_mut().and_then(|gpu| gpu.groups.aborting.iter_mut().rev().find(|(aborting, _)| *aborting == group));
        match waits {
            Some((_, waiting)) => waiting.push(id),
            None => self.answer(id, Ok(WorkerAnswer::Done)),
        }
    }

    /// Ends a group: what is under way in it fails with `why`, and its communicator is aborted aside. Nothing when there is none.
    pub(super) fn fail_group(&mut self, group: u64, why: &str) {
        let Some(gpu) = self.gpu.as_mut() else { return };
        let fault = aborted(group, why);
        let mut communicators = Vec::new();
        let mut streams = Vec::new();
        if let Some(ready) = gpu.groups.ready.remove(&group) {
            communicators.push(ready.communicator);
            streams.push(ready.stream);
        }
        let joining = gpu.groups.joining.iter().position(|joining| joining.group == group);
        let joining = joining.map(|at| gpu.groups.joining.swap_remove(at));
        if let Some(joining) = joining {
            let id = joining.id;
            self.give_up_joining(joining);
            self.answer(id, Err(fault.clone()));
        }
        if communicators.is_empty() {
            return;
        }
        if let Some(gpu) = self.gpu.as_mut() {
            gpu.groups.remember(group, why);
        }
        self.fail_works(group, &fault);
        self.abort_aside(group, communicators, streams);
    }

    /// Aborts communicators in a thread of its own, then lets their streams go.
    pub(super) fn abort_aside(&mut self, group: u64, communicators: Vec<Communicator>, streams: Vec<Stream>) {
        let Some(gpu) = self.gpu.as_mut() else { return };
        gpu.groups.aborting.push((group, Vec::new()));
        let abort = move |_: &_| {
            let results: Vec<_> = communicators.into_iter().map(Communicator::abort).collect();
            drop(streams);
            results.into_iter().collect::<Result<(), GpuError>>()
        };
        self.aside(abort, move |server, done| {
            if let Err(error) = &done {
                let _ = writeln!(std::io::stderr(), "group {group} could not be aborted as it should: {error}");
            }
            let Some(gpu) = server.gpu.as_mut() else { return };
            let at = gpu.groups.aborting.iter().position(|(aborting, _)| *aborting == group);
            let waiting = at.map(|at| gpu.groups.aborting.remove(at).1).unwrap_or_default();
            for id in waiting {
                server.answer(id, done.clone().map(|()| WorkerAnswer::Done).map_err(|error| error.fault()));
            }
        });
    }
}

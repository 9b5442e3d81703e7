//! The communicator of one epoch, as one member sees it: its ranks, their rings, and whether it can still be used. A member without a rank, on
//! the source's GPU, has the source's ring instead, opened by CUDA IPC. In an epoch of reads through NIXL no member has a rank: there this is a
//! member's GPUs and rings.
//!
//! A collective that one rank left in the middle can never be finished, so the first trouble ends the communicator for good: it is aborted
//! (never destroyed, which is a rendezvous) on every GPU of this member at once. The workers and their rings stay warm for the next epoch.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::borrow::Borrowed;
use super::staging::Staging;
use weightsync_core::protocol::worker::{NcclId, WorkerFaultCode};
use weightsync_core::protocol::{EpochId, MemberName, StreamFailure};
use weightsync_gpu::worker::{Joined, Ring, Worker, WorkerError};

/// An abort may take this long; no one waits for it.
const ABORT: Duration = Duration::from_secs(20);

/// A GPU of this member with the ring that buckets land in.
#[derive(Clone)]
#[allow(missing_docs)]
pub struct LocalRank {
    pub worker: Worker,
    pub ring: Ring,
    pub staging: Staging,
}

#[allow(missing_docs)]
pub struct Joining {
    pub epoch: EpochId,
    pub me: MemberName,
    pub id: NcclId,
    /// First rank of this member.
    pub first: u32,
    pub world: u32,
    /// Its GPUs, in the order of their ranks.
    pub locals: Vec<LocalRank>,
    pub within: Duration,
}

/// How a member gets the bytes.
enum Way {
    /// It has ranks, from this one on.
    Ranks(u32),
    /// It copies them from the source's ring, on the same GPU.
    Borrowed(Borrowed),
    /// It reads them from the memory of the member before it.
    Reads,
}

/// A communicator that was joined and proven.
pub struct Communicator {
    epoch: EpochId,
    me: MemberName,
    way: Way,
    locals: Vec<LocalRank>,
    /// Why it cannot be used any more.
    broken: watch::Sender<Option<StreamFailure>>,
    /// One stream at a time: every rank must see the same broadcasts in the same order.
    stream: Arc<tokio::sync::Mutex<()>>,
    borrowers: OnceLock<Vec<MemberName>>,
}

impl Communicator {
    /// Joins with all GPUs of this member at once, and proves it with one element. When it fails nothing is left of it.
    pub(super) async fn join(joining: Joining) -> Result<(Arc<Self>, Joined), WorkerError> {
        let Joining { epoch, me, id, first, world, locals, within } = joining;
        let mut joins = JoinSet::new();
        for (rank, local) in (first..).zip(&locals) {
            let (worker, group) = (local.worker.clone(), epoch.epoch);
            joins.spawn(async move { worker.join(group, id, rank, world, within).await });
        }
        let mut slowest: Option<Joined> = None;
        let mut failed: Option<WorkerError> = None;
        while let Some(joined) = joins.join_next().await {
            match joined {
                Ok(Ok(joined)) if slowest.is_some_and(|slowest| slowest.init >= joined.init) => {}
                Ok(Ok(joined)) => slowest = Some(joined),
                // A worker that is gone says more than one that waited for it in vain.
                Ok(Err(error)) if failed.is_none() || matches!(error, WorkerError::Gone { .. }) => failed = Some(error),
                Ok(Err(_)) => {}
                Err(ended) => failed = Some(WorkerError::Gone { cause: ended.to_string() }),
            }
        }
        let communicator = Self::with(epoch, me, Way::Ranks(first), locals);
        match (failed, slowest) {
            // Dropped here: aborted on the GPUs that did join.
            (Some(error), _) => Err(error),
            (None, Some(joined)) => Ok((Arc::new(communicator), joined)),
            (None, None) => Err(WorkerError::Gone { cause: "no GPU worker joined".into() }),
        }
    }

    /// For a member without a rank, whose worker opened the source's ring.
    pub fn borrowed(epoch: EpochId, me: MemberName, local: LocalRank, borrowed: Borrowed) -> Arc<Self> {
        Arc::new(Self::with(epoch, me, Way::Borrowed(borrowed), vec![local]))
    }

    /// For an epoch whose members read from each other.
    pub(crate) fn of_reads(epoch: EpochId, me: MemberName, locals: Vec<LocalRank>) -> Arc<Self> {
        Arc::new(Self::with(epoch, me, Way::Reads, locals))
    }

    fn with(epoch: EpochId, me: MemberName, way: Way, locals: Vec<LocalRank>) -> Self {
        Self { epoch, me, way, locals, broken: watch::Sender::new(None), stream: Arc::default(), borrowers: OnceLock::new() }
    }

    pub(crate) fn epoch(&self) -> &EpochId {
        &self.epoch
    }

    pub(crate) fn me(&self) -> &MemberName {
        &self.me
    }

    /// First rank of this member.
    pub fn rank(&self) -> u32 {
        match self.way {
            Way::Ranks(first) => first,
            Way::Borrowed(_) | Way::Reads => 0,
        }
    }

    /// Whether its members take part in broadcasts: then a stream that stops in the middle ends it.
    fn is_collective(&self) -> bool {
        matches!(self.way, Way::Ranks(_))
    }

    /// The source's ring, where this member has no rank and copies from there.
    pub(super) fn lender(&self) -> Option<&Borrowed> {
        match &self.way {
            Way::Ranks(_) | Way::Reads => None,
            Way::Borrowed(borrowed) => Some(borrowed),
        }
    }

    /// Notes who opened this member's ring. Once, before the first stream.
    pub fn lent_to(&self, members: Vec<MemberName>) {
        let _first = self.borrowers.set(members);
    }

    /// Who opened this member's ring.
    pub fn borrowers(&self) -> &[MemberName] {
        self.borrowers.get().map(Vec::as_slice).unwrap_or_default()
    }

    /// Number of the group at the workers.
    pub(super) fn group(&self) -> u64 {
        self.epoch.epoch
    }

    /// The GPUs of this member.
    pub fn locals(&self) -> &[LocalRank] {
        &self.locals
    }

    /// Bytes of a slot: the longest piece that is broadcast at once.
    pub(super) fn slot_bytes(&self) -> u64 {
        self.locals.iter().map(|local| local.ring.slot_bytes()).min().unwrap_or(0)
    }

    /// Takes the only stream; none while another one runs. Copies disturb no one: there one that is ending does not hold up the next.
    pub(super) fn stream(&self) -> Option<tokio::sync::OwnedMutexGuard<()>> {
        let stream = if self.is_collective() { self.stream.clone() } else { Arc::default() };
        stream.try_lock_owned().ok()
    }

    pub(super) fn broken(&self) -> Option<StreamFailure> {
        self.broken.borrow().clone()
    }

    /// Waits until it cannot be used any more.
    pub async fn breaks(&self) -> StreamFailure {
        let mut broken = self.broken.subscribe();
        let failure = broken.wait_for(Option::is_some).await.ok().and_then(|broken| broken.clone());
        failure.unwrap_or(StreamFailure::Cancelled)
    }

    /// Ends it: aborted on all GPUs at once, whatever is under way. The first reason stays.
    pub fn break_off(&self, failure: StreamFailure) {
        let first = self.broken.send_if_modified(|broken| {
            let first = broken.is_none();
            broken.get_or_insert(failure);
            first
        });
        if first {
            self.abort();
        }
    }

    /// A stream ended in the middle: ranks may be in different broadcasts. Copies leave nothing that a later stream could meet.
    pub(super) fn stream_failed(&self, failure: StreamFailure) {
        if self.is_collective() {
            self.break_off(failure);
        }
    }

    fn abort(&self) {
        if !self.is_collective() {
            return;
        }
        for local in &self.locals {
            // Asked for before it returns; the answer is not needed, also not before the next join.
            drop(local.worker.abort(self.group(), ABORT));
        }
    }

    /// A failure of one of our workers, in the terms of the chain. `None`: the chain will name the member at fault, or no member is.
    pub(super) fn blame(&self, error: &WorkerError) -> Option<StreamFailure> {
        let mine = || StreamFailure::Lost { peer: self.me.clone(), cause: error.to_string() };
        match error {
            WorkerError::Fault { fault, .. } => match fault.code {
                WorkerFaultCode::Late | WorkerFaultCode::Aborted | WorkerFaultCode::Nccl => None,
                _ => Some(mine()),
            },
            // The holder of the slots reports it: broadcasts that others have not entered hold a leader's.
            WorkerError::NoSlot { .. } => None,
            WorkerError::Start { .. } | WorkerError::Gone { .. } | WorkerError::Nonsense { .. } => Some(mine()),
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.broken.borrow().is_none() {
            self.abort();
        }
    }
}

/// How long a broadcast may take before its worker gives up, and how long after that those who live wait for others to be named: a worker
/// that hangs is found by its own agent a second after its deadline, and only that agent can name it.
pub(super) fn patience(silence: Duration) -> (Duration, Duration) {
    let grace = weightsync_gpu::worker::GRACE + Duration::from_millis(400);
    let within = (silence / 2).max(silence.saturating_sub(grace));
    (within, grace)
}

/// Where the communicator of the present epoch is kept.
#[derive(Default)]
pub(super) struct Present(Mutex<Option<Arc<Communicator>>>);

impl Present {
    pub(super) fn of(&self, epoch: &EpochId) -> Option<Arc<Communicator>> {
        let present = self.0.lock();
        present.clone().filter(|communicator| communicator.epoch() == epoch)
    }

    /// Ends what copies from another member's memory.
    pub(super) fn give_back(&self) {
        let borrowed = self.0.lock().as_ref().is_some_and(|present| present.lender().is_some());
        if borrowed {
            self.set(None);
        }
    }

    /// Replaces what was there, which is aborted.
    pub(super) fn set(&self, communicator: Option<Arc<Communicator>>) {
        let before = std::mem::replace(&mut *self.0.lock(), communicator);
        if let Some(before) = before {
            before.break_off(StreamFailure::Cancelled);
        }
    }

    pub(super) fn end(&self, epoch: &EpochId) {
        if self.of(epoch).is_some() {
            self.set(None);
        }
    }
}

//! The agent's handle of a worker: one async method a request.
//!
//! It never retries, never restarts, and decides nothing about groups. Dropping the last handle, ring, slot and resource ends the worker.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::asks::{Broadcast, Copy, Joined, Sums};
use super::held::{Event, Held, HostMemory, ImportedMemory, Resource, Span};
use super::pending::Pending;
use super::process::{self, Network, WorkerStart};
use super::ring::Ring;
use super::wire::{self, Outgoing};
use super::{GRACE, WorkerError};
use weightsync_core::protocol::worker::{
    GpuFacts, IpcHandle, NcclFacts, NcclId, Part, Proof, WorkerAnswer, WorkerCall, WorkerRequest, WorkerResource, encode_worker_frame,
};

/// Giving something up may take this long: memory is unmapped and unregistered.
const RELEASE: Duration = Duration::from_secs(60);

/// A worker process and what is under way in it. Clones share it.
#[derive(Clone)]
pub struct Worker {
    shared: Arc<Shared>,
    /// Cancelled with the last clone; resources and slots that are still held keep one.
    _life: Arc<Life>,
}

struct Life(CancellationToken);

impl Drop for Life {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

struct Shared {
    pending: Pending,
    outbox: mpsc::UnboundedSender<Outgoing>,
    kill: CancellationToken,
    ended: CancellationToken,
    lost: CancellationToken,
    gpu: OnceLock<String>,
    network: Arc<Network>,
}

impl Worker {
    /// Starts a worker. It has no GPU before [`open`](Self::open). Must be called on a tokio runtime.
    pub fn start(start: &WorkerStart) -> Result<Self, WorkerError> {
        let (child, socket) = start.spawn()?;
        let socket = UnixStream::from_std(socket).map_err(|error| WorkerError::Start { cause: error.to_string() })?;
        let (read, write) = socket.into_split();
        let (outbox, frames) = mpsc::unbounded_channel();
        let (kill, ended, closed) = (CancellationToken::new(), CancellationToken::new(), CancellationToken::new());
        let (pending, gpu) = (Pending::default(), OnceLock::new());
        let network = Network::new(start);
        let shared = Arc::new(Shared { pending, outbox, kill: kill.clone(), ended, lost: closed.clone(), gpu, network: network.clone() });
        tokio::spawn(wire::write(frames, write));
        let (book, shut) = (Arc::clone(&shared), closed.clone());
        tokio::spawn(async move {
            let why = wire::read(read, |reply| book.pending.answer(reply)).await;
            tracing::debug!(%why, "no more answers of a GPU worker");
            shut.cancel();
        });
        let (book, label, stop) = (Arc::clone(&shared), start.label.clone(), kill.clone());
        tokio::spawn(async move {
            process::supervise(child, (&label, network), &book.pending, stop, closed).await;
            tracing::debug!(worker = %label, cause = ?book.pending.cause(), "a GPU worker ended");
            book.ended.cancel();
        });
        Ok(Self { shared, _life: Arc::new(Life(kill)) })
    }

    /// Whether both are handles of the same process.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Kills it (SIGKILL). Everything under way fails with `why`.
    pub fn kill(&self, why: &str) {
        self.shared.pending.gone(&format!("killed: {why}"));
        self.shared.kill.cancel();
    }

    /// UUID of its GPU (`GPU-...`); empty before [`open`](Self::open).
    pub fn gpu(&self) -> &str {
        self.shared.gpu.get().map(String::as_str).unwrap_or_default()
    }

    /// Returns how it ended, when it did.
    pub async fn ended(&self) -> String {
        self.shared.ended.cancelled().await;
        self.shared.pending.cause().unwrap_or_default()
    }

    /// Whether it ended, or was killed.
    pub fn has_ended(&self) -> bool {
        self.shared.ended.is_cancelled() || self.shared.kill.is_cancelled()
    }

    /// Returns when its socket closed. That is earlier than [`ended`](Self::ended): a process with a GPU takes 80 ms and more to die.
    pub async fn lost(&self) {
        self.shared.lost.cancelled().await;
    }

    /// How it ended, if it did.
    pub fn cause(&self) -> Option<String> {
        self.shared.pending.cause()
    }

    /// Which GPUs and which NCCL are here: always a [`WorkerAnswer::Devices`]. Makes no context on any GPU.
    pub async fn devices(&self, nccl: Option<&Path>, within: Duration) -> Result<WorkerAnswer, WorkerError> {
        self.ask("list devices", WorkerRequest::Devices { nccl: nccl.map(Path::to_owned) }, within, Vec::new(), None).await
    }

    /// Takes a GPU by UUID, or the only visible one, and loads NCCL, whose absence is no error. Once in a worker's life.
    /// Gives the worker's pid, its GPU, and its NCCL or why there is none.
    pub async fn open(
        &self,
        gpu: Option<&str>,
        nccl: Option<&Path>,
        within: Duration,
    ) -> Result<(u32, GpuFacts, Result<NcclFacts, String>), WorkerError> {
        let what = "open its GPU";
        let request = WorkerRequest::Open { gpu: gpu.map(str::to_owned), nccl: nccl.map(Path::to_owned) };
        match self.ask(what, request, within, Vec::new(), None).await? {
            WorkerAnswer::Opened { pid, gpu, nccl } => {
                // A worker opens one GPU in its life.
                let _first = self.shared.gpu.set(gpu.uuid.clone());
                Ok((pid, gpu, nccl))
            }
            _ => Err(WorkerError::Nonsense { what }),
        }
    }

    /// Allocates a ring.
    pub async fn ring(&self, slots: u32, slot_bytes: u64, within: Duration) -> Result<Ring, WorkerError> {
        let what = "allocate a ring";
        match self.ask(what, WorkerRequest::Ring { slots, slot_bytes }, within, Vec::new(), None).await? {
            WorkerAnswer::Ring { ring, handle, .. } => {
                let resource = Resource::new(self, WorkerResource::Ring(ring));
                Ok(Ring::new(self.clone(), ring, slots, slot_bytes, handle, resource))
            }
            _ => Err(WorkerError::Nonsense { what }),
        }
    }

    /// Maps a sealed memfd in the worker, and registers it with the driver where a GPU is open.
    pub async fn map_host(&self, memfd: impl AsFd, bytes: u64, within: Duration) -> Result<HostMemory, WorkerError> {
        let what = "map host memory";
        let memfd = memfd.as_fd().try_clone_to_owned();
        let memfd = memfd.map_err(|error| WorkerError::Start { cause: format!("a descriptor cannot be passed on: {error}") })?;
        match self.ask(what, WorkerRequest::MapHost { bytes }, within, Vec::new(), Some(memfd)).await? {
            WorkerAnswer::Host { host, unpinned } => {
                let resource = Resource::new(self, WorkerResource::Host(host));
                Ok(HostMemory { number: host, unpinned: unpinned.map(Into::into), resource })
            }
            _ => Err(WorkerError::Nonsense { what }),
        }
    }

    /// Opens another process's allocation on the same GPU, which must have at least `bytes`.
    pub async fn import(&self, handle: &IpcHandle, bytes: u64, within: Duration) -> Result<ImportedMemory, WorkerError> {
        let what = "open another process's GPU memory";
        match self.ask(what, WorkerRequest::Import { handle: *handle, bytes }, within, Vec::new(), None).await? {
            WorkerAnswer::Memory { memory, bytes } => {
                let resource = Resource::new(self, WorkerResource::Memory(memory));
                Ok(ImportedMemory { number: memory, bytes, resource })
            }
            _ => Err(WorkerError::Nonsense { what }),
        }
    }

    /// Opens another process's event.
    pub async fn import_event(&self, handle: &IpcHandle, within: Duration) -> Result<Event, WorkerError> {
        self.event("open another process's event", WorkerRequest::ImportEvent { handle: *handle }, within).await
    }

    /// Makes an event that other processes can open.
    pub async fn new_event(&self, within: Duration) -> Result<Event, WorkerError> {
        self.event("make an event", WorkerRequest::NewEvent, within).await
    }

    async fn event(&self, what: &'static str, request: WorkerRequest, within: Duration) -> Result<Event, WorkerError> {
        match self.ask(what, request, within, Vec::new(), None).await? {
            WorkerAnswer::Event { event, handle } => {
                Ok(Event { number: event, handle, resource: Resource::new(self, WorkerResource::Event(event)) })
            }
            _ => Err(WorkerError::Nonsense { what }),
        }
    }

    /// Makes the id of a new group: rank 0's job.
    pub async fn unique_id(&self, within: Duration) -> Result<NcclId, WorkerError> {
        let what = "make the id of a group";
        match self.ask(what, WorkerRequest::UniqueId, within, Vec::new(), None).await? {
            WorkerAnswer::UniqueId { id } => Ok(id),
            _ => Err(WorkerError::Nonsense { what }),
        }
    }

    /// Joins a group and proves it with a broadcast of one element. When it fails the communicator is aborted already.
    pub async fn join(&self, group: u64, id: NcclId, rank: u32, world: u32, within: Duration) -> Result<Joined, WorkerError> {
        self.join_as(group, id, (rank, world), Proof::Broadcast, within).await
    }

    /// Joins a group whose other ranks are not workers of ours: `place` is rank and number of ranks, `proof` what all of them enter first.
    pub async fn join_as(&self, group: u64, id: NcclId, place: (u32, u32), proof: Proof, within: Duration) -> Result<Joined, WorkerError> {
        let (rank, world) = place;
        self.joined("join a group", WorkerRequest::Join { group, id, rank, world, proof }, within).await
    }

    /// Makes a new group of a group's survivors. When it fails both communicators are aborted already.
    pub async fn shrink(&self, group: u64, into: u64, without: Vec<u32>, revoke: bool, within: Duration) -> Result<Joined, WorkerError> {
        self.joined("shrink a group", WorkerRequest::Shrink { group, into, without, revoke }, within).await
    }

    /// Why broadcasts of a group that it joined pass TCP sockets between hosts, as NCCL's log says. None where they do not, where the log was not
    /// [asked for](WorkerStart::with_nccl_log), or where it is not read so far in time.
    pub async fn over_sockets(&self, group: u64, within: Duration) -> Option<String> {
        self.shared.network.over_sockets(group, within).await
    }

    async fn joined(&self, what: &'static str, request: WorkerRequest, within: Duration) -> Result<Joined, WorkerError> {
        self.shared.network.begins();
        match self.ask(what, request, within, Vec::new(), None).await? {
            WorkerAnswer::Joined { rank, world, init_ms, warm_up_ms } => {
                Ok(Joined { rank, world, init: milliseconds(init_ms), warm_up: milliseconds(warm_up_ms) })
            }
            _ => Err(WorkerError::Nonsense { what }),
        }
    }

    /// Takes part in a broadcast; returns when the bytes are there and digested. Requests go out in the order in which these futures are
    /// first polled: use [`broadcast_now`](Self::broadcast_now) to fix the order at the call. A failed broadcast aborted its group.
    pub async fn broadcast(&self, broadcast: Broadcast, within: Duration) -> Result<Sums, WorkerError> {
        self.broadcast_now(broadcast, within).await
    }

    /// As [`broadcast`](Self::broadcast), but asked for before this returns.
    pub fn broadcast_now(&self, broadcast: Broadcast, within: Duration) -> impl Future<Output = Result<Sums, WorkerError>> + Send + use<> {
        let Broadcast { group, root, at, bytes, parts, after } = broadcast;
        let (place, mut held) = (at.place, vec![at.held]);
        let after = after.map(|event| hold(&event, &mut held));
        let what = "broadcast";
        let answer = self.ask(what, WorkerRequest::Broadcast { group, root, at: place, bytes, parts, after }, within, held, None);
        async move { sums(what, answer.await?) }
    }

    /// Digests parts of GPU memory; offsets count from `at`.
    pub async fn digest(&self, at: Span, parts: Vec<Part>, after: Option<Event>, within: Duration) -> Result<Sums, WorkerError> {
        let (place, mut held) = (at.place, vec![at.held]);
        let after = after.map(|event| hold(&event, &mut held));
        let what = "digest";
        sums(what, self.ask(what, WorkerRequest::Digest { at: place, parts, after }, within, held, None).await?)
    }

    /// Copies; returns when the bytes are there.
    pub async fn copy(&self, copy: Copy, within: Duration) -> Result<(), WorkerError> {
        self.copy_now(copy, within).await
    }

    /// As [`copy`](Self::copy), but asked for before this returns.
    pub fn copy_now(&self, copy: Copy, within: Duration) -> impl Future<Output = Result<(), WorkerError>> + Send + use<> {
        let Copy { from, to, bytes, after, then } = copy;
        let (source, target, mut held) = (from.place, to.place, vec![from.held, to.held]);
        let after = after.map(|event| hold(&event, &mut held));
        let then = then.map(|event| hold(&event, &mut held));
        let what = "copy";
        let answer = self.ask(what, WorkerRequest::Copy { from: source, to: target, bytes, after, then }, within, held, None);
        async move { done(what, answer.await?) }
    }

    /// Aborts a group; requests under way in it fail first. No error when it was aborted before. Asked for before this returns, and no
    /// need to wait for it before the next [`join`](Self::join).
    pub fn abort(&self, group: u64, within: Duration) -> impl Future<Output = Result<(), WorkerError>> + Send + use<> {
        let what = "abort a group";
        let answer = self.ask(what, WorkerRequest::Abort { group }, within, Vec::new(), None);
        async move { done(what, answer.await?) }
    }

    /// What the worker holds: always a [`WorkerAnswer::Stats`].
    pub async fn stats(&self, within: Duration) -> Result<WorkerAnswer, WorkerError> {
        self.ask("count what it holds", WorkerRequest::Stats, within, Vec::new(), None).await
    }

    /// Gives something up without waiting.
    pub(super) fn release(&self, what: WorkerResource) {
        self.shared.release(what);
    }

    /// Sends a request at once; the future waits for its answer. The deadline holds also when no one waits.
    pub(super) fn ask(
        &self,
        what: &'static str,
        request: WorkerRequest,
        within: Duration,
        held: Vec<Held>,
        descriptor: Option<OwnedFd>,
    ) -> impl Future<Output = Result<WorkerAnswer, WorkerError>> + Send + use<> {
        let waiting = self.shared.send(what, request, within, held, descriptor);
        // Keeps the worker alive while its answer is waited for.
        let worker = self.clone();
        async move {
            let answer = waiting?.await;
            drop(worker);
            answer.unwrap_or_else(|_| Err(WorkerError::Gone { cause: "its supervisor ended".into() }))
        }
    }
}

type Waiting = oneshot::Receiver<Result<WorkerAnswer, WorkerError>>;

impl Shared {
    fn send(
        &self,
        what: &'static str,
        request: WorkerRequest,
        within: Duration,
        held: Vec<Held>,
        descriptor: Option<OwnedFd>,
    ) -> Result<Waiting, WorkerError> {
        let (answer, waiting) = oneshot::channel();
        let id = self.pending.enter(what, within, held, answer)?;
        let within_ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
        match encode_worker_frame(&WorkerCall { id, within_ms, request }) {
            // A closed channel means that the worker is gone; its supervisor says so to everything that is entered.
            Ok(frame) => drop(self.outbox.send(Outgoing { frame, descriptor })),
            Err(error) => self.pending.refuse(id, &error.to_string()),
        }
        Ok(waiting)
    }

    fn release(&self, what: WorkerResource) {
        // An error means that the worker is gone, and everything of it.
        let _ = self.send("release something", WorkerRequest::Release { what }, RELEASE.max(GRACE), Vec::new(), None);
    }
}

fn hold(event: &Event, held: &mut Vec<Held>) -> u64 {
    held.push(event.held());
    event.number
}

fn sums(what: &'static str, answer: WorkerAnswer) -> Result<Sums, WorkerError> {
    match answer {
        WorkerAnswer::Sums { sums, ms } => Ok(Sums { sums, took: milliseconds(ms) }),
        _ => Err(WorkerError::Nonsense { what }),
    }
}

pub(super) fn done(what: &'static str, answer: WorkerAnswer) -> Result<(), WorkerError> {
    match answer {
        WorkerAnswer::Done => Ok(()),
        _ => Err(WorkerError::Nonsense { what }),
    }
}

fn milliseconds(ms: f64) -> Duration {
    Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default()
}

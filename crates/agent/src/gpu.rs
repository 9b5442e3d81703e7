//! The GPUs of one endpoint: a worker on each, started, opened, and started again when it ends; and the communicator of its epoch.
//!
//! Decides which of the visible GPUs belong to the endpoint, and what is reported of them. It never decides whether a group uses them: that is
//! membership's, by what `Gpus::report` says.

mod alongside;
mod lending;
mod state;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use self::state::{GpuState, Open};
use super::client::SourceWorker;
use super::core::Core;
use super::fabric::devices;
use super::group::{Epoch, refusal};
use super::locks::lock;
use super::rdma;
use weightsync_core::plan::RingWish;
use weightsync_core::protocol::worker::{NcclId, UcxSettings, WorkerAnswer};
use weightsync_core::protocol::{
    CommunicatorPlan, GpuReport, JoinResponse, MemberGpu, MemberName, Refusal, RefusalCode, Roster, StreamFailure, TransportPolicy,
    TransportWish,
};
use weightsync_gpu::worker::{GRACE, Ring, Worker, WorkerError, WorkerStart};
use weightsync_transport::nccl::{Joining, LocalRank, NcclTransport, Staging};

/// NCCL's log is read up to the join within this long: it lies in a pipe.
const LOG: Duration = Duration::from_secs(2);

/// Buckets that memory is pinned for before the first version at most.
const MOST_BUCKETS: u64 = 1 << 16;

/// Questions to a worker that costs nothing but its time.
const ASK: Duration = Duration::from_secs(2);

/// Which GPUs an endpoint uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum GpuChoice {
    /// Those that are visible: a trainer's first one; of a pod with several engines, each engine its share, in the order of its ports.
    #[default]
    Auto,
    /// None: the endpoint takes part over TCP only.
    None,
    /// These, by UUID, in the order of the engine's ranks.
    These(Vec<String>),
}

impl std::str::FromStr for GpuChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "" | "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            list => {
                let gpus: Vec<String> = list.split(',').map(|gpu| gpu.trim().to_owned()).collect();
                match gpus.iter().find(|gpu| !gpu.starts_with("GPU-")) {
                    Some(wrong) => Err(format!("\"{wrong}\" is not auto, none or a GPU's UUID (GPU-...: `nvidia-smi -L`)")),
                    None => Ok(Self::These(gpus)),
                }
            }
        }
    }
}

/// How workers are started.
#[derive(Debug, Clone, Default)]
pub struct GpuSettings {
    /// Which GPUs.
    pub choice: GpuChoice,
    /// NCCL's library, where it is not to be looked for.
    pub nccl: Option<PathBuf>,
    /// The program and arguments of a worker; this program's own if not given.
    pub worker: Option<WorkerStart>,
    /// Whether the engine or trainer runs below this agent (`weightsync run`), and so in its container.
    pub child: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Wanted {
    /// NCCL's settings by the object; workers start with them.
    environment: BTreeMap<String, String>,
    /// What holds where neither the object nor our environment has it.
    defaults: BTreeMap<String, String>,
    /// Ranks of the engine; 0 before the first group.
    ranks: usize,
    /// Slots and bytes of a slot, as the object says; what is 0 is chosen.
    ring: (u32, u64),
    /// What UCX may use, where NIXL is to be opened.
    ucx: Option<UcxSettings>,
    /// RDMA devices that NCCL must use between hosts; empty where it may pass TCP sockets.
    rdma: Vec<String>,
}

/// What workers start with: others are started where it changes. The last is whether NCCL's log is read.
#[derive(PartialEq, Eq)]
struct StartedWith(BTreeMap<String, String>, BTreeMap<String, String>, Option<UcxSettings>, bool);

impl Wanted {
    fn by(policy: &TransportPolicy, devices: &[String], ranks: usize) -> Self {
        let ring = (policy.slots, policy.slot_bytes);
        let ucx = devices::wanted(policy, devices);
        let broadcasts = matches!(policy.wish, TransportWish::Auto | TransportWish::Nccl) && !policy.allow_tcp;
        let rdma = if broadcasts { rdma::usable(Path::new("/")) } else { Vec::new() };
        Self { environment: policy.environment.clone(), defaults: policy.defaults.clone(), ranks, ring, ucx, rdma }
    }

    fn start(&self) -> StartedWith {
        StartedWith(self.environment.clone(), self.defaults.clone(), self.ucx.clone(), !self.rdma.is_empty())
    }
}

/// Which part of the visible GPUs is an endpoint's: its number among the endpoints of the pod, and how many there are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Share {
    /// From 0.
    pub number: usize,
    /// At least 1.
    pub of: usize,
}

pub(crate) struct Gpus {
    core: Arc<Core>,
    settings: GpuSettings,
    /// RDMA devices that UCX may use, as in [`FabricSettings`](super::fabric::FabricSettings).
    devices: Vec<String>,
    share: Share,
    transport: Arc<NcclTransport>,
    state: watch::Sender<GpuState>,
    wanted: watch::Sender<Wanted>,
    /// What the trainer's socket is reported, where there is one.
    source: Option<watch::Sender<Result<SourceWorker, String>>>,
    rings: Mutex<Vec<Ring>>,
    /// Why NCCL passes TCP sockets between hosts with the present settings although there is an RDMA device.
    over_sockets: Mutex<Option<String>>,
}

impl Gpus {
    /// Nothing is started before [`supervise`](Self::supervise) runs. Workers start with the settings of `policy`.
    pub fn new(
        core: Arc<Core>,
        settings: GpuSettings,
        devices: Vec<String>,
        share: Share,
        policy: &TransportPolicy,
        transport: Arc<NcclTransport>,
        source: Option<watch::Sender<Result<SourceWorker, String>>>,
    ) -> Arc<Self> {
        let (state, wanted) = (watch::Sender::new(GpuState::Starting), watch::Sender::new(Wanted::by(policy, &devices, 0)));
        Arc::new(Self {
            core,
            settings,
            devices,
            share,
            transport,
            state,
            wanted,
            source,
            rings: Mutex::default(),
            over_sockets: Mutex::default(),
        })
    }

    pub fn transport(&self) -> &Arc<NcclTransport> {
        &self.transport
    }

    /// What NCCL is reported by its environment (workers that were started with something else are started again), and how many ranks the
    /// engine has: so many GPUs at most are taken of those that are visible.
    pub fn configure(&self, policy: &TransportPolicy, ranks: u32) {
        let wanted = Wanted::by(policy, &self.devices, usize::try_from(ranks).unwrap_or(usize::MAX));
        // GpuState say that workers start before anybody can see what they are to start with: a report must not take the old ones for the new.
        // No one starts workers for an agent that was asked to use no GPU: they would be waited for in vain at every epoch.
        let none = self.settings.choice == GpuChoice::None;
        self.wanted.send_if_modified(|now| {
            let differs = *now != wanted;
            if differs {
                *now = wanted;
                *lock(&self.over_sockets) = None;
            }
            if differs && !none {
                self.state.send_if_modified(|state| {
                    let open = matches!(state, GpuState::Open(_));
                    *state = GpuState::Starting;
                    open
                });
            }
            differs
        });
    }

    /// The worker on the first GPU, with its memory on the host; none while there is none.
    pub fn first(&self) -> Option<(Worker, Staging)> {
        let state = self.state.borrow();
        let open = state.open().first()?;
        Some((open.worker.clone(), open.staging.clone()))
    }

    /// The workers of all GPUs that are open, in the order of the engine's ranks.
    pub fn workers(&self) -> Vec<Worker> {
        self.state.borrow().open().iter().map(|entry| entry.worker.clone()).collect()
    }

    /// The same, each with the devices that UCX got at its start; waits up to `within` for workers that are starting.
    pub async fn settled_workers(&self, within: Duration) -> Vec<(Worker, Vec<String>)> {
        let state = self.settled(within).await;
        let of = |entry: &Open| (entry.worker.clone(), entry.devices.clone());
        state.map(|state| state.open().iter().map(of).collect()).unwrap_or_default()
    }

    /// Where the GPUs stand when none of their workers is starting any more; none where that takes longer than `within`.
    async fn settled(&self, within: Duration) -> Option<GpuState> {
        let mut state = self.state.subscribe();
        let settled = timeout(within, state.wait_for(|state| !matches!(state, GpuState::Starting))).await;
        settled.ok()?.ok().map(|state| state.clone())
    }

    /// What is reported of the GPUs when an epoch is prepared; waits up to `within` for workers that are starting.
    pub async fn report(&self, within: Duration) -> GpuReport {
        self.transport.give_back();
        let open = match self.settled(within).await {
            None => return GpuReport { reason: format!("its GPU worker is not up within {within:?}"), ..GpuReport::default() },
            Some(GpuState::Starting) => return GpuReport { reason: "its GPU worker is starting".into(), ..GpuReport::default() },
            Some(GpuState::None(reason)) => return GpuReport { reason, ..GpuReport::default() },
            Some(GpuState::Open(open)) => open,
        };
        let mut report = GpuReport::default();
        for entry in &open {
            let free = match entry.worker.stats(ASK).await {
                // What our own ring holds would be free for a ring of another shape.
                Ok(WorkerAnswer::Stats { gpu_free_bytes, ring_bytes, .. }) => gpu_free_bytes.saturating_add(ring_bytes),
                Ok(_) => 0,
                Err(error) => return GpuReport { reason: error.to_string(), ..GpuReport::default() },
            };
            report.gpus.push(MemberGpu {
                uuid: entry.gpu.uuid.clone(),
                name: entry.gpu.name.clone(),
                free_bytes: free,
                memory_bytes: entry.gpu.memory_bytes,
            });
            match &entry.nccl {
                Ok(nccl) => report.nccl = Some(nccl.version),
                Err(why) => return GpuReport { reason: why.clone(), nccl: None, ..report },
            }
        }
        if let Some(reason) = lock(&self.over_sockets).clone() {
            return GpuReport { reason, nccl: None, ..report };
        }
        report.unshared = self.unshared(&open).await;
        report
    }

    pub async fn unique_id(&self, within: Duration) -> Result<NcclId, Refusal> {
        let (worker, _) = self.first().ok_or_else(|| refusal(RefusalCode::Internal, "its GPU worker is gone"))?;
        worker.unique_id(within).await.map_err(|error| refusal(RefusalCode::Internal, error.to_string()))
    }

    /// Joins the communicator of an epoch with all GPUs of this endpoint, and leaves it when the epoch is over.
    pub async fn join(self: &Arc<Self>, epoch: &Arc<Epoch>, id: NcclId, deadline: Instant) -> Result<JoinResponse, Refusal> {
        let internal = |what: String| refusal(RefusalCode::Internal, what);
        let plan = epoch.communicator().ok_or_else(|| internal("this epoch has no communicator".into()))?;
        let (first, gpus) = plan.ranks_of(epoch.me()).ok_or_else(|| internal(format!("{} has no rank", epoch.me())))?;
        let open: Vec<Open> = self.state.borrow().open().to_vec();
        if !open.iter().map(|entry| &entry.gpu.uuid).eq(gpus) {
            return Err(internal(format!("its GPU workers are not those that it prepared with ({})", gpus.join(", "))));
        }
        let locals = self.with_rings(&open, plan.slots, plan.slot_bytes, deadline).await;
        let locals = locals.map_err(|error| internal(error.to_string()))?;
        // A worker that hangs is found a grace after its deadline, and that must be in time as well.
        let within = left(deadline).saturating_sub(GRACE + Duration::from_millis(200)).max(Duration::from_millis(100));
        let joining = Joining { epoch: epoch.id().clone(), me: epoch.me().clone(), id, first, world: plan.world(), locals, within };
        let (communicator, joined) = self.transport.join(joining).await.map_err(|error| {
            // Late or failed in NCCL: somebody else may be at fault.
            let code = if communicator_fault(&error) { RefusalCode::PeerUnreachable } else { RefusalCode::Internal };
            refusal(code, error.to_string())
        })?;
        if let Some(why) = self.passes_sockets(epoch, plan, &open).await {
            self.transport.leave(epoch.id());
            tracing::warn!(epoch = %epoch.id(), why, "left a communicator");
            *lock(&self.over_sockets) = Some(why.clone());
            return Err(refusal(RefusalCode::Unsupported, why));
        }
        let (over, transport, id) = (self.core.over(epoch.id()), self.transport.clone(), epoch.id().clone());
        tokio::spawn(async move {
            tokio::select! {
                () = over.cancelled() => {}
                failure = communicator.breaks() => tracing::info!(epoch = %id, ?failure, "a communicator ended before its epoch"),
            }
            transport.leave(&id);
        });
        tracing::info!(epoch = %epoch.id(), rank = joined.rank, world = joined.world, init = ?joined.init, warm_up = ?joined.warm_up, "joined");
        Ok(JoinResponse { init_ms: joined.init.as_secs_f64() * 1e3, warm_up_ms: joined.warm_up.as_secs_f64() * 1e3 })
    }

    /// Why a communicator that was joined is refused: it passes TCP sockets between hosts where there is an RDMA device.
    async fn passes_sockets(&self, epoch: &Epoch, plan: &CommunicatorPlan, open: &[Open]) -> Option<String> {
        let rdma = self.wanted.borrow().rdma.clone();
        if rdma.is_empty() || on_one_node(&epoch.prepared.roster, plan) {
            return None;
        }
        for entry in open {
            if let Some(why) = entry.worker.over_sockets(epoch.id().epoch, LOG).await {
                return Some(slow(&rdma, &why));
            }
        }
        None
    }

    /// All GPUs of this endpoint, each with a ring of this shape.
    pub async fn rings(&self, slots: u32, slot_bytes: u64, deadline: Instant) -> Result<Vec<LocalRank>, WorkerError> {
        let open: Vec<Open> = self.state.borrow().open().to_vec();
        self.with_rings(&open, slots, slot_bytes, deadline).await
    }

    async fn with_rings(&self, open: &[Open], slots: u32, slot_bytes: u64, deadline: Instant) -> Result<Vec<LocalRank>, WorkerError> {
        let mut locals = Vec::new();
        for entry in open {
            let ring = self.ring_of(entry, slots, slot_bytes, left(deadline)).await?;
            locals.push(LocalRank { worker: entry.worker.clone(), ring, staging: entry.staging.clone() });
        }
        *lock(&self.rings) = locals.iter().map(|local| local.ring.clone()).collect();
        Ok(locals)
    }

    /// The ring of a GPU: the one it has, where that is as wanted.
    async fn ring_of(&self, entry: &Open, slots: u32, slot_bytes: u64, within: Duration) -> Result<Ring, WorkerError> {
        let mut kept = entry.ring.lock().await;
        if let Some(ring) = kept.as_ref().filter(|ring| (ring.slots(), ring.slot_bytes()) == (slots, slot_bytes)) {
            return Ok(ring.clone());
        }
        // Given up first: there may not be room for both.
        lock(&self.rings).clear();
        *kept = None;
        let ring = entry.worker.ring(slots, slot_bytes, within).await?;
        *kept = Some(ring.clone());
        Ok(ring)
    }

    /// A worker ended: its rank is gone, and with it the communicator.
    fn worker_lost(&self, cause: &str) {
        let Some(epoch) = self.core.epoch() else { return };
        let Some(communicator) = self.transport.communicator(epoch.id()) else { return };
        communicator.break_off(StreamFailure::Lost { peer: epoch.me().clone(), cause: cause.to_owned() });
        self.core.peer_lost(epoch.id(), epoch.me(), &format!("its GPU worker ended: {cause}"));
    }

    /// What a trainer's ring is made on, or why it is made in host memory.
    fn source_worker(&self) -> Result<SourceWorker, String> {
        if let Some(epoch) = self.core.epoch().filter(|epoch| epoch.gpu_slot_bytes().is_none() && epoch.engines().is_none()) {
            return Err(format!("the group does not move weights between GPUs ({})", epoch.commit.transport.reason));
        }
        // Before the state are borrowed: `configure` locks what is wanted first, too, and each would wait for the other for ever.
        let (slots, slot_bytes) = self.wanted.borrow().ring;
        let state = self.state.borrow();
        let entry = match &*state {
            GpuState::Starting => return Err("the agent's GPU worker is starting".into()),
            GpuState::None(reason) => return Err(reason.clone()),
            GpuState::Open(open) => open.first().ok_or("the agent has no GPU")?,
        };
        if self.core.epoch().is_none_or(|epoch| epoch.commit.transport.gdr.is_none()) {
            entry.nccl.as_ref().map_err(Clone::clone)?;
        }
        let wish = RingWish::of(slots, slot_bytes);
        let room = (entry.gpu.free_bytes, entry.gpu.memory_bytes);
        let retain = self.core.epoch().map_or(0, |epoch| epoch.prepared.policy.retain_bytes);
        Ok(SourceWorker { worker: entry.worker.clone(), gpu: entry.gpu.uuid.clone(), wish, room, retain })
    }

    /// Lengths of the buckets of a version of so many bytes that a trainer would write into the memory of this source's worker; none where
    /// it would not.
    pub fn expected_buckets(&self, bytes: u64) -> Option<Vec<u64>> {
        let length = self.source_worker().ok()?.bucket_bytes(bytes)?;
        // Buckets are cut between tensors: they are not quite as long, and so one more.
        let count = bytes.div_ceil(length.max(1)).saturating_add(1).min(MOST_BUCKETS);
        Some(vec![length; usize::try_from(count).unwrap_or(0)])
    }

    /// Keeps what the trainer's socket is reported up to date, for ever.
    async fn tell_source(&self) {
        let Some(source) = &self.source else { return std::future::pending().await };
        let (mut standing, mut state, mut wanted) = (self.core.standing(), self.state.subscribe(), self.wanted.subscribe());
        loop {
            standing.borrow_and_update();
            state.borrow_and_update();
            wanted.borrow_and_update();
            drop(source.send_replace(self.source_worker()));
            let changed = tokio::select! {
                changed = standing.changed() => changed,
                changed = state.changed() => changed,
                changed = wanted.changed() => changed,
            };
            if changed.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// What UCX gets in a worker on that GPU, where NIXL is to be opened.
    fn ucx_of(&self, gpu: &str) -> Option<UcxSettings> {
        self.wanted.borrow().ucx.as_ref().map(|ucx| devices::near(ucx, gpu, Path::new("/")))
    }

    fn start_of(&self, label: &str, ucx: Option<&UcxSettings>) -> Result<WorkerStart, WorkerError> {
        let mut start = match &self.settings.worker {
            Some(start) => WorkerStart { label: label.to_owned(), ..start.clone() },
            None => WorkerStart::own(label)?,
        };
        // Multicast over NVLink needs memory and rights that containers often lack; it must be asked for.
        start.environment.push((OsString::from("NCCL_NVLS_ENABLE"), OsString::from("0")));
        let wanted = self.wanted.borrow();
        let given =
            |values: &BTreeMap<String, String>| -> Vec<_> { values.iter().map(|(name, value)| (name.into(), value.into())).collect() };
        start.environment.extend(given(&wanted.environment));
        start.defaults.extend(given(&wanted.defaults));
        if !wanted.rdma.is_empty() {
            start = start.with_nccl_log();
        }
        match ucx {
            Some(ucx) => start.with_ucx(ucx),
            None => Ok(start),
        }
    }
}

/// Whether all ranks of a communicator are known to run on one node: NCCL's sockets pass no network there.
fn on_one_node(roster: &Roster, plan: &CommunicatorPlan) -> bool {
    let node = |name: &MemberName| roster.member(name)?.pods.first()?.node.clone();
    let mut nodes = plan.ranks.iter().map(|(name, _)| node(name));
    let first = nodes.next().flatten();
    first.is_some() && nodes.all(|node| node == first)
}

/// The cause and the next step, for a member that has these RDMA devices and does not use them.
fn slow(rdma: &[String], why: &str) -> String {
    format!(
        "NCCL uses NET/Socket between hosts, and this host has an RDMA device ({}) that NET/IB could use: {why}. Let NCCL open the device \
         (libibverbs, /dev/infiniband, the capability IPC_LOCK, NCCL_IB_HCA), or set transport.allowTcp",
        rdma.join(", ")
    )
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

fn communicator_fault(error: &WorkerError) -> bool {
    use weightsync_core::protocol::worker::WorkerFaultCode::{Aborted, Late, Nccl};
    matches!(error, WorkerError::Fault { fault, .. } if matches!(fault.code, Aborted | Late | Nccl))
}

//! NIXL of one endpoint: the workers that have it open, on its GPUs or for host memory, and the slots that are registered for an epoch.
//!
//! Decides which of UCX's transports may be used: those of RDMA devices, and TCP only where the object allows it, so that no group is slow
//! without a word. It never decides whether a group uses NIXL: that is membership's, by what the report of each member says.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, timeout_at};

use super::core::Core;
use super::gpu::Gpus;
use super::group::{Epoch, refusal};
use super::space::Cgroups;
use weightsync_core::protocol::worker::{FabricFacts, UcxSettings};
use weightsync_core::protocol::{FabricPlan, FabricReport, OfferedSlots, Refusal, RefusalCode, TransportPolicy, TransportWish};
use weightsync_gpu::worker::{Worker, WorkerError, WorkerStart};
use weightsync_transport::gdr::{FabricRing, GdrTransport, GpuSlots, GpuSlotsWanted, RingWanted, Slots};

/// What UCX may use between hosts and between GPUs of one host.
const RDMA: [&str; 6] = ["rc", "dc", "ud", "cuda_copy", "cuda_ipc", "self"];

/// Where the kernel lists RDMA devices.
const DEVICES: &str = "/sys/class/infiniband";

/// Longest time for opening NIXL: the libraries are read from disk.
const OPEN: Duration = Duration::from_secs(20);

/// How NIXL is found.
#[derive(Debug, Clone, Default)]
pub struct FabricSettings {
    /// File of NIXL's C interface, where it is not to be looked for.
    pub nixl: Option<PathBuf>,
}

pub(crate) struct Fabric {
    core: Arc<Core>,
    settings: FabricSettings,
    cgroups: Cgroups,
    gpus: Arc<Gpus>,
    transport: Arc<GdrTransport>,
    /// The worker for slots in host memory.
    host: Mutex<Option<Open>>,
    /// Those on GPUs, in the order of the engine's ranks.
    on_gpus: Mutex<Vec<Open>>,
}

/// A worker with NIXL.
#[derive(Clone)]
struct Open {
    worker: Worker,
    facts: FabricFacts,
    allow_tcp: bool,
}

/// What UCX may use by an object that can have reads through NIXL; none where it cannot.
pub(crate) fn wanted(policy: &TransportPolicy) -> Option<UcxSettings> {
    let wanted = match policy.wish {
        TransportWish::Gdr => true,
        TransportWish::Auto => has_rdma_device(),
        TransportWish::Tcp | TransportWish::Nccl => false,
    };
    let tls = RDMA.into_iter().chain(policy.allow_tcp.then_some("tcp")).map(str::to_owned).collect();
    wanted.then_some(UcxSettings { tls, devices: Vec::new() })
}

impl Fabric {
    /// Starts nothing before an object asks for it.
    pub fn new(core: Arc<Core>, settings: FabricSettings, cgroups: Cgroups, gpus: Arc<Gpus>, transport: Arc<GdrTransport>) -> Arc<Self> {
        Arc::new(Self { core, settings, cgroups, gpus, transport, host: Mutex::default(), on_gpus: Mutex::default() })
    }

    /// What is said of NIXL when an epoch is prepared. The slots of the epoch before are given up: no member reads them any more.
    pub async fn report(&self, policy: &TransportPolicy, within: Duration) -> FabricReport {
        self.transport.leave(None);
        let rdma = has_rdma_device();
        let no = |reason: String| FabricReport { nixl: None, rdma, gpu: false, reason };
        let Some(ucx) = wanted(policy) else {
            return no("its agent did not open NIXL".to_owned());
        };
        if !rdma && !policy.allow_tcp {
            return no(format!(
                "its host shows no RDMA device ({DEVICES} is empty): mount one (an RDMA device plugin does), or set transport.gdr.allowTcp"
            ));
        }
        let until = Instant::now() + within;
        let on_gpus = timeout_at(until, self.open_on_gpus(policy.allow_tcp, &ucx, within / 2)).await;
        let why = match on_gpus.unwrap_or_else(|_| Err(format!("NIXL is not open within {within:?}"))) {
            Ok(facts) => return FabricReport { nixl: Some(shown(&facts, policy.allow_tcp, None)), rdma, gpu: true, reason: String::new() },
            Err(why) => why,
        };
        match timeout_at(until, self.open_on_host(policy.allow_tcp, &ucx)).await {
            Ok(Ok(Open { facts, .. })) => {
                let nixl = Some(shown(&facts, policy.allow_tcp, Some(why.as_str()).filter(|why| !why.is_empty())));
                FabricReport { nixl, rdma, gpu: false, reason: String::new() }
            }
            Ok(Err(error)) => no(error.to_string()),
            Err(_) => no(format!("NIXL is not open within {within:?}")),
        }
    }

    /// The worker for host memory that has NIXL open; started where there is none that lives, or one with other transports.
    async fn open_on_host(&self, allow_tcp: bool, ucx: &UcxSettings) -> Result<Open, WorkerError> {
        let mut open = self.host.lock().await;
        if let Some(open) = open.as_ref().filter(|open| open.allow_tcp == allow_tcp && !open.worker.has_ended()) {
            return Ok(open.clone());
        }
        *open = None;
        let worker = Worker::start(&WorkerStart::own("nixl")?.with_ucx(ucx)?)?;
        let facts = self.open(&worker, ucx).await?;
        tracing::info!(path = facts.path, version = facts.version, memory = ?facts.memory, allow_tcp, "NIXL is open");
        Ok(open.insert(Open { worker, facts, allow_tcp }).clone())
    }

    /// Opens NIXL in the workers of all GPUs of this endpoint; else why not, empty where there is no GPU.
    async fn open_on_gpus(&self, allow_tcp: bool, ucx: &UcxSettings, within: Duration) -> Result<FabricFacts, String> {
        let workers = self.gpus.settled_workers(within).await;
        let mut open = self.on_gpus.lock().await;
        open.retain(|open| workers.iter().any(|worker| worker.is(&open.worker)));
        for worker in &workers {
            if !open.iter().any(|open| open.worker.is(worker)) {
                let facts = self.open(worker, ucx).await.map_err(|error| error.to_string())?;
                tracing::info!(path = facts.path, version = facts.version, gpu = worker.gpu(), allow_tcp, "NIXL is open");
                open.push(Open { worker: worker.clone(), facts, allow_tcp });
            }
        }
        if let Some(why) = open.iter().find_map(|open| open.facts.gpu_memory.as_ref().err()) {
            return Err(why.clone());
        }
        open.first().map(|open| open.facts.clone()).ok_or_else(String::new)
    }

    async fn open(&self, worker: &Worker, ucx: &UcxSettings) -> Result<FabricFacts, WorkerError> {
        // Of this worker alone: the one before it may have had peers.
        let name = format!("{}-{}", self.core.me().incarnation.instance, uuid::Uuid::new_v4().simple());
        worker.open_fabric(self.settings.nixl.as_deref(), &name, ucx, OPEN).await
    }

    /// Registers the slots of an epoch that is being committed, and gives them up when it is over.
    pub async fn enter(&self, epoch: &Arc<Epoch>, plan: FabricPlan, deadline: Instant) -> Result<(), Refusal> {
        let on_gpus = plan.on_gpus && !self.on_gpus.lock().await.is_empty();
        let registered = async { if on_gpus { self.on_gpus(epoch, plan, deadline).await } else { self.on_host(epoch, plan, deadline).await } };
        let late = || refusal(RefusalCode::Timeout, "its memory is not registered in time");
        let (slots, workers) = timeout_at(deadline, registered).await.map_err(|_| late())??;
        self.transport.enter(slots);
        let (core, transport, over, epoch) = (self.core.clone(), self.transport.clone(), self.core.over(epoch.id()), epoch.clone());
        tokio::spawn(async move {
            let ends = workers.iter().map(|worker| Box::pin(worker.ended()));
            tokio::select! {
                () = over.cancelled() => {}
                (cause, _, _) = futures::future::select_all(ends) => {
                    core.peer_lost(epoch.id(), epoch.me(), &format!("its NIXL worker ended: {cause}"));
                }
            }
            transport.leave(Some(epoch.id()));
        });
        Ok(())
    }

    async fn on_host(&self, epoch: &Epoch, plan: FabricPlan, deadline: Instant) -> Result<(Slots, Vec<Worker>), Refusal> {
        let policy = &epoch.prepared.policy.transport;
        let ucx = wanted(policy).ok_or_else(|| refusal(RefusalCode::Internal, "its agent did not open NIXL"))?;
        let Open { worker, .. } = self.open_on_host(policy.allow_tcp, &ucx).await.map_err(|error| internal(&error))?;
        let FabricPlan { slots, slot_bytes, .. } = plan;
        let no_room =
            |error| refusal(RefusalCode::OutOfSpace, format!("no room for {slots} registered slots of {slot_bytes} bytes: {error}"));
        // Until they are allocated. From then on the machine counts them.
        let room = self.cgroups.reserve(plan.bytes()).map_err(no_room)?;
        let (epoch, me, within) = (epoch.id().clone(), epoch.me().clone(), left(deadline));
        let wanted = RingWanted { epoch, me, worker: worker.clone(), plan, within };
        let ring = FabricRing::register(wanted).await.map_err(|error| internal(&error))?;
        drop(room);
        Ok((Slots::Host(ring), vec![worker]))
    }

    async fn on_gpus(&self, epoch: &Epoch, plan: FabricPlan, deadline: Instant) -> Result<(Slots, Vec<Worker>), Refusal> {
        let seats = self.gpus.rings(plan.slots, plan.slot_bytes, deadline).await.map_err(|error| internal(&error))?;
        let workers = seats.iter().map(|seat| seat.worker.clone()).collect();
        // A ring is registered for one epoch at a time.
        self.transport.settled().await;
        let (epoch, me, within) = (epoch.id().clone(), epoch.me().clone(), left(deadline));
        let slots = GpuSlots::register(GpuSlotsWanted { epoch, me, seats, within }).await.map_err(|error| internal(&error))?;
        Ok((Slots::Gpu(slots), workers))
    }

    /// What others need to read this member's slots in an epoch; none where it has none.
    pub fn offered(&self, epoch: &Epoch) -> Option<OfferedSlots> {
        self.transport.memory(epoch.id())
    }
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

fn internal(error: &WorkerError) -> Refusal {
    refusal(RefusalCode::Internal, error.to_string())
}

fn has_rdma_device() -> bool {
    std::fs::read_dir(DEVICES).is_ok_and(|mut devices| devices.next().is_some_and(|device| device.is_ok()))
}

/// For status; `on_host` says why slots lie in host memory, where there are GPUs.
fn shown(facts: &FabricFacts, allow_tcp: bool, on_host: Option<&str>) -> String {
    let version = facts.version.as_deref().unwrap_or("of unknown version");
    let over = if allow_tcp { "RDMA or TCP" } else { "RDMA" };
    let through = on_host.map(|why| format!(", through host memory: {why}")).unwrap_or_default();
    format!("NIXL {version} ({}), {} over {over}{through}", facts.path, facts.plugin)
}

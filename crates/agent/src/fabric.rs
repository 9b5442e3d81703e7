//! NIXL of one endpoint: the worker that has it open, and the slots that are registered for an epoch.
//!
//! Decides which of UCX's transports may be used: those of RDMA devices, and TCP only where the object allows it, so that no group is slow
//! without a word. It never decides whether a group uses NIXL: that is membership's, by what the report of each member says.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use super::core::Core;
use super::group::{Epoch, refusal};
use super::space::Cgroups;
use weightsync_core::protocol::worker::{FabricFacts, UcxSettings};
use weightsync_core::protocol::{FabricPlan, FabricReport, OfferedSlots, Refusal, RefusalCode, TransportPolicy, TransportWish};
use weightsync_gpu::worker::{Worker, WorkerError, WorkerStart};
use weightsync_transport::gdr::{FabricRing, GdrTransport, RingWanted};

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
    transport: Arc<GdrTransport>,
    open: Mutex<Option<Open>>,
}

/// A worker with NIXL.
#[derive(Clone)]
struct Open {
    worker: Worker,
    facts: FabricFacts,
    allow_tcp: bool,
}

impl Fabric {
    /// Starts nothing before an object asks for it.
    pub fn new(core: Arc<Core>, settings: FabricSettings, cgroups: Cgroups, transport: Arc<GdrTransport>) -> Arc<Self> {
        Arc::new(Self { core, settings, cgroups, transport, open: Mutex::default() })
    }

    /// What is said of NIXL when an epoch is prepared. The slots of the epoch before are given up: no member reads them any more.
    pub async fn report(&self, policy: &TransportPolicy, within: Duration) -> FabricReport {
        self.transport.leave(None);
        let rdma = has_rdma_device().await;
        let wanted = match policy.wish {
            TransportWish::Gdr => true,
            TransportWish::Auto => rdma,
            TransportWish::Tcp | TransportWish::Nccl => false,
        };
        let no = |reason: String| FabricReport { nixl: None, rdma, reason };
        if !wanted {
            return no("its agent did not open NIXL".to_owned());
        }
        if !rdma && !policy.allow_tcp {
            return no(format!(
                "its host shows no RDMA device ({DEVICES} is empty): mount one (an RDMA device plugin does), or set transport.gdr.allowTcp"
            ));
        }
        match timeout(within, self.opened(policy.allow_tcp)).await {
            Ok(Ok(Open { facts, .. })) => FabricReport { nixl: Some(shown(&facts, policy.allow_tcp)), rdma, reason: String::new() },
            Ok(Err(error)) => no(error.to_string()),
            Err(_) => no(format!("NIXL is not open within {within:?}")),
        }
    }

    /// The worker that has NIXL open; started where there is none that lives, or one with other transports.
    async fn opened(&self, allow_tcp: bool) -> Result<Open, WorkerError> {
        let mut open = self.open.lock().await;
        if let Some(open) = open.as_ref().filter(|open| open.allow_tcp == allow_tcp && !open.worker.has_ended()) {
            return Ok(open.clone());
        }
        *open = None;
        let tls = RDMA.into_iter().chain(allow_tcp.then_some("tcp")).map(str::to_owned).collect();
        let ucx = UcxSettings { tls, devices: Vec::new() };
        let worker = Worker::start(&WorkerStart::own("nixl")?.with_ucx(&ucx)?)?;
        // Of this worker alone: the one before it may have had peers.
        let name = format!("{}-{}", self.core.me().incarnation.instance, uuid::Uuid::new_v4().simple());
        let facts = worker.open_fabric(self.settings.nixl.as_deref(), &name, &ucx, OPEN).await?;
        tracing::info!(path = facts.path, version = facts.version, memory = ?facts.memory, allow_tcp, "NIXL is open");
        Ok(open.insert(Open { worker, facts, allow_tcp }).clone())
    }

    /// Registers the slots of an epoch that is being committed, and gives them up when it is over.
    pub async fn enter(&self, epoch: &Arc<Epoch>, plan: FabricPlan, deadline: Instant) -> Result<(), Refusal> {
        let internal = |error: WorkerError| refusal(RefusalCode::Internal, error.to_string());
        let Open { worker, .. } = self.opened(epoch.prepared.policy.transport.allow_tcp).await.map_err(internal)?;
        let within = deadline.saturating_duration_since(Instant::now());
        let FabricPlan { slots, slot_bytes } = plan;
        let no_room =
            |error| refusal(RefusalCode::OutOfSpace, format!("no room for {slots} registered slots of {slot_bytes} bytes: {error}"));
        // Until they are allocated. From then on the machine counts them.
        let room = self.cgroups.reserve(plan.bytes()).map_err(no_room)?;
        let wanted = RingWanted { epoch: epoch.id().clone(), me: epoch.me().clone(), worker: worker.clone(), plan, within };
        let ring = timeout(within, FabricRing::register(wanted)).await;
        let late = || refusal(RefusalCode::Timeout, format!("its memory is not registered within {within:?}"));
        self.transport.enter(ring.map_err(|_| late())?.map_err(internal)?);
        drop(room);
        let (core, transport, over, epoch) = (self.core.clone(), self.transport.clone(), self.core.over(epoch.id()), epoch.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = over.cancelled() => {}
                cause = worker.ended() => core.peer_lost(epoch.id(), epoch.me(), &format!("its NIXL worker ended: {cause}")),
            }
            transport.leave(Some(epoch.id()));
        });
        Ok(())
    }

    /// What others need to read this member's slots in an epoch; none where it has none.
    pub fn offered(&self, epoch: &Epoch) -> Option<OfferedSlots> {
        self.transport.memory(epoch.id())
    }
}

async fn has_rdma_device() -> bool {
    let listed = tokio::fs::read_dir(DEVICES).await;
    match listed {
        Ok(mut devices) => devices.next_entry().await.is_ok_and(|device| device.is_some()),
        Err(_) => false,
    }
}

/// For status.
fn shown(facts: &FabricFacts, allow_tcp: bool) -> String {
    let version = facts.version.as_deref().unwrap_or("of unknown version");
    let over = if allow_tcp { "RDMA or TCP" } else { "RDMA" };
    format!("NIXL {version} ({}), {} over {over}", facts.path, facts.plugin)
}

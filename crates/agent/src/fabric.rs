//! NIXL of one endpoint: the workers that have it open, on its GPUs or for host memory, and the slots that are registered for an epoch.
//!
//! Decides which of UCX's transports may be used: those of RDMA devices, and TCP only where the object allows it, so that no group is slow
//! without a word. It never decides whether a group uses NIXL: that is membership's, by what the report of each member says.

pub(crate) mod devices;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tokio_util::task::AbortOnDropHandle;

use self::devices::{has_rdma_device, wanted};
use super::core::Core;
use super::gpu::Gpus;
use super::group::{Epoch, refusal};
use super::locks::lock;
use super::rdma::{self, DEVICES, LOCKED};
use super::space::Cgroups;
use weightsync_core::protocol::worker::{FabricFacts, UcxSettings};
use weightsync_core::protocol::{FabricPlan, FabricReport, GpuDevices, MemberFabric, OfferedSlots, Refusal, RefusalCode, TransportPolicy};
use weightsync_gpu::worker::{Worker, WorkerError, WorkerStart};
use weightsync_transport::gdr::{FabricRing, GdrTransport, GpuSlots, GpuSlotsWanted, RingWanted, Slots};

/// Longest time for opening NIXL: 100 MB of libraries are read from disk, and UCX asks every device. No report waits that long.
const OPEN: Duration = Duration::from_secs(60);

/// How NIXL is found.
#[derive(Debug, Clone, Default)]
pub struct FabricSettings {
    /// File of NIXL's C interface, where it is not to be looked for.
    pub nixl: Option<PathBuf>,
    /// Devices that it may use, by UCX's names, or `all`. Without any, workers on GPUs take those that are nearest, others take all.
    pub devices: Vec<String>,
    /// The program and arguments of a worker; this program's own if not given.
    pub worker: Option<WorkerStart>,
}

impl FabricSettings {
    /// Devices of a list as UCX reads it from `UCX_NET_DEVICES`: with commas between them.
    pub fn devices(listed: &str) -> Vec<String> {
        listed.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
    }
}

pub(crate) struct Fabric {
    core: Arc<Core>,
    settings: FabricSettings,
    cgroups: Cgroups,
    gpus: Arc<Gpus>,
    transport: Arc<GdrTransport>,
    /// The worker for slots in host memory, by what UCX may use there.
    host: Mutex<Option<Opening<UcxSettings, Open>>>,
    /// The workers on GPUs, in the order of the engine's ranks; gives the facts of the first one whose GPU memory cannot be registered, else of
    /// the first.
    on_gpus: Mutex<Option<Opening<Vec<Worker>, FabricFacts>>>,
}

/// A worker with NIXL.
#[derive(Clone)]
struct Open {
    worker: Worker,
    facts: FabricFacts,
}

/// NIXL that is being opened, or was. It goes on when the report that began it is over: else a slow one would be begun again for ever.
struct Opening<K, T> {
    of: K,
    /// None until it is known.
    outcome: watch::Receiver<Option<Result<T, WorkerError>>>,
    task: AbortOnDropHandle<()>,
}

impl<K, T: Clone + Send + Sync + 'static> Opening<K, T> {
    fn begin(of: K, open: impl Future<Output = Result<T, WorkerError>> + Send + 'static) -> Self {
        let (known, outcome) = watch::channel(None);
        let task = tokio::spawn(async move {
            let opened = open.await;
            known.send_replace(Some(opened));
        });
        Self { of, outcome, task: AbortOnDropHandle::new(task) }
    }

    /// Whether it may still be used, or become so.
    fn is_good(&self, serves: impl FnOnce(&T) -> bool) -> bool {
        match &*self.outcome.borrow() {
            None => !self.task.is_finished(),
            Some(opened) => opened.as_ref().is_ok_and(serves),
        }
    }
}

async fn outcome<T: Clone>(mut outcome: watch::Receiver<Option<Result<T, WorkerError>>>) -> Result<T, WorkerError> {
    let gone = || WorkerError::Gone { cause: "opening NIXL ended early".to_owned() };
    let known = outcome.wait_for(Option::is_some).await.map_err(|_| gone())?;
    known.clone().unwrap_or_else(|| Err(gone()))
}

/// What UCX's receive queues take of host memory for one registration: [`LOCKED`] for each of the devices.
fn queues(chosen: &[String]) -> u64 {
    let active = || rdma::devices(Path::new("/")).iter().filter(|device| device.active()).count();
    let devices = if chosen.is_empty() || chosen.iter().any(|name| name == "all") { active() } else { chosen.len() };
    LOCKED.saturating_mul(u64::try_from(devices).unwrap_or(u64::MAX))
}

impl Fabric {
    /// Starts nothing before an object asks for it.
    pub fn new(core: Arc<Core>, settings: FabricSettings, cgroups: Cgroups, gpus: Arc<Gpus>, transport: Arc<GdrTransport>) -> Arc<Self> {
        Arc::new(Self { core, settings, cgroups, gpus, transport, host: Mutex::default(), on_gpus: Mutex::default() })
    }

    /// The report about NIXL when an epoch is prepared. The slots of the previous epoch are released: no member reads them any more.
    pub async fn report(&self, policy: &TransportPolicy, within: Duration) -> FabricReport {
        self.transport.leave(None);
        let rdma = has_rdma_device();
        let no = |reason: String| FabricReport { nixl: None, rdma, gpu: false, reason };
        let Some(ucx) = wanted(policy, &self.settings.devices) else {
            return no("its agent did not open NIXL".to_owned());
        };
        if !rdma && !policy.allow_tcp {
            return no(format!(
                "its host shows no RDMA device ({DEVICES} is empty): mount one (an RDMA device plugin does), or set transport.allowTcp"
            ));
        }
        if rdma && let Some(limit) = rdma::locks_too_little(getrlimit(Resource::Memlock).current, &own_status().await) {
            return no(format!(
                "its agent may lock {limit} bytes of memory (RLIMIT_MEMLOCK), and an RDMA device needs {LOCKED} and the slots: raise the \
                 limit (ulimit -l unlimited), or add the capability IPC_LOCK"
            ));
        }
        let until = Instant::now() + within;
        let late = || no(format!("NIXL is still being opened after {within:?}; it goes on, and the member is asked again"));
        let why = match timeout_at(until, self.open_on_gpus(&ucx, within / 2)).await {
            Err(_) => return late(),
            Ok(Ok((facts, devices))) => {
                self.show(&facts, devices);
                return FabricReport { nixl: Some(shown(&facts, policy.allow_tcp, "")), rdma, gpu: true, reason: String::new() };
            }
            Ok(Err(why)) => why,
        };
        match timeout_at(until, self.open_on_host(ucx)).await {
            Ok(Ok(Open { facts, .. })) => {
                self.show(&facts, vec![(None, self.settings.devices.clone())]);
                FabricReport { nixl: Some(shown(&facts, policy.allow_tcp, &why)), rdma, gpu: false, reason: String::new() }
            }
            Ok(Err(error)) => no(error.to_string()),
            Err(_) => late(),
        }
    }

    /// The worker for host memory that has NIXL open; started where there is none that lives, or one with other transports.
    async fn open_on_host(&self, ucx: UcxSettings) -> Result<Open, WorkerError> {
        let outcome_of = {
            let mut slot = lock(&self.host);
            let good = slot.take().filter(|opening| opening.of == ucx && opening.is_good(|open| !open.worker.has_ended()));
            let begin = || Opening::begin(ucx.clone(), open(self.settings.clone(), self.name(), ucx));
            slot.insert(good.unwrap_or_else(begin)).outcome.clone()
        };
        outcome(outcome_of).await
    }

    /// Keeps for status what was opened, with the GPUs and the devices that were chosen for each.
    fn show(&self, facts: &FabricFacts, devices: Vec<(Option<String>, Vec<String>)>) {
        let shown = Some(Box::new(summary(facts, devices, &active())));
        self.core.set_facts(|facts| facts.fabric = shown);
    }

    /// Opens NIXL in the workers of all GPUs of this endpoint, and gives the devices of each; else why slots cannot lie there, empty where there is
    /// no GPU.
    async fn open_on_gpus(&self, ucx: &UcxSettings, within: Duration) -> Result<(FabricFacts, Vec<(Option<String>, Vec<String>)>), String> {
        let (workers, devices): (Vec<Worker>, Vec<Vec<String>>) = self.gpus.settled_workers(within).await.into_iter().unzip();
        if workers.is_empty() {
            return Err(String::new());
        }
        let by_gpu = workers.iter().map(|worker| Some(worker.gpu().to_owned())).zip(devices.iter().cloned()).collect();
        let same = |others: &[Worker]| others.len() == workers.len() && others.iter().zip(&workers).all(|(one, other)| one.is(other));
        let outcome_of = {
            let mut slot = lock(&self.on_gpus);
            let good = slot.take().filter(|opening| same(&opening.of) && opening.is_good(|_| true));
            let begin = || {
                let with = |devices| ToOpen { name: self.name(), ucx: UcxSettings { devices, ..ucx.clone() } };
                let each = workers.iter().cloned().zip(devices.into_iter().map(with)).collect();
                Opening::begin(workers.clone(), open_all(self.settings.nixl.clone(), each))
            };
            slot.insert(good.unwrap_or_else(begin)).outcome.clone()
        };
        let facts = outcome(outcome_of).await.map_err(|error| error.to_string())?;
        match &facts.gpu_memory {
            Ok(()) => Ok((facts, by_gpu)),
            Err(why) => Err(why.clone()),
        }
    }

    /// Of one worker alone: the one before it may have had peers.
    fn name(&self) -> String {
        format!("{}-{}", self.core.me().incarnation.instance, uuid::Uuid::new_v4().simple())
    }

    /// Registers the slots of an epoch that is being committed, and gives them up when it is over.
    pub async fn enter(&self, epoch: &Arc<Epoch>, plan: FabricPlan, deadline: Instant) -> Result<(), Refusal> {
        let on_gpus = plan.on_gpus && self.has_gpu_slots();
        let registered =
            async { if on_gpus { self.on_gpus(epoch, plan, deadline).await } else { self.on_host(epoch, plan, deadline).await } };
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
        let ucx = wanted(&epoch.prepared.policy.transport, &self.settings.devices);
        let ucx = ucx.ok_or_else(|| refusal(RefusalCode::Internal, "its agent did not open NIXL"))?;
        let Open { worker, .. } = self.open_on_host(ucx).await.map_err(|error| internal(&error))?;
        let FabricPlan { slots, slot_bytes, .. } = plan;
        let no_room =
            |error| refusal(RefusalCode::OutOfSpace, format!("no room for {slots} registered slots of {slot_bytes} bytes: {error}"));
        // Until they are allocated. From then on the machine counts them.
        let room = self.cgroups.reserve(plan.bytes().saturating_add(queues(&self.settings.devices))).map_err(no_room)?;
        let (epoch, me, within) = (epoch.id().clone(), epoch.me().clone(), left(deadline));
        let wanted = RingWanted { epoch, me, worker: worker.clone(), plan, within };
        let ring = FabricRing::register(wanted).await.map_err(|error| internal(&error))?;
        drop(room);
        Ok((Slots::Host(ring), vec![worker]))
    }

    async fn on_gpus(&self, epoch: &Epoch, plan: FabricPlan, deadline: Instant) -> Result<(Slots, Vec<Worker>), Refusal> {
        let locals = self.gpus.rings(plan.slots, plan.slot_bytes, deadline).await.map_err(|error| internal(&error))?;
        let workers = locals.iter().map(|local| local.worker.clone()).collect();
        // A ring is registered for one epoch at a time.
        self.transport.settled().await;
        let bytes = queues(&self.settings.devices).saturating_mul(u64::try_from(locals.len()).unwrap_or(u64::MAX));
        let no_room = |error| refusal(RefusalCode::OutOfSpace, format!("no room for UCX's receive queues of {bytes} bytes: {error}"));
        let room = self.cgroups.reserve(bytes).map_err(no_room)?;
        let (epoch, me, within) = (epoch.id().clone(), epoch.me().clone(), left(deadline));
        let slots = GpuSlots::register(GpuSlotsWanted { epoch, me, locals, within }).await.map_err(|error| internal(&error))?;
        drop(room);
        Ok((Slots::Gpu(slots), workers))
    }

    /// Whether, by the last report, slots can be on GPUs.
    fn has_gpu_slots(&self) -> bool {
        lock(&self.on_gpus).as_ref().is_some_and(|opening| opening.is_good(|facts| facts.gpu_memory.is_ok()))
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

/// Starts the worker for host memory, and opens NIXL there.
async fn open(settings: FabricSettings, name: String, ucx: UcxSettings) -> Result<Open, WorkerError> {
    let start = settings.worker.map_or_else(|| WorkerStart::own("nixl"), Ok)?;
    let worker = Worker::start(&start.with_ucx(&ucx)?)?;
    let facts = worker.open_fabric(settings.nixl.as_deref(), &name, &ucx, OPEN).await?;
    tracing::info!(path = facts.path, version = facts.version, memory = ?facts.memory, tls = ?ucx.tls, "NIXL is open");
    Ok(Open { worker, facts })
}

/// How a worker opens NIXL.
struct ToOpen {
    name: String,
    ucx: UcxSettings,
}

/// Opens NIXL in each worker on a GPU.
async fn open_all(nixl: Option<PathBuf>, each: Vec<(Worker, ToOpen)>) -> Result<FabricFacts, WorkerError> {
    let opening = each.iter().map(|(worker, ToOpen { name, ucx })| worker.open_fabric(nixl.as_deref(), name, ucx, OPEN));
    let mut facts = futures::future::try_join_all(opening).await?;
    for ((worker, ToOpen { ucx, .. }), FabricFacts { path, version, gpu_memory, .. }) in each.iter().zip(&facts) {
        tracing::info!(path, version, gpu = worker.gpu(), ?gpu_memory, tls = ?ucx.tls, devices = ?ucx.devices, "NIXL is open on a GPU");
    }
    let shown = facts.iter().position(|facts| facts.gpu_memory.is_err()).unwrap_or(0);
    Ok(facts.swap_remove(shown))
}

async fn own_status() -> String {
    tokio::fs::read_to_string("/proc/self/status").await.unwrap_or_default()
}

/// Ports of this host's RDMA devices that are up, by UCX's names.
fn active() -> Vec<String> {
    rdma::devices(Path::new("/")).iter().flat_map(rdma::Rdma::ucx_names).collect()
}

/// What a member reads with. Where no devices were chosen, UCX takes all that are active.
fn summary(facts: &FabricFacts, devices: Vec<(Option<String>, Vec<String>)>, active: &[String]) -> MemberFabric {
    let all = |names: &[String]| names.is_empty() || names.iter().any(|name| name == "all");
    let of = |(gpu, names): (Option<String>, Vec<String>)| GpuDevices { gpu, names: if all(&names) { active.to_vec() } else { names } };
    let transports = facts.parameters.get("UCX_TLS").map(|listed| FabricSettings::devices(listed)).unwrap_or_default();
    let summary = MemberFabric {
        library: facts.path.clone(),
        version: facts.version.clone(),
        plugin: facts.plugin.clone(),
        transports,
        devices: devices.into_iter().map(of).filter(|devices| !devices.names.is_empty()).collect(),
    };
    summary.bounded()
}

/// For status; `on_host` says why slots lie in host memory, where there are GPUs.
fn shown(facts: &FabricFacts, allow_tcp: bool, on_host: &str) -> String {
    let version = facts.version.as_deref().unwrap_or("of unknown version");
    let over = if allow_tcp { "RDMA or TCP" } else { "RDMA" };
    let through = if on_host.is_empty() { String::new() } else { format!(", through host memory: {on_host}") };
    let listed = facts.parameters.get("UCX_NET_DEVICES").filter(|listed| *listed != "all").cloned();
    let devices = listed.unwrap_or_else(|| active().join(","));
    let by = if devices.is_empty() { String::new() } else { format!(" by {devices}") };
    format!("NIXL {version} ({}), {} over {over}{by}{through}", facts.path, facts.plugin)
}

#[cfg(test)]
mod tests;

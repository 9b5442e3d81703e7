//! Rank 0 of groups that a server's own workers join: a GPU worker, a store where one is wanted, and the broadcasts of an update.
//!
//! Decides the order: id and store exist before the server gets them; both ends join at once; a bucket is broadcast while the server's
//! answer to it is awaited, and whichever fails ends the other; rank 0 aborts before the server is asked to leave, which is a rendezvous
//! otherwise. A group serves one update. Never repairs one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::ConformanceError;
use weightsync_core::protocol::worker::{NcclId, Proof, WorkerAnswer};
use weightsync_core::protocol::{GroupPlace, HeldVersion, Rendezvous};
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_engine::{DeviceBucket, DeviceInstall, DeviceJob, Engine, EngineError, EngineGroup, GroupJoin, InstallError, InstallReport};
use weightsync_gpu::worker::{Broadcast, Worker, WorkerStart};
use weightsync_testkit::simulator::{GroupOptions, SimulatorOptions, WeightTransfer};
use weightsync_torch::store::{Server, nccl_id_keys};
use weightsync_transport::Payload;
use weightsync_transport::nccl::{PackedBucket, Packer, Staging};

/// A driver that has just been loaded takes seconds.
const START: Duration = Duration::from_secs(60);
const ABORT: Duration = Duration::from_secs(20);
/// Rank 0 waits longer than the server's answer is awaited: it is ended by that, and an engine that it left alone in a collective operation would
/// be stuck.
const COLLECTIVE: Duration = Duration::from_secs(60);
/// Once the server reported that it received, the broadcast ends within this time, or the server took no part in it.
const AFTER_SUCCESS: Duration = Duration::from_secs(3);
/// Step of a report about the group's end.
pub(super) const LEAVE: &str = "leave";

/// Who can be rank 0: workers on one GPU, one for each update at a time, used again for later ones.
pub struct Sources {
    pool: Arc<Pool>,
    /// The one that leads an update now.
    leading: Mutex<Option<Worker>>,
}

struct Pool {
    start: WorkerStart,
    nccl: Option<PathBuf>,
    gpu: String,
    others: Vec<String>,
    stand_in: Option<PathBuf>,
    idle: Mutex<Vec<Source>>,
    number: AtomicU64,
}

impl std::fmt::Debug for Sources {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Sources").field("gpu", &self.pool.gpu).finish_non_exhaustive()
    }
}

struct Source {
    worker: Worker,
    staging: Staging,
}

struct Formed {
    number: u64,
    id: NcclId,
    world: u32,
    /// Closed with it.
    store: Option<Server>,
}

impl Sources {
    /// Looks for GPUs, as a worker sees them, and takes `gpu`, or else the first. `stand_in` is the folder of the stand-in driver, for simulated
    /// engines.
    ///
    /// # Errors
    ///
    /// There is no such GPU, or no NCCL.
    pub async fn find(
        start: WorkerStart,
        nccl: Option<PathBuf>,
        gpu: Option<&str>,
        stand_in: Option<PathBuf>,
    ) -> Result<Arc<Self>, ConformanceError> {
        let failed = |why: String| ConformanceError::Source(why);
        let worker = Worker::start(&start).map_err(|error| failed(error.to_string()))?;
        let answer = worker.devices(nccl.as_deref(), START).await.map_err(|error| failed(error.to_string()))?;
        let WorkerAnswer::Devices { gpus, nccl: found, .. } = answer else {
            return Err(failed("its worker answered with something else".into()));
        };
        found.map_err(failed)?;
        let mut usable: Vec<String> = gpus.into_iter().filter(|gpu| gpu.refused.is_none()).map(|gpu| gpu.uuid).collect();
        let at = match gpu {
            Some(gpu) => usable.iter().position(|known| known == gpu),
            None => (!usable.is_empty()).then_some(0),
        };
        let at = at.ok_or_else(|| failed(format!("there is no GPU {} here", gpu.unwrap_or_default())))?;
        let gpu = usable.remove(at);
        let (idle, number) = (Mutex::default(), AtomicU64::new(1));
        Ok(Self::of(Arc::new(Pool { start, nccl, gpu, others: usable, stand_in, idle, number })))
    }

    fn of(pool: Arc<Pool>) -> Arc<Self> {
        Arc::new(Self { pool, leading: Mutex::default() })
    }

    /// The same workers for another caller that leads other updates.
    pub(super) fn share(&self) -> Arc<Self> {
        Self::of(self.pool.clone())
    }

    /// Kills the worker that leads an update now.
    pub(super) fn kill(&self) {
        if let Some(worker) = self.leading.lock().as_ref() {
            worker.kill("the suite ends its source");
        }
    }

    /// Puts the ranks of a simulated engine on the other GPUs. They must be those of the stand-in driver.
    pub(super) fn lend_gpus(&self, options: &mut SimulatorOptions) {
        let Pool { nccl, others, stand_in, start, .. } = self.pool.as_ref();
        let WorkerStart { program, environment, .. } = start.clone();
        options.gpus.clone_from(others);
        options.gpu_memory = stand_in.as_ref().map(|folder| folder.join("memory"));
        options.groups = Some(GroupOptions { environment, nccl: nccl.clone(), ..GroupOptions::new(&options.engine, program) });
        options.weight_transfer = (options.engine == "vllm").then(|| WeightTransfer::of("nccl"));
    }

    /// Brings a version into an engine by a group of its own: joined, fed, left. `address` is where the engine's ranks reach this process.
    /// The report has a step `leave` if the engine confirmed that it left.
    ///
    /// # Errors
    ///
    /// As of [`DeviceInstall`]; a group that does not form leaves the engine untouched.
    pub async fn update(
        &self,
        engine: &dyn Engine,
        job: &DeviceJob,
        version: HeldVersion,
        checkpoint: &Checkpoint,
        address: IpAddr,
    ) -> Result<InstallReport, InstallError> {
        let group = engine.group().ok_or_else(|| clean(unusable(format!("{} joins no group by itself", engine.kind()))))?;
        let source = self.pool.take().await.map_err(|why| clean(unusable(why)))?;
        *self.leading.lock() = Some(source.worker.clone());
        let number = self.pool.number.fetch_add(1, Ordering::Relaxed);
        let formed = source.form(group.as_ref(), number, address, job.silence).await;
        let fed = match &formed {
            Ok(formed) => source.feed(group.as_ref(), formed, job, version, checkpoint).await,
            Err(error) => Err(clean(unusable(format!("no group: {error}")))),
        };
        source.abort(number).await;
        let begun = Instant::now();
        let left = group.leave(job.silence).await;
        drop(formed);
        *self.leading.lock() = None;
        self.pool.give_back(source);
        fed.map(|mut report| {
            if left.is_ok() {
                report.steps_ms.push((LEAVE.to_owned(), u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX)));
            }
            report
        })
    }
}

impl Pool {
    async fn take(&self) -> Result<Source, String> {
        let idle = self.idle.lock().pop();
        if let Some(source) = idle.filter(|source| source.worker.cause().is_none()) {
            return Ok(source);
        }
        let worker = Worker::start(&self.start).map_err(|error| error.to_string())?;
        let opened = worker.open(Some(&self.gpu), self.nccl.as_deref(), START).await;
        let (_, _, nccl) = opened.map_err(|error| error.to_string())?;
        nccl?;
        Ok(Source { staging: Staging::new(worker.clone()), worker })
    }

    fn give_back(&self, source: Source) {
        if source.worker.cause().is_none() {
            self.idle.lock().push(source);
        }
    }
}

/// The address of this machine by which a server reaches it. Sends nothing.
pub(super) async fn toward(url: &str) -> std::io::Result<IpAddr> {
    let url = reqwest::Url::parse(url).map_err(std::io::Error::other)?;
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned();
    let port = url.port_or_known_default().unwrap_or_default();
    let target = tokio::net::lookup_host((host, port)).await?.next().ok_or_else(|| std::io::Error::other("its host has no address"))?;
    let any: IpAddr = if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = tokio::net::UdpSocket::bind((any, 0)).await?;
    socket.connect(target).await?;
    Ok(socket.local_addr()?.ip())
}

fn unusable(what: String) -> EngineError {
    EngineError::Unsupported { what, next_step: "see `weightsync doctor` about GPUs and NCCL".into() }
}

fn clean(source: EngineError) -> InstallError {
    InstallError::before_start(source)
}

impl Source {
    async fn abort(&self, number: u64) {
        if let Err(error) = self.worker.abort(number, ABORT).await {
            tracing::debug!(%error, "a group could not be aborted: its worker is gone, and the group with it");
        }
    }

    async fn form(&self, group: &dyn EngineGroup, number: u64, address: IpAddr, within: Duration) -> Result<Formed, EngineError> {
        let facts = group.facts(within).await?;
        if !facts.why_not.is_empty() {
            return Err(unusable(facts.why_not));
        }
        let said = |error: &dyn std::fmt::Display| unusable(error.to_string());
        let id = self.worker.unique_id(COLLECTIVE).await.map_err(|error| said(&error))?;
        let name = format!("conformance-{}-{number}", uuid::Uuid::new_v4().simple());
        let (store, place) = match facts.rendezvous {
            Rendezvous::UniqueId => (None, GroupPlace::UniqueId { id }),
            Rendezvous::Store => {
                let store = Server::bind(SocketAddr::new(address, 0), |_| true, &CancellationToken::new()).await;
                let store = store.map_err(|error| said(&error))?;
                for key in nccl_id_keys(&name) {
                    store.set(&key, &id.0).map_err(|error| said(&error))?;
                }
                let place = GroupPlace::Store { address: address.to_string(), port: store.address().port() };
                (Some(store), place)
            }
        };
        let formed = Formed { number, id, world: facts.size.saturating_add(1), store };
        let join = GroupJoin { name, place, offset: 1, world: formed.world };
        let met = async {
            match &formed.store {
                Some(store) => {
                    let ranks = usize::try_from(facts.size).unwrap_or(usize::MAX);
                    store.wait_for_clients(ranks, within).await.map_err(|error| said(&error))
                }
                None => self.communicate(&formed, Proof::AllReduce).await.map_err(|why| said(&why)),
            }
        };
        tokio::try_join!(group.join(&join, within), met)?;
        Ok(formed)
    }

    /// Makes the communicator; the other ranks make theirs at the same time.
    async fn communicate(&self, formed: &Formed, proof: Proof) -> Result<(), String> {
        let made = self.worker.join_as(formed.number, formed.id, (0, formed.world), proof, COLLECTIVE).await;
        made.map(drop).map_err(|error| error.to_string())
    }

    async fn feed(
        &self,
        group: &dyn EngineGroup,
        formed: &Formed,
        job: &DeviceJob,
        version: HeldVersion,
        checkpoint: &Checkpoint,
    ) -> Result<InstallReport, InstallError> {
        // One bucket at a time: no request is made ahead.
        let mut install = group.begin(job, watch::Sender::new(None).subscribe()).await?;
        install.open().await?;
        match self.buckets(install.as_mut(), formed, job, checkpoint).await {
            Ok(()) => install.finish(version).await,
            Err(Broken::Engine(error)) => Err(error),
            Err(Broken::Source(why)) => {
                let left = install.abandon(&why).await;
                Err(InstallError { step: "load", left, source: unusable(why) })
            }
        }
    }

    async fn buckets(
        &self,
        install: &mut dyn DeviceInstall,
        formed: &Formed,
        job: &DeviceJob,
        checkpoint: &Checkpoint,
    ) -> Result<(), Broken> {
        let own = |error: &dyn std::fmt::Display| Broken::Source(error.to_string());
        let layout = &job.layout;
        let mut packer = Packer::new(self.worker.clone(), self.staging.clone(), layout).map_err(|error| own(&error))?;
        // A group with a store has no communicator before its first broadcast.
        let mut stands = formed.store.is_none();
        for bucket in layout.buckets() {
            let mut bytes = vec![0; usize::try_from(bucket.bytes).map_err(|error| own(&error))?];
            checkpoint.read_stream(layout, bucket.offset, &mut bytes).map_err(|error| own(&error))?;
            let wire = layout.wire(&bucket).map_err(|error| own(&error))?;
            let packed = packer.pack(&Payload::Host(Bytes::from(bytes)), &wire, COLLECTIVE).await.map_err(|error| own(&error))?;
            let sends = !packed.broadcasts.is_empty();
            let sent = self.send(formed, packed, sends && !stands);
            let taken = install.bucket(DeviceBucket { bucket, places: Vec::new(), sums: Vec::new() });
            self.together(formed.number, taken, sent).await?;
            stands |= sends;
        }
        Ok(())
    }

    async fn send(&self, formed: &Formed, packed: PackedBucket, makes: bool) -> Result<(), String> {
        if makes {
            self.communicate(formed, Proof::Nothing).await?;
        }
        let PackedBucket { broadcasts, copies, held } = packed;
        let enter = broadcasts.into_iter().map(|packed| {
            let (at, bytes, after) = (packed.span, packed.bytes, packed.after);
            self.worker.broadcast_now(Broadcast { group: formed.number, root: 0, at, bytes, parts: Vec::new(), after }, COLLECTIVE)
        });
        // All are asked for at once, in the order of the wire.
        let entered: Vec<_> = enter.collect();
        let (copied, sent) = (futures::future::try_join_all(copies).await, futures::future::try_join_all(entered).await);
        drop(held);
        copied.map_err(|error| error.to_string())?;
        sent.map(drop).map_err(|error| error.to_string())
    }

    /// Watches the server's answer and our broadcasts; the failure of one ends the other.
    async fn together<T>(
        &self,
        number: u64,
        taken: impl Future<Output = Result<T, InstallError>>,
        sent: impl Future<Output = Result<(), String>>,
    ) -> Result<(), Broken> {
        tokio::pin!(taken, sent);
        tokio::select! {
            biased;
            taken = &mut taken => {
                if let Err(error) = taken {
                    self.abort(number).await;
                    return Err(Broken::Engine(error));
                }
                let ended = tokio::time::timeout(AFTER_SUCCESS, sent).await;
                let nothing = || "the server says that it received what was not broadcast: its group does nothing".to_owned();
                let failed = ended.map_or_else(|_| Some(nothing()), Result::err);
                if let Some(why) = failed {
                    self.abort(number).await;
                    return Err(Broken::Source(why));
                }
                Ok(())
            }
            sent = &mut sent => {
                if sent.is_err() {
                    self.abort(number).await;
                }
                // It ends with its own deadline, and an engine that refused is the cause.
                taken.await.map_err(Broken::Engine)?;
                sent.map_err(Broken::Source)
            }
        }
    }
}

enum Broken {
    /// The install is over.
    Engine(InstallError),
    /// It is still open.
    Source(String),
}

//! Keeps a worker on each GPU of an endpoint: finds the GPUs, opens them, and starts what ended again, ever more slowly while it fails.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::alongside::missing;
use super::{GpuChoice, Gpus, Share};
use weightsync_core::protocol::worker::{GpuFacts, NcclFacts, WorkerAnswer};
use weightsync_gpu::worker::{Ring, Worker, WorkerError};
use weightsync_net::backoff::Backoff;
use weightsync_transport::nccl::Staging;

/// Opening a GPU makes a context on it; a cold driver takes seconds.
const OPEN: Duration = Duration::from_secs(60);

/// Waits between attempts to open GPUs.
const AGAIN: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));

/// A driver that was never there will hardly come: it is looked for this often.
const LOOK: Duration = Duration::from_secs(120);

/// A worker that lived for so long is started again at once when it ends.
const STEADY: Duration = Duration::from_secs(5);

/// Where the GPUs of an endpoint stand.
#[derive(Clone)]
pub(super) enum GpuState {
    /// Not known yet, or being opened.
    Starting,
    None(String),
    /// A worker on each.
    Open(Vec<Open>),
}

/// A GPU with a worker on it.
#[derive(Clone)]
pub(super) struct Open {
    pub(super) worker: Worker,
    pub(super) gpu: GpuFacts,
    pub(super) nccl: Result<NcclFacts, String>,
    /// Devices that UCX got when the worker started.
    pub(super) devices: Vec<String>,
    pub(super) staging: Staging,
    pub(super) ring: Arc<tokio::sync::Mutex<Option<Ring>>>,
}

impl GpuState {
    pub(super) fn open(&self) -> &[Open] {
        match self {
            Self::Open(open) => open,
            Self::Starting | Self::None(_) => &[],
        }
    }
}

impl Gpus {
    /// Keeps workers open until `cancel`.
    pub async fn supervise(self: Arc<Self>, cancel: CancellationToken) {
        if self.settings.choice == GpuChoice::None {
            self.state.send_replace(GpuState::None("its agent was asked to use no GPU".into()));
            if let Some(source) = &self.source {
                drop(source.send_replace(Err("its agent was asked to use no GPU".into())));
            }
            return;
        }
        tokio::select! {
            () = cancel.cancelled() => {}
            () = self.keep() => {}
            () = self.tell_source() => {}
        }
    }

    async fn keep(&self) {
        let mut wanted = self.wanted.subscribe();
        let mut backoff = Backoff::new(AGAIN.0, AGAIN.1);
        let mut open: Vec<Open> = Vec::new();
        let (mut had_one, mut said) = (false, None::<String>);
        loop {
            let started_with = wanted.borrow_and_update().start();
            match self.open_all(std::mem::take(&mut open)).await {
                Ok(opened) => {
                    open.clone_from(&opened);
                    (had_one, said) = (true, None);
                    // Workers of settings that changed meanwhile are not shown: an epoch would be prepared with them and lose them.
                    let wanted = self.wanted.borrow();
                    if wanted.start() == started_with {
                        self.state.send_replace(GpuState::Open(opened));
                    }
                }
                Err(reason) => {
                    if said.as_ref() != Some(&reason) {
                        tracing::info!(reason, "no GPU is used here");
                        said = Some(reason.clone());
                    }
                    self.state.send_replace(GpuState::None(reason));
                    let never = self.settings.choice == GpuChoice::Auto && !had_one;
                    let wait = if never { LOOK } else { backoff.failed() };
                    tokio::select! {
                        () = sleep(wait) => {}
                        _ = wanted.changed() => {}
                    }
                    continue;
                }
            }
            let since = Instant::now();
            let ends = open.iter().cloned().map(|entry| Box::pin(async move { (entry.worker.ended().await, entry.gpu.uuid) }));
            tokio::select! {
                ((cause, gpu), _, _) = futures::future::select_all(ends) => {
                    tracing::warn!(gpu, cause, "a GPU worker ended; another one is started");
                    self.state.send_replace(GpuState::Starting);
                    self.worker_lost(&cause);
                    if since.elapsed() >= STEADY {
                        backoff.succeeded();
                    } else {
                        sleep(backoff.failed()).await;
                    }
                }
                _ = wanted.changed() => {
                    if wanted.borrow().start() == started_with {
                        continue;
                    }
                    tracing::info!("settings of NCCL or UCX changed: GPU workers start again");
                    for entry in open.drain(..) {
                        self.worker_lost("its settings changed");
                        entry.worker.kill("its settings changed");
                    }
                }
            }
        }
    }

    /// Workers on all GPUs; those that live already stay.
    async fn open_all(&self, living: Vec<Open>) -> Result<Vec<Open>, String> {
        let (gpus, mut idle) = match &self.settings.choice {
            GpuChoice::These(gpus) => (gpus.clone(), None),
            GpuChoice::None => return Err("its agent was asked to use no GPU".into()),
            GpuChoice::Auto => self.visible().await.map(|(gpus, worker)| (gpus, Some(worker)))?,
        };
        let mut open = Vec::new();
        for gpu in gpus {
            match living.iter().find(|entry| entry.gpu.uuid == gpu && entry.worker.cause().is_none()) {
                Some(entry) => open.push(entry.clone()),
                None => open.push(self.open(&gpu, idle.take()).await.map_err(|error| error.to_string())?),
            }
        }
        Ok(open)
    }

    /// `idle` is a worker that has opened none yet: the driver takes as long to be loaded as a GPU to be opened.
    async fn open(&self, gpu: &str, idle: Option<Worker>) -> Result<Open, WorkerError> {
        let ucx = self.ucx_of(gpu);
        // The idle one was started before its GPU was known.
        let idle = idle.filter(|_| ucx == self.wanted.borrow().ucx);
        let worker = match idle {
            Some(worker) => worker,
            None => Worker::start(&self.start_of(gpu, ucx.as_ref())?)?,
        };
        let (pid, gpu, nccl) = worker.open(Some(gpu), self.settings.nccl.as_deref(), OPEN).await?;
        tracing::info!(pid, gpu = gpu.uuid, name = gpu.name, ?nccl, "a GPU worker is up");
        let staging = Staging::new(worker.clone());
        let devices = ucx.map(|ucx| ucx.devices).unwrap_or_default();
        Ok(Open { worker, gpu, nccl, devices, staging, ring: Arc::default() })
    }

    /// The UUIDs of this endpoint's share of the visible GPUs, and the worker that found them.
    async fn visible(&self) -> Result<(Vec<String>, Worker), String> {
        let listing = async {
            let ucx = self.wanted.borrow().ucx.clone();
            let worker = Worker::start(&self.start_of("GPU", ucx.as_ref())?)?;
            Ok((worker.devices(self.settings.nccl.as_deref(), OPEN).await?, worker))
        };
        let (listed, worker) = listing.await.map_err(|error: WorkerError| missing(error.to_string()))?;
        let WorkerAnswer::Devices { gpus, .. } = listed else {
            return Err("the GPU worker answered something else than its GPUs".into());
        };
        if let Some(refused) = gpus.iter().find_map(|gpu| gpu.refused.as_ref().map(|why| format!("{}: {why}", gpu.uuid))) {
            return Err(refused);
        }
        Ok((share(gpus.into_iter().map(|gpu| gpu.uuid).collect(), self.share, self.wanted.borrow().ranks)?, worker))
    }
}

/// An endpoint's share of the visible GPUs, which stand in the order of the driver: as many as it has ranks, and at least one.
pub(super) fn share(gpus: Vec<String>, share: Share, ranks: usize) -> Result<Vec<String>, String> {
    let Share { number, of } = share;
    let each = gpus.len() / of.max(1);
    if each == 0 {
        return Err(format!("{} GPUs are visible for {of} engines", gpus.len()));
    }
    Ok(gpus.into_iter().skip(number * each).take(each.min(ranks.max(1))).collect())
}

//! An engine on top of its server's calls: health checks, installs and their steps, once for all kinds.
//!
//! Decides which caller may change the engine (one at a time) and the result of a check. An install is a [`session::Session`], fed in one
//! of four ways: a directory ([`install`]), host memory ([`host`]), GPU memory or the engine's own group ([`device`]). This never resumes
//! an engine that may hold half an update.

mod actor;
mod canary;
mod device;
mod external;
mod group;
mod host;
mod install;
mod last_group;
mod proof;
mod put_back;
mod session;
mod settle;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{Mutex, OwnedMutexGuard};

use self::last_group::LastGroup;
use self::proof::Proven;
use super::draft::DraftWay;
use super::fit::Fit;
use super::http::Until;
use super::mixed::Mixed;
use super::served;
use super::server::Server;
use super::start::StartWatch;
use super::{
    DeviceInstall, DeviceJob, DeviceRoute, Engine, EngineError, EngineGroup, EngineStart, External, Health, Holding, HostInstall, HostJob,
    InstallError, InstallJob, InstallReport, Left, Settled, Settling,
};
use weightsync_core::protocol::{CanaryPolicy, EngineFacts, HeldVersion, KvCachePolicy, MixedWindow, PausePolicy};
use weightsync_core::weights::{IgnoredTensors, Section, TensorSpec};

/// An engine on top of its [`Server`] calls. Clones share it.
pub(super) struct Adapter<S>(Arc<Inner<S>>);

struct Inner<S> {
    server: S,
    /// The checkpoint with which the server was started, as this process sees it: from the settings, or the path that the server reports,
    /// if it exists here.
    served_model: parking_lot::Mutex<Result<PathBuf, String>>,
    /// Tensors that a version is not compared by.
    ignored: parking_lot::Mutex<IgnoredTensors>,
    /// The directory of processes (`/proc`).
    processes: PathBuf,
    start: StartWatch,
    /// Held during each change of the engine: two installs, or an install and a resume, must not overlap.
    turn: Arc<Mutex<()>>,
    group: LastGroup,
    proven: Proven,
    mixed: Mixed,
    /// True while the engine core may be too busy with our work to respond.
    loading: AtomicBool,
}

impl<S: Server> Adapter<S> {
    /// `record` is the path of its record; other files are stored next to it.
    pub(super) fn new(server: S, served_model: Option<PathBuf>, record: Option<&Path>, processes: PathBuf) -> Self {
        let served_model = served_model.ok_or_else(|| "the engine was not asked for its checkpoint yet".to_owned());
        let inner = Inner {
            server,
            served_model: parking_lot::Mutex::new(served_model),
            ignored: parking_lot::Mutex::default(),
            processes,
            start: StartWatch::default(),
            turn: Arc::default(),
            group: LastGroup::new(record.map(|record| record.with_extension("group"))),
            proven: Proven::default(),
            mixed: Mixed::default(),
            loading: AtomicBool::new(false),
        };
        Self(Arc::new(inner))
    }
}

impl<S: Server> Inner<S> {
    fn served_model(&self) -> Option<PathBuf> {
        self.served_model.lock().clone().ok()
    }

    /// Finds the server's checkpoint by the name that the server reports; otherwise, why versions cannot be compared with it.
    async fn find_served_model(&self, until: Until) {
        let named = self.server.startup_checkpoint(until).await;
        let found = named.map_err(|error| format!("the engine does not name its checkpoint: {error}"));
        *self.served_model.lock() = found.and_then(|name| served::find(&name, &self.processes));
    }

    /// Whether these tensors replace all tensors of the server's start-up checkpoint.
    fn fits(&self, tensors: &[TensorSpec]) -> Result<Fit, EngineError> {
        let served = match self.served_model.lock().clone() {
            Ok(served) => served,
            Err(why) => return Ok(Fit::Unchecked { why, tied: false }),
        };
        let model: Vec<_> = tensors.iter().filter(|tensor| tensor.section == Section::Model).cloned().collect();
        self.server.fits(&served, &model, &self.ignored.lock().clone())
    }

    /// Waits for the lock on changes of the engine.
    async fn turn(&self, until: Until) -> Result<OwnedMutexGuard<()>, EngineError> {
        let timeout = EngineError::Timeout { url: self.server.url().to_owned(), deadline: until.total() };
        tokio::time::timeout(until.left(), Arc::clone(&self.turn).lock_owned()).await.map_err(|_| timeout)
    }

    /// Writes the version field and remembers its expected content.
    async fn write(&self, holding: Holding, until: Until) -> Result<(), EngineError> {
        self.start.writing();
        let written = self.server.write(&holding, until).await;
        self.start.wrote(written.is_ok().then_some(holding));
        written
    }

    /// Resumes the engine and checks that it runs. Repeats this until the deadline, because a pause that we gave up may still take effect.
    async fn run_again(&self, until: Until) -> Result<(), EngineError> {
        loop {
            let tried = match self.server.unpause(until).await {
                Ok(()) => self.server.is_paused(until).await,
                Err(error) => Err(error),
            };
            let wait = Duration::from_millis(50);
            match tried {
                Ok(false) => return Ok(()),
                // An engine that is gone is not paused, and does not respond to a second request either.
                Err(error @ EngineError::Unreachable { .. }) => return Err(error),
                // Nor does the same key open a server that refuses it.
                Err(error @ EngineError::Status { status: 401 | 403, .. }) => return Err(error),
                Err(error) if until.left() <= wait => return Err(error),
                Ok(true) if until.left() <= wait => {
                    let what = "it still says that it is paused".to_owned();
                    return Err(EngineError::BadReply { url: self.server.url().to_owned(), what });
                }
                Ok(true) | Err(_) => tokio::time::sleep(wait).await,
            }
        }
    }

    async fn health(&self, until: Until) -> Result<Health, EngineError> {
        let judged = async {
            let (before, start) = self.sight(until).await?;
            // With the lock held, our own sleep cannot be mistaken for another client's. An engine with half an update may be woken here.
            let start = match self.turn.try_lock() {
                Ok(_turn) if !before.is_half() => self.look_whether_it_sleeps(until).await.map(|_| self.start.last())?,
                _ => start,
            };
            Ok(Health { start, holding: Some(before.holding) })
        };
        let busy = || Health { start: self.start.last(), holding: None };
        if !self.loading.load(Ordering::Acquire) {
            return match judged.await {
                // The load began during this call: the core is busy with our work.
                Err(EngineError::Timeout { .. }) if self.loading.load(Ordering::Acquire) => Ok(busy()),
                judged => judged,
            };
        }
        self.server.front(until).await?;
        Ok(busy())
    }

    /// The caller holds the lock.
    async fn look_whether_it_sleeps(&self, until: Until) -> Result<bool, EngineError> {
        let sleep = self.server.sleeps(until).await?;
        self.start.slept(sleep);
        Ok(sleep.now)
    }

    /// Checks the HTTP front, then the engine core: one token, or its state while it is paused.
    async fn is_stuck(&self, until: Until) -> bool {
        if self.start.is_asleep() {
            return false;
        }
        if self.loading.load(Ordering::Acquire) || self.server.front(until.at_most(until.total() / 4)).await.is_err() {
            return false;
        }
        let asked = match self.server.is_paused(until).await {
            Ok(false) => self.server.generate(until).await,
            // It depends on the server which of the two involves the engine core: SGLang's scheduler reports the start, vLLM's core the
            // version.
            Ok(true) => match self.server.fingerprint(until).await {
                Ok(_) => self.server.holding(until).await.map(drop),
                Err(error) => Err(error),
            },
            Err(error) => Err(error),
        };
        matches!(asked, Err(EngineError::Timeout { .. }))
    }
}

#[async_trait]
impl<S: Server> Engine for Adapter<S> {
    fn kind(&self) -> &'static str {
        self.0.server.kind()
    }

    async fn probe(&self, deadline: Duration) -> Result<EngineFacts, EngineError> {
        let until = Until::new(deadline);
        let mut facts = self.0.server.facts(until).await;
        if let Ok(facts) = &mut facts {
            if self.0.served_model().is_none() {
                self.0.find_served_model(until).await;
            }
            let served = self.0.served_model.lock().clone();
            match served.and_then(|served| self.0.server.readable(&served)) {
                Ok(bytes) => facts.model_bytes = Some(bytes),
                Err(why) => facts.unchecked = Some(why),
            }
        }
        facts.inspect_err(|error| self.0.start.failed(error))
    }

    fn accepts(&self, pause: PausePolicy, kv_cache: KvCachePolicy) -> Result<(), EngineError> {
        self.0.server.descriptor().accepts(pause, kv_cache)
    }

    fn takes_directories(&self) -> Result<(), EngineError> {
        self.0.server.takes_directories()
    }

    async fn takes_draft(&self, way: DraftWay, draft: Vec<TensorSpec>, deadline: Duration) -> Result<(), EngineError> {
        self.0.server.takes_draft(way, draft, Until::new(deadline)).await
    }

    fn ignore(&self, ignored: &IgnoredTensors) {
        self.0.ignored.lock().clone_from(ignored);
    }

    fn fits(&self, tensors: &[TensorSpec]) -> Result<Fit, EngineError> {
        self.0.fits(tensors)
    }

    async fn health(&self, deadline: Duration) -> Result<Health, EngineError> {
        let health = self.0.health(Until::new(deadline)).await;
        health.inspect_err(|error| self.0.start.failed(error))
    }

    fn is_still(&self, start: &EngineStart) -> bool {
        self.0.start.is_still(start)
    }

    fn asleep(&self) -> Option<EngineError> {
        self.0.start.is_asleep().then(|| EngineError::Asleep { url: self.0.server.url().to_owned() })
    }

    async fn until_lost(&self) {
        match self.0.start.line() {
            Some(line) => line.broke().await,
            // There is no connection: the next check finds a new process.
            None => std::future::pending().await,
        }
    }

    async fn is_stuck(&self, deadline: Duration) -> bool {
        self.0.is_stuck(Until::new(deadline)).await
    }

    async fn answers(&self, canary: &CanaryPolicy, deadline: Duration) -> Result<bool, EngineError> {
        self.0.answers(canary, Until::new(deadline)).await
    }

    async fn install(&self, job: &InstallJob) -> Result<InstallReport, InstallError> {
        let (inner, job) = (Arc::clone(&self.0), job.clone());
        // A separate task: if an agent drops this future (a select, a fenced epoch), the engine must not stay paused in the middle.
        let installed = tokio::spawn(async move { inner.install(&job).await }).await;
        installed.unwrap_or(Err(InstallError { step: "start", left: Left::Mixture, source: EngineError::Cancelled }))
    }

    fn mixed_windows(&self) -> Vec<MixedWindow> {
        self.0.mixed.windows()
    }

    async fn see_owed_answer(&self, version: &HeldVersion, deadline: Duration) -> Result<(), InstallError> {
        self.0.see_owed_answer(version, Until::new(deadline)).await
    }

    async fn device_route(&self, pause: PausePolicy, kv_cache: KvCachePolicy, deadline: Duration) -> Result<DeviceRoute, EngineError> {
        let served = self.0.served_model();
        self.0.server.device_route(pause, kv_cache, served.as_deref(), Until::new(deadline)).await
    }

    fn group(&self) -> Option<Box<dyn EngineGroup>> {
        let server = self.0.server.groups()?;
        Some(Box::new(group::Member { inner: Arc::clone(&self.0), server }))
    }

    async fn begin_device(&self, job: &DeviceJob) -> Result<Box<dyn DeviceInstall>, InstallError> {
        device::begin(Arc::clone(&self.0), job.clone(), None).await
    }

    async fn host_route(&self, deadline: Duration) -> Result<&'static str, EngineError> {
        self.0.server.host_route(Until::new(deadline)).await
    }

    async fn begin_host(&self, job: &HostJob) -> Result<Box<dyn HostInstall>, InstallError> {
        host::begin(Arc::clone(&self.0), job.clone()).await
    }

    async fn settle(&self, how: &Settling, deadline: Duration) -> Result<Settled, InstallError> {
        let settled = self.0.settle(how, Until::new(deadline)).await;
        settled.inspect_err(|error| self.0.start.failed(&error.source))
    }

    async fn put_back(&self, deadline: Duration) -> Result<(), EngineError> {
        let inner = Arc::clone(&self.0);
        let put_back = tokio::spawn(async move { inner.put_back(Until::new(deadline)).await }).await;
        put_back.unwrap_or(Err(EngineError::Cancelled))
    }

    async fn holding(&self, deadline: Duration) -> Result<Holding, EngineError> {
        let holding = self.0.server.holding(Until::new(deadline)).await;
        holding.inspect_err(|error| self.0.start.failed(error))
    }

    fn external(&self) -> Result<Arc<dyn External>, EngineError> {
        Ok(self.0.clone())
    }
}

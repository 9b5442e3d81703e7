//! One engine's agent: receives versions, verifies them, has the engine switched, and says what the engine holds.
//!
//! The decisions are pure: `state` says what follows from an event, with `machine` for the steps of an update, and `readiness` says whether
//! the pod may serve. This room carries them out. It never resumes an engine that may hold half an update, and never calls a version installed that the engine's present start did not confirm.

mod arriving;
mod canary;
mod companions;
mod device;
mod external;
mod going_back;
mod group;
mod leaving;
pub(crate) mod machine;
mod memory;
mod owed;
pub(crate) mod readiness;
mod receive;
mod receiver;
pub(super) mod ring;
mod settle;
mod state;
mod supervise;
mod switch;
mod through_gpus;
mod through_memory;
mod update;
mod version;
pub(crate) mod version_dir;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::arriving::Arriving;
use self::companions::Companions;
use self::readiness::Assigned;
use self::state::{Effects, Now, State};
pub(crate) use self::update::PAUSING;
pub(crate) use self::version::Version;
use self::version_dir::{AgentDir, DirError};
use super::core::Core;
use super::gpu::Gpus;
use super::group::{Epoch, refusal};
use super::lead::feed::{Copy, Holder};
use super::locks::lock;
use super::space::Cgroups;
use weightsync_core::protocol::{Delivery, HeldVersion, PrepareRequest, Refusal, RefusalCode, UpdateId, UpdatePolicy, UpdateStatus};
use weightsync_engine::Engine;
use weightsync_net::deadline::ProgressDeadline;

/// Where a rollout keeps its files.
#[derive(Debug, Clone)]
pub struct Places {
    /// Root of version directories, as this process sees it; a memory-backed file system where there is one.
    pub versions: PathBuf,
    /// The same root as the engine sees it; none when both see the same.
    pub versions_in_engine: Option<PathBuf>,
    /// The model directory that the engine started with, as this process sees it: its configuration and tokenizer go next to the weights.
    pub model: Option<PathBuf>,
    /// Name of this agent below the root; the same in each life of the same pod and engine.
    pub name: String,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error("the version directory cannot be used: {0}")]
    Directory(#[from] DirError),
    #[error("the model directory {path} cannot be read: {source}")]
    Model { path: String, source: io::Error },
    #[error("{path} cannot be made: {source}")]
    Shared { path: String, source: io::Error },
}

pub(crate) struct Rollout {
    core: Arc<Core>,
    engine: Arc<dyn Engine>,
    places: Places,
    shared: PathBuf,
    companions: Companions,
    cgroups: Cgroups,
    inner: Mutex<Inner>,
    changed: watch::Sender<u64>,
    assigned: watch::Sender<Assigned>,
    /// Held while the engine is being switched: one switch at a time, and no space is counted meanwhile.
    switching: tokio::sync::Mutex<()>,
    /// Holds a token of everybody who has the engine leave its group.
    leaving: TaskTracker,
    /// Held while the engine is released.
    releasing: tokio::sync::Mutex<()>,
    probe_now: Notify,
    gpus: OnceLock<Arc<Gpus>>,
    dir: AgentDir,
    /// When this agent began.
    begun: Instant,
}

#[derive(Default)]
struct Inner {
    state: State<Version>,
    receiving: Option<Receiving>,
}

/// The attempt that runs, as far as it needs tasks.
struct Receiving {
    update: UpdateId,
    receiver: Option<Arriving>,
    deadline: ProgressDeadline,
    over: CancellationToken,
}

impl Rollout {
    /// Takes its directory, and sweeps what agents left there that live no more.
    pub fn start(core: Arc<Core>, engine: Arc<dyn Engine>, places: Places, cgroups: Cgroups) -> Result<Arc<Self>, StartError> {
        let (dir, swept) = AgentDir::open(&places.versions, &places.name)?;
        if swept > 0 {
            tracing::info!(root = %places.versions.display(), swept, "removed directories that earlier agents left");
        }
        let companions = match &places.model {
            Some(model) => Companions::find(model).map_err(|source| StartError::Model { path: model.display().to_string(), source })?,
            None => Companions::none(),
        };
        let shared = dir.path().join("companions");
        std::fs::create_dir(&shared).map_err(|source| StartError::Shared { path: shared.display().to_string(), source })?;
        let rollout = Self {
            core,
            engine,
            places,
            shared,
            companions,
            cgroups,
            inner: Mutex::default(),
            changed: watch::Sender::new(0),
            assigned: watch::Sender::default(),
            switching: tokio::sync::Mutex::new(()),
            leaving: TaskTracker::new(),
            releasing: tokio::sync::Mutex::default(),
            probe_now: Notify::new(),
            gpus: OnceLock::new(),
            dir,
            begun: Instant::now(),
        };
        Ok(Arc::new(rollout))
    }

    pub fn assign(&self, assigned: Assigned) {
        self.core.learn_current(assigned.current.as_ref());
        self.engine.ignore(&assigned.ignored);
        self.assigned.send_replace(assigned);
    }

    /// Checks that this replica is what the roster says, before it takes part.
    pub async fn prepare(&self, request: &PrepareRequest) -> Result<(), Refusal> {
        let Some(member) = request.roster.member(&request.member) else { return Ok(()) };
        let policy = &request.policy;
        self.with(|state| state.prepared(policy));
        if policy.delivery != Delivery::External {
            self.engine.accepts(policy.pause, policy.kv_cache).map_err(|error| refusal(RefusalCode::Unsupported, error.to_string()))?;
        }
        if let Some(reason) = self.read(State::ill) {
            return Err(refusal(RefusalCode::EngineRefused, reason));
        }
        let known = || self.read(|state| state.engine.facts().cloned());
        if known().is_none() {
            let limit = Duration::from_millis(request.deadline_ms / 2);
            self.ask_engine(limit, limit).await?;
        }
        let ended = || refusal(RefusalCode::EngineRefused, "the engine ended while it was asked what it is");
        let facts = known().ok_or_else(ended)?;
        // What a start can do does not change: an engine that is still busy with the epoch before is not asked for it once more.
        let knows = facts.groups.as_ref().is_some_and(|groups| groups.why_not.is_empty());
        if policy.delivery == Delivery::Engine && !knows {
            self.ask_group(Duration::from_millis(request.deadline_ms / 2)).await?;
        }
        self.can_be_asked(policy, Duration::from_millis(request.deadline_ms / 4)).await?;
        if facts.size != member.size {
            return Err(refusal(
                RefusalCode::SizeMismatch,
                format!("the engine at {} has {} worker ranks, the spec says {}: correct `ranks`", facts.url, facts.size, member.size),
            ));
        }
        Ok(())
    }

    pub fn epoch_over(&self, reason: &str) {
        self.with(|state| state.epoch_over(reason));
    }

    /// A version that lies here complete, to feed others.
    pub fn holding(&self, wanted: &HeldVersion) -> Option<Arc<Version>> {
        self.read(|state| state.versions.find(wanted).cloned())
    }

    pub fn ready(&self) -> Result<(), String> {
        let released = self.core.released();
        let current = self.core.current();
        let assigned = self.assigned.borrow().clone();
        let epoch = self.core.epoch();
        // Looked at here and now: between two probes an engine may be killed, start again and answer.
        self.with(|state| {
            let policy = state.policy();
            readiness::ready(&readiness::Seen {
                assigned: &assigned,
                released: released.is_some(),
                current: current.as_ref(),
                last: state.last(),
                installed: state.machine.installed(),
                awaits: state.machine.awaits_its_turn().filter(|_| policy.is_some_and(|policy| policy.max_unavailable > 0)),
                max_skew: policy.and_then(|policy| policy.max_skew),
                left: state.machine.installed().is_some_and(|installed| epoch.is_some_and(|epoch| epoch.left(installed.held.version))),
                dirty: state.machine.dirty().map(|dirty| dirty.reason.as_str()),
                unproven: state.machine.unproven().map(|unproven| unproven.reason.as_str()),
                switching: state.is_switching(),
                start: state.engine.start(),
                certain: state.machine.is_certain(),
                unhealthy: state.engine.unhealthy() || state.engine.unreachable(),
            })
        })
    }

    /// Whether the engine answered, and the process that did is there.
    fn engine_stands(&self) -> bool {
        self.read(|state| state.engine.start().is_some_and(|start| self.engine.is_still(start)))
    }

    /// Bytes of the last update that arrived and were checked, and of how many.
    pub fn progress(&self) -> (u64, u64) {
        self.read(|state| state.machine.progress())
    }

    /// Where the last attempt stands; none before the first.
    pub fn last_attempt(&self) -> Option<UpdateStatus> {
        let mut status = self.read(|state| state.machine.status());
        if let Some(status) = &mut status {
            status.mixed = self.engine.mixed_windows().into_iter().filter(|window| window.version == status.update.version).collect();
        }
        status
    }

    /// A number that grows whenever [`last_attempt`](Self::last_attempt) changes.
    pub fn attempt_changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    pub fn engine_kind(&self) -> &'static str {
        self.engine.kind()
    }

    pub fn port(&self) -> u16 {
        self.core.me().port.unwrap_or(0)
    }

    /// Where a directory of ours is for the engine.
    fn in_engine(&self, path: &Path) -> PathBuf {
        match (&self.places.versions_in_engine, path.strip_prefix(&self.places.versions)) {
            (Some(root), Ok(below)) => root.join(below),
            _ => path.to_owned(),
        }
    }

    /// What is known now.
    fn read<T>(&self, look: impl FnOnce(&State<Version>) -> T) -> T {
        look(&lock(&self.inner).state)
    }

    /// Takes in an event: carries out what follows from it, and notifies those who report facts.
    fn with<T>(&self, event: impl FnOnce(&mut State<Version>) -> T) -> T {
        self.change(|inner| event(&mut inner.state))
    }

    fn change<T>(&self, change: impl FnOnce(&mut Inner) -> T) -> T {
        let mut inner = lock(&self.inner);
        let certain = inner.state.engine.start().is_none_or(|start| self.engine.is_still(start));
        inner.state.machine.engine_is_certain(certain);
        let outcome = change(&mut inner);
        inner.state.settle(self.now());
        let current = self.core.current();
        self.core.set_facts(|facts| {
            inner.state.show(facts, current.as_ref());
            facts.mixed = self.engine.mixed_windows();
        });
        let sequence = inner.state.machine.sequence();
        let effects = inner.state.take_effects();
        let stopped = effects.stop.as_ref().and_then(|_| inner.receiving.take());
        drop(inner);
        Self::carry_out(effects, stopped);
        self.changed.send_if_modified(|known| std::mem::replace(known, sequence) != sequence);
        outcome
    }

    fn carry_out(effects: Effects<Version>, stopped: Option<Receiving>) {
        if let Some(restarts) = effects.restarted {
            tracing::warn!(restarts, "the engine started again");
        }
        if let (Some(reason), Some(receiving)) = (effects.stop, stopped) {
            receiving.over.cancel();
            if let Some(receiver) = receiving.receiver {
                receiver.discard(&reason);
            }
        }
        for old in effects.dropped {
            tracing::debug!(version = old.held.version, "an earlier version is kept no longer");
        }
    }

    /// Where the bytes of this attempt go; none when it is over, or has none.
    fn receiver_of(&self, update: &UpdateId) -> Option<Arriving> {
        let inner = lock(&self.inner);
        inner.receiving.as_ref().filter(|receiving| receiving.update == *update).and_then(|receiving| receiving.receiver.clone())
    }

    fn now(&self) -> Now {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Now { elapsed: self.begun.elapsed(), unix_ms: u64::try_from(unix.as_millis()).unwrap_or(u64::MAX) }
    }

    fn policy_of(epoch: &Epoch) -> UpdatePolicy {
        epoch.prepared.policy.clone()
    }
}

/// A rollout feeds others from what lies in its directory.
#[async_trait]
impl Holder for Rollout {
    fn to_feed(&self, epoch: &Epoch) -> Option<Copy> {
        let current = epoch.current().filter(|_| epoch.feeds())?;
        if self.goes_first(epoch, current) {
            return None;
        }
        let version = self.holding(current)?;
        Some(Copy { held: version.held.clone(), algorithm: version.manifest.algorithm, source: version.source() })
    }

    async fn suspect(&self, held: &HeldVersion) {
        if let Some(version) = self.holding(held) {
            // What is found was logged, and a damaged copy is dropped.
            let _checked = self.check_kept(&version).await;
        }
    }
}

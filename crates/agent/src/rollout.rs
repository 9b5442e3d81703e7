//! One engine's agent: receives versions, verifies them, has the engine switched, and says what the engine holds.
//!
//! The decisions are in `machine` (what follows in an update) and `readiness` (whether the pod may serve); this room carries them out.
//! It never resumes an engine that may hold half an update, and never calls a version installed that the engine's present start did not confirm.

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
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::arriving::Arriving;
use self::companions::Companions;
use self::machine::Machine;
use self::readiness::Assigned;
use self::supervise::Probed;
pub(crate) use self::update::PAUSING;
pub(crate) use self::version::Version;
use self::version_dir::{AgentDir, DirError};
use super::archive::Archive;
use super::core::Core;
use super::gpu::Gpus;
use super::group::{Epoch, refusal};
use super::lead::feed::{Copy, Holder};
use super::locks::lock;
use super::space::Cgroups;
use weightsync_core::protocol::{
    CanaryPolicy, Delivery, EpochId, HeldVersion, PrepareRequest, Received, Refusal, RefusalCode, RefusedVersion, UpdateId, UpdatePolicy,
    UpdateStatus,
};
use weightsync_core::weights::Layout;
use weightsync_engine::{Engine, EngineStart};
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
}

#[derive(Default)]
struct Inner {
    machine: Machine,
    receiving: Option<Receiving>,
    /// Who leads the last attempt.
    led: Option<Led>,
    /// What the engine was last switched to, where it lies in files.
    kept: Option<Arc<Version>>,
    /// What it was switched to before, kept to go back.
    earlier: Archive<Version>,
    /// The epoch in which this rollout, which feeds the others, went back first or tried to; and whether it is at it.
    went_back: Option<EpochId>,
    going_back: bool,
    /// Versions that its canary refused, the highest last.
    refused: Vec<RefusedVersion>,
    /// The start of the engine that answered a canary, and which.
    answered: Option<(EngineStart, CanaryPolicy)>,
    /// What the engine was last switched to.
    last: Option<HeldVersion>,
    /// A start of the engine that cannot be fed from GPU memory although it reported that it can, and why.
    no_device: Option<(EngineStart, String)>,
    /// Verified, not installed.
    staged: Option<Arc<Version>>,
    /// What the engine is being switched to, or holds half of: its files must stay until it is switched again or put back.
    touched: Option<Arc<Version>>,
    /// Tensors of the version that this start of the engine took last.
    took: Option<(EngineStart, HeldVersion, Arc<Layout>)>,
    /// A version that the engine read and refused, and its start: where it refuses another one too, its loader may be broken.
    load_refused: Option<(Option<EngineStart>, HeldVersion)>,
    /// Whether its start-up weights are to be put back at once: they show whether it loads anything.
    suspect: bool,
    /// The files of what the engine may hold, after an install that ended without proof.
    to_prove: Option<Arc<Version>>,
    engine: Probed,
    /// How the last version came.
    received: Option<Received>,
    paused_until: Option<u64>,
    /// Whether the engine is being switched by us.
    switching: bool,
    /// The rules of the last group: they hold until the next one brings others.
    policy: Option<UpdatePolicy>,
    dirty_since: Option<Instant>,
}

/// Who leads an attempt, and the manifest that it must bring, where that was settled before.
struct Led {
    update: UpdateId,
    pod_uid: String,
    manifest: Option<String>,
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
        };
        Ok(Arc::new(rollout))
    }

    pub fn assign(&self, assigned: Assigned) {
        self.core.learn_current(assigned.current.as_ref());
        self.assigned.send_replace(assigned);
    }

    /// Checks that this replica is what the roster says, before it takes part.
    pub async fn prepare(&self, request: &PrepareRequest) -> Result<(), Refusal> {
        let Some(member) = request.roster.member(&request.member) else { return Ok(()) };
        let policy = &request.policy;
        self.with(|inner| inner.policy = Some(policy.clone()));
        if policy.delivery != Delivery::External {
            self.engine.accepts(policy.pause, policy.kv_cache).map_err(|error| refusal(RefusalCode::Unsupported, error.to_string()))?;
        }
        if let Some(reason) = self.with(|inner| inner.engine.known_ill().filter(|_| !inner.switching)) {
            return Err(refusal(RefusalCode::EngineRefused, reason));
        }
        let facts = match self.with(|inner| inner.engine.facts.clone()) {
            Some(facts) => facts,
            None => self.probe(Duration::from_millis(request.deadline_ms / 2)).await?,
        };
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
        self.with(|inner| {
            if inner.machine.epoch_over(reason) {
                inner.stop_receiving(reason);
            }
        });
    }

    /// A version that lies here complete, to feed others.
    pub fn holding(&self, wanted: &HeldVersion) -> Option<Arc<Version>> {
        self.with(|inner| inner.held().find(|version| version.held.is(wanted)).cloned())
    }

    pub fn ready(&self) -> Result<(), String> {
        let released = self.core.released();
        let current = self.core.current();
        let assigned = self.assigned.borrow().clone();
        let epoch = self.core.epoch();
        self.with(|inner| {
            readiness::ready(&readiness::Seen {
                assigned: &assigned,
                released: released.is_some(),
                current: current.as_ref(),
                last: inner.last.as_ref(),
                installed: inner.machine.installed(),
                awaits: inner.machine.awaits_its_turn().filter(|_| inner.policy.as_ref().is_some_and(|policy| policy.max_unavailable > 0)),
                max_skew: inner.policy.as_ref().and_then(|policy| policy.max_skew),
                left: inner.machine.installed().is_some_and(|installed| epoch.is_some_and(|epoch| epoch.left(installed.held.version))),
                dirty: inner.machine.dirty().map(|dirty| dirty.reason.as_str()),
                unproven: inner.machine.unproven().map(|unproven| unproven.reason.as_str()),
                switching: inner.switching,
                start: inner.engine.start(),
                // Looked at here and now: between two probes an engine may be killed, start again and answer.
                certain: inner.machine.is_certain(),
                unhealthy: inner.engine.unhealthy() || inner.engine.unreachable(),
            })
        })
    }

    /// Whether the engine answered, and the process that did is there.
    fn engine_stands(&self) -> bool {
        lock(&self.inner).engine.start().is_some_and(|start| self.engine.is_still(start))
    }

    /// Bytes of the last update that arrived and were checked, and of how many.
    pub fn progress(&self) -> (u64, u64) {
        lock(&self.inner).machine.progress()
    }

    /// Where the last attempt stands; none before the first.
    pub fn last_attempt(&self) -> Option<UpdateStatus> {
        let mut status = lock(&self.inner).machine.status();
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

    /// Runs a change under the lock, and lets everybody know what came of it.
    fn with<T>(&self, change: impl FnOnce(&mut Inner) -> T) -> T {
        let mut inner = lock(&self.inner);
        let certain = inner.engine.start().is_none_or(|start| self.engine.is_still(start));
        inner.machine.engine_is_certain(certain);
        let outcome = change(&mut inner);
        inner.note_dirt();
        let current = self.core.current();
        self.core.set_facts(|facts| {
            inner.show(facts, current.as_ref());
            facts.mixed = self.engine.mixed_windows();
        });
        let sequence = inner.machine.sequence();
        drop(inner);
        self.changed.send_if_modified(|known| std::mem::replace(known, sequence) != sequence);
        outcome
    }

    fn policy_of(epoch: &Epoch) -> UpdatePolicy {
        epoch.prepared.policy.clone()
    }
}

impl Inner {
    fn held(&self) -> impl Iterator<Item = &Arc<Version>> {
        self.kept.iter().chain(&self.staged).chain(self.earlier.all())
    }

    fn stop_receiving(&mut self, reason: &str) {
        if let Some(receiving) = self.receiving.take() {
            receiving.over.cancel();
            if let Some(receiver) = receiving.receiver {
                receiver.discard(reason);
            }
        }
    }

    fn note_dirt(&mut self) {
        match (self.machine.must_not_serve(), self.dirty_since) {
            (true, None) => self.dirty_since = Some(Instant::now()),
            (false, Some(_)) => self.dirty_since = None,
            _ => {}
        }
    }

    fn show(&self, facts: &mut super::core::Facts, current: Option<&HeldVersion>) {
        let of_group = self.held().find(|version| current.is_some_and(|current| version.held.is(current)));
        facts.retained = of_group.or(self.kept.as_ref()).or(self.staged.as_ref()).map(|version| version.held.clone());
        facts.earlier = self.held().map(|version| version.held.clone()).filter(|held| Some(held) != facts.retained.as_ref()).collect();
        facts.installed = self.machine.certainly_installed().map(|installed| installed.held.clone());
        facts.proven_by = self.machine.certainly_installed().and_then(|installed| installed.proven_by);
        facts.refused.clone_from(&self.refused);
        facts.engine_restarts = self.engine.restarts;
        facts.engine.clone_from(&self.engine.facts);
        facts.healthy = !self.engine.unhealthy();
        facts.wedged = self.engine.is_wedged();
        facts.received.clone_from(&self.received);
        facts.paused_until = self.paused_until;
        facts.updating = self.machine.live().is_some() || self.going_back;
        facts.dirty = self.machine.dirty().is_some();
        facts.unproven = self.machine.unproven().is_some();
        facts.engine_down = self.engine.gone() || self.engine.unhealthy() && !self.switching;
        let wedged = self.engine.reason.clone().filter(|_| facts.wedged);
        let dirty = || self.machine.dirty().map(|dirty| dirty.reason.clone());
        let unproven = || self.machine.unproven().map(|unproven| unproven.reason.clone());
        facts.reason = wedged.or_else(dirty).or_else(unproven).or_else(|| self.engine.reason.clone());
    }
}

/// A rollout feeds others from what lies in its directory.
impl Holder for Rollout {
    fn to_feed(&self, epoch: &Epoch) -> Option<Copy> {
        let current = epoch.current().filter(|_| epoch.feeds())?;
        if self.goes_first(epoch, current) {
            return None;
        }
        let version = self.holding(current)?;
        Some(Copy { held: version.held.clone(), algorithm: version.manifest.algorithm, source: version.source() })
    }
}

//! Messages of a leader, as one rollout carries them out: begin, finish, activate, abort, status.
//!
//! [`State`](super::state::State) decides; here space is checked, files are made, and a silent leader is noticed.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::machine::{Activating, Finishing, Opening};
use super::receive::{Listener, Receiver};
use super::state::Takes;
use super::{Arriving, Receiving, Rollout, Version};
use crate::group::{Epoch, LedBy, refusal};
use weightsync_core::protocol::{
    AbortRequest, ActivateRequest, BeginRequest, FinishRequest, HeldVersion, Received, Refusal, RefusalCode, Role, Statement,
    StatusRequest, UpdateId, UpdateStatus,
};
use weightsync_core::weights::safetensors::SafetensorsPlan;
use weightsync_core::weights::{Layout, Section, TensorSpec};
use weightsync_engine::{DraftWay, EngineError, Fit, InstallTerms, draft, same_tensors};
use weightsync_net::deadline::ProgressDeadline;
use weightsync_net::identity::PeerIdentity;
use weightsync_transport::{Fault, Transfer};

/// So many times the allowed silence may pass before a begin is answered: an engine that answers no request while it is fed is paused first,
/// and LMDeploy moves its weights to the host for that (2 GB/s).
pub const PAUSING: u32 = 6;

impl Rollout {
    /// Opens an update: compares the layout, checks memory, asks the engine; before a byte moves.
    pub async fn begin(self: &Arc<Self>, epoch: &Arc<Epoch>, by: LedBy, request: BeginRequest) -> Result<UpdateStatus, Refusal> {
        let manifest = may_bring(epoch, &by, &request)?;
        self.check_leader(&request.update, &by)?;
        check_layout(&request)?;
        if let (Some(statement), Some(manifest)) = (&request.statement, &request.manifest_digest) {
            let held = HeldVersion { version: request.update.version, manifest: manifest.clone() };
            self.learn(statement, &held, &request.layout_digest)?;
        }
        let policy = &epoch.prepared.policy;
        let silence = Duration::from_millis(policy.silence_ms);
        // An engine that takes the buckets of an attempt that was replaced would be waited for in vain.
        self.with(|state| state.make_way(&request.update));
        // An engine that is being switched may be about to hold the very version; and its space is not counted twice.
        let Ok(switched) = timeout(silence, self.switching.lock()).await else { return Err(busy()) };
        drop(switched);
        let update = request.update.clone();
        match self.with(|state| state.begins(&request, by, manifest))? {
            Opening::Busy => return Err(busy()),
            Opening::Known => self.watch_attempt(epoch, &update, None),
            Opening::Check => match self.open(epoch, &request).await {
                Ok(receiver) => {
                    let fed = receiver.feeds();
                    if let Err(refusal) = self.with(|state| state.machine.opened(&update, fed)) {
                        receiver.discard("another attempt took its place");
                        return Err(refusal);
                    }
                    self.watch_attempt(epoch, &update, Some(receiver));
                }
                Err(refusal) => {
                    self.with(|state| state.machine.refused(&update, &refusal));
                    return Err(refusal);
                }
            },
        }
        self.answer(&update)
    }

    /// Ends the stream: coverage and digests are compared now.
    pub async fn finish(self: &Arc<Self>, request: FinishRequest) -> Result<UpdateStatus, Refusal> {
        let update = request.update.clone();
        self.heard_leader(&update);
        self.read(|state| state.check_manifest(&request))?;
        self.learn_statement(&request)?;
        if self.with(|state| state.machine.finish(&request))? == Finishing::Verify {
            let receiver = self.receiver_of(&update).ok_or_else(|| refusal(RefusalCode::Internal, "the received bytes are gone"))?;
            let begun = Instant::now();
            let outcome = match receiver {
                Arriving::Files(receiver) => {
                    self.conclude_files(receiver, request).await.map(|version| (version.held.clone(), Some(version)))
                }
                Arriving::Device(receiver) => receiver.conclude(&request).await.map(without_files),
                Arriving::Group(receiver) => {
                    if request.check
                        && let Some(checksum) = receiver.seal().await
                    {
                        self.with(|state| state.machine.checked(&update, checksum))?;
                    }
                    receiver.conclude(&request).await.map(without_files)
                }
                Arriving::External(..) => Err("its bytes travel in the trainer's own data plane".into()),
                Arriving::Memory(receiver) => receiver.conclude(&request).await.map(without_files),
            };
            let took_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
            if let Err(reason) = &outcome {
                tracing::warn!(version = update.version, attempt = update.attempt, reason, "a version is not what its manifest says");
            }
            self.with(|state| state.verified(&update, outcome, took_ms))?;
        }
        self.answer(&update)
    }

    /// Compares what lies in files, and puts configuration and tokenizer next to it.
    async fn conclude_files(self: &Arc<Self>, receiver: Arc<Receiver>, request: FinishRequest) -> Result<Version, String> {
        let rollout = self.clone();
        // Takes as long as the manifest is to hash; the bytes were hashed while they came.
        let concluded = tokio::task::spawn_blocking(move || {
            let version = receiver.conclude(&request)?;
            let placed = rollout.companions.place(&rollout.shared, version.dir().path());
            placed.map_err(|error| format!("configuration and tokenizer cannot be placed next to the weights: {error}"))?;
            Ok(version)
        });
        concluded.await.unwrap_or_else(|ended| Err(format!("verification ended early: {ended}")))
    }

    /// Has the engine switched to the delivered version; answers at once.
    pub fn activate(self: &Arc<Self>, epoch: &Arc<Epoch>, request: &ActivateRequest) -> Result<UpdateStatus, Refusal> {
        let update = &request.update;
        self.heard_leader(update);
        if let Activating::Install(held) = self.with(|state| state.machine.activate(update))? {
            let fed = self.receiver_of(update);
            let agreed = request.agreed && self.read(|state| state.machine.has_checksum(update));
            match self.holding(&held) {
                _ if fed.as_ref().is_some_and(|receiver| receiver.finish(&held, agreed)) => {}
                Some(version) => {
                    let (rollout, policy) = (self.clone(), Self::policy_of(epoch));
                    tokio::spawn(async move { rollout.switch(version, &policy).await });
                }
                None => self.with(|state| state.copy_lost("the delivered version is gone".into())),
            }
        }
        self.answer(update)
    }

    pub fn abort(&self, request: &AbortRequest) {
        self.end_attempt(&request.update, &request.reason);
    }

    /// Notes who leads an attempt that was opened.
    pub fn is_led(&self, update: &UpdateId, by: LedBy) {
        self.with(|state| state.leads(update, by));
    }

    /// Refuses a message about an attempt that another member leads.
    pub fn check_leader(&self, update: &UpdateId, by: &LedBy) -> Result<(), Refusal> {
        self.read(|state| state.check_leader(update, by))
    }

    /// Keeps what a source signed. Other weights under the number of what is installed take its place where they were announced later.
    fn learn(&self, statement: &Statement, held: &HeldVersion, layout: &str) -> Result<(), Refusal> {
        let statements = self.core.statements();
        statements.learn(statement, held, layout)?;
        self.with(|state| {
            let installed = state.machine.installed().map(|installed| &installed.held);
            let other = installed.filter(|other| other.version == held.version && *other != held);
            if other.is_some_and(|other| statements.about(other).is_none_or(|known| known.epoch < statement.epoch)) {
                state.machine.supersede();
            }
        });
        Ok(())
    }

    /// Keeps what the source signed about the weights that arrived.
    fn learn_statement(&self, request: &FinishRequest) -> Result<(), Refusal> {
        let layout = self.read(|state| state.machine.layout_of(&request.update).map(str::to_owned));
        match (&request.statement, layout) {
            (Some(statement), Some(layout)) => {
                let held = HeldVersion { version: request.update.version, manifest: request.manifest_digest.clone() };
                self.learn(statement, &held, &layout)
            }
            _ => Ok(()),
        }
    }

    /// Where the last attempt stands; waits up to [`StatusRequest::LONG_POLL`] for something newer than `after`. It is a sign of life of the leader where the
    /// leader asks.
    pub async fn status(&self, after: Option<u64>, peer: &PeerIdentity) -> Result<UpdateStatus, Refusal> {
        let mut changed = self.changed.subscribe();
        if let Some(after) = after {
            // Time over or not: what is known now is the answer.
            let _ = timeout_at(Instant::now() + StatusRequest::LONG_POLL, changed.wait_for(|sequence| *sequence > after)).await;
        }
        let status = self.last_attempt();
        let status = status.ok_or_else(|| refusal(RefusalCode::WrongPhase, "no update was begun here yet"))?;
        let leads = |leader: &str| matches!(peer, PeerIdentity::Agent { pod_uid, .. } if pod_uid == leader);
        if self.read(|state| state.leader_of(&status.update).is_some_and(leads)) {
            self.heard_leader(&status.update);
        }
        Ok(status)
    }

    async fn open(self: &Arc<Self>, epoch: &Epoch, request: &BeginRequest) -> Result<Arriving, Refusal> {
        let health = Duration::from_millis(epoch.prepared.policy.health.timeout_ms);
        self.ask_engine(health, health).await?;
        let notes = self.check_tensors(request).await?;
        if !notes.is_empty() {
            tracing::warn!(
                version = request.update.version,
                ?notes,
                "the tensors of a version and the engine's checkpoint do not quite agree"
            );
        }
        self.with(|state| state.machine.compared(&request.update, notes));
        // What waits to be installed waits no more: its room is needed. What the engine was switched to stays, to feed others.
        self.with(|state| state.versions.unstage());
        let internal = |what: String| refusal(RefusalCode::Internal, what);
        let layout = Arc::new(request.layout.clone());
        // Taken as it comes, a version pauses the engine while it travels; the object counts on it being paused for the switch only.
        let staged_only = epoch.prepared.policy.max_unavailable > 0 && self.read(|state| state.machine.installed().is_some());
        if staged_only && let Err(error) = self.takes_files() {
            let what = format!("{error}; membership.maxUnavailable needs versions that lie complete before an engine is switched");
            return Err(refusal(RefusalCode::EngineRefused, what));
        }
        if !staged_only && Self::takes_from_group(epoch, request) {
            self.takes_draft(DraftWay::Group, &layout, health).await?;
            return self.open_group(epoch, request, &layout).await.map(Arriving::Group);
        }
        let why_not = match self.takes_device(epoch, request) {
            Ok(()) if staged_only => "membership.maxUnavailable wants engines paused for the switch only".to_owned(),
            Ok(()) if layout.has_draft() => draft::untaken(self.engine.kind(), DraftWay::Other).to_string(),
            Ok(()) => match self.open_device(epoch, request, &layout).await {
                Ok(receiver) => return Ok(Arriving::Device(receiver)),
                Err(refusal) => refusal.message,
            },
            Err(why) => why,
        };
        if let Err(error) = self.takes_files() {
            return Err(refusal(RefusalCode::EngineRefused, format!("{error}; from GPU memory: {why_not}")));
        }
        if layout.has_draft() {
            self.takes_draft(self.way_of_files().await, &layout, health).await?;
        }
        tracing::info!(why_not, "the version is put into files and not handed over from GPU memory as it comes");
        let plan = SafetensorsPlan::new(&layout, None).map_err(|error| refusal(RefusalCode::Invalid, error.to_string()))?;
        let wanted = plan.total_bytes().saturating_add(self.companions.bytes());
        let room = match self.make_room(wanted) {
            Ok(room) => room,
            Err(error) => {
                let out_of_space = |what: String| Err(refusal(RefusalCode::OutOfSpace, what));
                if staged_only {
                    return out_of_space(format!("{error} (version {}); membership.maxUnavailable needs them", request.update.version));
                }
                return match self.open_memory(epoch, request, &layout).await {
                    Ok(receiver) => Ok(Arriving::Memory(receiver)),
                    Err(why) => {
                        let what = format!("{error} (version {}); and not without files: {why}", request.update.version);
                        out_of_space(what)
                    }
                };
            }
        };
        let dir = self.dir.version(request.update.version, request.update.attempt).map_err(|error| internal(error.to_string()))?;
        let listener = Box::new(Weak::clone(&Arc::downgrade(self)));
        let receiver = Receiver::create(request.update.clone(), layout, request.algorithm, plan, dir, listener)
            .map_err(|error| internal(format!("the files of version {} cannot be made: {error}", request.update.version)))?;
        Ok(Arriving::Files(Arc::new(receiver.within(room))))
    }

    /// Compares the tensors of a version with the engine's checkpoint, or where that cannot be read with the version that this start of the engine
    /// took before. Answers what is worth a look and no fault.
    async fn check_tensors(&self, request: &BeginRequest) -> Result<Vec<String>, Refusal> {
        let (engine, tensors) = (self.engine.clone(), request.layout.tensors().cloned().collect::<Vec<_>>());
        let before = self.read(|state| state.took().cloned());
        let ignored = self.assigned.borrow().ignored.clone();
        let compared = tokio::task::spawn_blocking(move || match (engine.fits(&tensors)?, before) {
            (Fit::Whole { notes }, _) => Ok(notes),
            (Fit::Unchecked { why, tied }, Some(took)) => {
                let (version, before) = (took.held.version, took.layout.tensors().cloned().collect::<Vec<_>>());
                same_tensors((version, &before), &tensors, &ignored, tied)?;
                Ok(vec![format!("its names and shapes were compared with those of version {version} only: {why}")])
            }
            (Fit::Unchecked { why, .. }, None) => Ok(vec![format!("its names and shapes were compared with nothing: {why}")]),
        });
        let compared = compared.await.map_err(|ended| refusal(RefusalCode::Internal, ended.to_string()))?;
        compared.map_err(|error: EngineError| refusal(RefusalCode::Invalid, error.to_string()))
    }

    /// Whether the engine takes the draft model of a version that comes that way, where the version has one.
    async fn takes_draft(&self, way: DraftWay, layout: &Layout, deadline: Duration) -> Result<(), Refusal> {
        let of_draft = |tensor: &&TensorSpec| tensor.section == Section::Draft;
        let draft: Vec<_> = layout.tensors().filter(of_draft).cloned().collect();
        if draft.is_empty() {
            return Ok(());
        }
        let taken = self.engine.takes_draft(way, draft, deadline).await;
        taken.map_err(|error| refusal(RefusalCode::EngineRefused, error.to_string()))
    }

    /// How a version that lies in files comes into the engine.
    async fn way_of_files(&self) -> DraftWay {
        if self.memory_route().await.is_some() { DraftWay::HostMemory } else { DraftWay::Other }
    }

    /// Lets the stream in, and ends the attempt when its leader falls silent or its epoch is over.
    pub(super) fn watch_attempt(self: &Arc<Self>, epoch: &Epoch, update: &UpdateId, receiver: Option<Arriving>) {
        let policy = &epoch.prepared.policy;
        let silence = Duration::from_millis(policy.silence_ms);
        let total = Duration::from_millis(policy.update_timeout_ms).saturating_add(silence);
        let deadline = ProgressDeadline::new(silence, total);
        let over = CancellationToken::new();
        let takes = receiver.as_ref().map_or(Takes::Nothing, Arriving::takes);
        let watched = self.change(|inner| {
            let receives = inner.state.receives(update, takes);
            if receives {
                let (update, receiver) = (update.clone(), receiver.clone());
                inner.receiving = Some(Receiving { update, receiver, deadline: deadline.clone(), over: over.clone() });
            }
            receives
        });
        if !watched {
            return;
        }
        if let Some(store) = receiver.and_then(|receiver| receiver.store()) {
            self.core.expect(update.clone(), store);
        }
        let (rollout, update, epoch_over) = (Arc::downgrade(self), update.clone(), self.core.over(epoch.id()));
        tokio::spawn(async move {
            let silent = tokio::select! {
                passed = deadline.passed() => Some(format!("its leader fell silent: {passed}")),
                () = epoch_over.cancelled() => None,
                () = over.cancelled() => return,
            };
            let Some(rollout) = rollout.upgrade() else { return };
            match silent {
                Some(reason) => rollout.end_attempt(&update, &reason),
                None => rollout.fence_attempt(&update),
            };
        });
    }

    /// Gives an attempt up here; false when it was over already.
    pub(super) fn end_attempt(&self, update: &UpdateId, reason: &str) -> bool {
        let ended = self.with(|state| state.attempt_ended(update, reason));
        self.ended(update, reason, ended)
    }

    /// The same, where the epoch of the attempt is over.
    fn fence_attempt(&self, update: &UpdateId) -> bool {
        let reason = self.core.why_over();
        let ended = self.with(|state| state.attempt_fenced(update, &reason));
        self.ended(update, &reason, ended)
    }

    fn ended(&self, update: &UpdateId, reason: &str, ended: bool) -> bool {
        if ended {
            tracing::info!(version = update.version, attempt = update.attempt, reason, "an attempt ended");
        }
        self.core.expect_no_more(update);
        ended
    }

    /// Keeps how the bytes of a version came. Over NCCL they come from the leader.
    fn measured(&self, update: &UpdateId, transfer: &Transfer) {
        let Some(epoch) = self.core.epoch().filter(|epoch| *epoch.id() == update.epoch) else { return };
        let leader = || {
            let pod_uid = self.read(|state| state.leader_of(update).map(str::to_owned))?;
            let leader = epoch.commit.addresses.iter().find(|member| member.incarnation.pod_uid == pod_uid)?;
            Some(leader.member.clone())
        };
        let Some(from) = transfer.from.clone().or_else(leader) else { return };
        let Transfer { by, bytes, took, .. } = *transfer;
        tracing::info!(version = update.version, %from, by = by.as_str(), bytes, ?took, "received a version");
        let microseconds = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.with(|state| state.measured(Received { version: update.version, from, by, bytes, microseconds }));
    }

    pub(super) fn heard_leader(&self, update: &UpdateId) {
        let inner = crate::locks::lock(&self.inner);
        if let Some(receiving) = inner.receiving.as_ref().filter(|receiving| receiving.update == *update) {
            receiving.deadline.moved();
        }
    }

    pub(super) fn answer(&self, update: &UpdateId) -> Result<UpdateStatus, Refusal> {
        let status = self.last_attempt().filter(|status| status.update == *update);
        status.ok_or_else(|| refusal(RefusalCode::WrongPhase, format!("attempt {} was replaced by another", update.attempt)))
    }
}

impl Listener for Weak<Rollout> {
    fn moving(&self) {
        let Some(rollout) = self.upgrade() else { return };
        let inner = crate::locks::lock(&rollout.inner);
        if let Some(receiving) = &inner.receiving {
            receiving.deadline.moved();
        }
    }

    fn received(&self, update: &UpdateId, bytes: u64) {
        if let Some(rollout) = self.upgrade() {
            rollout.with(|state| state.machine.received(update, bytes));
        }
    }

    fn measured(&self, update: &UpdateId, transfer: &Transfer) {
        if let Some(rollout) = self.upgrade() {
            rollout.measured(update, transfer);
        }
    }

    fn streamed(&self, update: &UpdateId, took_ms: u64) -> Result<(), Refusal> {
        let rollout = self.upgrade().ok_or_else(|| refusal(RefusalCode::Internal, "the agent is ending"))?;
        rollout.with(|state| state.machine.streamed(update, took_ms))
    }

    fn broken(&self, update: &UpdateId, fault: Fault<'_>, cause: &str) {
        let Some(rollout) = self.upgrade() else { return };
        let reason = match fault.peer() {
            Some(peer) => format!("the stream broke at {peer}: {cause}"),
            None => format!("the stream broke: {cause}"),
        };
        // The leader sees a loss by its own transport; this is for the loss of the leader. A stream breaks as well once its attempt was given
        // up, at this member or at the next one, which refuses the rest: then both live.
        if rollout.end_attempt(update, &reason)
            && let Fault::Lost(peer) = fault
            && rollout.core.epoch().is_some_and(|epoch| *epoch.id() == update.epoch && epoch.me() != peer)
        {
            rollout.core.peer_lost(&update.epoch, peer, cause);
        }
    }
}

/// A version that lies in no files.
fn without_files(held: HeldVersion) -> (HeldVersion, Option<Version>) {
    (held, None)
}

/// Refuses what a member may not bring: a source brings what its trainer publishes, a feeder the version that the epoch names and nothing else.
/// Answers the manifest that the update must end with.
fn may_bring(epoch: &Epoch, by: &LedBy, request: &BeginRequest) -> Result<Option<String>, Refusal> {
    if by.role == Role::Source {
        return Ok(None);
    }
    let begun = request.manifest_digest.as_ref().filter(|_| request.feeding);
    let named = epoch.current().filter(|current| current.version == request.update.version && Some(&current.manifest) == begun);
    if let Some(current) = named {
        return Ok(Some(current.manifest.clone()));
    }
    let what = epoch.current().map_or_else(|| "none".to_owned(), |current| format!("{} ({})", current.version, current.manifest));
    let message = format!("a feeder brings the version that the epoch names ({what}), not version {}", request.update.version);
    Err(refusal(RefusalCode::Forbidden, message))
}

/// What an engine is marked with that takes the bytes as they come.
pub(super) fn mark(request: &BeginRequest) -> HeldVersion {
    InstallTerms::mark(request.update.version, request.manifest_digest.clone())
}

fn check_layout(request: &BeginRequest) -> Result<(), Refusal> {
    let mismatch = |what: String| Err(refusal(RefusalCode::LayoutMismatch, what));
    if let Err(error) = Layout::validate(&request.layout) {
        return mismatch(error.to_string());
    }
    let digest = request.layout.digest();
    if digest != request.layout_digest {
        return mismatch(format!("the layout is {} by the leader and {digest} by what was sent", request.layout_digest));
    }
    Ok(())
}

pub(super) fn busy() -> Refusal {
    refusal(RefusalCode::WrongPhase, "the engine is still being switched to another version")
}

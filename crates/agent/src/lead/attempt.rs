//! One attempt to bring one version to the rollouts of one epoch, from begin to the last engine's word.
//!
//! Carries out what [`Table`] decides. Every wait ends: with the epoch, with a lost member, or with a deadline. When it ends without its
//! aim, or is dropped, every member is asked to give the attempt up.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::Leader;
use super::agreement::{Agreement, compare};
use super::calls::{Calls, Following};
use super::engines::EngineGroupsLed;
use super::keeping::Keep;
use super::order::{after, in_order};
use super::peers::Peers;
use super::stream::Sending;
use super::table::{Failure, Switching, Table, Verdict};
use crate::core::Core;
use crate::group::{Epoch, refusal};
use crate::locks::lock;
use crate::version_source::VersionSource;
use weightsync_core::protocol::{
    FinishRequest, HeldVersion, InstallStep, MemberName, MixedWindow, PublishErrorCode, RefusalCode, Role, Statement, UpdateId,
    UpdatePhase, UpdateView,
};
use weightsync_core::weights::{DigestAlgorithm, Layout, Manifest};

/// Least time between two views while bytes move.
const VIEW_PERIOD: Duration = Duration::from_millis(200);

/// What the caller wants to know of an attempt, and to decide in it.
#[async_trait]
pub trait Stage: Send {
    /// It got on; `bytes` are those of the slowest member.
    fn progress(&mut self, phase: UpdatePhase, bytes: u64);

    /// The whole stream was read, and this is what it was.
    fn streamed(&mut self, manifest: &Manifest, held: &HeldVersion) -> Result<(), Failure>;

    /// Every member that will ever verify the version did; returns when engines may switch.
    async fn staged(&mut self) -> Result<(), Failure>;

    /// The known state of members that were asked to switch; reported before they are informed, and after each of their reports.
    fn switching(&mut self, known: Switching);
}

pub struct Plan<'a> {
    pub epoch: Arc<Epoch>,
    pub version: u64,
    /// Number of the attempt, from 1.
    pub attempt: u32,
    /// Whether the version is the group's already.
    pub feeding: bool,
    /// Whether the trainer says when engines switch.
    pub manual: bool,
    pub algorithm: DigestAlgorithm,
    /// To whom, in the order of the chain.
    pub members: Vec<MemberName>,
    pub min_ready: u32,
    /// The manifest's digest, where these very bytes were read before: members that hold them take no second copy.
    pub known: Option<String>,
    /// The manifest's digest that the bytes must have, though they were not read yet.
    pub must: Option<String>,
    pub source: &'a mut dyn VersionSource,
    pub keep: Option<Arc<dyn Keep>>,
    pub stage: &'a mut dyn Stage,
}

/// An attempt that reached its aim.
#[derive(Debug, Clone)]
pub struct Brought {
    pub held: HeldVersion,
    /// Length of its stream.
    pub bytes: u64,
    pub installed: Vec<MemberName>,
    pub behind: Vec<(MemberName, String)>,
    pub mixed: Vec<(MemberName, Vec<MixedWindow>)>,
    pub notes: Vec<(MemberName, Vec<String>)>,
    pub phases_ms: Vec<(String, u64)>,
}

impl Leader {
    /// Runs an attempt to its end. Dropping the future gives the attempt up.
    pub async fn lead(&self, plan: Plan<'_>) -> Result<Brought, Failure> {
        let _busy = self.busy();
        let over = self.core.over(plan.epoch.id());
        let limit = Duration::from_millis(plan.epoch.prepared.policy.update_timeout_ms);
        let mut attempt = Attempt::new(self, Begun::of(&plan));
        let phase_of = |attempt: &Attempt<'_>, code, message: String, again| Failure {
            code,
            message,
            phase: attempt.view.phase,
            member: None,
            again,
            lasting: false,
        };
        let outcome = tokio::select! {
            biased;
            () = over.cancelled() => None,
            outcome = tokio::time::timeout(limit, attempt.run(plan)) => Some(outcome),
        };
        let outcome = match outcome {
            None => Err(phase_of(&attempt, PublishErrorCode::NotEnoughReplicas, "the epoch ended in the middle".into(), true)),
            Some(Err(_)) => Err(phase_of(&attempt, PublishErrorCode::Timeout, format!("the update did not end within {limit:?}"), true)),
            Some(Ok(outcome)) => outcome,
        };
        attempt.end(outcome.as_ref().err());
        outcome
    }
}

/// An attempt that runs. Its phases are in [`super::phases`].
pub(super) struct Attempt<'a> {
    pub(super) leader: &'a Leader,
    pub(super) epoch: Arc<Epoch>,
    pub(super) calls: Calls,
    pub(super) peers: Arc<Peers>,
    pub(super) members: Vec<MemberName>,
    pub(super) table: Table,
    pub(super) view: UpdateView,
    pub(super) silence: Duration,
    phase_begun: Instant,
    shown: Instant,
    unshown: bool,
    over: bool,
    /// Members whose engines' own checksums are those of most of their pool.
    pub(super) agreed: Vec<MemberName>,
}

pub(super) struct Begun<'a> {
    pub(super) epoch: &'a Arc<Epoch>,
    pub(super) version: u64,
    pub(super) attempt: u32,
    pub(super) feeding: bool,
    pub(super) members: Vec<MemberName>,
    pub(super) min_ready: u32,
    pub(super) total_bytes: u64,
}

impl<'a> Begun<'a> {
    fn of(plan: &'a Plan<'_>) -> Self {
        Self {
            epoch: &plan.epoch,
            version: plan.version,
            attempt: plan.attempt,
            feeding: plan.feeding,
            members: plan.members.clone(),
            min_ready: plan.min_ready,
            total_bytes: plan.source.layout().total_bytes,
        }
    }
}

impl<'a> Attempt<'a> {
    pub(super) fn new(leader: &'a Leader, begun: Begun<'_>) -> Self {
        let Begun { epoch, version, attempt, feeding, members, min_ready, total_bytes } = begun;
        let now = Instant::now();
        let mut attempt = Self {
            leader,
            epoch: epoch.clone(),
            calls: Calls::new(leader.client.clone(), epoch.clone()),
            peers: leader.peers(epoch),
            table: Table::new(&members, min_ready),
            members,
            view: UpdateView {
                id: epoch.id().clone(),
                version,
                attempt,
                phase: UpdatePhase::Begin,
                total_bytes,
                members: Vec::new(),
                phases_ms: Vec::new(),
                failure: None,
                feeding,
            },
            phase_begun: now,
            shown: now,
            unshown: false,
            silence: Duration::from_millis(epoch.prepared.policy.silence_ms),
            over: false,
            agreed: Vec::new(),
        };
        attempt.set_updating(true);
        attempt.show();
        attempt
    }

    async fn run(&mut self, plan: Plan<'_>) -> Result<Brought, Failure> {
        let Plan { source, keep, stage, known, must, feeding, manual, algorithm, .. } = plan;
        let layout = Arc::new(source.layout().clone());
        let update = self.update();
        stage.progress(UpdatePhase::Begin, 0);
        // A broadcast to engines needs every one of them: who holds the version takes it once more.
        let reported = known.clone().filter(|_| feeding || self.epoch.engines().is_none());
        let announced = reported.as_ref().and_then(|manifest| self.statement(manifest, &layout.digest()));
        self.begin(&layout, (algorithm, feeding, manual), reported, announced).await?;

        self.enter(UpdatePhase::Transfer, stage);
        let planned = in_order(self.table.receiving(), &self.leader.measured_order());
        let receiving = in_order(planned, lock(&self.leader.order).as_slice());
        let mut following = self.calls.follow(&self.members_in(), &update);
        let copy = keep.clone();
        let (held, finish) = match known {
            // Everybody holds it: nothing is to be read.
            Some(manifest) if receiving.is_empty() => (HeldVersion { version: update.version, manifest }, None),
            known => {
                let staging = self.leader.gpus().and_then(|gpus| gpus.first()).map(|(_, staging)| staging);
                let sending = Sending { source, layout: layout.clone(), algorithm, keep, staging };
                let digests = self.transfer(&receiving, sending, &mut following, stage).await?;
                let manifest = Manifest::new(update.version, Layout::clone(&layout), algorithm, &digests)
                    .map_err(|error| self.failure(PublishErrorCode::Internal, error.to_string(), None, false))?;
                let held = HeldVersion { version: update.version, manifest: manifest.digest() };
                if let Some(before) = known.or(must).filter(|before| *before != held.manifest) {
                    let message = format!(
                        "version {} was tried with manifest {before}, these are other weights ({}): give them a new number",
                        held.version, held.manifest
                    );
                    return Err(self.failure(PublishErrorCode::ManifestChanged, message, None, false));
                }
                stage.streamed(&manifest, &held)?;
                let request = FinishRequest {
                    update: update.clone(),
                    tensor_digests: manifest.tensor_digests,
                    manifest_digest: held.manifest.clone(),
                    statement: self.statement(&held.manifest, &layout.digest()),
                    check: self.engines_led().is_some_and(|led| led.is_to_be_checked()),
                };
                (held, Some(request))
            }
        };
        // The trainer may change its tensors once a whole copy is here or every member has them, whichever is first: engines switch meanwhile.
        let (verified, silence) = (Notify::new(), self.silence);
        let released = async {
            let kept = async {
                match copy {
                    Some(copy) if copy.whole(layout.bucket_count(), silence).await => {}
                    _ => std::future::pending().await,
                }
            };
            tokio::select! {
                () = kept => {}
                () = verified.notified() => {}
            }
            source.released().await;
        };
        {
            let installed = self.install(&receiving, finish, &mut following, stage, update, &verified);
            tokio::pin!(released, installed);
            tokio::select! {
                biased;
                installed = &mut installed => installed?,
                () = &mut released => installed.await?,
            }
        }
        Ok(Brought {
            held,
            bytes: layout.total_bytes,
            installed: self.table.installed(),
            behind: self.table.behind(),
            mixed: self.table.mixed(),
            notes: self.table.notes(),
            phases_ms: self.view.phases_ms.clone(),
        })
    }

    /// From the last byte to the last engine's word. Says when every member that will ever verify the version did.
    async fn install(
        &mut self,
        receiving: &[MemberName],
        finish: Option<FinishRequest>,
        following: &mut Following,
        stage: &mut dyn Stage,
        update: UpdateId,
        verified: &Notify,
    ) -> Result<(), Failure> {
        self.enter(UpdatePhase::Verify, stage);
        let checks = finish.as_ref().is_some_and(|request| request.check);
        if let Some(request) = finish {
            self.tell(receiving, request, FinishRequest::WITHIN + self.silence).await;
        }
        let settled = self.settle(following, stage, Table::after_finish).await;
        self.learn_order(receiving);
        settled?;
        if checks {
            self.compare_engines()?;
        }
        verified.notify_one();

        self.enter(UpdatePhase::Staged, stage);
        stage.staged().await?;

        self.enter(UpdatePhase::Activate, stage);
        self.switch(following, stage, update).await?;
        self.enter(UpdatePhase::Done, stage);
        Ok(())
    }

    fn engines_led(&self) -> Option<Arc<EngineGroupsLed>> {
        self.leader.engines_of(&self.epoch).filter(|_| !self.view.feeding)
    }

    /// Takes engines out that hold other weights than most of their pool. They are paused still, and stay so until they are fed in full.
    fn compare_engines(&mut self) -> Result<(), Failure> {
        let said = self.table.checksums();
        let Agreement { agreed, wrong } = compare(&said);
        let compared = |name: &MemberName| agreed.contains(name) || wrong.iter().any(|(wrong, _)| wrong == name);
        let slowest_ms = said.iter().filter(|(name, _)| compared(name)).map(|(_, checksum)| checksum.took_ms).max();
        if let Some(led) = self.engines_led() {
            led.checked(slowest_ms);
        }
        for (member, why) in wrong {
            tracing::error!(%member, version = self.view.version, why, "an engine holds other weights than were sent");
            self.table.refused(&member, &refusal(RefusalCode::EngineRefused, why.clone()));
            self.calls.abort(vec![member], self.update(), why);
        }
        self.agreed = agreed;
        match self.table.after_finish() {
            Verdict::Fail(failure) => Err(failure),
            Verdict::Wait | Verdict::Enough | Verdict::All => Ok(()),
        }
    }

    /// Of members that pass bytes on: those that did not verify them come first in the next chain, and their predecessor is reported.
    fn learn_order(&mut self, chain: &[MemberName]) {
        let passed_on = self.view.feeding || self.epoch.communicator().is_none() && self.epoch.engines().is_none();
        if !passed_on {
            return;
        }
        let failed = |table: &Table, member: &MemberName| table.step(member) == Some(InstallStep::Failed);
        {
            let mut order = lock(&self.leader.order);
            *order = after(chain, &order, |member| failed(&self.table, member));
            let known = self.epoch.rollouts();
            order.retain(|member| known.contains(member));
        }
        for (before, member) in chain.iter().zip(chain.iter().skip(1)) {
            if failed(&self.table, member) {
                self.table.passed_on(member, before);
            }
        }
    }

    pub(super) fn failure(&self, code: PublishErrorCode, message: String, member: Option<MemberName>, again: bool) -> Failure {
        Failure { code, message, phase: self.view.phase, member, again, lasting: false }
    }

    pub(super) fn enter(&mut self, phase: UpdatePhase, stage: &mut dyn Stage) {
        let took = u64::try_from(self.phase_begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        // How long a trainer takes to activate is not ours to measure.
        if self.view.phase != UpdatePhase::Staged {
            self.view.phases_ms.push((format!("{:?}", self.view.phase).to_lowercase(), took));
        }
        self.phase_begun = Instant::now();
        self.view.phase = phase;
        stage.progress(phase, self.table.slowest_bytes());
        self.show();
    }

    pub(super) fn moved(&mut self, stage: &mut dyn Stage) {
        stage.progress(self.view.phase, self.table.slowest_bytes());
        self.unshown = true;
        if self.shown.elapsed() >= VIEW_PERIOD {
            self.show();
        }
    }

    /// When what moved is to be shown though nothing more moves; none when all is shown.
    pub(super) fn show_at(&self) -> Option<Instant> {
        self.unshown.then(|| self.shown + VIEW_PERIOD)
    }

    pub(super) fn show(&mut self) {
        (self.shown, self.unshown) = (Instant::now(), false);
        self.view.members = self.table.progress();
        self.leader.core.events().set_update(self.view.clone());
    }

    pub(super) fn end(&mut self, failure: Option<&Failure>) {
        self.over = true;
        if let Some(failure) = failure {
            tracing::warn!(version = self.view.version, attempt = self.view.attempt, failure = %failure.message, "an attempt failed");
            self.view.phase = UpdatePhase::Failed;
            self.view.failure = Some(failure.message.clone());
            self.calls.abort(self.members.clone(), self.update(), failure.message.clone());
        }
        self.show();
        self.set_updating(false);
    }

    pub(super) fn update(&self) -> UpdateId {
        UpdateId { epoch: self.view.id.clone(), version: self.view.version, attempt: self.view.attempt }
    }

    /// What a source signed about the version: this one, where it is a source, else the one that announced it.
    pub(super) fn statement(&self, manifest: &str, layout: &str) -> Option<Box<Statement>> {
        let (statements, held) = (self.leader.core.statements(), HeldVersion { version: self.view.version, manifest: manifest.to_owned() });
        let found = match self.leader.core.me().role {
            Role::Source => statements.announce(&held, layout, self.view.id.epoch),
            Role::Rollout => statements.about(&held),
        };
        found.map(Box::new)
    }

    fn members_in(&self) -> Vec<MemberName> {
        self.members.iter().filter(|member| !self.table.is_over(member)).cloned().collect()
    }

    fn set_updating(&self, updating: bool) {
        let core: &Arc<Core> = &self.leader.core;
        // A rollout says by itself whether it is in an update; that it feeds others is none of its engine's.
        if core.me().role == Role::Source {
            core.set_facts(|facts| facts.updating = updating);
        }
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if !self.over {
            let given_up = self.failure(PublishErrorCode::Cancelled, "it was given up".into(), None, false);
            self.end(Some(&given_up));
        }
    }
}

//! One publish, from its turn to its one outcome.
//!
//! Carries out: an attempt in each epoch that comes, from the trainer's bytes or from the retained copy, until one reaches `minReady`, the
//! time is over, or a failure that no other epoch can mend.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use tokio::time::{Instant, timeout_at};

use super::Source;
use super::outcome::{by_topology, cancelled, internal, pinned, publish_error, refused, timed_out};
use super::reach::Reach;
use super::retain::{Keeper, Retained, fits};
use super::tracked::{LAST_COPY, Tracked};
use crate::group::Epoch;
use crate::lead::feed::Feeder;
use crate::lead::table::{Failure, Switching};
use crate::lead::{Brought, Keep, Plan, Stage};
use crate::locks::lock;
use crate::publish_job::{NotActivated, PublishJob, Reporter};
use crate::version_source::VersionSource;
use weightsync_core::protocol::{
    Activation, Delivery, EpochId, HeldVersion, PublishError, PublishErrorCode, PublishResult, UpdatePhase, UpdatePolicy, Version,
};
use weightsync_core::weights::{DigestAlgorithm, Layout, Manifest};
use weightsync_transport::nccl::Staging;

/// A publish as far as all its attempts share it.
struct Publish {
    version: Version,
    activation: Activation,
    deadline: Instant,
    source: Tracked,
    /// Its buckets as far as they were read, where there is room for them.
    kept: Option<Arc<Keeper>>,
    /// Bytes of this very version, complete.
    copy: Option<Arc<Retained>>,
    /// The same, while the last of it are still being copied.
    to_keep: Option<ToKeep>,
    /// The epoch that it was brought in.
    reached: Option<Arc<Epoch>>,
    /// Its manifest, once its bytes were read.
    manifest: Option<String>,
    /// What the running attempt read, once it read all of it.
    streamed: Option<HeldVersion>,
    /// How the digests of its manifest are computed; settled by the first attempt.
    algorithm: Option<DigestAlgorithm>,
    /// The manifest that its number was tried with by an earlier publish.
    must: Option<String>,
    attempts: u32,
    failed: Option<(EpochId, Failure)>,
    /// Who was asked to switch, in all attempts.
    reach: Arc<Mutex<Reach>>,
}

impl Source {
    /// Publishes; its asker hears exactly one outcome.
    pub(super) async fn publish(self: &Arc<Self>, job: PublishJob, feeder: &Feeder) {
        let PublishJob { version, activation, deadline, cancel, source, mut reporter } = job;
        tracing::info!(version, bytes = source.layout().total_bytes, "a publish begins");
        let mut publish = Publish {
            version,
            activation,
            deadline,
            source: Tracked::new(source),
            kept: None,
            copy: None,
            to_keep: None,
            reached: None,
            manifest: None,
            streamed: None,
            algorithm: None,
            must: None,
            attempts: 0,
            failed: None,
            reach: Arc::default(),
        };
        let outcome = tokio::select! {
            biased;
            () = cancel.cancelled() => None,
            outcome = timeout_at(deadline, self.attempts(&mut publish, &mut reporter, feeder)) => Some(outcome),
        };
        let outcome = match outcome {
            None => Err(cancelled()),
            Some(Err(_)) => Err(timed_out(publish.attempts, publish.failed.as_ref(), self.core.hindrance())),
            Some(Ok(outcome)) => outcome,
        };
        publish.source.released().await;
        match outcome {
            Ok(result) => {
                tracing::info!(version, epoch = result.epoch, attempts = result.attempts, installed = ?result.installed, "published");
                self.in_roster(&result, deadline).await;
                reporter.done(result);
                if let (Some(epoch), true) = (publish.reached.take(), publish.to_keep.is_some()) {
                    publish.keep_whole().await;
                    self.archive(&epoch.prepared.policy, &mut publish);
                }
            }
            Err(error) => {
                // Not what the last attempt knew: an earlier one may have reported engines to switch whose answers never came.
                let error = lock(&publish.reach).judge(version, error);
                if error.code == PublishErrorCode::VersionRefused {
                    lock(&self.history).refused(version);
                }
                tracing::warn!(version, code = ?error.code, message = %error.message, "a publish failed");
                let may_count = error.code == PublishErrorCode::OutcomeUnknown;
                reporter.failed(error);
                if may_count {
                    self.archive_in_doubt(&mut publish).await;
                }
            }
        }
    }

    async fn attempts(&self, publish: &mut Publish, reporter: &mut Reporter, feeder: &Feeder) -> Result<PublishResult, PublishError> {
        loop {
            let over = publish.failed.as_ref().map(|(id, _)| id.clone());
            let epoch = self.next_epoch(over.as_ref(), feeder).await?;
            if epoch.prepared.policy.delivery == Delivery::External {
                return Err(by_topology());
            }
            if let Some(returned) = epoch.returned().filter(|returned| returned.pinned) {
                return Err(pinned(returned.to));
            }
            if epoch.commit.refused.contains(&publish.version) {
                return Err(refused(publish.version, publish.failed.as_ref()));
            }
            if publish.attempts == 0 {
                publish.source.lay_out();
                let current = self.current(Some(&epoch));
                let mut history = lock(&self.history);
                publish.must = history.admit(publish.version, current.as_ref())?;
                history.tried(publish.version);
            } else if publish.copy.is_none() {
                let reason = publish.failed.as_ref().map_or_else(String::new, |(_, failure)| failure.message.clone());
                let again = publish.source.again(publish.kept.as_ref(), &reason).await;
                if !again.map_err(|error| error.publish_error(None))? {
                    publish.kept = None;
                }
            }
            publish.attempts += 1;
            reporter.begins(publish.attempts);
            match self.attempt(&epoch, publish, reporter).await {
                Ok(brought) => return Ok(self.reached(&epoch, publish, brought)),
                Err(failure) if failure.again => publish.failed = Some((epoch.id().clone(), failure)),
                Err(failure) => return Err(publish_error(failure)),
            }
        }
    }

    /// Waits for a committed epoch with enough rollouts that is not the one that failed. Who lacks the current version is fed meanwhile.
    async fn next_epoch(&self, failed: Option<&EpochId>, feeder: &Feeder) -> Result<Arc<Epoch>, PublishError> {
        let mut standing = self.core.standing();
        let usable = standing.wait_for(|standing| {
            standing.committed().is_some_and(|epoch| {
                let wanted = usize::try_from(epoch.prepared.policy.min_ready.max(1)).unwrap_or(usize::MAX);
                Some(epoch.id()) != failed && epoch.rollouts().len() >= wanted
            })
        });
        let committed = tokio::select! {
            biased;
            usable = usable => usable.ok().and_then(|standing| standing.committed().cloned()),
            () = feeder.run() => None,
        };
        committed.ok_or_else(|| internal("the agent is ending"))
    }

    async fn attempt(&self, epoch: &Arc<Epoch>, publish: &mut Publish, reporter: &mut Reporter) -> Result<Brought, Failure> {
        let layout = publish.source.layout().clone();
        self.pinning.laid_out(&layout);
        if publish.copy.is_none() && publish.kept.is_none() {
            publish.kept = self.keeper(epoch, publish, &layout);
        }
        let algorithm = lock(&self.history).algorithm(publish.version, epoch.algorithm());
        publish.algorithm = Some(algorithm);
        let keeper = publish.kept.clone().filter(|_| publish.copy.is_none());
        let mut copy = publish.copy.as_ref().and_then(|copy| copy.source());
        publish.streamed = None;
        let mut stage = PublishStage {
            source: self,
            reporter,
            streamed: &mut publish.streamed,
            algorithm,
            activation: publish.activation,
            deadline: publish.deadline,
            reach: publish.reach.clone(),
        };
        lock(&publish.reach).needed(epoch.prepared.policy.min_ready);
        let plan = Plan {
            epoch: epoch.clone(),
            version: publish.version,
            attempt: self.attempts.next(publish.version),
            feeding: false,
            manual: publish.activation == Activation::Manual,
            algorithm,
            members: epoch.rollouts(),
            min_ready: epoch.prepared.policy.min_ready,
            known: publish.manifest.clone(),
            must: publish.must.clone(),
            source: match copy.as_mut() {
                Some(copy) => copy.as_mut(),
                None => &mut publish.source,
            },
            keep: keeper.map(|keeper| keeper as Arc<dyn Keep>),
            stage: &mut stage,
        };
        let outcome = self.leader.lead(plan).await;
        if publish.note_streamed() {
            // The next attempt reads it; a version that is served is reported at once, and archived after that.
            if outcome.is_err() || publish.to_keep.as_ref().is_some_and(|to_keep| to_keep.is_whole(&publish.source)) {
                publish.keep_whole().await;
            }
        }
        outcome
    }

    /// Whether the bytes of this attempt are kept in memory while they are sent. Copies of versions before give way, the oldest first.
    fn keeper(&self, epoch: &Epoch, publish: &Publish, layout: &Layout) -> Option<Arc<Keeper>> {
        if publish.source.another().is_some() {
            return None;
        }
        let limit = epoch.prepared.policy.retain_bytes;
        // Of a version on a GPU, the copy of the one before gives its pinned memory on to the next one, also when it has to give way first:
        // pinning takes far longer than copying.
        let staging = self.leader.gpus().and_then(|gpus| gpus.first()).map(|(_, staging)| staging);
        if let Some(staging) = &staging {
            staging.reuse(limit);
        }
        let spare = || staging.as_ref().map_or(0, Staging::spare);
        let current = self.current(Some(epoch));
        let fit = self.change_archive(|archive| {
            if let Some(current) = &current {
                archive.touch(current);
            }
            loop {
                let reason = match fits(layout.total_bytes, archive.memory(), limit, spare(), &self.cgroups) {
                    Ok(room) => return Ok(room),
                    Err(reason) => reason,
                };
                let old = if layout.total_bytes > limit { None } else { archive.make_room() };
                let Some(old) = old else { return Err(reason) };
                let version = old.held.version;
                tracing::info!(
                    reason,
                    version,
                    "the copy of an earlier version is dropped: until this one is there, rollouts feed joiners"
                );
            }
        });
        match fit {
            Ok(room) => Some(Arc::new(Keeper::with(room))),
            Err(reason) => {
                tracing::info!(version = publish.version, reason, "no copy of this version is kept");
                None
            }
        }
    }

    fn reached(&self, epoch: &Arc<Epoch>, publish: &mut Publish, brought: Brought) -> PublishResult {
        lock(&self.history).reached(brought.held.clone());
        self.core.learn_current(Some(&brought.held));
        if publish.to_keep.is_none() {
            self.archive(&epoch.prepared.policy, publish);
        }
        self.core.set_facts(|facts| facts.installed = Some(brought.held.clone()));
        publish.reached = Some(epoch.clone());
        PublishResult {
            version: publish.version,
            epoch: epoch.id().epoch,
            attempts: publish.attempts,
            bytes: brought.bytes,
            manifest: brought.held.manifest,
            installed: brought.installed,
            behind: brought.behind,
            phases_ms: brought.phases_ms,
            mixed: brought.mixed,
            notes: brought.notes,
        }
    }

    /// Keeps the copy of a version that engines may serve although its publish failed: the group may find that it counts, and must be able to
    /// bring it to others then. There is room: both copies were in memory during the publish. The version that counted before stays in front.
    async fn archive_in_doubt(&self, publish: &mut Publish) {
        publish.note_streamed();
        publish.keep_whole().await;
        let Some(copy) = publish.copy.take().or_else(|| publish.elsewhere()) else { return };
        let current = self.current(None);
        self.change_archive(|archive| {
            archive.put(copy);
            if let Some(current) = &current {
                archive.touch(current);
            }
        });
    }

    /// Puts the copy of a version that is served on the archive, and takes down what has no room next to it.
    fn archive(&self, policy: &UpdatePolicy, publish: &mut Publish) {
        let copy = publish.copy.take().or_else(|| publish.elsewhere());
        let keep = usize::try_from(policy.keep.max(1)).unwrap_or(usize::MAX);
        self.change_archive(|archive| {
            // Without a copy of this version there is room for one less of those before.
            let whole = if copy.is_some() { keep } else { keep - 1 };
            if let Some(copy) = copy {
                archive.put(copy);
            }
            archive.trim(whole, policy.retain_bytes)
        });
    }
}

/// A version whose copy was still under way when all of it was sent.
struct ToKeep {
    keeper: Arc<Keeper>,
    held: HeldVersion,
    algorithm: DigestAlgorithm,
}

impl ToKeep {
    fn is_whole(&self, source: &Tracked) -> bool {
        self.keeper.is_whole(source.layout().bucket_count())
    }
}

impl Publish {
    /// Notes what the attempt read, and that its copy is to be kept; false when it did not read all of it.
    fn note_streamed(&mut self) -> bool {
        let Some(held) = self.streamed.clone() else { return false };
        self.manifest = Some(held.manifest.clone());
        let algorithm = self.algorithm.unwrap_or_default();
        self.to_keep = self.kept.clone().filter(|_| self.copy.is_none()).map(|keeper| ToKeep { keeper, held, algorithm });
        true
    }

    /// A reader of bytes that stay where they are, if they do and all of them were read once.
    fn elsewhere(&self) -> Option<Arc<Retained>> {
        let reader = self.source.another()?;
        let held = HeldVersion { version: self.version, manifest: self.manifest.clone()? };
        Some(Arc::new(Retained::elsewhere(held, self.algorithm.unwrap_or_default(), reader)))
    }

    /// Waits for the copy that is under way, if there is one.
    async fn keep_whole(&mut self) {
        let Some(ToKeep { keeper, held, algorithm }) = self.to_keep.take() else { return };
        let layout = self.source.layout();
        if keeper.whole(layout.bucket_count(), LAST_COPY).await {
            self.copy = Retained::in_memory(held, algorithm, layout, keeper.empty()).map(Arc::new);
        }
    }
}

/// What one attempt of a publish reports to its caller, and keeps.
struct PublishStage<'a> {
    source: &'a Source,
    reporter: &'a mut Reporter,
    streamed: &'a mut Option<HeldVersion>,
    algorithm: DigestAlgorithm,
    activation: Activation,
    deadline: Instant,
    reach: Arc<Mutex<Reach>>,
}

#[async_trait]
impl Stage for PublishStage<'_> {
    fn progress(&mut self, phase: UpdatePhase, bytes: u64) {
        self.reporter.progress(phase, bytes);
    }

    fn streamed(&mut self, _manifest: &Manifest, held: &HeldVersion) -> Result<(), Failure> {
        lock(&self.source.history).read(held, self.algorithm);
        *self.streamed = Some(held.clone());
        Ok(())
    }

    async fn staged(&mut self) -> Result<(), Failure> {
        if self.activation == Activation::Auto {
            return Ok(());
        }
        let failure =
            |code, message: String| Failure { code, message, phase: UpdatePhase::Staged, member: None, again: false, lasting: false };
        self.reporter.staged(self.deadline).await.map_err(|error| match error {
            NotActivated::TimedOut => failure(PublishErrorCode::Timeout, error.to_string()),
            NotActivated::Gone => failure(PublishErrorCode::Cancelled, error.to_string()),
        })
    }

    fn switching(&mut self, known: Switching) {
        lock(&self.reach).heard(known);
    }
}

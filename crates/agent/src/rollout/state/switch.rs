//! What a change of the engine means: begun, ended well or badly, undone, or found out later.
//!
//! Pure. Decides which version counts as installed after each end, whether the engine must not serve, and which files stay for it. An end
//! that proved nothing never counts as an install, and half an update is never forgotten before the engine was fed or put back.

use std::sync::Arc;
use std::time::Duration;

use super::{Now, State, Took};
use crate::archive::Archived;
use crate::group::Epoch;
use weightsync_core::protocol::{HeldVersion, PausePolicy, ProvenBy, UpdateId};
use weightsync_core::weights::Layout;
use weightsync_engine::{EngineError, EngineStart, Holding, InstallError, InstallReport, Left, Settled};

/// A change of the engine that began.
#[derive(Debug, Default)]
pub(in crate::rollout) struct Switch {
    /// The start that is touched, where it is known.
    start: Option<EngineStart>,
    /// Tensors of the version that it is given, where they are known.
    layout: Option<Arc<Layout>>,
}

/// How an install ended.
#[derive(Debug)]
pub(in crate::rollout) enum Outcome {
    /// The engine confirmed it, and what shows that it holds the bytes.
    Confirmed(InstallReport, ProvenBy),
    Failed(InstallError),
    /// It did not end in time.
    NoEnd,
}

impl Outcome {
    /// Of an install that was given a limit: the error of that is none of its own.
    pub(in crate::rollout) fn of<E>(ended: Result<Result<InstallReport, InstallError>, E>, proven_by: ProvenBy) -> Self {
        match ended {
            Ok(Ok(report)) => Self::Confirmed(report, proven_by),
            Ok(Err(error)) => Self::Failed(error),
            Err(_) => Self::NoEnd,
        }
    }

    /// Whether a token must still be asked for.
    pub(in crate::rollout) fn owes_answer(&self) -> bool {
        matches!(self, Self::Confirmed(report, _) if report.owes_answer)
    }
}

/// The end of a switch to a version.
#[derive(Debug)]
pub(in crate::rollout) struct Ended<'a, F> {
    pub(in crate::rollout) held: &'a HeldVersion,
    /// Its files, where it lies in files.
    pub(in crate::rollout) files: Option<&'a Arc<F>>,
    pub(in crate::rollout) outcome: Outcome,
    pub(in crate::rollout) switch: Switch,
    /// The time that it was given.
    pub(in crate::rollout) limit: Duration,
}

impl<F: Archived> State<F> {
    /// The engine is being changed by us from now on, at most for `limit`.
    pub(in crate::rollout) fn switch_begins(&mut self, limit: Duration, layout: Arc<Layout>, now: Now) -> Switch {
        self.switching = true;
        let external = self.policy.as_ref().is_some_and(|policy| policy.pause == PausePolicy::External);
        self.paused_until = (!external).then(|| now.after(limit));
        Switch { start: self.engine.start().cloned(), layout: Some(layout) }
    }

    /// The engine is marked: the user's own data plane changes it from now on, and may pause it.
    pub(in crate::rollout) fn external_begins(&mut self) -> Switch {
        self.switching = true;
        Switch { start: self.engine.start().cloned(), layout: None }
    }

    /// The engine could not be marked.
    pub(in crate::rollout) fn external_not_begun(&mut self) {
        self.switching = false;
    }

    /// The switch to a version ended.
    pub(in crate::rollout) fn switch_ended(&mut self, ended: Ended<'_, F>, now: Now) {
        let Ended { held, files, outcome, switch, limit } = ended;
        self.switching = false;
        self.paused_until = None;
        match outcome {
            Outcome::Confirmed(report, proven_by) => self.confirmed(held, files, report, proven_by, switch.layout),
            Outcome::Failed(error) => {
                if let EngineError::CanaryRefused { measured } = &error.source {
                    self.canary_refused(held, measured);
                }
                if error.repeats() {
                    self.machine.would_repeat();
                    if error.step == "load" {
                        // One version may be wrong. Where a second one is refused too, the loader may be.
                        self.refusals.by_loader(self.engine.start().cloned(), held, error.left);
                    }
                }
                self.install_failed(held, files, &error.to_string(), error.left, switch, now.after(limit));
            }
            Outcome::NoEnd => self.install_failed(held, files, &format!("no end after {limit:?}"), Left::Mixture, switch, now.after(limit)),
        }
    }

    fn confirmed(
        &mut self,
        held: &HeldVersion,
        files: Option<&Arc<F>>,
        report: InstallReport,
        proven_by: ProvenBy,
        layout: Option<Arc<Layout>>,
    ) {
        self.refusals.took(held);
        self.refusals.loads();
        self.engine_started(report.start.clone());
        if let Some(layout) = layout {
            self.took = Some(Took { start: report.start.clone(), held: held.clone(), layout });
        }
        self.machine.install_confirmed(held.clone(), report.start, proven_by, report.steps_ms);
        self.last = Some(held.clone());
        let (keep, limit) = self.kept_at_most();
        self.effects.dropped.extend(self.versions.installed(files, keep, limit));
        self.stop("it is installed");
    }

    fn install_failed(&mut self, held: &HeldVersion, files: Option<&Arc<F>>, cause: &str, left: Left, switch: Switch, paused_until: u64) {
        match left {
            Left::AsBefore => self.versions.untouched(),
            // Whole by what was seen so far: proven, it is kept as any other version.
            Left::Unknown => self.versions.unproven(files),
            Left::Mixture => {}
        }
        // A new start of the engine holds no half update either; its files go with the next switch.
        if left != Left::AsBefore {
            self.paused_until = Some(paused_until);
        }
        let reason = format!("version {} could not be installed: {cause}", held.version);
        self.machine.install_failed(reason, left, Some(held), switch.start);
        self.stop("it could not be installed");
    }

    /// An install that took buckets was given up before its last step.
    pub(in crate::rollout) fn install_given_up(&mut self, reason: String, left: Left, switch: Switch) {
        self.switching = false;
        if left == Left::AsBefore {
            self.paused_until = None;
        } else {
            self.machine.install_failed(reason, left, None, switch.start);
        }
    }

    /// The kept copy of a version that was to be installed is damaged, or gone. The engine was not touched.
    pub(in crate::rollout) fn copy_lost(&mut self, reason: String) {
        self.machine.install_failed(reason, Left::AsBefore, None, None);
        self.stop("its copy is damaged or gone");
    }

    /// An update by the user's data plane ended without a proof; `touched` unless the data plane never began.
    pub(in crate::rollout) fn external_over(&mut self, update: &UpdateId, reason: &str, touched: bool, switch: Switch) {
        self.machine.abort(update, reason);
        self.stop_if(update, reason);
        self.switching = false;
        if touched {
            let reason = format!("version {} was being brought by the trainer's data plane: {reason}", update.version);
            self.machine.install_failed(reason, Left::Mixture, None, switch.start);
        }
    }

    /// A pause of the engine, if there is one, belongs to its trainer.
    pub(in crate::rollout) fn pause_is_not_ours(&mut self) {
        self.paused_until = None;
    }

    /// The token that an install left to be asked for did not come.
    pub(in crate::rollout) fn token_failed(&mut self, held: &HeldVersion, left: Left, cause: &str, now: Now) {
        let counts = self.machine.installed().is_some_and(|installed| installed.held == *held);
        if counts && left != Left::AsBefore {
            let reason = format!("version {} was installed, and the engine does not compute with it: {cause}", held.version);
            self.machine.install_failed(reason, left, Some(held), self.engine.start().cloned());
            self.paused_until = self.policy.as_ref().map(|policy| now.after(Duration::from_millis(policy.update_timeout_ms)));
        }
    }

    /// The engine was asked what it holds. The version that counts by that is answered.
    pub(in crate::rollout) fn engine_settled(&mut self, settled: &Settled) -> Option<HeldVersion> {
        let Settled { start, holding, .. } = settled;
        if let Holding::HalfAnUpdate(held) = holding {
            self.found_half(held, Some(start.clone()));
            return None;
        }
        self.machine.unproven()?;
        self.engine_started(start.clone());
        self.machine.engine_settled(holding, start);
        self.paused_until = None;
        let installed = self.machine.installed().map(|installed| installed.held.clone());
        if let Some(installed) = &installed {
            self.refusals.took(installed);
            self.last = Some(installed.clone());
        }
        let (keep, limit) = self.kept_at_most();
        self.effects.dropped.extend(self.versions.settled(installed.as_ref(), keep, limit));
        installed
    }

    /// The engine was asked, and does not compute with what it holds.
    pub(in crate::rollout) fn does_not_compute(&mut self, cause: &str) {
        let reason = format!("the engine does not compute with what it holds: {cause}");
        self.machine.found_dirty(reason, self.engine.start().cloned());
    }

    /// The engine carries the mark of an install that an earlier life of this agent began.
    pub(in crate::rollout) fn found_mark(&mut self, held: &HeldVersion) {
        if self.machine.live().is_none() && self.machine.installed().is_none() {
            self.found_half(held, self.engine.start().cloned());
        }
    }

    fn found_half(&mut self, held: &HeldVersion, start: Option<EngineStart>) {
        self.machine.found_dirty(format!("an install of version {} began and was not seen to end", held.version), start);
    }

    /// The engine's start-up weights are back: it holds no version.
    pub(in crate::rollout) fn put_back(&mut self) {
        self.machine.put_back();
        self.refusals.loads();
        self.engine.mended();
        self.versions.untouched();
        self.paused_until = None;
    }

    /// The engine did not take its start-up weights back.
    pub(in crate::rollout) fn not_put_back(&mut self, error: &EngineError) {
        // Seen with vLLM alone, whose loader keeps a tensor that does not fit and answers 500 from then on.
        if self.refusals.clear_suspicion() && error.is_refusal() && matches!(error, EngineError::Status { .. }) {
            self.engine.breaks(format!("the engine takes no weights any more, not even those that it started with: restart it ({error})"));
        }
    }

    /// Putting back was tried: whether or not it worked, the next try is a whole deadline away.
    pub(in crate::rollout) fn put_back_tried(&mut self, now: Now) {
        self.dirty_since = self.dirty_since.map(|_| now.elapsed);
    }

    /// The engine must be asked what it holds.
    pub(in crate::rollout) fn must_ask(&self) -> bool {
        self.machine.unproven().is_some() && self.engine.is_healthy() && self.machine.live().is_none()
    }

    /// The engine lacks a version, and one lies here.
    pub(in crate::rollout) fn lacks_a_copy(&self) -> bool {
        self.engine.is_healthy() && self.versions.installed_once().next().is_some() && self.holds_nothing()
    }

    /// The copy that an engine that holds nothing is given: the group's version, or a newer one that the group did not leave.
    pub(in crate::rollout) fn to_reinstall(&self, current: Option<&HeldVersion>, epoch: Option<&Epoch>) -> Option<Arc<F>> {
        let of_group = current.and_then(|current| self.versions.installed_once().find(|version| version.held().is(current)));
        let newer = |kept: &&Arc<F>| {
            let number = kept.held().version;
            current.is_none_or(|current| number > current.version) && epoch.is_none_or(|epoch| !epoch.left(number))
        };
        of_group.or_else(|| self.versions.kept().filter(newer)).filter(|_| self.holds_nothing()).cloned()
    }

    /// The start-up weights must be put back: the engine was not fed within `limit`, or its loader is suspect.
    pub(in crate::rollout) fn must_put_back(&self, limit: Duration, now: Now) -> bool {
        let late = self.dirty_since.is_some_and(|since| now.elapsed.saturating_sub(since) >= limit);
        (self.refusals.is_suspect() || late) && self.machine.live().is_none()
    }

    fn holds_nothing(&self) -> bool {
        self.machine.live().is_none() && self.machine.installed().is_none() && !self.machine.must_not_serve()
    }

    /// How many versions are kept, and how many bytes of earlier ones.
    fn kept_at_most(&self) -> (u32, u64) {
        self.policy.as_ref().map_or((1, 0), |policy| (policy.keep, policy.retain_bytes))
    }
}

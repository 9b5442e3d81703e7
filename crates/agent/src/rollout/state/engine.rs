//! Whether the engine next to the agent answers, and whether it is still the same start of it.
//!
//! Pure. Decides by thresholds when it counts as unhealthy and healthy again, and what follows from a new start: nothing is installed any
//! more. An engine that is being switched is not judged: a pause of ours is not ill health.

use super::State;
use crate::archive::Archived;
use weightsync_core::protocol::{EngineFacts, GroupFacts, HealthPolicy};
use weightsync_engine::{EngineStart, Holding};

/// What is known of the engine's health.
#[derive(Debug, Clone, Default)]
pub(in crate::rollout) struct EngineHealth {
    pub(super) facts: Option<EngineFacts>,
    start: Option<EngineStart>,
    /// Starts that took the place of one that was known.
    restarts: u32,
    reason: Option<String>,
    failures: u32,
    successes: u32,
    healthy: bool,
    unreachable: bool,
    /// Its front answers and it computes nothing.
    wedged: bool,
    /// Why this start of it takes no weights any more, not even those that it started with.
    broken: Option<String>,
    /// Its process ended, as its parent saw: no answer of whatever listens there now counts.
    ended: bool,
    /// Whether this start was asked what it is and can do.
    probed: bool,
}

/// What an answer of the engine showed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rollout) struct Answered {
    /// This start must still be asked what it is and can do.
    pub(in crate::rollout) is_new: bool,
    /// It is the first start that was seen.
    pub(in crate::rollout) is_first: bool,
    /// It lacks what an earlier start held.
    pub(in crate::rollout) lost_version: bool,
    /// It reports another version than its agent recorded.
    pub(in crate::rollout) differs: bool,
}

impl EngineHealth {
    /// The start that answered last.
    pub(in crate::rollout) fn start(&self) -> Option<&EngineStart> {
        self.start.as_ref()
    }

    pub(in crate::rollout) fn facts(&self) -> Option<&EngineFacts> {
        self.facts.as_ref()
    }

    pub(in crate::rollout) fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    pub(super) fn restarts(&self) -> u32 {
        self.restarts
    }

    pub(in crate::rollout) fn is_healthy(&self) -> bool {
        self.healthy
    }

    pub(in crate::rollout) fn unhealthy(&self) -> bool {
        !self.healthy || self.ended || self.broken.is_some()
    }

    /// Whether only another start of it helps.
    pub(super) fn is_wedged(&self) -> bool {
        (self.wedged && self.unhealthy() || self.broken.is_some()) && !self.ended
    }

    /// Whether it may be stuck: it is ill, something answers there, and that it is stuck is not known yet.
    pub(in crate::rollout) fn may_be_stuck(&self) -> bool {
        self.unhealthy() && !self.unreachable && !self.ended && !self.wedged
    }

    /// Whether its process ended, as its parent saw.
    pub(in crate::rollout) fn gone(&self) -> bool {
        self.ended
    }

    /// Whether no one listens on its port: it may come back as another start, before any threshold is reached.
    pub(in crate::rollout) fn unreachable(&self) -> bool {
        self.unreachable
    }

    /// Why it is ill, when it was asked at all.
    pub(super) fn known_ill(&self) -> Option<String> {
        self.reason.clone().filter(|_| self.unhealthy())
    }

    /// It answered whether it can join a group.
    pub(in crate::rollout) fn learn_groups(&mut self, groups: GroupFacts) {
        if let Some(known) = &mut self.facts {
            known.groups = Some(groups);
        }
    }

    /// It passed a probe. `first`: the first answer of the first start that was seen. `facts`: its properties, if it was asked for them. Both
    /// are one event: an engine whose properties are known and whose health is not would count as one that fails its probes.
    pub(in crate::rollout) fn passed(&mut self, policy: &HealthPolicy, first: bool, facts: Option<&EngineFacts>) {
        if self.ended {
            return;
        }
        if let Some(facts) = facts {
            self.facts = Some(facts.clone());
            self.probed = true;
        }
        self.failures = 0;
        (self.unreachable, self.wedged) = (false, false);
        self.successes = self.successes.saturating_add(1);
        // The first answer counts by itself: there is nothing to recover from.
        if first || self.successes >= policy.success_threshold {
            self.healthy = true;
            self.reason.clone_from(&self.broken);
        }
    }

    fn failed(&mut self, policy: &HealthPolicy, reason: String, unreachable: bool) {
        if self.ended {
            return;
        }
        self.successes = 0;
        self.unreachable = unreachable;
        // One that went away was ended; one that merely goes on saying nothing is as stuck as before.
        self.wedged &= !unreachable;
        self.failures = self.failures.saturating_add(1);
        if self.failures >= policy.failure_threshold {
            self.healthy = false;
        }
        if !self.wedged {
            self.reason = Some(reason);
        }
    }

    /// Its front answers, and it computes nothing.
    pub(in crate::rollout) fn stuck(&mut self, reason: String) {
        self.wedged = true;
        self.reason = Some(reason);
    }

    /// It loaded its start-up weights after all.
    pub(super) fn mended(&mut self) {
        if self.broken.take().is_some() {
            self.reason = None;
        }
    }

    /// This start takes no weights any more.
    pub(super) fn breaks(&mut self, why: String) {
        self.reason = Some(why.clone());
        self.broken = Some(why);
    }

    /// This start answered, to whomever. So many restarts were seen, where it took the place of another.
    fn started(&mut self, start: EngineStart) -> Option<u32> {
        if self.start.as_ref() == Some(&start) {
            return None;
        }
        let slept = self.start.as_ref().is_some_and(|before| before.is_same_process(&start));
        // One that slept is what it was, and can what it could.
        self.probed &= slept;
        if !slept {
            self.broken = None;
        }
        let replaced = self.start.replace(start).is_some() && !slept;
        self.restarts = self.restarts.saturating_add(u32::from(replaced));
        replaced.then_some(self.restarts)
    }
}

impl<F: Archived> State<F> {
    /// The engine answers, from this start; `holding` is what it says that it holds.
    pub(in crate::rollout) fn engine_answered(&mut self, start: EngineStart, holding: Option<&Holding>) -> Answered {
        let is_first = self.engine.start.is_none();
        let lost_version = self.machine.engine_seen(&start);
        self.engine_started(start);
        // The user's own data plane writes words of its own there.
        let holding = holding.filter(|_| !self.is_external() && !self.switching);
        let differs = holding.is_some_and(|holding| self.machine.engine_reports(holding));
        Answered { is_new: !self.engine.probed, is_first, lost_version, differs }
    }

    /// The engine failed a probe; whether it counts as unhealthy from now on, after so many failures.
    pub(in crate::rollout) fn engine_failed(&mut self, policy: &HealthPolicy, reason: &str, unreachable: bool) -> Option<u32> {
        // An engine that loads what we gave it may not answer: that is no ill health.
        if self.switching {
            return None;
        }
        let was = self.engine.healthy;
        self.engine.failed(policy, reason.to_owned(), unreachable);
        (was && !self.engine.healthy).then_some(self.engine.failures)
    }

    /// The engine sleeps, and not because of us: certain at once, and over when it wakes. Whether it was healthy until now.
    pub(in crate::rollout) fn engine_sleeps(&mut self, start: EngineStart, reason: &str) -> bool {
        let was = std::mem::replace(&mut self.engine.healthy, false);
        self.machine.engine_seen(&start);
        self.engine_started(start);
        (self.engine.successes, self.engine.reason) = (0, Some(reason.to_owned()));
        was
    }

    /// The engine's process ended, as its parent saw: an attempt under way is over.
    pub(in crate::rollout) fn engine_ended(&mut self, reason: &str) {
        self.engine.ended = true;
        self.engine.reason = Some(reason.to_owned());
        self.epoch_over(reason);
    }

    pub(super) fn engine_started(&mut self, start: EngineStart) {
        if let Some(restarts) = self.engine.started(start) {
            self.effects.restarted = Some(restarts);
        }
    }
}

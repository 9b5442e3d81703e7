//! All that a rollout knows, and what follows when something happens.
//!
//! Pure: each method is one event. It changes the state, and what the agent must do because of it waits in [`Effects`] until
//! [`State::take_effects`]; no file, engine, task or clock. [`Machine`] decides what may follow in an update. The parts decide the rest: which
//! files stay ([`versions`]), whether the engine is healthy ([`engine`]), what it refused ([`refusals`]), and what the end of a switch means
//! ([`switch`]). A version counts here only after the engine's present start confirmed it.

mod attempt;
mod engine;
mod going_back;
mod refusals;
mod switch;
#[cfg(test)]
mod tests;
mod versions;

use std::sync::Arc;
use std::time::Duration;

pub(super) use self::attempt::Takes;
use self::attempt::{Led, Receives};
pub(super) use self::engine::EngineHealth;
use self::refusals::Refusals;
pub(super) use self::switch::{Ended, Outcome, Switch};
use self::versions::Versions;
use super::machine::Machine;
use crate::archive::Archived;
use crate::core::Facts;
use weightsync_core::protocol::{Delivery, EpochId, HeldVersion, Received, UpdatePolicy};
use weightsync_core::weights::Layout;
use weightsync_engine::EngineStart;

/// The time of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Now {
    /// Since the agent began.
    pub(super) elapsed: Duration,
    /// The time of day, in ms since 1970.
    pub(super) unix_ms: u64,
}

impl Now {
    /// The time of day after `limit`, in ms since 1970.
    fn after(self, limit: Duration) -> u64 {
        self.unix_ms.saturating_add(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX))
    }
}

/// What the agent must do because of an event.
#[derive(Debug)]
#[must_use]
pub(super) struct Effects<F> {
    /// The attempt that was received is over, and why: nothing of it is taken any more.
    pub(super) stop: Option<String>,
    /// Versions that are kept no longer: their files go.
    pub(super) dropped: Vec<Arc<F>>,
    /// The engine started again; so many times by now.
    pub(super) restarted: Option<u32>,
}

impl<F> Default for Effects<F> {
    fn default() -> Self {
        Self { stop: None, dropped: Vec::new(), restarted: None }
    }
}

/// The tensors of the version that a start of the engine took last.
#[derive(Debug, Clone)]
pub(super) struct Took {
    start: EngineStart,
    pub(super) held: HeldVersion,
    pub(super) layout: Arc<Layout>,
}

/// What a rollout knows. `F` are the files of one version.
#[derive(Debug)]
pub(super) struct State<F> {
    pub(super) machine: Machine,
    pub(super) engine: EngineHealth,
    pub(super) versions: Versions<F>,
    pub(super) refusals: Refusals,
    /// Who leads the last attempt.
    led: Option<Led>,
    /// The attempt whose bytes are taken, or were and wait for the switch.
    receiving: Option<Receives>,
    /// The epoch in which this rollout, which feeds the others, went back first or tried to.
    went_back: Option<EpochId>,
    going_back: bool,
    /// What the engine was last switched to, in whatever start.
    last: Option<HeldVersion>,
    took: Option<Took>,
    /// How the last version came.
    received: Option<Received>,
    /// Until when the engine may be paused by us, in ms since 1970.
    paused_until: Option<u64>,
    /// Whether the engine is being switched by us.
    switching: bool,
    /// The rules of the last group: they hold until the next one brings others.
    policy: Option<UpdatePolicy>,
    /// Since when the engine must not serve.
    dirty_since: Option<Duration>,
    effects: Effects<F>,
}

impl<F> Default for State<F> {
    fn default() -> Self {
        Self {
            machine: Machine::default(),
            engine: EngineHealth::default(),
            versions: Versions::default(),
            refusals: Refusals::default(),
            led: None,
            receiving: None,
            went_back: None,
            going_back: false,
            last: None,
            took: None,
            received: None,
            paused_until: None,
            switching: false,
            policy: None,
            dirty_since: None,
            effects: Effects::default(),
        }
    }
}

impl<F: Archived> State<F> {
    /// What is to be done because of the events since the last call.
    pub(super) fn take_effects(&mut self) -> Effects<F> {
        std::mem::take(&mut self.effects)
    }

    /// Follows every event: notes since when the engine must not serve.
    pub(super) fn settle(&mut self, now: Now) {
        match (self.machine.must_not_serve(), self.dirty_since) {
            (true, None) => self.dirty_since = Some(now.elapsed),
            (false, Some(_)) => self.dirty_since = None,
            _ => {}
        }
    }

    /// A group is formed with these rules.
    pub(super) fn prepared(&mut self, policy: &UpdatePolicy) {
        self.policy = Some(policy.clone());
    }

    pub(super) fn policy(&self) -> Option<&UpdatePolicy> {
        self.policy.as_ref()
    }

    pub(super) fn last(&self) -> Option<&HeldVersion> {
        self.last.as_ref()
    }

    pub(super) fn is_switching(&self) -> bool {
        self.switching
    }

    /// Why the engine is ill, unless a switch of ours explains its silence.
    pub(super) fn ill(&self) -> Option<String> {
        self.engine.known_ill().filter(|_| !self.switching)
    }

    /// What the present start of the engine took last.
    pub(super) fn took(&self) -> Option<&Took> {
        self.took.as_ref().filter(|took| self.engine.start() == Some(&took.start))
    }

    /// Why the engine must not serve, where that is so.
    pub(super) fn why_not_serve(&self) -> Option<&str> {
        let dirty = self.machine.dirty().map(|dirty| dirty.reason.as_str());
        dirty.or_else(|| self.machine.unproven().map(|unproven| unproven.reason.as_str()))
    }

    /// Whether the user's own data plane loads weights.
    fn is_external(&self) -> bool {
        self.policy.as_ref().is_some_and(|policy| policy.delivery == Delivery::External)
    }

    /// Writes the facts that the agent reports. `current` is the version that the group is at.
    pub(super) fn show(&self, facts: &mut Facts, current: Option<&HeldVersion>) {
        let of_group = current.and_then(|current| self.versions.find(current));
        let retained = of_group.or_else(|| self.versions.kept()).or_else(|| self.versions.staged());
        facts.retained = retained.map(|version| version.held().clone());
        facts.earlier =
            self.versions.all().map(|version| version.held().clone()).filter(|held| Some(held) != facts.retained.as_ref()).collect();
        facts.installed = self.machine.certainly_installed().map(|installed| installed.held.clone());
        facts.proven_by = self.machine.certainly_installed().and_then(|installed| installed.proven_by);
        self.refusals.refused().clone_into(&mut facts.refused);
        facts.engine_restarts = self.engine.restarts();
        facts.engine.clone_from(&self.engine.facts);
        facts.healthy = !self.engine.unhealthy();
        facts.wedged = self.engine.is_wedged();
        facts.received.clone_from(&self.received);
        facts.paused_until = self.paused_until;
        facts.updating = self.machine.live().is_some() || self.going_back;
        facts.dirty = self.machine.dirty().is_some();
        facts.unproven = self.machine.unproven().is_some();
        facts.engine_down = self.engine.gone() || self.engine.unhealthy() && !self.switching;
        let wedged = self.engine.reason().filter(|_| facts.wedged);
        facts.reason = wedged.or_else(|| self.why_not_serve()).or_else(|| self.engine.reason()).map(str::to_owned);
    }
}

//! Watches the engine next to the agent: whether it answers, and whether it is still the same start of it.
//!
//! Decides by thresholds when it counts as unhealthy and healthy again, and what follows from a new start: nothing is installed any more.
//! An engine that is being switched is not probed: a pause of ours is not ill health.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::{Inner, Rollout};
use crate::group::{Standing, refusal};
use weightsync_core::protocol::{Delivery, EngineFacts, HealthPolicy, KvCachePolicy, PausePolicy, Refusal, RefusalCode, UpdatePolicy};
use weightsync_engine::{EngineError, EngineStart, Health, Holding};

/// How long a pause that an earlier life of this agent may have left is suffered while no group says who pauses.
const LEFT_PAUSED: Duration = Duration::from_secs(30);

/// How long a start may take to say what it is. The first `/server_info` of a vLLM 0.32 lists its packages: 3 to 5 s on a busy processor.
const PROPERTIES: Duration = Duration::from_secs(30);

/// Time between two probes of an engine that cannot be reached.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

#[derive(Debug, Clone, Default)]
pub(super) struct Probed {
    pub(super) facts: Option<EngineFacts>,
    start: Option<EngineStart>,
    /// Starts that took the place of one that was known.
    pub(super) restarts: u32,
    pub(super) reason: Option<String>,
    failures: u32,
    successes: u32,
    healthy: bool,
    unreachable: bool,
    /// Its front answers and it computes nothing.
    pub(super) wedged: bool,
    /// Why this start of it takes no weights any more, not even those that it started with.
    broken: Option<String>,
    /// Its process ended, by the word of its parent: no answer of whatever listens there now counts.
    ended: bool,
    /// Whether this start was asked what it is and can do.
    probed: bool,
}

impl Probed {
    /// The start that answered last.
    pub(super) fn start(&self) -> Option<&EngineStart> {
        self.start.as_ref()
    }

    /// This start answered, to whomever.
    pub(super) fn started(&mut self, start: EngineStart) {
        if self.start.as_ref() == Some(&start) {
            return;
        }
        let slept = self.start.as_ref().is_some_and(|before| before.is_same_process(&start));
        // One that slept is what it was, and can what it could.
        self.probed &= slept;
        if !slept {
            self.broken = None;
        }
        if self.start.replace(start).is_some() && !slept {
            self.restarts = self.restarts.saturating_add(1);
            tracing::warn!(restarts = self.restarts, "the engine started again");
        }
    }

    pub(super) fn unhealthy(&self) -> bool {
        !self.healthy || self.ended || self.broken.is_some()
    }

    /// Whether only another start of it helps.
    pub(super) fn is_wedged(&self) -> bool {
        (self.wedged && self.unhealthy() || self.broken.is_some()) && !self.ended
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

    /// Whether its process ended, as its parent saw.
    pub(super) fn gone(&self) -> bool {
        self.ended
    }

    /// Whether no one listens on its port: it may come back as another start, before any threshold is reached.
    pub(super) fn unreachable(&self) -> bool {
        self.unreachable
    }

    /// Why it is ill, when it was asked at all.
    pub(super) fn known_ill(&self) -> Option<String> {
        self.reason.clone().filter(|_| self.unhealthy())
    }

    /// Notes an answer of an engine whose properties are known; `first`: the first answer of the first start that was seen.
    fn passed(&mut self, policy: &HealthPolicy, first: bool) {
        if self.ended {
            return;
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
}

impl Rollout {
    pub async fn supervise(self: Arc<Self>, cancel: CancellationToken) {
        let begun = Instant::now();
        let mut knows = false;
        loop {
            let policy = self.policy();
            if self.switching.try_lock().is_ok() {
                let timeout = Duration::from_millis(policy.health.timeout_ms);
                let asked = self.ask_engine(timeout, timeout.max(PROPERTIES)).await;
                match asked {
                    Ok(()) if !knows => knows = self.learn_what_was_left(begun, &policy).await,
                    Ok(()) => {}
                    Err(_) => self.look_for_wedge(&policy.health).await,
                }
            }
            self.heal(&policy).await;
            tokio::select! {
                () = sleep(self.period(&policy.health)) => {}
                () = self.probe_now.notified() => {}
                // What is not known to stand is asked again in its turn, not at once: it may be refusing everybody, or not have started yet.
                () = self.engine.until_lost(), if self.engine_stands() => {
                    tracing::warn!("the engine's process is gone, or was replaced: it is asked again");
                    self.with(|_| ());
                }
                () = cancel.cancelled() => return,
            }
        }
    }

    /// Looks at the engine now, and does what is due: another epoch may want it at another version.
    pub fn look_now(&self) {
        self.probe_now.notify_one();
    }

    /// The engine's process ended, as its parent saw: nothing is waited for, and an attempt under way is over.
    pub fn engine_ended(&self, reason: &str) {
        self.with(|inner| {
            inner.engine.ended = true;
            inner.engine.reason = Some(reason.to_owned());
            if inner.machine.epoch_over(reason) {
                inner.stop_receiving(reason);
            }
        });
    }

    /// Time until the next probe; shorter while no one listens, because who comes back there is another start.
    fn period(&self, health: &HealthPolicy) -> Duration {
        let period = Duration::from_millis(health.period_ms.max(10));
        if self.with(|inner| inner.engine.unreachable) { period.min(LOOK_AGAIN) } else { period }
    }

    /// Asks the engine for its health now, and takes in what it says. A start that was not seen before is asked for its properties too,
    /// within `properties`; it counts as healthy once they are known, so that no group waits for them.
    pub(super) async fn ask_engine(self: &Arc<Self>, deadline: Duration, properties: Duration) -> Result<(), Refusal> {
        let health = self.policy().health;
        match self.engine.health(deadline).await {
            Ok(Health { start, holding }) => {
                // A trainer that loads weights by itself may put engines to sleep between its steps.
                if let Some(asleep) = self.engine.asleep().filter(|_| self.policy().delivery != Delivery::External) {
                    return Err(self.asleep(start, &asleep));
                }
                let (new, first) = self.with(|inner| inner.answered(start, holding.as_ref()));
                if new {
                    self.probe(properties).await?;
                }
                self.with(|inner| inner.engine.passed(&health, first));
                Ok(())
            }
            Err(error) => Err(self.ill(&health, &error, deadline)),
        }
    }

    /// Distinguishes a permanently stuck engine from a lost one: its front answers, and one token does not come.
    async fn look_for_wedge(&self, health: &HealthPolicy) {
        let asks =
            self.with(|inner| inner.engine.unhealthy() && !inner.engine.unreachable() && !inner.engine.gone() && !inner.engine.wedged);
        // Three probes in a row had no answer; a token is given as long as all of them.
        let patience = Duration::from_millis(health.timeout_ms).saturating_mul(health.failure_threshold.max(2));
        if !asks || !self.engine.is_stuck(patience).await {
            return;
        }
        let reason = format!(
            "the engine is stuck: its front answers, and for {patience:?} it computed nothing (a rank that waits in a collective operation for \
             ever); only another start of it ends that"
        );
        tracing::warn!(reason, "the engine is wedged");
        self.with(|inner| {
            inner.engine.wedged = true;
            inner.engine.reason = Some(reason);
        });
    }

    /// Asks the engine what it is and can do.
    pub(super) async fn probe(&self, deadline: Duration) -> Result<EngineFacts, Refusal> {
        match self.engine.probe(deadline).await {
            Ok(facts) => {
                self.with(|inner| {
                    inner.engine.facts = Some(facts.clone());
                    inner.engine.probed = true;
                });
                Ok(facts)
            }
            Err(error) => Err(self.ill(&self.policy().health, &error, deadline)),
        }
    }

    /// The engine sleeps, and not because of us: certain at once, and over when it wakes.
    fn asleep(&self, start: EngineStart, asleep: &EngineError) -> Refusal {
        let reason = asleep.to_string();
        self.with(|inner| {
            let was = std::mem::replace(&mut inner.engine.healthy, false);
            if was {
                tracing::warn!(reason, "the engine sleeps");
            }
            inner.machine.engine_seen(&start);
            inner.engine.started(start);
            (inner.engine.successes, inner.engine.reason) = (0, Some(reason.clone()));
        });
        refusal(RefusalCode::EngineRefused, reason)
    }

    fn ill(&self, health: &HealthPolicy, error: &EngineError, deadline: Duration) -> Refusal {
        let reason = error.to_string();
        // Anyone who asks for an epoch may have less time than the rules give a probe.
        let hasty = matches!(error, EngineError::Timeout { .. }) && deadline < Duration::from_millis(health.timeout_ms);
        self.with(|inner| {
            // An engine that loads what we gave it may not answer: that is no ill health.
            if inner.switching || hasty {
                return;
            }
            let was = inner.engine.healthy;
            inner.engine.failed(health, reason.clone(), matches!(error, EngineError::Unreachable { .. }));
            if was && !inner.engine.healthy {
                tracing::warn!(reason, failures = inner.engine.failures, "the engine is unhealthy");
            }
        });
        refusal(RefusalCode::EngineRefused, reason)
    }

    /// Finds out what an earlier life of this agent left in the engine; true when there is nothing left to find out.
    async fn learn_what_was_left(&self, begun: Instant, policy: &UpdatePolicy) -> bool {
        match self.engine.holding(Duration::from_secs(5)).await {
            Ok(Holding::HalfAnUpdate(held)) => {
                self.with(|inner| {
                    if inner.machine.live().is_none() && inner.machine.installed().is_none() {
                        let reason = format!("an install of version {} began and was not seen to end", held.version);
                        inner.machine.found_dirty(reason, inner.engine.start().cloned());
                    }
                });
                true
            }
            // The group decides which side pauses; a trainer's own pause is not ours to undo.
            Ok(_) => {
                let pauses = |policy: &UpdatePolicy| policy.pause != PausePolicy::External && policy.delivery != Delivery::External;
                let ours = match &*self.core.standing().borrow() {
                    Standing::Idle => begun.elapsed() > LEFT_PAUSED,
                    Standing::Prepared(prepared) => pauses(&prepared.policy),
                    Standing::Committing(epoch) | Standing::Committed(epoch) => pauses(&epoch.prepared.policy),
                };
                let external = !ours && !matches!(&*self.core.standing().borrow(), Standing::Idle);
                // A switch of this life ended with an engine that runs: who paused it, or put it to sleep, since then is somebody else.
                if ours && self.with(|inner| inner.machine.live().is_none() && inner.last.is_none()) {
                    return self.resume_if_safe(policy).await.is_ok();
                }
                ours || external
            }
            Err(_) => false,
        }
    }

    /// Brings a kept version into an engine that lacks it, and ends a pause that took too long.
    async fn heal(self: &Arc<Self>, policy: &UpdatePolicy) {
        let limit = Duration::from_millis(policy.update_timeout_ms);
        let asks = self.with(|inner| inner.machine.unproven().is_some() && inner.engine.healthy && inner.machine.live().is_none());
        if asks && let Ok(_switching) = self.switching.try_lock() {
            // What did not work was logged, and is tried at the next look.
            let _unknown = self.ask_what_it_holds(policy, true).await;
        }
        let (lacks, overdue) = self.with(|inner| {
            let lacks = inner.engine.healthy
                && inner.installed_once().next().is_some()
                && inner.machine.installed().is_none()
                && !inner.machine.must_not_serve()
                && inner.machine.live().is_none();
            let due = inner.suspect || inner.dirty_since.is_some_and(|since| since.elapsed() >= limit);
            let overdue = due && inner.machine.live().is_none();
            (lacks, overdue)
        });
        if lacks && self.core.released().is_none() {
            self.reinstall(policy).await;
        }
        self.go_back(policy).await;
        // What the user's own data plane spoiled, it repairs: no one else loads weights there.
        if overdue && policy.delivery != Delivery::External {
            self.put_back(limit).await;
        }
    }

    /// The rules of the last group, or usual ones before there was one.
    pub(super) fn policy(&self) -> UpdatePolicy {
        crate::locks::lock(&self.inner).policy.clone().unwrap_or_else(usual_policy)
    }
}

impl Inner {
    /// The engine answers: whether this start must still be asked what it is, and whether it is the first start that was seen.
    fn answered(&mut self, start: EngineStart, holding: Option<&Holding>) -> (bool, bool) {
        let first = self.engine.start.is_none();
        if self.machine.engine_seen(&start) {
            tracing::warn!("the engine started again, or slept: it holds no version");
        }
        self.engine.started(start);
        // The user's own data plane writes words of its own there.
        let external = self.policy.as_ref().is_some_and(|policy| policy.delivery == Delivery::External);
        if let Some(holding) = holding.filter(|_| !external && !self.switching)
            && self.machine.engine_reports(holding)
        {
            tracing::warn!(%holding, "the engine holds another version than its agent recorded");
        }
        (!self.engine.probed, first)
    }
}

fn usual_policy() -> UpdatePolicy {
    UpdatePolicy {
        pause: PausePolicy::Keep,
        kv_cache: KvCachePolicy::Reset,
        min_ready: 1,
        silence_ms: 30_000,
        update_timeout_ms: 600_000,
        retain_bytes: 0,
        keep: 1,
        max_unavailable: 0,
        max_skew: None,
        bucket_bytes: 0,
        delivery: Delivery::default(),
        digest: weightsync_core::protocol::Digest::Blake3,
        data_tls: true,
        transport: weightsync_core::protocol::TransportPolicy::default(),
        health: HealthPolicy { period_ms: 1_000, timeout_ms: 3_000, failure_threshold: 3, success_threshold: 1 },
        canary: None,
    }
}

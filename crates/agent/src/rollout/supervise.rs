//! Watches the engine next to the agent: whether it answers, and whether it is still the same start of it.
//!
//! Decides when it is asked, and what is tried for an engine that lacks a version or stays paused; [`super::state`] decides what an answer
//! means. An engine that is being switched is not probed: a pause of ours is not ill health.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::Rollout;
use super::state::State;
use crate::group::{Standing, refusal};
use weightsync_core::protocol::{Delivery, HealthPolicy, KvCachePolicy, PausePolicy, Refusal, RefusalCode, UpdatePolicy};
use weightsync_engine::{EngineError, EngineStart, Health, Holding};

/// How long a pause that an earlier life of this agent may have left is suffered while no group says who pauses.
const LEFT_PAUSED: Duration = Duration::from_secs(30);

/// How long a start may take to say what it is. The first `/server_info` of a vLLM 0.32 lists its packages: 3 to 5 s on a busy processor.
const PROPERTIES: Duration = Duration::from_secs(30);

/// Time between two probes of an engine that cannot be reached.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

impl Rollout {
    pub async fn supervise(self: Arc<Self>, cancel: CancellationToken) {
        let begun = Instant::now();
        let mut knows = false;
        loop {
            let policy = self.policy();
            // A release may wait a minute for an engine that hangs: the pod must not be ready for so long.
            let releasing = self.releasing.try_lock().is_err() && !self.read(State::is_switching);
            if self.switching.try_lock().is_ok() || releasing {
                let timeout = Duration::from_millis(policy.health.timeout_ms);
                let asked = self.ask_engine(timeout, timeout.max(PROPERTIES)).await;
                match asked {
                    Ok(()) if !knows && !releasing => knows = self.learn_what_was_left(begun, &policy).await,
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
        self.with(|state| state.engine_ended(reason));
    }

    /// Time until the next probe; shorter while no one listens, because who comes back there is another start.
    fn period(&self, health: &HealthPolicy) -> Duration {
        let period = Duration::from_millis(health.period_ms.max(10));
        if self.read(|state| state.engine.unreachable()) { period.min(LOOK_AGAIN) } else { period }
    }

    /// Asks the engine for its health now, and takes in what it says. A start that was not seen before is asked for its properties too,
    /// within `properties`; it counts as healthy once they are known, so that no group waits for them.
    pub(super) async fn ask_engine(&self, deadline: Duration, properties: Duration) -> Result<(), Refusal> {
        let health = self.policy().health;
        match self.engine.health(deadline).await {
            Ok(Health { start, holding }) => {
                // A trainer that loads weights by itself may put engines to sleep between its steps.
                if let Some(asleep) = self.engine.asleep().filter(|_| self.policy().delivery != Delivery::External) {
                    return Err(self.asleep(start, &asleep));
                }
                let answered = self.with(|state| state.engine_answered(start, holding.as_ref()));
                if answered.lost_version {
                    tracing::warn!("the engine started again, or slept: it holds no version");
                }
                if let Some(holding) = holding.filter(|_| answered.differs) {
                    tracing::warn!(%holding, "the engine holds another version than its agent recorded");
                }
                let facts = if answered.is_new {
                    Some(self.engine.probe(properties).await.map_err(|error| self.ill(&health, &error, properties))?)
                } else {
                    None
                };
                self.with(|state| state.engine.passed(&health, answered.is_first, facts.as_ref()));
                Ok(())
            }
            Err(error) => Err(self.ill(&health, &error, deadline)),
        }
    }

    /// Distinguishes a permanently stuck engine from a lost one: its front answers, and one token does not come.
    async fn look_for_wedge(&self, health: &HealthPolicy) {
        let asks = self.read(|state| state.engine.may_be_stuck());
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
        self.with(|state| state.engine.stuck(reason));
    }

    /// The engine sleeps, and not because of us: certain at once, and over when it wakes.
    fn asleep(&self, start: EngineStart, asleep: &EngineError) -> Refusal {
        let reason = asleep.to_string();
        if self.with(|state| state.engine_sleeps(start, &reason)) {
            tracing::warn!(reason, "the engine sleeps");
        }
        refusal(RefusalCode::EngineRefused, reason)
    }

    fn ill(&self, health: &HealthPolicy, error: &EngineError, deadline: Duration) -> Refusal {
        let reason = error.to_string();
        // Anyone who asks for an epoch may have less time than the rules give a probe.
        let hasty = matches!(error, EngineError::Timeout { .. }) && deadline < Duration::from_millis(health.timeout_ms);
        let unreachable = matches!(error, EngineError::Unreachable { .. });
        if !hasty && let Some(failures) = self.with(|state| state.engine_failed(health, &reason, unreachable)) {
            tracing::warn!(reason, failures, "the engine is unhealthy");
        }
        refusal(RefusalCode::EngineRefused, reason)
    }

    /// Finds out what an earlier life of this agent left in the engine; true when there is nothing left to find out.
    async fn learn_what_was_left(&self, begun: Instant, policy: &UpdatePolicy) -> bool {
        match self.engine.holding(Duration::from_secs(5)).await {
            Ok(Holding::HalfAnUpdate(held)) => {
                self.with(|state| state.found_mark(&held));
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
                if ours && self.read(|state| state.machine.live().is_none() && state.last().is_none()) {
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
        if self.read(State::must_ask)
            && let Ok(_switching) = self.switching.try_lock()
        {
            // What did not work was logged, and is tried at the next look.
            let _unknown = self.ask_what_it_holds(policy, true).await;
        }
        let now = self.now();
        let (lacks, overdue) = self.read(|state| (state.lacks_a_copy(), state.must_put_back(limit, now)));
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
        self.read(|state| state.policy().cloned()).unwrap_or_else(usual_policy)
    }
}

pub(super) fn usual_policy() -> UpdatePolicy {
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

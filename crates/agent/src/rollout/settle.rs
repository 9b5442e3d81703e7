//! Finds out what the engine holds when its last change ended without proof, and lets it run where that is safe.
//!
//! Decides when the engine is asked: at each look while that is not known, until an update's time is over. Then its start-up weights are put
//! back, as for half an update. A release asks too: no engine stays paused by us. A version counts here only when it was verified before the
//! change began, and the engine ran with it and answered.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::Rollout;
use weightsync_core::protocol::{PausePolicy, UpdatePolicy};
use weightsync_engine::{EngineError, Left, Settled, Settling};

/// Longest call that asks an engine and lets it run.
const ASK: Duration = Duration::from_secs(30);

/// Longest time in which an engine is restored when its agent leaves it.
pub const RESTORE: Duration = Duration::from_secs(60);

/// Wait between two tries.
const AGAIN: Duration = Duration::from_secs(1);

impl Rollout {
    /// Undoes a pause of ours, unless the engine may hold half an update. The adapter asks the engine itself.
    pub(super) async fn resume_if_safe(&self, policy: &UpdatePolicy) -> Result<(), EngineError> {
        if self.read(|state| state.machine.dirty().is_some()) {
            return Ok(());
        }
        let unproven = self.read(|state| state.machine.unproven().is_some());
        self.ask_what_it_holds(policy, unproven).await
    }

    /// Asks the engine what it holds, and takes in the answer.
    pub(super) async fn ask_what_it_holds(&self, policy: &UpdatePolicy, unproven: bool) -> Result<(), EngineError> {
        let how = Settling { pause: policy.pause, canary: policy.canary.clone(), unproven };
        match self.engine.settle(&how, ASK).await {
            Ok(settled) => {
                self.settled_as(&settled);
                Ok(())
            }
            Err(error) => {
                tracing::warn!(left = ?error.left, %error, "it is not known what the engine holds");
                if error.left == Left::Mixture {
                    self.with(|state| state.does_not_compute(&error.to_string()));
                }
                Err(error.source)
            }
        }
    }

    fn settled_as(&self, settled: &Settled) {
        if settled.resumed {
            tracing::info!(holding = %settled.holding, "a pause that an earlier agent left is undone");
        }
        if let Some(installed) = self.with(|state| state.engine_settled(settled)) {
            tracing::info!(version = installed.version, "the engine holds the version, and runs");
        }
    }

    /// Leaves no engine paused by us: what it holds is found out, and half an update is replaced, by the version that is kept here or else by its
    /// start-up weights. Within [`RESTORE`]; what does not work is the last thing that the log says of the engine.
    pub(super) async fn restore(self: &Arc<Self>, policy: &UpdatePolicy) {
        if policy.pause == PausePolicy::External {
            return;
        }
        let end = Instant::now() + RESTORE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match tokio::time::timeout(left, self.restore_once(policy, left)).await {
                Ok(Ok(())) if self.read(|state| !state.machine.must_not_serve()) => return,
                // An engine that is gone is not paused.
                Ok(Err(EngineError::Unreachable { .. })) => return,
                Ok(_) if left > AGAIN => sleep(AGAIN).await,
                Ok(_) | Err(_) => break,
            }
        }
        let reason = self.read(|state| state.why_not_serve().map(str::to_owned));
        let url = self.read(|state| state.engine.facts().map(|facts| facts.url.clone()));
        tracing::error!(
            engine = url.unwrap_or_default(),
            port = self.port(),
            reason = reason.unwrap_or_else(|| "it does not answer".to_owned()),
            "the engine stays out of service: restart it to bring it back with its start-up weights"
        );
    }

    async fn restore_once(self: &Arc<Self>, policy: &UpdatePolicy, left: Duration) -> Result<(), EngineError> {
        let switching = self.switching.lock().await;
        self.resume_if_safe(policy).await?;
        let kept = self.read(|state| state.versions.kept().filter(|_| state.machine.dirty().is_some()).cloned());
        if let Some(kept) = kept
            && self.check_kept(&kept).await.is_ok()
        {
            self.switch_locked(kept, policy).await;
        }
        drop(switching);
        if self.read(|state| state.machine.dirty().is_some()) {
            self.put_back(left).await;
        }
        Ok(())
    }
}

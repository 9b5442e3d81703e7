//! How a rollout leaves a group, and what the end of its agent waits for.
//!
//! Decides nothing about who is in a group. An agent that ended before its engine was informed would leave a pause of ours, and memory of the engine's
//! GPUs in a group of its own that no one is in any more.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::task::task_tracker::TaskTrackerToken;

use super::Rollout;
use super::settle::RESTORE;

/// Longest time that an engine may take to leave a group for good.
const LEAVE: Duration = Duration::from_secs(10);

impl Rollout {
    /// Says that a release follows, which [`settled`](Self::settled) waits for: no one who heard of the release ends the agent before it is done.
    pub fn will_leave(&self) -> TaskTrackerToken {
        self.leaving.token()
    }

    /// Leaves the group, and leaves the engine running. Asked again meanwhile, it does nothing more.
    pub async fn release(self: &Arc<Self>) {
        self.epoch_over("released");
        let Ok(_only) = self.releasing.try_lock() else { return };
        let policy = self.policy();
        self.restore(&policy).await;
        self.leave_group(LEAVE).await;
    }

    /// Whether the engine is there and must not serve: it is paused by us, or may hold half an update.
    pub fn must_stay_out(&self) -> bool {
        self.read(|state| state.machine.must_not_serve() && !state.engine.gone() && !state.engine.unreachable())
    }

    /// Waits until the engine has left the group that it was released from, and then at most `limit` until it is not being switched: its files
    /// must stay until then.
    pub async fn settled(&self, limit: Duration) {
        self.leaving.close();
        if tokio::time::timeout(RESTORE + LEAVE, self.leaving.wait()).await.is_err() {
            tracing::warn!("the engine still leaves its group while its agent ends");
        }
        if tokio::time::timeout(limit, self.switching.lock()).await.is_err() {
            tracing::warn!(?limit, "the engine is still being switched while its agent ends");
        }
    }

    /// Has the engine leave the group that it is in, for good.
    async fn leave_group(&self, within: Duration) {
        let Some(group) = self.engine.group() else { return };
        if let Err(error) = group.leave(within).await {
            tracing::warn!(%error, "the engine could not leave its group: it is left when it joins another");
        }
    }
}

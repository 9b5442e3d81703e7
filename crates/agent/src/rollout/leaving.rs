//! How a rollout leaves a group, and what the end of its agent waits for.
//!
//! Decides nothing about who is in a group. An agent that ended before its engine was told would leave a pause of ours, and memory of the engine's
//! GPUs in a group of its own that nobody is in any more.

use std::time::Duration;

use tokio_util::task::task_tracker::TaskTrackerToken;

use super::Rollout;

/// Longest time that an engine may take to leave a group for good.
const LEAVE: Duration = Duration::from_secs(10);

impl Rollout {
    /// Says that a release follows, which [`settled`](Self::settled) waits for: nobody who heard of the release ends the agent before it is done.
    pub fn will_leave(&self) -> TaskTrackerToken {
        self.leaving.token()
    }

    /// Leaves the group: undoes a pause of ours where that is safe.
    pub async fn release(&self) {
        self.epoch_over("released");
        self.resume_if_safe().await;
        self.leave_group(LEAVE).await;
    }

    /// Waits until the engine is not being switched and has left the group that it was released from, at most so long: its files must stay until
    /// then.
    pub async fn settled(&self, limit: Duration) {
        let settled = async {
            self.leaving.close();
            self.leaving.wait().await;
            drop(self.switching.lock().await);
        };
        if tokio::time::timeout(limit, settled).await.is_err() {
            tracing::warn!(?limit, "the engine is still being switched, or leaves its group, while its agent ends");
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

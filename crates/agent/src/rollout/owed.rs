//! The token that an install left owing: asked for at once after it, while the version counts already.
//!
//! Decides what follows when the engine does not compute with what it was given: the replica is dirty from then on, as if the install had
//! ended so, and says why. It never delays the next update, which asks the engine itself.

use std::sync::Arc;
use std::time::Duration;

use super::Rollout;
use super::switch::ms_since_1970;
use weightsync_core::protocol::HeldVersion;
use weightsync_engine::Left;

/// Time for the token and for what is done about an engine that gives none.
const WHOLE: Duration = Duration::from_secs(90);

impl Rollout {
    pub(super) fn see_owed_answer(self: &Arc<Self>, held: HeldVersion) {
        let rollout = self.clone();
        tokio::spawn(async move {
            let Err(error) = rollout.engine.see_owed_answer(&held, WHOLE).await else { return };
            tracing::warn!(version = held.version, left = ?error.left, %error, "the engine does not compute with the version that it took");
            rollout.with(|inner| {
                let still = inner.machine.installed().is_some_and(|installed| installed.held == held);
                if still && error.left != Left::AsBefore {
                    let reason = format!("version {} was installed, and the engine does not compute with it: {error}", held.version);
                    let start = inner.engine.start().cloned();
                    inner.machine.install_failed(reason, error.left, Some(&held), start);
                    inner.paused_until = inner.policy.as_ref().map(|policy| ms_since_1970(Duration::from_millis(policy.update_timeout_ms)));
                }
            });
            rollout.probe_now.notify_one();
        });
    }
}

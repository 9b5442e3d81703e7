//! The token that an install left owing: asked for at once after it, while the version counts already.
//!
//! Decides what follows when the engine does not compute with what it was given: the replica is dirty from then on, as if the install had
//! ended so, and says why. It never delays the next update, which asks the engine itself.

use std::sync::Arc;
use std::time::Duration;

use super::Rollout;
use weightsync_core::protocol::HeldVersion;

/// Time for the token and for what is done about an engine that gives none.
const WHOLE: Duration = Duration::from_secs(90);

impl Rollout {
    pub(super) fn see_owed_answer(self: &Arc<Self>, held: HeldVersion) {
        let rollout = self.clone();
        tokio::spawn(async move {
            let Err(error) = rollout.engine.see_owed_answer(&held, WHOLE).await else { return };
            tracing::warn!(version = held.version, left = ?error.left, %error, "the engine does not compute with the version that it took");
            let now = rollout.now();
            rollout.with(|state| state.token_failed(&held, error.left, &error.to_string(), now));
            rollout.probe_now.notify_one();
        });
    }
}

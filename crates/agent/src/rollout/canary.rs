//! Whether the engine of this replica can be asked what the object's canary asks.
//!
//! Decides that an engine that gives no log-probs takes part in no group whose object has a canary: it would be switched and then held, for
//! ever.

use std::time::Duration;

use super::Rollout;
use crate::group::refusal;
use weightsync_core::protocol::{PausePolicy, Refusal, RefusalCode, UpdatePolicy};
use weightsync_engine::EngineError;

impl Rollout {
    /// Refuses where the engine cannot be asked what the object's canary asks. One that is busy or held is asked after its next switch.
    pub(super) async fn can_be_asked(&self, policy: &UpdatePolicy, deadline: Duration) -> Result<(), Refusal> {
        let Some(canary) = &policy.canary else { return Ok(()) };
        let lacks = |what: String| Err(refusal(RefusalCode::CanaryUnavailable, what));
        if policy.pause == PausePolicy::External {
            return lacks("the trainer pauses the engine by itself (update.pause: External), and a paused engine answers no canary".into());
        }
        let start = self.read(|state| state.engine.start().cloned());
        if self.read(|state| state.refusals.has_answered(start.as_ref(), canary)) {
            return Ok(());
        }
        match self.engine.answers(canary, deadline).await {
            Ok(true) => {
                if let Some(start) = start {
                    self.with(|state| state.refusals.answers(start, canary));
                }
            }
            Ok(false) => {}
            Err(error @ EngineError::Unsupported { .. }) => return lacks(error.to_string()),
            Err(error) => tracing::info!(%error, "whether the engine answers the canary is not known yet"),
        }
        Ok(())
    }
}

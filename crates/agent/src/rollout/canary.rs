//! What this replica knows of versions that its canary refused, and whether its engine can be asked at all.
//!
//! Decides that an engine that gives no log-probs takes part in no group whose object has a canary: it would be switched and then held, for
//! ever. A refusal is remembered until a version as high passed: the coordinator counts those of all replicas, and decides for the group.

use std::time::Duration;

use super::{Inner, Rollout};
use crate::group::refusal;
use weightsync_core::protocol::{HeldVersion, PausePolicy, Refusal, RefusalCode, RefusedVersion, UpdatePolicy};
use weightsync_engine::EngineError;

const REMEMBERED: usize = 4;

impl Rollout {
    /// Refuses where the engine cannot be asked what the object's canary asks. One that is busy or held is asked after its next switch.
    pub(super) async fn can_be_asked(&self, policy: &UpdatePolicy, deadline: Duration) -> Result<(), Refusal> {
        let Some(canary) = &policy.canary else { return Ok(()) };
        let lacks = |what: String| Err(refusal(RefusalCode::CanaryUnavailable, what));
        if policy.pause == PausePolicy::External {
            return lacks("the trainer pauses the engine by itself (update.pause: External), and a paused engine answers no canary".into());
        }
        let start = self.with(|inner| inner.engine.start().cloned());
        let known = |inner: &mut Inner| inner.answered.as_ref().is_some_and(|(of, asked)| Some(of) == start.as_ref() && asked == canary);
        if self.with(known) {
            return Ok(());
        }
        match self.engine.answers(canary, deadline).await {
            Ok(true) => self.with(|inner| inner.answered = start.map(|start| (start, canary.clone()))),
            Ok(false) => {}
            Err(error @ EngineError::Unsupported { .. }) => return lacks(error.to_string()),
            Err(error) => tracing::info!(%error, "whether the engine answers the canary is not known yet"),
        }
        Ok(())
    }
}

impl Inner {
    /// The canary refused a version that the engine loaded: it is not kept either.
    pub(super) fn refuse(&mut self, held: &HeldVersion, measured: &str) {
        self.refused.retain(|refused| refused.held != *held);
        self.refused.push(RefusedVersion { held: held.clone(), measured: measured.to_owned() });
        self.refused.sort_by_key(|refused| refused.held.version);
        let most = self.refused.len().saturating_sub(REMEMBERED);
        self.refused.drain(..most);
        self.staged = self.staged.take().filter(|staged| staged.held != *held);
        self.earlier.remove(held);
        self.machine.refused_by_canary();
    }

    /// The engine holds a version: refusals of it, and of lower ones, are over.
    pub(super) fn took(&mut self, held: &HeldVersion) {
        self.refused.retain(|refused| refused.held.version > held.version);
    }
}

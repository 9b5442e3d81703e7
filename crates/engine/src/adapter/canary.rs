//! The last check of an engine after a switch: its response to the canary with the new weights.
//!
//! Decides the consequence for the replica. With a canary, only a response within the expected range lets the install succeed. A refused
//! response, or none, leaves the engine paused and marked, because unknown is not good. Only a refusal is reported as one: it concerns the
//! weights, and other replicas may have measured the same. Without a canary, the engine must generate one token.

use super::Inner;
use super::proof::MOST_GENERATE;
use super::session::Failed;
use crate::canary::{failed_to_compute, judge};
use crate::http::Until;
use crate::server::Server;
use crate::{EngineError, Holding, InstallError, Left};
use weightsync_core::protocol::{CanaryPolicy, HeldVersion};

impl<S: Server> Inner<S> {
    /// Sends the question to the running engine, and names this step. `marked` is written into an engine that must not serve.
    pub(super) async fn see_an_answer(
        &self,
        canary: Option<&CanaryPolicy>,
        marked: &HeldVersion,
        until: Until,
        whole: Until,
    ) -> Result<&'static str, InstallError> {
        match canary {
            Some(canary) => self.ask_canary(canary, marked, until, whole).await.map(|()| "canary"),
            None => self.generate(marked, until, whole).await.map(|()| "probe"),
        }
    }

    async fn ask_canary(&self, canary: &CanaryPolicy, marked: &HeldVersion, until: Until, whole: Until) -> Result<(), InstallError> {
        let source = match self.server.log_probs(canary, until.at_most(MOST_GENERATE)).await {
            Ok(log_probs) => match judge(canary, &log_probs) {
                Ok(()) => return Ok(()),
                Err(measured) => EngineError::CanaryRefused { measured },
            },
            Err(error @ EngineError::Unreachable { .. }) => {
                return Err(self.seen(Failed { step: "canary", source: error }).left(Left::Unknown));
            }
            Err(error) => match failed_to_compute(&error) {
                Some(measured) => EngineError::CanaryRefused { measured },
                None => error,
            },
        };
        tracing::warn!(engine = self.server.url(), version = marked.version, %source, "the canary does not let the version pass");
        Err(self.hold_back(Failed { step: "canary", source }, marked, whole).await)
    }

    /// The engine must not serve with these weights: it is marked, and paused until it is fed again.
    pub(super) async fn hold_back(&self, failed: Failed, marked: &HeldVersion, whole: Until) -> InstallError {
        if let Err(error) = self.write(Holding::HalfAnUpdate(marked.clone()), whole).await {
            tracing::warn!(engine = self.server.url(), %error, "an engine that must not serve cannot be marked");
        }
        self.hold_mixture(failed, whole).await
    }

    /// Whether it responds to the canary's question now, whatever the response; an error names what it lacks.
    pub(super) async fn answers(&self, canary: &CanaryPolicy, until: Until) -> Result<bool, EngineError> {
        // A paused engine computes nothing: it is checked after its next switch.
        let held = self.server.is_paused(until).await? || matches!(self.server.holding(until).await?, Holding::HalfAnUpdate(_));
        if held {
            return Ok(false);
        }
        match self.server.log_probs(canary, until).await {
            Ok(_) => Ok(true),
            Err(error @ EngineError::Unsupported { .. }) => Err(error),
            // It is busy, or its weights are bad: this question does not judge that.
            Err(_) => Ok(false),
        }
    }
}

//! The one token that shows that an engine computes with its weights, and when it may be requested after the install.
//!
//! A token proves that a pause ended, so an install waits for it if the engine was paused. An engine that was never paused needs no such
//! proof. Its token may wait for the requests of users as long as those take (an LMDeploy under load: 1.3 s, alone 41 ms). If it generated
//! after an earlier install by the same route, the token is requested after the version counts
//! ([`Engine::see_owed_answer`](crate::Engine::see_owed_answer)). Only the proof that it computes is delayed: the weights were compared
//! before. It never judges the token, which is the canary's task; an install always waits for a canary.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Inner;
use super::session::{Failed, at};
use crate::http::Until;
use crate::server::Server;
use crate::{EngineError, EngineStart, Holding, InstallError, Left};
use weightsync_core::protocol::HeldVersion;

/// Longest wait for the one token after the switch; the first of a fresh vLLM 0.32 took 5.5 s on an idle CPU machine and 30 s on a busy
/// one.
pub(super) const MOST_GENERATE: Duration = Duration::from_secs(60);

/// Longest time for which a token may stay pending. If updates follow each other so closely that it is never requested in between, one of
/// them waits for it.
const MOST_OWED: Duration = Duration::from_secs(10);
/// Delay before the request. Trainers that publish again at once would find the engine generating, which halves the speed of an LMDeploy
/// 0.18 that joins groups.
const QUIET: Duration = Duration::from_millis(150);

/// The start that generated after an install, and its pending token.
struct Generated {
    start: EngineStart,
    way: &'static str,
    owes: Option<Instant>,
}

#[derive(Default)]
pub(super) struct Proven(Mutex<Option<Generated>>);

impl Proven {
    fn with<T>(&self, change: impl FnOnce(&mut Option<Generated>) -> T) -> T {
        change(&mut self.0.lock())
    }

    pub(super) fn answered(&self, start: &EngineStart, way: &'static str) {
        self.with(|known| *known = Some(Generated { start: start.clone(), way, owes: None }));
    }

    /// Whether the token of this start may come later; if so, it is pending from then on.
    pub(super) fn may_owe(&self, start: &EngineStart, way: &'static str) -> bool {
        self.with(|known| {
            let known = known.as_mut().filter(|known| known.start == *start && known.way == way);
            known.is_some_and(|known| known.owes.get_or_insert_with(Instant::now).elapsed() < MOST_OWED)
        })
    }

    /// No token is pending any more: the engine responded, or it failed and the next install waits for one.
    fn settle(&self, answered: bool) {
        self.with(|known| match known {
            Some(known) if answered => known.owes = None,
            known => *known = None,
        });
    }
}

enum Silent {
    /// No caller is waiting.
    Gone(EngineError),
    /// It computes with other weights than it was given.
    Spoiled(EngineError),
}

impl<S: Server> Inner<S> {
    /// One token from the new weights. A merely busy engine passes; one that fails to compute does not.
    pub(super) async fn generate(&self, marked: &HeldVersion, until: Until, whole: Until) -> Result<(), InstallError> {
        match self.token(until, whole).await {
            Ok(()) => Ok(()),
            Err(Silent::Gone(source)) => Err(self.seen(Failed { step: "probe", source }).left(Left::Unknown)),
            Err(Silent::Spoiled(source)) => Err(self.hold_back(Failed { step: "probe", source }, marked, whole).await),
        }
    }

    /// The same, for an install that ended before.
    pub(super) async fn see_owed_answer(&self, version: &HeldVersion, whole: Until) -> Result<(), InstallError> {
        tokio::time::sleep(QUIET).await;
        // A caller that replaced the version, or is about to, requests a token as well.
        drop(self.turn(whole).await.map_err(|error| at("probe")(error).left(Left::Unknown))?);
        if self.server.holding(whole).await.is_ok_and(|holds| holds != Holding::Version(version.clone())) {
            return Ok(());
        }
        let source = match self.token(whole, whole).await {
            Ok(()) => {
                self.proven.settle(true);
                return Ok(());
            }
            Err(Silent::Gone(source)) => return Err(self.seen(Failed { step: "probe", source }).left(Left::Unknown)),
            // Another client put it to sleep meanwhile: it computes nothing, and its version has ended.
            Err(Silent::Spoiled(_)) if self.server.is_paused(whole).await.is_ok_and(|paused| paused) => return Ok(()),
            Err(Silent::Spoiled(source)) => source,
        };
        // An install in progress waits for its own token.
        self.proven.settle(false);
        let failed = Failed { step: "probe", source };
        let turn = self.turn(whole).await;
        let holds = self.server.holding(whole).await;
        match (turn, holds) {
            (Ok(_turn), Ok(Holding::Version(held))) if held == *version => Err(self.hold_back(failed, version, whole).await),
            // It has another version now; that change made its own check.
            (Ok(_), Ok(_)) => Ok(()),
            (Err(_), _) | (_, Err(_)) => Err(self.seen(failed).left(Left::Unknown)),
        }
    }

    /// Whether it computes with weights that are no WeightSync version: one token, or a sign of activity from a busy engine.
    pub(super) async fn computes(&self, until: Until) -> Result<(), EngineError> {
        match self.token(until, until).await {
            Ok(()) => Ok(()),
            Err(Silent::Gone(error) | Silent::Spoiled(error)) => Err(error),
        }
    }

    async fn token(&self, until: Until, whole: Until) -> Result<(), Silent> {
        match self.server.generate(until.at_most(MOST_GENERATE)).await {
            Ok(()) => Ok(()),
            Err(error @ EngineError::Timeout { .. }) => match self.server.holding(whole).await {
                Ok(_) => {
                    tracing::warn!(engine = self.server.url(), "no token in time after the switch: the engine lives but is busy");
                    Ok(())
                }
                Err(_) => Err(Silent::Gone(error)),
            },
            Err(error @ EngineError::Unreachable { .. }) => Err(Silent::Gone(error)),
            Err(error) => Err(Silent::Spoiled(error)),
        }
    }
}

#[cfg(test)]
mod tests;

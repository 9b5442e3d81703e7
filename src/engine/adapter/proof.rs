//! The one token that shows that an engine computes with what it was given, and when it may be asked for behind the install.
//!
//! A pause is over when a token comes, so whoever was paused is waited for. An engine that was never stopped has nothing to be let go of, and
//! its token may wait behind the requests of users for as long as those take (an LMDeploy under load: 1.3 s, alone 41 ms): once it
//! generated behind an install of the same way, it is asked after the version counts ([`Engine::see_owed_answer`](crate::engine::Engine::see_owed_answer)).
//! Nothing is taken on trust by that but that it computes: what it holds was compared before. It never judges what is answered, which is
//! the canary's, and a canary is always waited for.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::Inner;
use super::install::{Failed, Terms, clean};
use crate::engine::http::Until;
use crate::engine::server::Server;
use crate::engine::{EngineError, EngineStart, Holding, InstallError};
use crate::protocol::HeldVersion;

/// Longest wait for the one token after the switch; the first of a fresh vLLM 0.32 took 5.5 s on an idle CPU machine and 30 s on a busy one.
pub(super) const MOST_GENERATE: Duration = Duration::from_secs(60);

/// The start that generated behind an install, and the way of that install.
#[derive(Default)]
pub(super) struct Proven(Mutex<Option<(EngineStart, &'static str)>>);

impl Proven {
    pub(super) fn set(&self, proven: Option<(EngineStart, &'static str)>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = proven;
    }

    pub(super) fn is(&self, start: &EngineStart, way: &'static str) -> bool {
        let proven = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        proven.as_ref().is_some_and(|(of, by)| of == start && *by == way)
    }
}

/// Why no token came.
enum Silent {
    /// Nobody is there to be held back.
    Gone(EngineError),
    /// What it computes with is not what it was given.
    Spoiled(EngineError),
}

impl<S: Server> Inner<S> {
    /// One token from the new weights. An engine that is merely busy passes; one that fails to compute does not.
    pub(super) async fn generate(&self, terms: &Terms, until: Until, whole: Until) -> Result<(), InstallError> {
        match self.token(until, whole).await {
            Ok(()) => Ok(()),
            Err(Silent::Gone(source)) => Err(clean(self.seen(Failed { step: "probe", source }))),
            Err(Silent::Spoiled(source)) => Err(self.hold_back(Failed { step: "probe", source }, &terms.marked, whole).await),
        }
    }

    /// The same, for an install that ended before.
    pub(super) async fn see_owed_answer(&self, version: &HeldVersion, whole: Until) -> Result<(), InstallError> {
        let source = match self.token(whole, whole).await {
            Ok(()) => return Ok(()),
            Err(Silent::Gone(source)) => return Err(clean(self.seen(Failed { step: "probe", source }))),
            Err(Silent::Spoiled(source)) => source,
        };
        // An install that is under way waits for its own token.
        self.proven.set(None);
        let failed = Failed { step: "probe", source };
        let turn = self.turn(whole).await;
        let holds = self.server.holding(whole).await;
        match (turn, holds) {
            (Ok(_turn), Ok(Holding::Version(held))) if held == *version => Err(self.hold_back(failed, version, whole).await),
            // It is not at that version any more: whoever changed it asked it as well.
            (Ok(_), Ok(_)) => Ok(()),
            (Err(_), _) | (_, Err(_)) => Err(clean(self.seen(failed))),
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

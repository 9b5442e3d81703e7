//! Marks an engine that the user's data plane feeds, and proves afterwards what can be proven, once for all engines.
//!
//! The version field carries our mark during the transfer. Afterwards it must still have that mark (then our version replaces it) or the
//! text that the data plane wrote. The start-up text means another process. It never pauses, resumes or loads.

use std::time::Duration;

use async_trait::async_trait;

use super::Inner;
use super::proof::MOST_GENERATE;
use super::session::Steps;
use crate::http::Until;
use crate::server::Server;
use crate::{EngineError, External, ExternalMark, ExternalProof, Holding, InstallError, InstallReport, Left};
use weightsync_core::protocol::HeldVersion;

#[async_trait]
impl<S: Server> External for Inner<S> {
    async fn mark(&self, version: &HeldVersion, deadline: Duration) -> Result<ExternalMark, EngineError> {
        let marked = self.mark_external(version, Until::new(deadline)).await;
        marked.inspect_err(|error| self.start.failed(error))
    }

    async fn alive(&self, mark: &ExternalMark, deadline: Duration) -> Result<(), EngineError> {
        let until = Until::new(deadline);
        let asked = async {
            self.server.front(until).await?;
            self.server.fingerprint(until).await
        };
        match asked.await {
            Ok(fingerprint) if fingerprint == mark.fingerprint => Ok(()),
            Ok(_) => Err(EngineError::Restarted),
            Err(error) => {
                self.start.failed(&error);
                Err(error)
            }
        }
    }

    async fn prove(&self, proof: &ExternalProof) -> Result<InstallReport, InstallError> {
        let proven = self.prove_external(proof, Until::new(proof.timeout)).await;
        proven.map_err(|(step, source)| {
            self.start.failed(&source);
            let left = if matches!(source, EngineError::Restarted) { Left::Unknown } else { Left::Mixture };
            InstallError { step, left, source }
        })
    }

    async fn take_back(&self, mark: &ExternalMark, deadline: Duration) -> Result<(), EngineError> {
        let until = Until::new(deadline);
        let _turn = self.turn(until).await?;
        if self.server.fingerprint(until).await? == mark.fingerprint && self.server.holding(until).await? == marked(mark) {
            self.write(mark.before.clone(), until).await?;
        }
        Ok(())
    }
}

fn marked(mark: &ExternalMark) -> Holding {
    Holding::HalfAnUpdate(mark.version.clone())
}

impl<S: Server> Inner<S> {
    async fn mark_external(&self, version: &HeldVersion, until: Until) -> Result<ExternalMark, EngineError> {
        let _turn = self.turn(until).await?;
        let look = self.start.look();
        let fingerprint = self.server.fingerprint(until).await?;
        let before = self.server.holding(until).await?;
        let start = self.start.answered(look, &fingerprint, &before);
        self.write(Holding::HalfAnUpdate(version.clone()), until).await?;
        Ok(ExternalMark { start, fingerprint, before, version: version.clone() })
    }

    async fn prove_external(&self, proof: &ExternalProof, until: Until) -> Result<InstallReport, (&'static str, EngineError)> {
        let check = |source| ("check", source);
        let mark = &proof.mark;
        let _turn = self.turn(until).await.map_err(check)?;
        let mut steps = Steps::new();
        let fingerprint = self.server.fingerprint(until).await.map_err(check)?;
        let found = self.server.holding(until).await.map_err(check)?;
        if fingerprint != mark.fingerprint || found == Holding::Startup {
            return Err(("check", EngineError::Restarted));
        }
        let ours = found == marked(mark);
        let bad = |what: String| ("check", EngineError::BadReply { url: self.server.url().to_owned(), what });
        match (&proof.engine_version, &found) {
            (Some(wanted), _) if ours => {
                return Err(bad(format!("the trainer announced the weight version {wanted:?}, and the engine has none")));
            }
            (Some(wanted), found) if found.text() != *wanted => {
                return Err(bad(format!("it reports the weight version {:?}, the trainer announced {wanted:?}", found.text())));
            }
            (None, Holding::HalfAnUpdate(other)) if !ours => {
                return Err(bad(format!("it carries the mark of another update, of version {}", other.version)));
            }
            _ => {}
        }
        steps.done("check");
        // A paused engine generates nothing. Its trainer resumes it, and the next client's token is its probe.
        if !self.server.is_paused(until).await.map_err(check)? {
            self.server.generate(until.at_most(MOST_GENERATE)).await.map_err(|source| ("probe", source))?;
            steps.done("probe");
        }
        let carries = if ours { Holding::Version(mark.version.clone()) } else { found };
        if ours {
            self.write(carries.clone(), until).await.map_err(check)?;
        } else {
            // From now on the field must have this content: the data plane's text is no sign of a restart.
            self.start.writing();
            self.start.wrote(Some(carries.clone()));
        }
        let look = self.start.look();
        Ok(InstallReport { start: self.start.answered(look, &fingerprint, &carries), steps_ms: steps.done, owes_answer: false })
    }
}

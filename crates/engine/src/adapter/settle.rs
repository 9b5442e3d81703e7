//! The state of an engine after an ending that proved nothing.
//!
//! Decides when the engine may run again: it needs complete weights, by its own version field, and an answer computed with them. It never
//! resumes an engine that may hold half an update, and never ends a trainer's own pause.

use super::Inner;
use super::session::at;
use crate::http::Until;
use crate::server::Server;
use crate::{EngineError, Holding, InstallError, Left, Settled, Settling};
use weightsync_core::protocol::PausePolicy;

impl<S: Server> Inner<S> {
    pub(super) async fn settle(&self, how: &Settling, until: Until) -> Result<Settled, InstallError> {
        let unknown = |step: &'static str| move |source: EngineError| at(step)(source).left(Left::Unknown);
        let _turn = self.turn(until).await.map_err(unknown("start"))?;
        let (before, start) = self.sight(until).await.map_err(unknown("start"))?;
        let mut settled = Settled { start, holding: before.holding, resumed: false };
        if matches!(settled.holding, Holding::HalfAnUpdate(_)) || how.pause == PausePolicy::External {
            return Ok(settled);
        }
        if self.server.is_paused(until).await.map_err(unknown("start"))? {
            self.run_again(until).await.map_err(unknown("resume"))?;
            settled.resumed = true;
        }
        if settled.resumed || how.unproven {
            match &settled.holding {
                Holding::Version(version) => {
                    self.see_an_answer(how.canary.as_ref(), version, until, until).await?;
                }
                _ => self.computes(until).await.map_err(unknown("probe"))?,
            }
        }
        Ok(settled)
    }
}

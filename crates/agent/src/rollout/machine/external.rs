//! Where a rollout stands in an update by the user's own data plane, and what may follow.
//!
//! Pure. From the mark to the proof the engine counts as touched: whatever ends such an update without a proof makes the rollout dirty, but
//! for a trainer that says that it never began.

use super::attempt::{Attempt, Stage};
use super::{Machine, Opening};
use crate::group::refusal;
use weightsync_core::protocol::{ExternalBegin, HeldVersion, Refusal, RefusalCode, UpdateId};

impl Machine {
    /// Opens an update whose bytes no agent sees; [`Machine::opened`] follows when the engine is marked, or [`Machine::refused`].
    pub fn begin_external(&mut self, request: &ExternalBegin) -> Result<Opening, Refusal> {
        let update = &request.update;
        if let Some(attempt) = &self.attempt
            && let Some(opening) = attempt.before(update)?
        {
            return Ok(opening);
        }
        if let Some(installed) = self.installed.as_ref().map(|installed| &installed.held) {
            let held = &request.held;
            if held.version < installed.version {
                let message = format!("version {} is installed, version {} is not higher", installed.version, held.version);
                return Err(refusal(RefusalCode::VersionNotHigher, message));
            }
            if held.version == installed.version && held.manifest != installed.manifest {
                let message = format!("version {} is installed with other weights: give new weights a new number", held.version);
                return Err(refusal(RefusalCode::VersionNotHigher, message));
            }
        }
        self.attempt = Some(Attempt::new(update.clone(), Stage::Opening));
        self.sequence += 1;
        Ok(Opening::Check)
    }

    /// The trainer reports that its data plane finished here: [`Machine::install_confirmed`] or [`Machine::install_failed`] follows. False
    /// if it reported that before.
    pub fn delivered_external(&mut self, update: &UpdateId, held: HeldVersion) -> Result<bool, Refusal> {
        let attempt = self.known(update)?;
        if matches!(attempt.stage, Stage::Installing(_) | Stage::Installed) {
            return Ok(false);
        }
        self.advance(update, &Stage::Receiving, |attempt| attempt.stage = Stage::Installing(held))?;
        Ok(true)
    }
}

//! One attempt of an update, and how far it is. Holds values; the machine decides what may follow.

use super::Opening;
use crate::group::refusal;
use weightsync_core::protocol::{EngineChecksum, HeldVersion, InstallStep, Refusal, RefusalCode, UpdateId};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Stage {
    /// Memory and engine are being checked.
    Opening,
    Receiving,
    /// The stream ended as it should; digests are not compared yet.
    Streamed,
    /// Complete and verified.
    Delivered(HeldVersion),
    Installing(HeldVersion),
    Installed,
    /// Refused before a byte moved.
    Refused,
    Failed,
}

#[derive(Debug, Clone)]
pub(super) struct Attempt {
    pub(super) update: UpdateId,
    pub(super) layout_digest: String,
    /// Whether it brings what the group holds: that takes the place of other weights under the same number.
    pub(super) feeding: bool,
    pub(super) stage: Stage,
    pub(super) bytes: u64,
    pub(super) total_bytes: u64,
    pub(super) reason: Option<String>,
    pub(super) dirty: bool,
    /// Whether the canary refused what the engine answers.
    pub(super) refused: bool,
    /// Whether the same weights would fail here again.
    pub(super) repeats: bool,
    /// Whether it ended because its epoch did.
    pub(super) fenced: bool,
    /// Whether the engine takes buckets while they come.
    pub(super) fed: bool,
    /// The engine's own checksums, where it was asked for them.
    pub(super) checksum: Option<EngineChecksum>,
    pub(super) steps_ms: Vec<(String, u64)>,
    /// What the comparison of its tensors found and did not refuse.
    pub(super) notes: Vec<String>,
}

impl Attempt {
    /// One that nothing is known of but its stage.
    pub(super) fn new(update: UpdateId, stage: Stage) -> Self {
        Self {
            update,
            layout_digest: String::new(),
            feeding: false,
            stage,
            bytes: 0,
            total_bytes: 0,
            reason: None,
            dirty: false,
            refused: false,
            repeats: false,
            fenced: false,
            fed: false,
            checksum: None,
            steps_ms: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// What the begin of an update means for this attempt, the last one: none when the update may take its place.
    pub(super) fn before(&self, update: &UpdateId) -> Result<Option<Opening>, Refusal> {
        if self.update == *update && self.stage != Stage::Refused {
            return Ok(Some(Opening::Known));
        }
        if matches!(self.stage, Stage::Installing(_)) {
            return Ok(Some(Opening::Busy));
        }
        if self.live() && self.update.epoch == update.epoch && self.update.version > update.version {
            let message = format!("version {} is on its way, version {} comes too late", self.update.version, update.version);
            return Err(refusal(RefusalCode::WrongPhase, message));
        }
        Ok(None)
    }

    pub(super) fn live(&self) -> bool {
        !matches!(self.stage, Stage::Installed | Stage::Refused | Stage::Failed)
    }

    pub(super) fn step(&self) -> InstallStep {
        match self.stage {
            Stage::Opening | Stage::Receiving | Stage::Streamed => InstallStep::Receiving,
            Stage::Delivered(_) => InstallStep::Delivered,
            Stage::Installing(_) => InstallStep::Installing,
            Stage::Installed => InstallStep::Installed,
            Stage::Refused => InstallStep::Refused,
            Stage::Failed => InstallStep::Failed,
        }
    }

    pub(super) fn fail(&mut self, reason: String) {
        self.stage = Stage::Failed;
        self.reason = Some(reason);
    }
}

pub(super) fn wrong_phase(attempt: &Attempt) -> Refusal {
    let reason = attempt.reason.as_ref().map_or_else(String::new, |reason| format!(" ({reason})"));
    let UpdateId { version, attempt: number, .. } = &attempt.update;
    refusal(RefusalCode::WrongPhase, format!("attempt {number} of version {version} is {:?} here{reason}", attempt.step()))
}

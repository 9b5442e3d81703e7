//! Where a rollout stands in an update, and what may follow.
//!
//! Pure: requests and outcomes in, the next step or a [`Refusal`] out; no file, engine or clock. A version is delivered only after
//! [`Machine::verified`] with its manifest, installed only after the engine confirmed it, and an install that may have touched the engine
//! and did not end well makes the rollout dirty, until an install in full succeeds or the engine starts again. An ending that proved nothing makes
//! what the engine holds unknown, until the engine was asked.

mod attempt;
mod external;

use self::attempt::{Attempt, Stage, wrong_phase};
use crate::group::refusal;
use weightsync_core::protocol::{
    BeginRequest, EngineChecksum, FinishRequest, HeldVersion, ProvenBy, Refusal, RefusalCode, UpdateId, UpdateStatus,
};
use weightsync_engine::{EngineStart, Holding, Left};

/// A version that the engine confirmed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    pub held: HeldVersion,
    pub start: EngineStart,
    /// What shows that the engine holds its bytes; none where this agent did not switch it, or did not see the end of the switch.
    pub proven_by: Option<ProvenBy>,
}

/// An install that began and did not end well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dirty {
    pub reason: String,
    /// The start of the engine that was touched, where known: another start holds no half update.
    pub start: Option<EngineStart>,
}

/// What the engine holds was not seen after its last change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unproven {
    pub reason: String,
    /// Versions that were verified here and may be what it holds.
    pub may_hold: Vec<HeldVersion>,
}

/// What is to be done about a begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opening {
    /// Nothing: known already, or held already.
    Known,
    /// The engine is being switched: ask again when that is over.
    Busy,
    /// Check memory and engine, then call [`Machine::opened`] or [`Machine::refused`]. An older attempt is over by this.
    Check,
}

/// What is to be done about a finish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finishing {
    /// Nothing: known already.
    Known,
    /// Compare coverage and digests, then call [`Machine::verified`].
    Verify,
}

/// What is to be done about an activate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Activating {
    /// Nothing: known already.
    Known,
    /// Install this version, then call [`Machine::install_confirmed`] or [`Machine::install_failed`].
    Install(HeldVersion),
}

#[derive(Debug, Default)]
pub struct Machine {
    attempt: Option<Attempt>,
    installed: Option<Installed>,
    dirty: Option<Dirty>,
    unproven: Option<Unproven>,
    sequence: u64,
    /// Whether the engine's process may be another one than that which answered last.
    uncertain: bool,
    /// What is installed, where a source announced other weights under its number later.
    superseded: Option<HeldVersion>,
}

impl Machine {
    /// What the engine's present start is confirmed to hold.
    pub fn installed(&self) -> Option<&Installed> {
        self.installed.as_ref()
    }

    /// The same, unless the engine's process may be another one by now: no version counts then before it was asked.
    pub fn certainly_installed(&self) -> Option<&Installed> {
        self.installed.as_ref().filter(|_| !self.uncertain)
    }

    /// Whether the engine's process is the one that answered last, as it was last looked at; also before any answered.
    pub fn is_certain(&self) -> bool {
        !self.uncertain
    }

    /// Whether the engine's process is known to be the one that answered last.
    pub fn engine_is_certain(&mut self, certain: bool) {
        self.uncertain = !certain;
    }

    /// Why the engine may hold a mixture.
    pub fn dirty(&self) -> Option<&Dirty> {
        self.dirty.as_ref()
    }

    /// Why it is not known what the engine holds.
    pub fn unproven(&self) -> Option<&Unproven> {
        self.unproven.as_ref()
    }

    /// Whether the engine must be proven or fed before it serves.
    pub fn must_not_serve(&self) -> bool {
        self.dirty.is_some() || self.unproven.is_some()
    }

    /// The attempt that runs: readiness that drops meanwhile is not ill health.
    pub fn live(&self) -> Option<&UpdateId> {
        self.attempt.as_ref().filter(|attempt| attempt.live()).map(|attempt| &attempt.update)
    }

    /// The version that is complete here and whose switch the leader has not asked for yet.
    pub fn awaits_its_turn(&self) -> Option<&HeldVersion> {
        match self.attempt.as_ref().map(|attempt| &attempt.stage) {
            Some(Stage::Delivered(held)) => Some(held),
            _ => None,
        }
    }

    /// Bytes of the last attempt that arrived and were checked, and of how many; zeros before the first.
    pub fn progress(&self) -> (u64, u64) {
        self.attempt.as_ref().map_or((0, 0), |attempt| (attempt.bytes, attempt.total_bytes))
    }

    #[cfg(test)]
    pub fn installing(&self) -> bool {
        matches!(self.attempt, Some(Attempt { stage: Stage::Installing(_), .. }))
    }

    /// The last attempt that was heard of.
    pub fn status(&self) -> Option<UpdateStatus> {
        let attempt = self.attempt.as_ref()?;
        Some(UpdateStatus {
            update: attempt.update.clone(),
            sequence: self.sequence,
            step: attempt.step(),
            bytes: attempt.bytes,
            reason: attempt.reason.clone(),
            dirty: attempt.dirty,
            refused: attempt.refused,
            repeats: attempt.repeats,
            fenced: attempt.fenced,
            steps_ms: attempt.steps_ms.clone(),
            checksum: attempt.checksum.clone(),
            mixed: Vec::new(),
            notes: attempt.notes.clone(),
        })
    }

    /// A source announced other weights under the number of what is installed, later than that: they may take its place.
    pub fn supersede(&mut self) {
        self.superseded = self.installed.as_ref().map(|installed| installed.held.clone());
    }

    /// Digest of the layout that an attempt was begun with.
    pub fn layout_of(&self, update: &UpdateId) -> Option<&str> {
        self.attempt.as_ref().filter(|attempt| attempt.update == *update).map(|attempt| attempt.layout_digest.as_str())
    }

    /// Grows with every change.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Opens an attempt. `kept` are versions that lie complete and verified next to the engine.
    pub fn begin(&mut self, request: &BeginRequest, kept: &[HeldVersion]) -> Result<Opening, Refusal> {
        let update = &request.update;
        if let Some(attempt) = &self.attempt {
            if attempt.update == *update && attempt.layout_digest != request.layout_digest {
                return Err(refusal(RefusalCode::LayoutMismatch, "a second begin of this attempt has another layout"));
            }
            if let Some(opening) = attempt.before(update)? {
                return Ok(opening);
            }
        }
        let wanted = request.manifest_digest.as_ref().map(|manifest| HeldVersion { version: update.version, manifest: manifest.clone() });
        self.check_version(request, wanted.as_ref())?;
        let serves =
            |wanted: &HeldVersion| !self.must_not_serve() && self.certainly_installed().is_some_and(|installed| installed.held == *wanted);
        let stage = match wanted {
            Some(wanted) if serves(&wanted) => Stage::Installed,
            Some(wanted) if kept.contains(&wanted) => Stage::Delivered(wanted),
            _ => Stage::Opening,
        };
        let opening = stage == Stage::Opening;
        self.attempt = Some(Attempt {
            layout_digest: request.layout_digest.clone(),
            feeding: request.feeding,
            bytes: if opening { 0 } else { request.layout.total_bytes },
            total_bytes: request.layout.total_bytes,
            ..Attempt::new(update.clone(), stage)
        });
        self.sequence += 1;
        Ok(if opening { Opening::Check } else { Opening::Known })
    }

    /// The tensors were compared with the engine's checkpoint.
    pub fn compared(&mut self, update: &UpdateId, notes: Vec<String>) {
        // An attempt that was replaced meanwhile is reported no more.
        let _ = self.advance(update, &Stage::Opening, |attempt| attempt.notes = notes);
    }

    /// Memory and engine can take the version: buckets may come. `fed` when the engine takes them while they come: it must be taken to its
    /// last step then, whatever it held before.
    pub fn opened(&mut self, update: &UpdateId, fed: bool) -> Result<(), Refusal> {
        self.advance(update, &Stage::Opening, |attempt| {
            attempt.stage = Stage::Receiving;
            attempt.fed = fed;
        })
    }

    /// Memory or engine cannot take the version.
    pub fn refused(&mut self, update: &UpdateId, refusal: &Refusal) {
        let refuse = |attempt: &mut Attempt| {
            attempt.stage = Stage::Refused;
            attempt.reason = Some(refusal.message.clone());
        };
        // An attempt that was replaced meanwhile has nothing left to refuse.
        let _ = self.advance(update, &Stage::Opening, refuse);
    }

    /// So many bytes arrived and were checked, in all.
    pub fn received(&mut self, update: &UpdateId, bytes: u64) {
        // An attempt that is over counts no more.
        let _ = self.advance(update, &Stage::Receiving, |attempt| attempt.bytes = bytes);
    }

    pub fn streamed(&mut self, update: &UpdateId, took_ms: u64) -> Result<(), Refusal> {
        self.advance(update, &Stage::Receiving, |attempt| {
            attempt.stage = Stage::Streamed;
            attempt.steps_ms.push(("receive".into(), took_ms));
        })
    }

    /// All was sent; the digests are known.
    pub fn finish(&mut self, request: &FinishRequest) -> Result<Finishing, Refusal> {
        let attempt = self.known(&request.update)?;
        match &attempt.stage {
            Stage::Streamed => Ok(Finishing::Verify),
            Stage::Delivered(held) | Stage::Installing(held) if held.manifest != request.manifest_digest => {
                Err(refusal(RefusalCode::Invalid, "a second finish of this attempt names another manifest"))
            }
            Stage::Opening | Stage::Receiving => Err(wrong_phase(attempt)),
            _ => Ok(Finishing::Known),
        }
    }

    /// The engine took its last step and computed checksums of its own; [`verified`](Self::verified) follows.
    pub fn checked(&mut self, update: &UpdateId, checksum: EngineChecksum) -> Result<(), Refusal> {
        self.advance(update, &Stage::Streamed, |attempt| attempt.checksum = Some(checksum))
    }

    /// Whether the engine computed checksums of its own in that attempt.
    pub fn has_checksum(&self, update: &UpdateId) -> bool {
        self.attempt.as_ref().is_some_and(|attempt| attempt.update == *update && attempt.checksum.is_some())
    }

    /// The outcome of comparing coverage and digests.
    pub fn verified(&mut self, update: &UpdateId, outcome: Result<HeldVersion, String>, took_ms: u64) -> Result<(), Refusal> {
        let serves = self.certainly_installed().filter(|_| !self.must_not_serve()).map(|installed| installed.held.clone());
        let serves = serves.filter(|held| self.superseded.as_ref() != Some(held));
        self.advance(update, &Stage::Streamed, |attempt| {
            attempt.steps_ms.push(("verify".into(), took_ms));
            match (outcome, serves) {
                (Ok(held), Some(serves)) if held == serves && !attempt.fed => attempt.stage = Stage::Installed,
                (Ok(held), Some(serves)) if held.version == serves.version && held != serves && !attempt.feeding => attempt.fail(format!(
                    "version {} is installed with manifest {}: these are other weights under the same number",
                    held.version, serves.manifest
                )),
                (Ok(held), _) => attempt.stage = Stage::Delivered(held),
                (Err(reason), _) => attempt.fail(reason),
            }
        })
    }

    pub fn activate(&mut self, update: &UpdateId) -> Result<Activating, Refusal> {
        let attempt = self.known(update)?;
        match attempt.stage.clone() {
            Stage::Delivered(held) => {
                attempt.stage = Stage::Installing(held.clone());
                self.sequence += 1;
                Ok(Activating::Install(held))
            }
            Stage::Installing(_) | Stage::Installed | Stage::Failed => Ok(Activating::Known),
            Stage::Opening | Stage::Receiving | Stage::Streamed | Stage::Refused => Err(wrong_phase(attempt)),
        }
    }

    pub fn install_confirmed(&mut self, held: HeldVersion, start: EngineStart, proven_by: ProvenBy, steps_ms: Vec<(String, u64)>) {
        if let Some(attempt) = &mut self.attempt
            && attempt.stage == Stage::Installing(held.clone())
        {
            attempt.stage = Stage::Installed;
            attempt.steps_ms.extend(steps_ms);
        }
        self.installed = Some(Installed { held, start, proven_by: Some(proven_by) });
        self.dirty = None;
        self.unproven = None;
        self.sequence += 1;
    }

    /// The install of `held` did not end well. `left` is what the engine is left with; a mixture is that of `start`, as far as known.
    pub fn install_failed(&mut self, reason: String, left: Left, held: Option<&HeldVersion>, start: Option<EngineStart>) {
        let touched = left != Left::AsBefore;
        let before = if touched { self.installed.take() } else { None };
        match left {
            Left::AsBefore => {}
            Left::Mixture => {
                self.dirty = Some(Dirty { reason: reason.clone(), start });
                self.unproven = None;
            }
            Left::Unknown => {
                let may_hold = held.cloned().into_iter().chain(before.map(|before| before.held)).collect();
                self.unproven = Some(Unproven { reason: reason.clone(), may_hold });
                self.dirty = None;
            }
        }
        if let Some(attempt) = &mut self.attempt {
            if matches!(attempt.stage, Stage::Installing(_)) {
                attempt.dirty = touched;
                attempt.fail(reason);
            } else if attempt.fed && attempt.stage == Stage::Failed {
                attempt.dirty |= touched;
            }
        }
        self.sequence += 1;
    }

    /// The engine loaded the version of the attempt, and the canary refused what it answers; [`install_failed`](Self::install_failed) follows.
    pub fn refused_by_canary(&mut self) {
        if let Some(attempt) = self.attempt.as_mut().filter(|attempt| matches!(attempt.stage, Stage::Installing(_))) {
            attempt.refused = true;
        }
    }

    /// The same weights would fail here again; [`install_failed`](Self::install_failed) follows.
    pub fn would_repeat(&mut self) {
        if let Some(attempt) = self.attempt.as_mut().filter(|attempt| matches!(attempt.stage, Stage::Installing(_))) {
            attempt.repeats = true;
        }
    }

    /// Ends an attempt; one whose engine is being switched goes on, since its bytes are complete. True when one ended.
    pub fn abort(&mut self, update: &UpdateId, reason: &str) -> bool {
        self.end(|attempt| attempt.update == *update, reason).is_some()
    }

    /// The epoch of an attempt is over, and the attempt as [`abort`](Self::abort) ends it. True when it ended.
    pub fn fenced(&mut self, update: &UpdateId, reason: &str) -> bool {
        self.end(|attempt| attempt.update == *update, reason).map(|attempt| attempt.fenced = true).is_some()
    }

    /// The epoch is over: so is every attempt, but for an engine that is being switched. True when one ended.
    pub fn epoch_over(&mut self, reason: &str) -> bool {
        self.end(|_| true, reason).map(|attempt| attempt.fenced = true).is_some()
    }

    /// The engine answers, from this start. True when this start lacks what an earlier one held or spoiled.
    pub fn engine_seen(&mut self, start: &EngineStart) -> bool {
        let lacks = self.installed.as_ref().is_some_and(|installed| installed.start != *start);
        let clean = self.dirty.as_ref().and_then(|dirty| dirty.start.as_ref()).is_some_and(|touched| touched != start);
        if lacks {
            self.installed = None;
        }
        if clean {
            self.dirty = None;
        }
        if lacks || clean {
            self.sequence += 1;
        }
        lacks || clean
    }

    /// The engine says that it holds that, and this rollout recorded another version: true when it is not known any more what it holds.
    pub fn engine_reports(&mut self, holding: &Holding) -> bool {
        let Some(installed) = self.installed.as_ref().filter(|_| !self.must_not_serve()) else { return false };
        if *holding == Holding::Version(installed.held.clone()) {
            return false;
        }
        let reason = format!("the engine says that it holds {holding}, and its agent recorded version {}", installed.held.version);
        let may_hold = vec![installed.held.clone()];
        self.installed = None;
        self.unproven = Some(Unproven { reason, may_hold });
        self.sequence += 1;
        true
    }

    /// The engine was asked after an ending that proved nothing: what it runs with, in which start.
    pub fn engine_settled(&mut self, holding: &Holding, start: &EngineStart) {
        let Some(unproven) = self.unproven.take() else { return };
        match holding {
            Holding::Version(held) if unproven.may_hold.contains(held) => {
                self.installed = Some(Installed { held: held.clone(), start: start.clone(), proven_by: None });
            }
            Holding::HalfAnUpdate(_) => self.dirty = Some(Dirty { reason: unproven.reason, start: Some(start.clone()) }),
            // Whole, and no version that was verified here: it is fed.
            Holding::Version(_) | Holding::Startup | Holding::Foreign(_) => {}
        }
        self.sequence += 1;
    }

    /// The engine holds half an update, as it was found out later: no version counts.
    pub fn found_dirty(&mut self, reason: String, start: Option<EngineStart>) {
        self.installed = None;
        self.dirty = Some(Dirty { reason, start });
        self.unproven = None;
        self.sequence += 1;
    }

    /// The engine runs with its start-up weights again: complete, and at no version of ours.
    pub fn put_back(&mut self) {
        self.installed = None;
        self.dirty = None;
        self.unproven = None;
        self.sequence += 1;
    }

    /// The attempt that ended.
    fn end(&mut self, which: impl Fn(&Attempt) -> bool, reason: &str) -> Option<&mut Attempt> {
        let attempt = self.attempt.as_mut()?;
        if !attempt.live() || matches!(attempt.stage, Stage::Installing(_)) || !which(attempt) {
            return None;
        }
        attempt.fail(reason.to_owned());
        self.sequence += 1;
        Some(attempt)
    }

    fn check_version(&self, request: &BeginRequest, wanted: Option<&HeldVersion>) -> Result<(), Refusal> {
        let installed = self.installed.as_ref().map(|installed| &installed.held).filter(|held| self.superseded.as_ref() != Some(held));
        let Some(installed) = installed else { return Ok(()) };
        let version = request.update.version;
        // Feeding brings the group's current version, which may be lower than one that was installed by an update that then failed.
        if request.feeding || version > installed.version {
            return Ok(());
        }
        let not_higher = |what: String| Err(refusal(RefusalCode::VersionNotHigher, what));
        match wanted {
            _ if version < installed.version => {
                not_higher(format!("version {} is installed, version {version} is not higher", installed.version))
            }
            Some(wanted) if wanted.manifest != installed.manifest => {
                not_higher(format!("version {version} is installed with another manifest: give new weights a new number"))
            }
            _ => Ok(()),
        }
    }

    fn known(&mut self, update: &UpdateId) -> Result<&mut Attempt, Refusal> {
        match &mut self.attempt {
            Some(attempt) if attempt.update == *update => Ok(attempt),
            _ => {
                Err(refusal(RefusalCode::WrongPhase, format!("attempt {} of version {} is not open here", update.attempt, update.version)))
            }
        }
    }

    fn advance(&mut self, update: &UpdateId, from: &Stage, change: impl FnOnce(&mut Attempt)) -> Result<(), Refusal> {
        let attempt = self.known(update)?;
        if attempt.stage != *from {
            return Err(wrong_phase(attempt));
        }
        change(attempt);
        self.sequence += 1;
        Ok(())
    }
}

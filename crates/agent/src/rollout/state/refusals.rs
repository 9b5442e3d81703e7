//! What a replica refused: versions by its canary, versions by the engine's loader, and routes by one start of the engine.
//!
//! Pure. Decides how long a refusal counts, and when the loader itself is suspect: where it refuses a second version, the start-up weights
//! show which of them is wrong. The coordinator counts refusals of all replicas, and decides for the group.

use super::State;
use crate::archive::Archived;
use weightsync_core::protocol::{CanaryPolicy, HeldVersion, RefusedVersion};
use weightsync_engine::{EngineStart, Left};

/// Most versions whose refusal is remembered.
const REMEMBERED: usize = 4;

#[derive(Debug, Default)]
pub(in crate::rollout) struct Refusals {
    /// Versions that the canary refused, the highest last.
    refused: Vec<RefusedVersion>,
    /// The start of the engine that answered a canary, and which.
    answered: Option<(EngineStart, CanaryPolicy)>,
    /// A start of the engine that cannot be fed from GPU memory although it reported that it can, and why.
    no_device: Option<(EngineStart, String)>,
    /// A version that the engine read and refused, and its start.
    by_loader: Option<(Option<EngineStart>, HeldVersion)>,
    /// Whether its start-up weights are to be put back at once: they show whether it loads anything.
    suspect: bool,
}

impl Refusals {
    pub(super) fn refused(&self) -> &[RefusedVersion] {
        &self.refused
    }

    pub(in crate::rollout) fn has_answered(&self, start: Option<&EngineStart>, canary: &CanaryPolicy) -> bool {
        self.answered.as_ref().is_some_and(|(of, asked)| Some(of) == start && asked == canary)
    }

    /// This start answers what the canary asks.
    pub(in crate::rollout) fn answers(&mut self, start: EngineStart, canary: &CanaryPolicy) {
        self.answered = Some((start, canary.clone()));
    }

    /// Why this start cannot be fed from GPU memory.
    pub(in crate::rollout) fn no_device(&self, start: Option<&EngineStart>) -> Option<&str> {
        self.no_device.as_ref().filter(|(of, _)| Some(of) == start).map(|(_, why)| why.as_str())
    }

    /// This start refused to be fed from GPU memory, and nothing was touched: it is fed another way from now on.
    pub(in crate::rollout) fn refuses_device(&mut self, start: EngineStart, why: String) {
        self.no_device = Some((start, why));
    }

    pub(in crate::rollout) fn is_suspect(&self) -> bool {
        self.suspect
    }

    /// It is known whether the engine loads its start-up weights; whether that was asked because its loader was suspect.
    pub(super) fn clear_suspicion(&mut self) -> bool {
        std::mem::take(&mut self.suspect)
    }

    /// The engine loaded weights: its loader works.
    pub(super) fn loads(&mut self) {
        (self.by_loader, self.suspect) = (None, false);
    }

    /// The engine holds a version: refusals of it and of lower ones are over.
    pub(super) fn took(&mut self, held: &HeldVersion) {
        self.refused.retain(|refused| refused.held.version > held.version);
    }

    pub(super) fn by_canary(&mut self, held: &HeldVersion, measured: &str) {
        self.refused.retain(|refused| refused.held != *held);
        self.refused.push(RefusedVersion { held: held.clone(), measured: measured.to_owned() });
        self.refused.sort_by_key(|refused| refused.held.version);
        let most = self.refused.len().saturating_sub(REMEMBERED);
        self.refused.drain(..most);
    }

    pub(super) fn by_loader(&mut self, start: Option<EngineStart>, held: &HeldVersion, left: Left) {
        let refused = (start, held.clone());
        let second = self.by_loader.as_ref().is_some_and(|(start, before)| *start == refused.0 && *before != refused.1);
        self.suspect |= left == Left::Mixture && second;
        self.by_loader = Some(refused);
    }
}

impl<F: Archived> State<F> {
    /// The canary refused a version that the engine loaded: it is not kept either.
    pub(super) fn canary_refused(&mut self, held: &HeldVersion, measured: &str) {
        self.refusals.by_canary(held, measured);
        self.versions.refused(held);
        self.machine.refused_by_canary();
    }
}

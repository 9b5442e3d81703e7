//! Which start of an engine's process one speaks to. No single sign is enough: a start time can be missing or too coarse, a refused
//! connection can fall between two looks (simulators restart in milliseconds), and a lost label shows only after an install.
//!
//! Decides when two looks saw different starts. In doubt it says "another start": the cost is one more install, never stale weights.

use std::sync::{Mutex, PoisonError};

use super::label::Holding;
use super::{EngineError, EngineStart};

/// What was seen of an engine so far.
#[derive(Debug, Default)]
pub(super) struct StartWatch(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    /// Grows with every sign of a new start.
    generation: u64,
    /// Whether the engine answered since the last refused connection.
    answered: bool,
    /// What the engine must still report, because this adapter wrote it.
    written: Option<Holding>,
    /// Of the last answer.
    fingerprint: String,
    /// Grows when a write begins and when it ends, so it is odd while one is under way.
    writes: u64,
}

/// When a look began; what was read while this adapter wrote proves nothing.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look(u64);

impl StartWatch {
    /// Takes a failed call into account: nobody listening, or a connection that broke, may be a restart.
    pub(super) fn failed(&self, error: &EngineError) {
        if matches!(error, EngineError::Unreachable { .. }) {
            let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if seen.answered {
                seen.answered = false;
                seen.generation += 1;
                seen.written = None;
            }
        }
    }

    /// The adapter is about to write into the engine.
    pub(super) fn writing(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).writes += 1;
    }

    /// The adapter wrote this into the engine; none when it is not known whether it did.
    pub(super) fn wrote(&self, holding: Option<Holding>) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.written = holding;
        seen.writes += 1;
    }

    /// A look at the engine begins.
    pub(super) fn look(&self) -> Look {
        Look(self.0.lock().unwrap_or_else(PoisonError::into_inner).writes)
    }

    /// The start that answered with this fingerprint (its start time or the like) and this label.
    pub(super) fn answered(&self, look: Look, fingerprint: &str, holding: &Holding) -> EngineStart {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.answered = true;
        fingerprint.clone_into(&mut seen.fingerprint);
        let undisturbed = look.0 == seen.writes && look.0.is_multiple_of(2);
        if undisturbed && seen.written.as_ref().is_some_and(|written| written != holding) {
            // Another program's label counts too: whoever wrote it may have written weights as well.
            seen.generation += 1;
            seen.written = None;
        }
        seen.start()
    }

    /// The start as it was last seen.
    pub(super) fn last(&self) -> EngineStart {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).start()
    }
}

impl Seen {
    fn start(&self) -> EngineStart {
        EngineStart(format!("{}#{}", self.fingerprint, self.generation))
    }
}

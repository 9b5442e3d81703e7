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
}

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

    /// The adapter wrote this into the engine.
    pub(super) fn wrote(&self, holding: Holding) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).written = Some(holding);
    }

    /// The start that answered with this fingerprint (its start time or the like) and, where it was asked, this label.
    pub(super) fn answered(&self, fingerprint: &str, holding: Option<&Holding>) -> EngineStart {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.answered = true;
        fingerprint.clone_into(&mut seen.fingerprint);
        if let (Some(written), Some(holding)) = (&seen.written, holding)
            && written != holding
        {
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

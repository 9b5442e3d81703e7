//! Which start of an engine's process responds. No single sign is enough. A start time can be missing or too coarse. A refused connection
//! can fall between two checks (simulators restart in milliseconds). A lost label shows only after an install. Between two checks, an idle
//! connection shows it: while it is open, the checked process still runs.
//!
//! Decides when two checks saw different starts, and whether the result of a check is still valid. In doubt it reports another start: the
//! cost is one more install, never stale weights.

use std::sync::Arc;

use parking_lot::Mutex;

use super::label::Holding;
use super::lifeline::Lifeline;
use super::record::UNKNOWN;
use super::server::Sleeps;
use super::{EngineError, EngineStart};

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
    /// Fingerprint in the last response.
    fingerprint: String,
    /// Grows when a write begins and when it ends, so it is odd while one is under way.
    writes: u64,
    /// Connection to the last known listener.
    line: Option<Arc<Lifeline>>,
    /// Grows with each new connection that may lead to another process than before.
    breaks: u64,
    /// The value of `breaks` during which a check began and ended: that process is known.
    known: Option<u64>,
    /// Its report of its sleep at the last check; `None` before the first one.
    sleep: Option<Sleeps>,
    /// How often it was found to have fallen asleep.
    sleeps: u64,
}

/// When a check began. Data that was read while this adapter wrote, or from a process that is gone, proves nothing.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look {
    writes: u64,
    breaks: u64,
}

impl StartWatch {
    /// Records a failed call: a refused or broken connection may be a restart.
    pub(super) fn failed(&self, error: &EngineError) {
        if matches!(error, EngineError::Unreachable { .. }) {
            let mut seen = self.0.lock();
            if seen.answered {
                seen.answered = false;
                seen.generation += 1;
                seen.written = None;
            }
        }
    }

    /// The adapter is about to write into the engine.
    pub(super) fn writing(&self) {
        self.0.lock().writes += 1;
    }

    /// Records what the adapter wrote; `None` if it is not known whether it did.
    pub(super) fn wrote(&self, holding: Option<Holding>) {
        let mut seen = self.0.lock();
        seen.written = holding;
        seen.writes += 1;
    }

    /// Takes a new connection to the present listener; `None` if there is none. Open it before a check whose result must stay valid until
    /// the next one.
    pub(super) fn hold(&self, fresh: Option<Lifeline>) {
        let mut seen = self.0.lock();
        // The older connection is still open although the younger one was accepted already: both lead to one process.
        if !seen.line.as_ref().is_some_and(|line| line.stands()) {
            seen.breaks += 1;
        }
        seen.line = fresh.map(Arc::new);
    }

    /// Whether the process of that start still runs and was not replaced, without a request.
    pub(super) fn is_still(&self, start: &EngineStart) -> bool {
        let seen = self.0.lock();
        seen.known == Some(seen.breaks) && seen.start() == *start && seen.line.as_ref().is_some_and(|line| line.stands())
    }

    /// The connection to the last known process.
    pub(super) fn line(&self) -> Option<Arc<Lifeline>> {
        self.0.lock().line.clone()
    }

    pub(super) fn look(&self) -> Look {
        let seen = self.0.lock();
        Look { writes: seen.writes, breaks: seen.breaks }
    }

    /// Whether the process of a check ran ever since its beginning.
    pub(super) fn stood_since(&self, look: Look) -> bool {
        let seen = self.0.lock();
        look.breaks == seen.breaks && seen.line.as_ref().is_some_and(|line| line.stands())
    }

    /// The start that responded with this fingerprint (its start time or similar) and this label.
    pub(super) fn answered(&self, look: Look, fingerprint: &str, holding: &Holding) -> EngineStart {
        let mut seen = self.0.lock();
        seen.answered = true;
        fingerprint.clone_into(&mut seen.fingerprint);
        let undisturbed = look.writes == seen.writes && look.writes.is_multiple_of(2);
        if undisturbed && seen.written.as_ref().is_some_and(|written| written != holding) {
            // Another program's label counts too: that program may also have written weights.
            seen.generation += 1;
            seen.written = None;
        }
        if look.breaks == seen.breaks {
            let before = seen.known.replace(look.breaks);
            // Nothing else distinguishes the known process from the present one.
            if fingerprint == UNKNOWN && before.is_some_and(|before| before != look.breaks) {
                seen.generation += 1;
                seen.written = None;
            }
        }
        seen.start()
    }

    /// Records its report of sleeps by another client. From then on its version no longer counts: in deep sleep an engine drops its weights
    /// and keeps the label, so nothing else would show it.
    pub(super) fn slept(&self, sleep: Sleeps) {
        let mut seen = self.0.lock();
        let before = seen.sleep.replace(sleep);
        let fell_asleep = sleep.now && !before.is_some_and(|before| before.now);
        // A sleep that has ended already counts as well.
        if fell_asleep || before.is_some_and(|before| sleep.times > before.times) {
            seen.sleeps += 1;
        }
    }

    pub(super) fn is_asleep(&self) -> bool {
        self.0.lock().sleep.is_some_and(|sleep| sleep.now)
    }

    pub(super) fn last(&self) -> EngineStart {
        self.0.lock().start()
    }
}

impl Seen {
    fn start(&self) -> EngineStart {
        let process = format!("{}#{}", self.fingerprint, self.generation);
        EngineStart(if self.sleeps == 0 { process } else { format!("{process}~{}", self.sleeps) })
    }
}

//! The version of an engine that has no field for it, or that an install began.
//!
//! LMDeploy 0.18 keeps no version. The record exists as long as the agent, and in a file if there is a place for one. So the next
//! incarnation of the agent also knows of an install whose end was not observed. Decides whether a record is about the running start. If
//! that is unknown, half an update counts and a complete version does not: the cost is one more install, never wrong weights.

use std::io::Write;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{EngineError, Holding};

/// The fingerprint of a start that cannot be distinguished from others.
pub(super) const UNKNOWN: &str = "unknown";

pub(super) struct Record {
    file: Option<PathBuf>,
    written: Mutex<Option<Entry>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Entry {
    start: String,
    holding: String,
}

impl Record {
    pub(super) fn new(file: Option<PathBuf>) -> Self {
        Self { file, written: Mutex::new(None) }
    }

    /// Records the present contents of this start.
    pub(super) fn write(&self, start: &str, holding: &Holding) -> Result<(), EngineError> {
        let entry = Entry { start: start.to_owned(), holding: holding.text() };
        if let Some(file) = &self.file {
            store(file, &entry).map_err(|error| EngineError::Unsupported {
                what: format!("what the engine holds cannot be recorded: {error}"),
                next_step: "give the agent a directory that it can write to".into(),
            })?;
        }
        *self.written.lock() = Some(entry);
        Ok(())
    }

    pub(super) fn read(&self, start: &str) -> Holding {
        let written = self.written.lock().clone();
        let own = written.is_some();
        let Some(entry) = written.or_else(|| self.file.as_deref().and_then(load)) else { return Holding::Startup };
        let holding = Holding::parse(&entry.holding);
        if entry.start != UNKNOWN && start != UNKNOWN {
            return if entry.start == start { holding } else { Holding::Startup };
        }
        match holding {
            Holding::HalfAnUpdate(_) => holding,
            _ if own => holding,
            _ => Holding::Startup,
        }
    }
}

fn store(file: &Path, entry: &Entry) -> std::io::Result<()> {
    let partial = file.with_extension("partial");
    let mut to = std::fs::File::create(&partial)?;
    to.write_all(serde_json::to_string(entry)?.as_bytes())?;
    to.sync_all()?;
    std::fs::rename(&partial, file)
}

fn load(file: &Path) -> Option<Entry> {
    serde_json::from_slice(&std::fs::read(file).ok()?).ok()
}

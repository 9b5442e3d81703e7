//! Groups of agents in one process, over real TLS and TCP on the loopback, with an engine that reads what it is given; and tables and
//! properties of the state machines.

mod announcing;
mod canary;
mod corrupting;
mod doors;
pub(crate) mod engine;
mod epochs;
mod external;
mod feeding;
pub(crate) mod fixture;
mod going_back;
mod installs;
mod keeping;
mod lasting;
mod lying;
pub(crate) mod machine;
mod memory;
mod preflight;
mod publishes;
mod pure;
mod reach;
mod surroundings;
pub(crate) mod trainer;
mod unproven;
mod waves;
mod workers;

use weightsync_core::protocol::{InstallStep, UpdateId, UpdateStatus};

/// What a member says first of an attempt.
fn first_status(update: UpdateId, step: InstallStep, bytes: u64) -> UpdateStatus {
    UpdateStatus {
        update,
        sequence: 1,
        step,
        bytes,
        reason: None,
        dirty: false,
        refused: false,
        repeats: false,
        fenced: false,
        steps_ms: Vec::new(),
        checksum: None,
        mixed: Vec::new(),
        notes: Vec::new(),
    }
}

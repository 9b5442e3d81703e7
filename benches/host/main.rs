//! What a loss costs, how fast groups form, what agents take, how soon a new rollout serves, how long engines are paused, and how fast
//! ranks of torch meet, on one host with simulated engines.
//!
//! `cargo bench --bench host` runs all but `-- formation` and `-- rendezvous` (which needs torch). A name after `--` runs one. Every agent
//! and engine is a process of the built program. It changes nothing on the machine but folders under the temporary directory and
//! `/dev/shm`, which it removes.

mod fixture;
mod formation;
mod join;
mod memory;
mod pause;
mod recovery;
mod rendezvous;
#[path = "../transport/report.rs"]
#[allow(dead_code)]
mod report;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// The program whose processes are measured.
const PROGRAM: &str = env!("CARGO_BIN_EXE_weightsync");

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// One JSON object instead of lines for people.
    #[arg(long, global = true)]
    json: bool,
    /// Given by cargo.
    #[arg(long, hide = true, global = true)]
    bench: bool,
}

#[derive(Subcommand)]
enum Command {
    /// A replica is killed, or frozen, in the middle of an update: time until the others serve the version.
    Recovery(recovery::Settings),
    /// A group forms: at its start, without a killed replica, and with it again.
    Formation(formation::Settings),
    /// Memory of agents: their own, shared, and directories of versions.
    Memory(memory::Settings),
    /// A new rollout: from the moment at which its engine is healthy until it serves the current version.
    Join(join::Settings),
    /// How long an engine is paused in an update, against the whole update.
    Pause(pause::Settings),
    /// Clients of the real torch at our store and at torch's own.
    Rendezvous(rendezvous::Settings),
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let mut report = report::Report::new(arguments.json);
    match arguments.command {
        Some(Command::Recovery(settings)) => recovery::measure(&settings, &mut report)?,
        Some(Command::Formation(settings)) => formation::measure(&settings, &mut report)?,
        Some(Command::Memory(settings)) => memory::measure(&settings, &mut report)?,
        Some(Command::Join(settings)) => join::measure(&settings, &mut report)?,
        Some(Command::Pause(settings)) => pause::measure(&settings, &mut report)?,
        Some(Command::Rendezvous(settings)) => rendezvous::measure(&settings, &mut report)?,
        None => {
            recovery::measure(&recovery::Settings::default(), &mut report)?;
            memory::measure(&memory::Settings::default(), &mut report)?;
            join::measure(&join::Settings::default(), &mut report)?;
            pause::measure(&pause::Settings::default(), &mut report)?;
        }
    }
    report.finish();
    Ok(())
}

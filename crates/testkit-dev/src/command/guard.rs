//! `weightsync-dev guard`: ends the processes of the demo once it is gone. Started by the demo.

use std::process::ExitCode;

use anyhow::Context;

/// Runs the command.
pub fn run() -> anyhow::Result<ExitCode> {
    weightsync_coordinator::local::guard::run(std::io::stdin().lock()).context("standard input names no processes")?;
    Ok(ExitCode::SUCCESS)
}

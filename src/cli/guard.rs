//! `weightsync guard`: ends the processes of a local group once the program that started them is gone. Started by that program.

use std::process::ExitCode;

use anyhow::Context;

/// Runs the command.
pub fn run() -> anyhow::Result<ExitCode> {
    weightsync_coordinator::local::guard::run(std::io::stdin().lock()).context("standard input names no processes")?;
    Ok(ExitCode::SUCCESS)
}

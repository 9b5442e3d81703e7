//! Commands that every program of WeightSync has, and what their command lines share: the agent, the worker, how output is printed.
//!
//! A command reads its arguments, calls one crate, prints what it answers, and says by the exit code whether it went well:
//! 0 success, 1 failure, 2 wrong usage. It never prints a secret.

mod agent;
pub mod text;
mod worker;

use std::future::Future;
use std::process::ExitCode;

use anyhow::Context;
use clap::ValueEnum;

pub use agent::{AgentArgs, PROBE_PORT, STATUS_PORT, unproven_routes};
pub use worker::WorkerArgs;

/// How a command prints what it found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people: tables and sentences.
    #[default]
    Human,
    /// For programs: one JSON object.
    Json,
}

/// Carries a program's command out; an error is printed as one line, with its causes.
pub fn run_program(command: impl FnOnce() -> anyhow::Result<ExitCode>) -> ExitCode {
    use_ring();
    match command() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// One cryptography provider for the whole process; HTTP clients without certificates of ours ask for a default one.
pub fn use_ring() {
    // An error means that it is set already.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// Runs an asynchronous command to its end on a runtime of its own.
pub fn block_on<T>(command: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("the async runtime cannot start")?;
    runtime.block_on(command)
}

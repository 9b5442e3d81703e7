//! The command line of `weightsync-dev`, one file a command.
//!
//! It has the commands of the product that the demo starts as processes, `agent`, `worker` and `guard`, so that the demo needs no second
//! program. It never touches a cluster.

pub mod conformance;
pub mod feed;
mod guard;
pub mod simulate_engine;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use weightsync_agent::command::{AgentArgs, WorkerArgs, run_program};

use crate::demo;

/// The demo of WeightSync, its conformance suite, and simulated engines.
#[derive(Debug, Parser)]
#[command(name = "weightsync-dev", version, propagate_version = true, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show the whole product on this host: versions, a kill in the middle of an update, a rejoin, and proof.
    Demo(Box<demo::DemoArgs>),
    /// Test whether an inference server keeps the protocol that WeightSync relies on: a live one, or simulators.
    Conformance(Box<conformance::ConformanceArgs>),
    /// Have one engine on this machine take a checkpoint through the memory of its GPUs.
    Feed(Box<feed::FeedArgs>),
    /// Stand in for an inference server: serves no model, but what it answers is computed from the bytes it loads.
    SimulateEngine(Box<simulate_engine::SimulateEngineArgs>),
    /// Run the agent of one pod, as `weightsync agent` does.
    #[command(hide = true)]
    Agent(Box<AgentArgs>),
    /// Have one GPU, as `weightsync worker` does. Started by an agent.
    #[command(hide = true)]
    Worker(WorkerArgs),
    /// End the processes of the demo once it is gone, as `weightsync guard` does.
    #[command(hide = true)]
    Guard,
}

impl Cli {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Demo(args) => args.run(),
            Command::Conformance(args) => args.run(),
            Command::Feed(args) => args.run(),
            Command::SimulateEngine(args) => args.run(),
            Command::Agent(args) => args.run(),
            Command::Worker(args) => args.run(),
            Command::Guard => guard::run(),
        }
    }
}

/// Reads the command line and carries it out.
pub fn main() -> ExitCode {
    run_program(|| Cli::parse().run())
}

//! Commands and their output: `weightsync COMMAND`, one file a command.
//!
//! A command reads its arguments, calls one crate or module, prints the result, and returns an exit code: 0 success, 1 failure, 2 wrong
//! usage. It decides nothing that they could decide, and never prints a secret.
//!
//! To add a command: a file `src/cli/NAME.rs` with `pub struct NameArgs` (derives `clap::Args`) and
//! `impl NameArgs { pub fn run(self) -> anyhow::Result<ExitCode> }`, a variant of [`Command`], and an arm in [`Cli::run`].

mod controller;
mod doctor;
mod generate;
mod guard;
mod install;
mod local;
mod manifests;
mod plan;
pub mod plugin;
mod publish;
mod run;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use weightsync_agent::command::{AgentArgs, Output, WorkerArgs, block_on, run_program, use_ring};

/// Keeps the weights that rollout engines serve equal to the weights that a trainer makes.
#[derive(Debug, Parser)]
#[command(name = "weightsync", version, propagate_version = true, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the operator in a cluster.
    Controller(Box<controller::ControllerArgs>),
    /// Run the agent of one pod.
    Agent(Box<AgentArgs>),
    /// Write what is made from the program's own types: CRDs, API reference, shell completion.
    Generate(generate::GenerateArgs),
    /// Show what this machine has for moving weights, what each transport would use, and why not the better one.
    Doctor(doctor::DoctorArgs),
    /// Run a group of processes on this host from a file.
    Local(local::LocalArgs),
    /// Show what a group would be made of and what an update would cost, from files, without a cluster.
    Plan(plan::PlanArgs),
    /// Publish a safetensors checkpoint through the agent of this pod.
    ///
    /// Exits 0 when enough replicas serve the version, 75 when it failed and the same command may succeed later, 1 when it cannot.
    Publish(publish::PublishArgs),
    /// Start a command and run the agent; exits with the status of the command.
    Run(Box<run::RunArgs>),
    /// Have one GPU: everything that touches the driver and NCCL. Started by the agent.
    #[command(hide = true)]
    Worker(WorkerArgs),
    /// End the processes of a local group once the program that started them is gone. Started by that program.
    #[command(hide = true)]
    Guard,
    /// Copy this program into a directory that another container of the pod mounts.
    Install(install::InstallArgs),
}

impl Cli {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Controller(args) => args.run(),
            Command::Agent(args) => args.run(),
            Command::Generate(args) => args.run(),
            Command::Doctor(args) => args.run(),
            Command::Local(args) => args.run(),
            Command::Plan(args) => args.run(),
            Command::Publish(args) => args.run(),
            Command::Run(args) => args.run(),
            Command::Worker(args) => args.run(),
            Command::Guard => guard::run(),
            Command::Install(args) => args.run(),
        }
    }
}

/// Reads the command line and carries it out; an error is printed as one line, with its causes.
pub fn main() -> ExitCode {
    run_program(|| Cli::parse().run())
}

//! Commands and their output: `weightsync COMMAND`, one file a command.
//!
//! A command reads its arguments, calls one room of the crate, prints what it answers, and says by the exit code whether it went well:
//! 0 success, 1 failure, 2 wrong usage. It decides nothing that a room could decide, and never prints a secret.
//!
//! To add a command: a file `src/cli/NAME.rs` with `pub struct NameArgs` (derives `clap::Args`) and
//! `impl NameArgs { pub fn run(self) -> anyhow::Result<ExitCode> }`, a variant of [`Command`], and an arm in [`Cli::run`].

mod agent;
mod check;
pub mod conformance;
pub mod controller;
pub mod demo;
pub mod doctor;
pub mod feed;
mod generate;
pub mod inject;
mod install;
mod local;
pub mod plan;
pub mod plugin;
mod publish;
mod run;
mod simulate_engine;
mod text;
mod worker;

use std::future::Future;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand, ValueEnum};

/// Keeps the weights that rollout engines serve equal to the weights that a trainer makes.
#[derive(Debug, Parser)]
#[command(name = "weightsync", version, propagate_version = true, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands of the program.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the operator in a cluster.
    Controller(controller::ControllerArgs),
    /// Ask whether an installation works: the resource is served, and a controller is ready.
    Check(check::CheckArgs),
    /// Run the agent of one pod.
    Agent(Box<agent::AgentArgs>),
    /// Test whether an inference server keeps the protocol that WeightSync relies on: a live one, or simulators.
    Conformance(Box<conformance::ConformanceArgs>),
    /// Have one engine on this machine take a checkpoint through the memory of its GPUs.
    Feed(Box<feed::FeedArgs>),
    /// Write what is made from the program's own types: CRDs, API reference, shell completion.
    Generate(generate::GenerateArgs),
    /// Show the whole product on this host: versions, a kill in the middle of an update, a rejoin, and proof.
    Demo(demo::DemoArgs),
    /// Show what this machine has for moving weights, what each transport would use, and why not the better one.
    Doctor(doctor::DoctorArgs),
    /// Run a group of processes on this host from a file.
    Local(local::LocalArgs),
    /// Show what a group would be made of and what an update would cost, from files, without a cluster.
    Plan(plan::PlanArgs),
    /// Publish a safetensors checkpoint through the agent beside this process.
    ///
    /// Exits 0 when enough replicas serve the version, 75 when it failed and the same command may succeed later, 1 when it cannot.
    Publish(publish::PublishArgs),
    /// Stand in for an inference server: for demos and tests.
    #[command(hide = true)]
    SimulateEngine(simulate_engine::SimulateEngineArgs),
    /// Start a command and run the agent beside it; exits as the command does.
    Run(Box<run::RunArgs>),
    /// Have one GPU: everything that touches the driver and NCCL. Started by the agent.
    #[command(hide = true)]
    Worker(worker::WorkerArgs),
    /// Copy this program into a directory that another container of the pod mounts.
    Install(install::InstallArgs),
}

impl Cli {
    /// Carries the command out.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Controller(args) => args.run(),
            Command::Check(args) => args.run(),
            Command::Agent(args) => args.run(),
            Command::Conformance(args) => args.run(),
            Command::Feed(args) => args.run(),
            Command::Generate(args) => args.run(),
            Command::Demo(args) => args.run(),
            Command::Doctor(args) => args.run(),
            Command::Local(args) => args.run(),
            Command::Plan(args) => args.run(),
            Command::Publish(args) => args.run(),
            Command::SimulateEngine(args) => args.run(),
            Command::Run(args) => args.run(),
            Command::Worker(args) => args.run(),
            Command::Install(args) => args.run(),
        }
    }
}

/// How a command prints what it found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people: tables and sentences.
    #[default]
    Human,
    /// For programs: one JSON object.
    Json,
}

/// Reads the command line and carries it out; an error is printed as one line, with its causes.
pub fn main() -> ExitCode {
    use_ring();
    match Cli::parse().run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// One cryptography provider for the whole process; HTTP clients without certificates of ours ask for a default one.
pub(crate) fn use_ring() {
    // An error means that it is set already.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// Runs an asynchronous command to its end on a runtime of its own.
pub fn block_on<T>(command: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("the async runtime cannot start")?;
    runtime.block_on(command)
}

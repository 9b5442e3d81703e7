//! `kubectl weightsync VERB`: what a person at a terminal needs of a cluster. One file a verb.
//!
//! Decides how things are shown. Every verb works with the rights of the person who calls it, and says which right is missing.

mod cluster;
mod inject;
mod release;
mod status;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Looks after WeightSync objects: status, injection of the agent, release.
#[derive(Debug, Parser)]
#[command(name = "kubectl-weightsync", bin_name = "kubectl weightsync", version, arg_required_else_help = true)]
pub struct Plugin {
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// The plugin's verbs.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Add the agent's sidecar to manifests: standard input to standard output.
    Inject(inject::InjectArgs),
    /// Show what a group would be made of and what an update would cost, from files, without a cluster.
    Plan(crate::cli::plan::PlanArgs),
    /// Suspend an object and wait until every pod serves on its own.
    Release(release::ReleaseArgs),
    /// Show members, ranks and versions, and why a member is out.
    Status(status::StatusArgs),
}

/// Reads the command line and carries it out.
pub fn main() -> ExitCode {
    super::use_ring();
    let done = match Plugin::parse().verb {
        Verb::Inject(args) => args.run(),
        Verb::Plan(args) => args.run(),
        Verb::Release(args) => args.run(),
        Verb::Status(args) => args.run(),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

//! `kubectl weightsync COMMAND`: commands for users of a cluster. One file for each command.
//!
//! Decides how things are shown. Every command uses the rights of the user who calls it, and names a missing right. It never repeats a
//! command of kubectl: logs, Events, patches and commands in a pod are kubectl's.

mod agents;
mod cluster;
mod completion;
mod forward;
mod inject;
mod preflight;
mod release;
mod report;
mod rollback;
mod status;
mod top;
mod ui;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Shows and controls WeightSync objects, and writes bug reports.
#[derive(Debug, Parser)]
#[command(name = "kubectl-weightsync", bin_name = "kubectl weightsync", version, propagate_version = true, arg_required_else_help = true)]
pub struct Plugin {
    /// The command.
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Write completion for a shell, or for kubectl itself.
    Completion(completion::CompletionArgs),
    /// Add the agent's sidecar to manifests: standard input to standard output.
    Inject(inject::InjectArgs),
    /// Show the members of a group and the cost of an update, from files, without a cluster.
    Plan(crate::cli::plan::PlanArgs),
    /// Measure every edge between the members of an object now, and show which are slow or broken.
    Preflight(preflight::PreflightArgs),
    /// Suspend an object and wait until every pod serves outside the group.
    Release(release::ReleaseArgs),
    /// Write a tar file for a bug report. It copies listed fields only.
    Report(report::ReportArgs),
    /// Take an object back to a kept version and hold it there, or clear that.
    Rollback(rollback::RollbackArgs),
    /// Show members, ranks and versions, and why a member is out.
    Status(status::StatusArgs),
    /// Show how fast each member got its last version, the slowest first.
    Top(top::TopArgs),
    /// Forward the leading controller's web page to this machine.
    Ui(ui::UiArgs),
    /// Candidates for kubectl's completion.
    #[command(name = "__complete", hide = true)]
    Complete(completion::CandidatesArgs),
}

pub fn main() -> ExitCode {
    super::use_ring();
    let done = match Plugin::parse().verb {
        Verb::Completion(args) => args.run(),
        Verb::Inject(args) => args.run(),
        Verb::Plan(args) => args.run(),
        Verb::Preflight(args) => args.run(),
        Verb::Release(args) => args.run(),
        Verb::Report(args) => args.run(),
        Verb::Rollback(args) => args.run(),
        Verb::Status(args) => args.run(),
        Verb::Top(args) => args.run(),
        Verb::Ui(args) => args.run(),
        Verb::Complete(args) => Ok(args.run()),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

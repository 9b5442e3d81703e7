//! One controller and many objects: what it costs the API server and its own pod, at rest and while every group publishes.
//!
//! `make bench-scale` runs this. An etcd and a kube-apiserver run on loopback, the real `weightsync controller` against them. KWOK plays
//! the kubelets: it makes nodes and pods ready and renews the nodes' leases. All agents are simulated in this process: they enrol, announce
//! themselves and report their state by the product's own code, and move no byte. All of it shares the machine's cores, so times are upper
//! bounds; counts and memory are not affected.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, clippy::cast_precision_loss, missing_docs)]

mod agent;
mod controller;
mod exposition;
mod fill;
mod plane;
#[path = "../transport/report.rs"]
#[allow(dead_code)]
mod report;
mod run;
mod statuses;
mod update;

use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;

use fill::Extent;
use report::Report;

#[derive(Debug, Clone, Parser)]
struct Arguments {
    /// How many objects there are, one run after another.
    #[arg(default_values_t = [50, 500])]
    objects: Vec<usize>,
    /// Rollouts of each object.
    #[arg(long, default_value_t = 8)]
    rollouts: usize,
    /// Objects in one namespace.
    #[arg(long, default_value_t = 10)]
    per_namespace: usize,
    /// The agents come one after another in this many seconds, instead of all at once.
    #[arg(long, default_value_t = 0)]
    arrive: u64,
    /// Versions that every object publishes.
    #[arg(long, default_value_t = 3)]
    rounds: u64,
    /// All objects publish one version in this many seconds.
    #[arg(long, default_value_t = 60)]
    period: u64,
    /// The bytes of a version need this many ms.
    #[arg(long, default_value_t = 3000)]
    transfer_ms: u64,
    /// Seconds in which nothing is published.
    #[arg(long, default_value_t = 300)]
    idle: u64,
    /// The controller of another build, to compare with.
    #[arg(long)]
    program: Option<PathBuf>,
    /// One JSON object after the tables.
    #[arg(long)]
    json: bool,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let interrupted = weightsync_net::shutdown::on_signals()?;
    let mut runs = Vec::new();
    for objects in arguments.objects.clone() {
        let extent = Extent { objects, rollouts: arguments.rollouts, per_namespace: arguments.per_namespace };
        // Dropped in the middle, it ends what it started.
        tokio::select! {
            figures = run::measure(extent, &arguments) => runs.push((objects, figures?)),
            () = interrupted.cancelled() => anyhow::bail!("interrupted"),
        }
    }
    show(&mut Report::new(false), &runs);
    if arguments.json {
        let mut report = Report::new(true);
        show(&mut report, &runs);
        report.finish();
    }
    Ok(())
}

fn show(report: &mut Report, runs: &[(usize, run::Figures)]) {
    let rows = |pick: &dyn Fn(&run::Figures) -> Vec<(&'static str, f64)>| -> Vec<(String, Vec<(&'static str, f64)>)> {
        runs.iter().map(|(objects, figures)| (format!("{objects} objects"), pick(figures))).collect()
    };
    report.table("Start: until every group works and every status says so", "s, calls per object, ms", &rows(&|run| run.start.clone()));
    report.table("Restart: until every group was taken over", "s, calls per object, ms", &rows(&|run| run.restart.clone()));
    report.table("Updates: one a period and object", "calls, ms", &rows(&|run| run.updates.clone()));
    report.table("Changes of pods", "looks, calls, ms", &rows(&|run| run.pods.clone()));
    report.table("At rest", "an hour; cores; ms", &rows(&|run| run.idle.clone()));
    report.table("Memory of the controller", "MiB", &rows(&|run| run.memory.clone()));
    for (objects, figures) in runs {
        let kinds = |answered: &[(String, f64)]| -> Vec<(String, Vec<(&'static str, f64)>)> {
            answered.iter().map(|(kind, count)| (kind.clone(), vec![("requests", *count)])).collect()
        };
        report.table(
            &format!("{objects} objects: what the API server answered until the start's end"),
            "an object",
            &kinds(&figures.at_start),
        );
        report.table(&format!("{objects} objects: what the API server answered"), "an update", &kinds(&figures.answered));
    }
}

//! `kubectl weightsync preflight NAME`: measures every edge of the group now, and shows the result.
//!
//! Requests the measurement by an annotation, which the controller sends to the agents with the next epoch. Makes no decision. While an
//! update runs, the measurement waits for its end.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use futures::TryStreamExt;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::watcher;
use kube::{Api, ResourceExt};
use serde_json::json;

use super::cluster::{ClusterArgs, find, within};
use crate::api::{EdgeStatus, EdgeVerdict, PREFLIGHT_ANNOTATION, Preflight, PreflightStatus, WeightSync};
use crate::watching;
use weightsync_agent::command::Output;
use weightsync_agent::command::text::columns;
use weightsync_core::plan::show_rate;

#[derive(Debug, Args)]
pub struct PreflightArgs {
    /// Name of the object; optional if the namespace has only one.
    name: Option<String>,
    /// The cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Seconds to wait for the measurement.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Output format. Progress goes to standard error.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl PreflightArgs {
    /// Exit code 0 when every edge is good, 1 when one is not.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        crate::cli::block_on(async {
            let api = self.cluster.weightsyncs().await?;
            let object = find(&api, self.name.as_deref()).await?;
            let name = object.name_any();
            refuse(&object)?;
            let request = Timestamp::now().to_string();
            let patch = Patch::Merge(json!({"metadata": {"annotations": {PREFLIGHT_ANNOTATION: request}}}));
            let what = format!("the annotation {PREFLIGHT_ANNOTATION} of WeightSync {name} cannot be written");
            within(&what, api.patch(&name, &PatchParams::default(), &patch)).await?;
            let waited = tokio::time::timeout(Duration::from_secs(self.timeout), follow(&api, &name, &request)).await;
            let object = waited.with_context(|| {
                format!("the edges of {name} were not measured within {} s: kubectl weightsync status {name}", self.timeout)
            })??;
            let found = object.status.as_ref().and_then(|status| status.preflight.clone()).unwrap_or_else(nothing);
            match self.output {
                Output::Json => println!("{}", serde_json::to_string(&found).context("the edges cannot be written as JSON")?),
                Output::Human => println!("{}", table(&object, &found)),
            }
            let good = found.edges.iter().all(|edge| edge.verdict == EdgeVerdict::Good) && left_out(&object).next().is_none();
            Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        })
    }
}

/// Objects whose edges are never measured.
fn refuse(object: &WeightSync) -> anyhow::Result<()> {
    let name = object.name_any();
    let asked = object.spec.transport.preflight.unwrap_or_default();
    if asked == Preflight::Off {
        bail!("spec.transport.preflight of {name} is Off: set it to Auto first");
    }
    if object.spec.suspend {
        bail!("{name} is suspended, so it has no group to measure: set spec.suspend to false first");
    }
    if object.spec.delivery != crate::api::Delivery::Agent {
        bail!("{name} has delivery {:?}: only edges between agents can be measured", object.spec.delivery);
    }
    let nccl = object.status.as_ref().and_then(|status| status.transport.as_ref()).is_some_and(|transport| transport.name == "nccl");
    if nccl {
        bail!("the group of {name} moves weights by NCCL, which has no edges to measure: nccl-tests measures it");
    }
    Ok(())
}

/// Watches until the group has measured its edges, and the members that it leaves out have left.
async fn follow(api: &Api<WeightSync>, name: &str, request: &str) -> anyhow::Result<WeightSync> {
    let only = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let mut changes = std::pin::pin!(watching::changes(api.clone(), only));
    let mut shown = None;
    while let Some(object) = changes.try_next().await.context("the object cannot be watched")? {
        let found = object.status.as_ref().and_then(|status| status.preflight.as_ref()).filter(|found| found.request == request);
        let Some(found) = found else {
            if shown.is_none() {
                eprintln!("waiting for the group to be formed for the measurement");
                shown = Some(-1);
            }
            continue;
        };
        if found.state == "Done" {
            return Ok(object);
        }
        if shown.replace(found.measured) != Some(found.measured) {
            eprintln!("{} edges measured, {} ms", found.measured, found.milliseconds);
        }
    }
    bail!("the watch on {name} ended")
}

fn nothing() -> PreflightStatus {
    let text = String::new;
    PreflightStatus { state: text(), transport: text(), request: text(), measured: 0, milliseconds: 0, edges: Vec::new() }
}

/// Members that are out because of an edge, with the reason and the message.
fn left_out(object: &WeightSync) -> impl Iterator<Item = (&str, &str, &str)> {
    let members = object.status.iter().flat_map(|status| &status.members);
    let members = members.filter(|member| member.reason == "BadEdge");
    members.map(|member| (member.name.as_str(), member.reason.as_str(), member.message.as_str()))
}

fn table(object: &WeightSync, found: &PreflightStatus) -> String {
    let mut rows = vec![["FROM", "TO", "NODES", "TRANSPORT", "RATE", "ROUND TRIP", "MTU", "CLOCK", "VERDICT", "WHY"].map(str::to_owned)];
    rows.extend(found.edges.iter().map(|edge| row(edge, &found.transport)));
    let mut text = columns(&rows).join("\n");
    for (name, reason, message) in left_out(object) {
        let _ = write!(text, "\nleft out: {name} ({reason}): {message}");
    }
    let _ = write!(text, "\n{} edges measured in {} ms", found.measured, found.milliseconds);
    text
}

fn row(edge: &EdgeStatus, transport: &str) -> [String; 10] {
    let dash = || "-".to_owned();
    [
        edge.from.clone(),
        edge.to.clone(),
        format!("{} > {}", edge.from_node, edge.to_node),
        transport.to_owned(),
        edge.bytes_per_second.map_or_else(dash, |rate| show_rate(rate.unsigned_abs())),
        edge.round_trip_microseconds.map_or_else(dash, |us| format!("{us} us")),
        edge.mtu.map_or_else(dash, |mtu| mtu.to_string()),
        edge.clock_milliseconds.map_or_else(dash, |ms| format!("{ms:+} ms")),
        format!("{:?}", edge.verdict),
        edge.message.clone(),
    ]
}

#[cfg(test)]
mod tests;

//! `kubectl weightsync top [NAME]`: how fast each member got its last version, the slowest first, in one object or in all of a namespace.
//!
//! Decides the order and the sums. It measures nothing: the members did, and status holds their figures.

use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use kube::ResourceExt;
use kube::api::ListParams;
use serde::Serialize;

use super::cluster::{ClusterArgs, find, within};
use super::status::gigabytes;
use crate::api::WeightSync;
use weightsync_agent::command::Output;
use weightsync_agent::command::text::columns;

#[derive(Debug, Args)]
pub struct TopArgs {
    /// Name of the object. Default: all of the namespace.
    name: Option<String>,
    /// The cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// One member's last transfer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    object: String,
    member: String,
    version: i64,
    from: String,
    transport: String,
    bytes: i64,
    milliseconds: i64,
    bytes_per_second: i64,
}

impl TopArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        crate::cli::block_on(async {
            let api = self.cluster.weightsyncs().await?;
            let objects = match &self.name {
                Some(name) => vec![find(&api, Some(name)).await?],
                None => within("WeightSync objects cannot be listed", api.list(&ListParams::default())).await?.items,
            };
            let rows = rows(&objects);
            match self.output {
                Output::Human => println!("{}", table(&rows)),
                Output::Json => println!("{}", serde_json::to_string(&rows).context("the rows cannot be written as JSON")?),
            }
            Ok(ExitCode::SUCCESS)
        })
    }
}

/// The last transfers of all members, the slowest first.
fn rows(objects: &[WeightSync]) -> Vec<Row> {
    let of = |object: &WeightSync| {
        let members = object.status.as_ref().map(|status| status.members.clone()).unwrap_or_default();
        let name = object.name_any();
        members.into_iter().filter_map(move |member| {
            let transfer = member.last_transfer?;
            Some(Row {
                object: name.clone(),
                member: member.name,
                version: transfer.version,
                from: transfer.from,
                transport: transfer.transport,
                bytes: transfer.bytes,
                milliseconds: transfer.milliseconds,
                bytes_per_second: transfer.bytes_per_second,
            })
        })
    };
    let mut rows: Vec<Row> = objects.iter().flat_map(of).collect();
    rows.sort_by(|a, b| a.bytes_per_second.cmp(&b.bytes_per_second).then_with(|| (&a.object, &a.member).cmp(&(&b.object, &b.member))));
    rows
}

fn table(rows: &[Row]) -> String {
    if rows.is_empty() {
        return "no member has received a version yet: publish one".to_owned();
    }
    let mut lines = vec![["OBJECT", "MEMBER", "VERSION", "GB/S", "GB", "MS", "FROM", "TRANSPORT"].map(str::to_owned)];
    lines.extend(rows.iter().map(|row| {
        [
            row.object.clone(),
            row.member.clone(),
            row.version.to_string(),
            gigabytes(row.bytes_per_second),
            gigabytes(row.bytes),
            row.milliseconds.to_string(),
            row.from.clone(),
            row.transport.clone(),
        ]
    }));
    columns(&lines).join("\n")
}

#[cfg(test)]
mod tests;

//! `kubectl weightsync status [NAME]`: members with ranks and versions, and the reason for each that is out.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use futures::TryStreamExt;
use kube::ResourceExt;
use kube::runtime::watcher;

use super::cluster::{ClusterArgs, find};
use crate::api::{GdrStatus, MemberStatus, ProofName, WeightSync, WeightSyncStatus};
use crate::watching;
use weightsync_agent::command::Output;
use weightsync_agent::command::text::columns;

#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Name of the object; optional if the namespace has only one.
    name: Option<String>,
    /// The cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Show every change until interrupted: in place on a terminal, else one after another.
    #[arg(short, long)]
    watch: bool,
    /// Output format; with `--watch`, JSON is one object for each line.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl StatusArgs {
    /// Shows the status; exit code 0 when the object is Ready, 1 when it is not.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        crate::cli::block_on(async {
            let api = self.cluster.weightsyncs().await?;
            let object = find(&api, self.name.as_deref()).await?;
            if !self.watch {
                self.print(&object)?;
                return Ok(if is_ready(&object) { ExitCode::SUCCESS } else { ExitCode::FAILURE });
            }
            let only = watcher::Config::default().fields(&format!("metadata.name={}", object.name_any()));
            let mut changes = std::pin::pin!(watching::changes(api, only));
            let redraws = self.output == Output::Human && std::io::stdout().is_terminal();
            while let Some(object) = changes.try_next().await.context("the object cannot be watched")? {
                if redraws {
                    // The screen from its top; text that is not overwritten goes.
                    print!("\x1b[H\x1b[J");
                }
                self.print(&object)?;
            }
            Ok(ExitCode::SUCCESS)
        })
    }

    fn print(&self, object: &WeightSync) -> anyhow::Result<()> {
        match self.output {
            Output::Human => println!("{}", table(object)),
            Output::Json => println!("{}", serde_json::to_string(object).context("the object cannot be written as JSON")?),
        }
        Ok(())
    }
}

fn is_ready(object: &WeightSync) -> bool {
    let conditions = object.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn table(object: &WeightSync) -> String {
    let mut text = String::new();
    let name = format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any());
    let Some(status) = &object.status else { return format!("{name}: no status yet; does the controller run?") };
    let number = |value: Option<i64>| value.map_or_else(|| "-".to_owned(), |value| value.to_string());
    let replicas = status.replicas.as_ref().map_or("-", |replicas| replicas.display.as_str());
    let transport =
        status.transport.as_ref().map_or_else(|| "-".to_owned(), |transport| format!("{} ({})", transport.name, transport.reason));
    let (version, epoch, world) = (number(status.version), number(status.epoch), number(status.world_size.map(i64::from)));
    let _ = writeln!(text, "{name}: {replicas} ready, version {version}, epoch {epoch}, world size {world}, transport {transport}");
    if let Some(kept) = kept(status) {
        let _ = writeln!(text, "{kept}");
    }
    if !status.refused.is_empty() {
        let refused: Vec<String> = status.refused.iter().rev().map(ToString::to_string).collect();
        let _ = writeln!(text, "refused by the canary: {}", refused.join(", "));
    }
    if let Some(update) = &status.last_update {
        let phases: Vec<_> = update.phases.iter().map(|phase| format!("{} {} ms", phase.name, phase.milliseconds)).collect();
        let kind = if update.feeding { "feeding" } else { "update" };
        let failure = update.failure.as_ref().map(|failure| format!(": {failure}")).unwrap_or_default();
        let _ = writeln!(text, "last {kind}: version {}, {} ({}){failure}", update.version, update.state, phases.join(", "));
    }
    for condition in status.conditions.iter().filter(|condition| worth_telling(&condition.type_, &condition.status)) {
        let _ = writeln!(text, "{}={} {}: {}", condition.type_, condition.status, condition.reason, condition.message);
    }
    let mut rows = vec![["MEMBER", "STATE", "RANKS", "VERSION", "PROVEN BY", "GB/S", "FROM", "REASON", "MESSAGE"].map(str::to_owned)];
    rows.extend(status.members.iter().map(row));
    text.push_str(&columns(&rows).join("\n"));
    for member in &status.members {
        if let Some(gdr) = &member.gdr {
            let _ = write!(text, "\n{} reads with {}", member.name, library(gdr));
        }
    }
    text
}

/// NIXL, its plugin, and the devices of each GPU.
fn library(gdr: &GdrStatus) -> String {
    let version = gdr.version.as_deref().unwrap_or("of unknown version");
    let devices: Vec<String> = gdr.devices.iter().map(|devices| format!("; {}: {}", devices.memory, devices.names.join(", "))).collect();
    format!("NIXL {version} ({}), {} over {}{}", gdr.library, gdr.plugin, gdr.transports.join(", "), devices.concat())
}

/// Kept versions below or above the current one, the newest first; `None` if there is only the current one.
fn kept(status: &WeightSyncStatus) -> Option<String> {
    let mut kept: BTreeMap<i64, usize> = BTreeMap::new();
    for version in status.members.iter().flat_map(|member| &member.retained) {
        *kept.entry(*version).or_default() += 1;
    }
    let listed: Vec<String> = kept.iter().rev().map(|(version, members)| format!("{version} (by {members})")).collect();
    (kept.len() > 1).then(|| format!("kept versions: {}", listed.join(", ")))
}

/// The first line already shows conditions that report no problem.
fn worth_telling(kind: &str, status: &str) -> bool {
    match kind {
        "Degraded" | "Progressing" => status == "True",
        _ => status != "True",
    }
}

fn row(member: &MemberStatus) -> [String; 9] {
    let ranks = member.rank_offset.map_or_else(
        || format!("- ({})", member.size),
        |first| if member.size == 1 { first.to_string() } else { format!("{first}-{}", first + member.size - 1) },
    );
    let version = member.version.map_or_else(|| "-".to_owned(), |version| version.to_string());
    let none = || "-".to_owned();
    let proven_by = match member.proven_by {
        Some(ProofName::Digests) => "digests".to_owned(),
        Some(ProofName::Engine) => "engine".to_owned(),
        Some(ProofName::Nothing) => "not proven".to_owned(),
        None => none(),
    };
    let (rate, from) = member.last_transfer.as_ref().map_or_else(
        || (none(), none()),
        |transfer| (gigabytes(transfer.bytes_per_second), format!("{} ({})", transfer.from, transfer.transport)),
    );
    let state = format!("{:?}", member.state);
    [member.name.clone(), state, ranks, version, proven_by, rate, from, member.reason.clone(), member.message.clone()]
}

/// Bytes as GB, with two digits after the point.
pub(super) fn gigabytes(bytes: i64) -> String {
    let hundredths = (bytes.max(0).saturating_add(5_000_000)) / 10_000_000;
    format!("{}.{:02}", hundredths / 100, hundredths % 100)
}

#[cfg(test)]
mod tests;

//! `kubectl weightsync rollback NAME`: sets `spec.targetVersion` to a kept version, or removes it.
//!
//! Decides the version, and refuses one that no member keeps before anything is changed. The controller does the rest.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use futures::TryStreamExt;
use kube::api::{Patch, PatchParams};
use kube::runtime::watcher;
use kube::{Api, ResourceExt};
use serde_json::json;

use super::cluster::{ClusterArgs, find, within};
use crate::api::{MAX_MEMBERS, WeightSync, WeightSyncStatus};
use crate::watching;
use weightsync_agent::command::Output;

#[derive(Debug, Args)]
pub struct RollbackArgs {
    /// Name of the object; optional if the namespace has only one.
    name: Option<String>,
    /// The cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
    /// The version to go back to. Default: the newest kept one below the current version.
    #[arg(long, conflicts_with = "clear")]
    to: Option<i64>,
    /// Clear the target: the object stays at its version until a higher one is published.
    #[arg(long)]
    clear: bool,
    /// Seconds to wait until every replica serves the version; 0 does not wait.
    #[arg(long, default_value_t = 300)]
    timeout: u64,
    /// Output format. Progress goes to standard error.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

#[derive(Debug, PartialEq, Eq)]
enum Progress {
    /// Not finished: the number of replicas that serve it, and of all.
    Moving(usize, usize),
    /// Every replica of the group serves it.
    There,
    /// It cannot finish: the cause.
    Missing(String),
}

impl RollbackArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        crate::cli::block_on(async {
            let api = self.cluster.weightsyncs().await?;
            let before = find(&api, self.name.as_deref()).await?;
            let name = before.name_any();
            if self.clear {
                set(&api, &name, None).await?;
                match self.output {
                    Output::Json => println!("{}", json!({"name": name, "targetVersion": null, "version": version(&before)})),
                    Output::Human => println!("{name} is not held any more: it continues with the next published version"),
                }
                return Ok(ExitCode::SUCCESS);
            }
            let target = choose(&before, self.to)?;
            let generation = set(&api, &name, Some(target)).await?;
            if self.timeout > 0 {
                let wait = self.follow(&api, &name, target, generation);
                let waited = tokio::time::timeout(Duration::from_secs(self.timeout), wait).await;
                waited.with_context(|| {
                    format!(
                        "not every replica of {name} serves version {target} after {} s: kubectl weightsync status {name}",
                        self.timeout
                    )
                })??;
            }
            let done = self.timeout > 0;
            match self.output {
                Output::Json => {
                    println!("{}", json!({"name": name, "targetVersion": target, "from": version(&before), "done": done}));
                }
                Output::Human if done => {
                    println!("{name} serves version {target} and is held there; to continue: kubectl weightsync rollback {name} --clear");
                }
                Output::Human => println!("{name} goes back to version {target}: kubectl weightsync status {name} --watch"),
            }
            Ok(ExitCode::SUCCESS)
        })
    }

    /// Watches until every replica serves the version.
    async fn follow(&self, api: &Api<WeightSync>, name: &str, target: i64, generation: Option<i64>) -> anyhow::Result<()> {
        let only = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let mut changes = std::pin::pin!(watching::changes(api.clone(), only));
        let mut shown = None;
        while let Some(object) = changes.try_next().await.context("the object cannot be watched")? {
            match progress(&object, target, generation) {
                Progress::There => return Ok(()),
                Progress::Missing(message) => bail!("{message}"),
                Progress::Moving(there, all) => {
                    if shown.replace((there, all)) != Some((there, all)) {
                        eprintln!("version {target}: {there} of {all} replicas");
                    }
                }
            }
        }
        bail!("the watch on {name} ended")
    }
}

async fn set(api: &Api<WeightSync>, name: &str, target: Option<i64>) -> anyhow::Result<Option<i64>> {
    let patch = Patch::Merge(json!({"spec": {"targetVersion": target}}));
    let what = format!("the target version of WeightSync {name} cannot be changed");
    Ok(within(&what, api.patch(name, &PatchParams::default(), &patch)).await?.metadata.generation)
}

fn version(object: &WeightSync) -> Option<i64> {
    object.status.as_ref()?.version
}

fn is_rollout(name: &str) -> bool {
    !name.starts_with("trainer/")
}

/// The version to go back to, if a member keeps it.
fn choose(object: &WeightSync, wanted: Option<i64>) -> anyhow::Result<i64> {
    let name = object.name_any();
    if object.spec.suspend {
        bail!(
            "{name} is suspended, and a suspended object changes no weights: \
             kubectl patch ws {name} --type merge -p '{{\"spec\":{{\"suspend\":false}}}}' first"
        );
    }
    let status = object.status.clone().unwrap_or_default();
    let refused = |version: &i64| object.spec.canary.is_some() && status.refused.contains(version);
    if let Some(wanted) = wanted.filter(refused) {
        bail!("the canary refused version {wanted} of {name}: to go back to it anyway, remove spec.canary");
    }
    let kept = status.members.iter().flat_map(|member| member.retained.iter().copied());
    let kept: BTreeSet<i64> = kept.filter(|version| !refused(version)).collect();
    let current = status.version;
    let listed = if kept.is_empty() { "none".to_owned() } else { kept.iter().map(i64::to_string).collect::<Vec<_>>().join(", ") };
    let keep = object.spec.membership.keep;
    match wanted {
        // Status lists only some members: the others may keep it.
        Some(wanted) if kept.contains(&wanted) || current == Some(wanted) || status.members.len() >= MAX_MEMBERS => Ok(wanted),
        Some(wanted) => bail!("no member keeps version {wanted} of {name}; kept versions: {listed} (membership.keep: {keep})"),
        None => {
            let Some(current) = current else { bail!("{name} has no version yet: there is nothing to go back from") };
            let below = kept.range(..current).next_back().copied();
            below.with_context(|| {
                format!("no member keeps a version of {name} below {current}; kept versions: {listed} (membership.keep: {keep}, must be 2 or more)")
            })
        }
    }
}

/// The progress, from a status of this generation.
fn progress(object: &WeightSync, target: i64, generation: Option<i64>) -> Progress {
    let status = object.status.clone().unwrap_or_default();
    let rollouts: Vec<_> = status.members.iter().filter(|member| is_rollout(&member.name)).collect();
    let there = rollouts.iter().filter(|member| member.version == Some(target)).count();
    let moving = Progress::Moving(there, rollouts.len());
    if status.observed_generation < generation {
        return moving;
    }
    let moves = status.conditions.iter().any(|condition| condition.type_ == "Progressing" && condition.status == "True");
    if let Some(missing) = missing(&status) {
        return Progress::Missing(missing);
    }
    if status.version == Some(target) && !moves { Progress::There } else { moving }
}

fn missing(status: &WeightSyncStatus) -> Option<String> {
    let degraded = status.conditions.iter().find(|condition| condition.type_ == "Degraded" && condition.status == "True")?;
    (degraded.reason == "TargetVersionMissing").then(|| degraded.message.clone())
}

#[cfg(test)]
mod tests;

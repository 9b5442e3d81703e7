//! `kubectl weightsync release [NAME]`: suspends an object and waits until every pod serves on its own.
//!
//! For the time before an uninstall, or when something else is to take the weights over. `spec.suspend: false` brings the group back.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use kube::runtime::wait::await_condition;
use serde_json::json;

use super::cluster::{ClusterArgs, DEADLINE, find};
use crate::api::WeightSync;

/// Arguments of `kubectl weightsync release`.
#[derive(Debug, Args)]
pub struct ReleaseArgs {
    /// Name of the object; may be left out when the namespace has one only.
    name: Option<String>,
    /// Which cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Seconds to wait until all pods are released; 0 does not wait.
    #[arg(long, default_value_t = 60)]
    timeout: u64,
}

impl ReleaseArgs {
    /// Suspends and waits.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        crate::cli::block_on(async {
            let api = self.cluster.weightsyncs().await?;
            let name = find(&api, self.name.as_deref()).await?.name_any();
            let patch = Patch::Merge(json!({"spec": {"suspend": true}}));
            let patched = tokio::time::timeout(DEADLINE, api.patch(&name, &PatchParams::default(), &patch)).await;
            let patched = patched.context("the cluster gave no answer within 15 s")?;
            let generation = patched.with_context(|| format!("WeightSync {name} cannot be suspended"))?.metadata.generation;
            if self.timeout > 0 {
                let done = |object: Option<&WeightSync>| object.is_none_or(|object| is_released(object, generation));
                let waited = tokio::time::timeout(Duration::from_secs(self.timeout), await_condition(api, &name, done)).await;
                if waited.is_err() {
                    bail!("{name} is suspended, but not all pods are released after {} s: kubectl weightsync status {name}", self.timeout);
                }
            }
            println!("{name} is released: its pods serve what they have; take it up again with");
            println!("  kubectl patch weightsync {name} --type merge -p '{{\"spec\": {{\"suspend\": false}}}}'");
            Ok(ExitCode::SUCCESS)
        })
    }
}

/// The controller says so of this generation or a later one: nobody is in a group any more.
fn is_released(object: &WeightSync, generation: Option<i64>) -> bool {
    let Some(status) = &object.status else { return false };
    let condition = status.conditions.iter().find(|condition| condition.type_ == "Ready");
    status.observed_generation >= generation && condition.is_some_and(|condition| condition.reason == "Released")
}

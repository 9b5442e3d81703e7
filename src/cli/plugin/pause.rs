//! `kubectl weightsync pause NAME` and `resume NAME`: `spec.suspend`, set and taken back.
//!
//! A paused object's pods leave their group and serve what they have; nothing is published. `release` does the same and waits for every pod.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use kube::api::{Patch, PatchParams};
use kube::runtime::wait::await_condition;
use kube::{Api, ResourceExt};
use serde_json::json;

use super::cluster::{ClusterArgs, find, within};
use super::status::is_ready;
use crate::api::WeightSync;
use crate::cli::Output;

/// Arguments of `kubectl weightsync pause` and `resume`.
#[derive(Debug, Args)]
pub struct PauseArgs {
    /// Name of the object; may be left out when the namespace has one only.
    name: Option<String>,
    /// Which cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Seconds to wait: for `resume` until the object is Ready, for `pause` until its pods are released. 0 does not wait.
    #[arg(long, default_value_t = 0)]
    timeout: u64,
    /// How to print it.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl PauseArgs {
    /// Sets `spec.suspend`.
    pub fn run(self, suspend: bool) -> anyhow::Result<ExitCode> {
        crate::cli::block_on(async {
            let api = self.cluster.weightsyncs().await?;
            let before = find(&api, self.name.as_deref()).await?;
            let (name, changed) = (before.name_any(), before.spec.suspend != suspend);
            let generation = set_suspend(&api, &name, suspend).await?;
            if self.timeout > 0 {
                let done = |object: Option<&WeightSync>| {
                    object.is_none_or(|object| if suspend { is_released(object, generation) } else { is_taken_up(object, generation) })
                };
                let waited = tokio::time::timeout(Duration::from_secs(self.timeout), await_condition(api, &name, done)).await;
                if waited.is_err() {
                    let wanted = if suspend { "released" } else { "Ready" };
                    bail!("{name} is not {wanted} after {} s: kubectl weightsync status {name}", self.timeout);
                }
            }
            match self.output {
                Output::Json => println!("{}", json!({"name": name, "suspend": suspend, "changed": changed})),
                Output::Human if suspend => println!("{name} is paused: its pods leave the group and serve what they have"),
                Output::Human => println!("{name} goes on: its pods form a group again"),
            }
            Ok(ExitCode::SUCCESS)
        })
    }
}

/// Sets `spec.suspend`; the generation that says so.
pub(super) async fn set_suspend(api: &Api<WeightSync>, name: &str, suspend: bool) -> anyhow::Result<Option<i64>> {
    let patch = Patch::Merge(json!({"spec": {"suspend": suspend}}));
    let what = format!("WeightSync {name} cannot be {}", if suspend { "suspended" } else { "resumed" });
    Ok(within(&what, api.patch(name, &PatchParams::default(), &patch)).await?.metadata.generation)
}

/// The controller says so of this generation or a later one: nobody is in a group any more.
pub(super) fn is_released(object: &WeightSync, generation: Option<i64>) -> bool {
    let Some(status) = &object.status else { return false };
    let condition = status.conditions.iter().find(|condition| condition.type_ == "Ready");
    status.observed_generation >= generation && condition.is_some_and(|condition| condition.reason == "Released")
}

fn is_taken_up(object: &WeightSync, generation: Option<i64>) -> bool {
    object.status.as_ref().is_some_and(|status| status.observed_generation >= generation) && is_ready(object)
}

//! `kubectl weightsync release [NAME]`: suspends an object and waits until every pod serves outside the group.
//!
//! For use before an uninstall, or before another tool takes the weights over. `spec.suspend: false` forms the group again; this command
//! never sets that.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use kube::api::{Patch, PatchParams};
use kube::runtime::wait::await_condition;
use kube::{Api, ResourceExt};
use serde_json::json;

use super::cluster::{ClusterArgs, find, within};
use crate::api::WeightSync;
use weightsync_agent::command::Output;

#[derive(Debug, Args)]
pub struct ReleaseArgs {
    /// Name of the object; optional if the namespace has only one.
    name: Option<String>,
    /// The cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Seconds to wait until all pods are released; 0 does not wait.
    #[arg(long, default_value_t = 60)]
    timeout: u64,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl ReleaseArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        crate::cli::block_on(async {
            let api = self.cluster.weightsyncs().await?;
            let name = find(&api, self.name.as_deref()).await?.name_any();
            let generation = suspend(&api, &name).await?;
            if self.timeout > 0 {
                let done = |object: Option<&WeightSync>| object.is_none_or(|object| is_released(object, generation));
                let waited = tokio::time::timeout(Duration::from_secs(self.timeout), await_condition(api, &name, done)).await;
                if waited.is_err() {
                    bail!("{name} is suspended, but not all pods are released after {} s: kubectl weightsync status {name}", self.timeout);
                }
            }
            match self.output {
                Output::Json => println!("{}", json!({"name": name, "suspend": true, "released": self.timeout > 0})),
                Output::Human => {
                    println!("{name} is released: its pods serve their current weights; to form the group again:");
                    println!(r#"  kubectl patch ws {name} --type merge -p '{{"spec":{{"suspend":false}}}}'"#);
                }
            }
            Ok(ExitCode::SUCCESS)
        })
    }
}

/// Sets `spec.suspend`; returns the generation with the change.
async fn suspend(api: &Api<WeightSync>, name: &str) -> anyhow::Result<Option<i64>> {
    let patch = Patch::Merge(json!({"spec": {"suspend": true}}));
    let what = format!("WeightSync {name} cannot be suspended");
    Ok(within(&what, api.patch(name, &PatchParams::default(), &patch)).await?.metadata.generation)
}

/// Whether status reports, for this generation or a later one, that no pod is in a group.
fn is_released(object: &WeightSync, generation: Option<i64>) -> bool {
    let Some(status) = &object.status else { return false };
    let mut conditions = status.conditions.iter();
    let done = conditions.any(|one| one.type_ == "Progressing" && one.status == "False" && one.reason == "Suspended");
    status.observed_generation >= generation && done
}

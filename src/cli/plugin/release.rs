//! `kubectl weightsync release [NAME]`: suspends an object and waits until every pod serves on its own.
//!
//! For the time before an uninstall, or when something else is to take the weights over. `spec.suspend: false` brings the group back.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use kube::ResourceExt;
use kube::runtime::wait::await_condition;
use serde_json::json;

use super::cluster::{ClusterArgs, find};
use super::pause::{is_released, set_suspend};
use crate::api::WeightSync;
use crate::cli::Output;

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
    /// How to print it.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl ReleaseArgs {
    /// Suspends and waits.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        crate::cli::block_on(async {
            let api = self.cluster.weightsyncs().await?;
            let name = find(&api, self.name.as_deref()).await?.name_any();
            let generation = set_suspend(&api, &name, true).await?;
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
                    println!("{name} is released: its pods serve what they have; `kubectl weightsync resume {name}` takes it up again");
                }
            }
            Ok(ExitCode::SUCCESS)
        })
    }
}

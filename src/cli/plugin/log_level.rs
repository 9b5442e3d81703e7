//! `kubectl weightsync log-level [FILTER]`: what controllers or agents log, shown or changed while they run.
//!
//! A change lasts until the process ends; the chart's `logLevel` says how it starts.

use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use http::Method;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use super::agents::{CONTROLLER_STATUS, operator, pods_of};
use super::cluster::{ClusterArgs, find};
use super::forward::ask;
use crate::cli::Output;
use crate::cli::inject::STATUS_PORT;
use crate::cli::text::columns;

/// Arguments of `kubectl weightsync log-level`.
#[derive(Debug, Args)]
pub struct LogLevelArgs {
    /// What is to be logged: a level, or `target=level` with commas between them, e.g. `weightsync=debug,info`. Shown if it is missing.
    filter: Option<String>,
    /// Which cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
    /// The agents of this object, instead of the operator's pods.
    #[arg(long, value_name = "NAME", conflicts_with = "pod")]
    of: Option<String>,
    /// The agent of this pod.
    #[arg(long)]
    pod: Option<String>,
    /// Back to what was logged at the start.
    #[arg(long, conflicts_with = "filter")]
    reset: bool,
    /// Namespace of the operator; looked for if it is missing.
    #[arg(long)]
    operator_namespace: Option<String>,
    /// How to print it.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl LogLevelArgs {
    /// Asks every process.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        crate::cli::block_on(async {
            let access = self.cluster.access().await?;
            let (pods, names, port): (Api<Pod>, Vec<String>, u16) = match (&self.of, &self.pod) {
                (Some(object), _) => (access.api(), pods_of(&find(&access.api(), Some(object)).await?), STATUS_PORT),
                (None, Some(pod)) => (access.api(), vec![pod.clone()], STATUS_PORT),
                (None, None) => {
                    let operator = operator(&access.client, self.operator_namespace.as_deref()).await?;
                    let names = operator.pods(&access.client).await?.iter().map(ResourceExt::name_any).collect();
                    (Api::namespaced(access.client.clone(), &operator.namespace), names, CONTROLLER_STATUS)
                }
            };
            if names.is_empty() {
                bail!("there is nobody to ask: kubectl weightsync status names the members");
            }
            let (method, body) = match (&self.filter, self.reset) {
                (Some(filter), _) => (Method::PUT, filter.clone()),
                (None, true) => (Method::PUT, String::new()),
                (None, false) => (Method::GET, String::new()),
            };
            let mut answers = Vec::new();
            for name in names {
                let answer = ask(&pods, &name, port, method.clone(), "/loglevel", body.clone()).await;
                answers.push((name, answer.and_then(|text| filter_of(&text))));
            }
            self.print(&answers);
            let all_did = answers.iter().all(|(_, answer)| answer.is_ok());
            Ok(if all_did { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        })
    }

    fn print(&self, answers: &[(String, anyhow::Result<String>)]) {
        match self.output {
            Output::Human => {
                let row = |(pod, answer): &(String, anyhow::Result<String>)| {
                    [pod.clone(), answer.as_ref().map_or_else(|error| format!("error: {error:#}"), Clone::clone)]
                };
                for line in columns(&answers.iter().map(row).collect::<Vec<_>>()) {
                    println!("{line}");
                }
            }
            Output::Json => {
                let row = |(pod, answer): &(String, anyhow::Result<String>)| match answer {
                    Ok(filter) => json!({"pod": pod, "filter": filter}),
                    Err(error) => json!({"pod": pod, "error": format!("{error:#}")}),
                };
                println!("{}", Value::Array(answers.iter().map(row).collect()));
            }
        }
    }
}

fn filter_of(answer: &str) -> anyhow::Result<String> {
    let answer: Value = serde_json::from_str(answer).context("the answer is no JSON")?;
    answer.get("filter").and_then(Value::as_str).map(str::to_owned).context("the answer names no filter")
}

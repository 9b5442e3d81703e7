//! `kubectl weightsync doctor [POD...]`: runs `weightsync doctor` where agents are, and shows what each says.
//!
//! What a node has for moving weights is only known inside the container that would move them. It needs the right `pods/exec`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use k8s_openapi::api::core::v1::Pod;
use kube::api::AttachParams;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::time::timeout;

use super::agents::{Agent, agent_of, opted_in, pods_of};
use super::cluster::{ClusterArgs, find};
use crate::cli::Output;

/// Longest output of one pod in bytes.
const LONGEST: u64 = 4 << 20;

/// Arguments of `kubectl weightsync doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Pods to ask; all pods of `--of`, or all that take part in the namespace, if none is named.
    pods: Vec<String>,
    /// All pods of this object.
    #[arg(long, value_name = "NAME", conflicts_with = "pods")]
    of: Option<String>,
    /// Which cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Seconds that one pod may take.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=600))]
    timeout: u64,
    /// How to print it; JSON is one object a line, with `pod` and `report` or `error`.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl DoctorArgs {
    /// Asks one pod after the other.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        crate::cli::block_on(async {
            let access = self.cluster.access().await?;
            let mut pods = opted_in(&access).await?;
            if let Some(object) = &self.of {
                let of = pods_of(&find(&access.api(), Some(object)).await?);
                pods.retain(|pod| of.contains(&pod.name_any()));
            } else if !self.pods.is_empty() {
                pods.retain(|pod| self.pods.contains(&pod.name_any()));
                let lacks = self.pods.iter().find(|wanted| !pods.iter().any(|pod| pod.name_any() == **wanted));
                if let Some(missing) = lacks {
                    bail!("no pod {missing} takes part (label weightsync.dev/role) in namespace {}", access.namespace);
                }
            }
            if pods.is_empty() {
                bail!("no pod takes part in namespace {}", access.namespace);
            }
            let api: Api<Pod> = access.api();
            let mut well = true;
            for pod in &pods {
                let name = pod.name_any();
                let said = match agent_of(pod) {
                    Some(agent) => self.ask(&api, &name, &agent).await,
                    None => Err(anyhow::anyhow!("the pod has no agent")),
                };
                well &= said.is_ok();
                self.print(&name, said)?;
            }
            Ok(if well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        })
    }

    async fn ask(&self, pods: &Api<Pod>, pod: &str, agent: &Agent) -> anyhow::Result<String> {
        let mut command = vec![agent.program.as_str(), "doctor"];
        if self.output == Output::Json {
            command.extend(["--output", "json"]);
        }
        let params = AttachParams::default().container(&agent.container).stdin(false).stdout(true).stderr(true);
        let asked = async {
            let mut process = pods.exec(pod, command, &params).await.context("the program cannot be run in the pod")?;
            let (out, err) = (process.stdout(), process.stderr());
            let status = process.take_status();
            let (out, err) = tokio::join!(text(out), text(err));
            let ended = match status {
                Some(status) => status.await,
                None => None,
            };
            match ended {
                Some(ended) if ended.status.as_deref() != Some("Success") => {
                    bail!("{}: {}", ended.message.unwrap_or_else(|| "it failed".to_owned()), err.trim())
                }
                _ => Ok(out),
            }
        };
        timeout(Duration::from_secs(self.timeout), asked).await.with_context(|| format!("no end after {} s", self.timeout))?
    }

    fn print(&self, pod: &str, said: anyhow::Result<String>) -> anyhow::Result<()> {
        match (self.output, said) {
            (Output::Human, Ok(report)) => println!("=== {pod}\n{report}"),
            (Output::Human, Err(error)) => println!("=== {pod}\nerror: {error:#}\n"),
            (Output::Json, Ok(report)) => {
                let report: Value = serde_json::from_str(&report).with_context(|| format!("what {pod} said is no JSON"))?;
                println!("{}", json!({"pod": pod, "report": report}));
            }
            (Output::Json, Err(error)) => println!("{}", json!({"pod": pod, "error": format!("{error:#}")})),
        }
        Ok(())
    }
}

async fn text(from: Option<impl AsyncRead + Unpin>) -> String {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        // What came until it broke is worth showing.
        let _ = from.take(LONGEST).read_to_end(&mut bytes).await;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

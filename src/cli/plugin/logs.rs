//! `kubectl weightsync logs [NAME]`: what the agents of an object logged, of all its pods together, sorted by time; with `--controller`, the
//! operator.
//!
//! Where an agent runs below an engine's command (`Wrap`), its lines are picked out of the engine's log.

use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use futures::{AsyncBufReadExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Pod;
use kube::api::LogParams;
use kube::{Api, ResourceExt};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::agents::{agent_of, operator, pods_of};
use super::cluster::{Access, ClusterArgs, find, within};
use super::lines::{Line, read};
use crate::api::WeightSync;
use crate::cli::Output;

/// Lines that wait to be printed.
const QUEUE: usize = 1024;

/// Arguments of `kubectl weightsync logs`.
#[derive(Debug, Args)]
pub struct LogsArgs {
    /// Name of the object; may be left out when the namespace has one only.
    name: Option<String>,
    /// Which cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
    /// The operator's own logs instead of the agents'.
    #[arg(long)]
    controller: bool,
    /// Namespace of the operator; looked for if it is missing.
    #[arg(long, requires = "controller")]
    operator_namespace: Option<String>,
    /// One pod only.
    #[arg(long)]
    pod: Option<String>,
    /// Go on showing lines as they come, until interrupted.
    #[arg(short, long)]
    follow: bool,
    /// The life of the container before this one.
    #[arg(short, long, conflicts_with = "follow")]
    previous: bool,
    /// Lines of each pod, from the end.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    tail: i64,
    /// How to print it; JSON is one object a line, with `pod` in it.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// A container to read.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) namespace: String,
    pub(super) pod: String,
    pub(super) container: String,
    /// Whether lines that are not ours are another program's.
    pub(super) shared_log: bool,
}

impl LogsArgs {
    /// Shows them.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        crate::cli::block_on(async {
            let access = self.cluster.access().await?;
            let mut wanted = if self.controller {
                controllers(&access, self.operator_namespace.as_deref()).await?
            } else {
                agents(&access, &find(&access.api(), self.name.as_deref()).await?).await?
            };
            wanted.retain(|wanted| self.pod.as_ref().is_none_or(|pod| *pod == wanted.pod));
            if wanted.is_empty() {
                bail!("there is no agent to read: kubectl weightsync status names the members");
            }
            if self.follow {
                self.stream(&access, wanted).await?;
            } else {
                self.all(&access, wanted).await?;
            }
            Ok(ExitCode::SUCCESS)
        })
    }

    fn params(&self, container: &str) -> LogParams {
        LogParams {
            container: Some(container.to_owned()),
            follow: self.follow,
            previous: self.previous,
            tail_lines: Some(self.tail),
            ..LogParams::default()
        }
    }

    async fn all(&self, access: &Access, wanted: Vec<Wanted>) -> anyhow::Result<()> {
        let mut lines = Vec::new();
        for container in &wanted {
            match text(access, container, &self.params(&container.container)).await {
                Ok(text) => lines.extend(text.lines().map(|line| (container, line.to_owned(), read(line)))),
                // One pod that is gone or starting keeps nobody from reading the others.
                Err(error) => eprintln!("{}: {error:#}", container.pod),
            }
        }
        lines.retain(|(container, _, line)| line.ours || !container.shared_log);
        let mut last = String::new();
        // Lines without a time of their own stay behind the one before them.
        let mut keyed: Vec<(String, &Wanted, String, Line)> = Vec::new();
        for (container, raw, line) in lines {
            last = line.at.clone().unwrap_or(last);
            keyed.push((last.clone(), container, raw, line));
        }
        keyed.sort_by(|a, b| a.0.cmp(&b.0));
        for (_, container, raw, line) in &keyed {
            self.print(&container.pod, raw, line);
        }
        Ok(())
    }

    async fn stream(&self, access: &Access, wanted: Vec<Wanted>) -> anyhow::Result<()> {
        let (sender, mut lines) = mpsc::channel(QUEUE);
        let mut readers = JoinSet::new();
        for container in wanted {
            let (sender, params) = (sender.clone(), self.params(&container.container));
            let pods: Api<Pod> = Api::namespaced(access.client.clone(), &container.namespace);
            readers.spawn(async move {
                let read = async {
                    let mut lines = pods.log_stream(&container.pod, &params).await?.lines();
                    while let Some(line) = lines.try_next().await? {
                        if sender.send((container.clone(), line)).await.is_err() {
                            return Ok(());
                        }
                    }
                    Ok::<(), anyhow::Error>(())
                };
                if let Err(error) = read.await {
                    eprintln!("{}: {error:#}", container.pod);
                }
            });
        }
        drop(sender);
        while let Some((container, raw)) = lines.recv().await {
            let line = read(&raw);
            if line.ours || !container.shared_log {
                self.print(&container.pod, &raw, &line);
            }
        }
        Ok(())
    }

    fn print(&self, pod: &str, raw: &str, line: &Line) {
        match self.output {
            Output::Human => println!("{pod} {}", line.text),
            Output::Json => {
                let mut object = serde_json::from_str::<Map<String, Value>>(raw).ok().filter(|_| line.ours).unwrap_or_default();
                if !line.ours {
                    object.insert("message".to_owned(), json!(raw));
                }
                object.insert("pod".to_owned(), json!(pod));
                println!("{}", Value::Object(object));
            }
        }
    }
}

/// The agents' containers of an object.
pub(super) async fn agents(access: &Access, object: &WeightSync) -> anyhow::Result<Vec<Wanted>> {
    let pods: Api<Pod> = access.api();
    let mut wanted = Vec::new();
    for name in pods_of(object) {
        let found = within(&format!("pod {name} cannot be read"), pods.get_opt(&name)).await?;
        if let Some(agent) = found.as_ref().and_then(agent_of) {
            let namespace = access.namespace.clone();
            wanted.push(Wanted { namespace, pod: name, container: agent.container, shared_log: agent.shared_log });
        }
    }
    Ok(wanted)
}

/// The operator's containers.
pub(super) async fn controllers(access: &Access, namespace: Option<&str>) -> anyhow::Result<Vec<Wanted>> {
    let operator = operator(&access.client, namespace).await?;
    let of = |pod: &Pod| Wanted {
        namespace: operator.namespace.clone(),
        pod: pod.name_any(),
        container: "controller".to_owned(),
        shared_log: false,
    };
    Ok(operator.pods(&access.client).await?.iter().map(of).collect())
}

/// All of a container's log that the parameters ask for.
pub(super) async fn text(access: &Access, wanted: &Wanted, params: &LogParams) -> anyhow::Result<String> {
    let pods: Api<Pod> = Api::namespaced(access.client.clone(), &wanted.namespace);
    let what = format!("the log of {}/{} cannot be read", wanted.pod, wanted.container);
    within(&what, pods.logs(&wanted.pod, params)).await
}

//! `kubectl weightsync report [NAME]`: one zip file for a bug report: the object, its Events and pods, logs and metrics of agents and of the
//! operator, and what could not be had.
//!
//! Secrets are never asked for, and what manifests and logs may hold of them is taken out ([`redact`]). Whatever cannot be read is named in
//! the file and does not end the report.

mod archive;
mod redact;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use http::Method;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ListParams, LogParams};
use kube::{Api, ResourceExt};
use serde::Serialize;
use serde_json::{Value, json};

use self::archive::Archive;
use self::redact::Redactor;
use super::agents::{CONTROLLER_STATUS, Operator, operator, opted_in, pods_of};
use super::cluster::{Access, ClusterArgs, within};
use super::logs::{Wanted, agents, controllers, text};
use crate::api::WeightSync;
use crate::cli::Output;
use crate::cli::inject::STATUS_PORT;

/// Longest log of one container in bytes.
const LOG: i64 = 4 << 20;

/// Arguments of `kubectl weightsync report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Name of the object; all objects of the namespace if it is missing.
    name: Option<String>,
    /// Which cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
    /// File to write; must not exist.
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Lines of each log, from the end.
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    tail: i64,
    /// Namespace of the operator; looked for if it is missing.
    #[arg(long)]
    operator_namespace: Option<String>,
    /// How to print what was written.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// What is to be written, before anything of it is taken out.
#[derive(Default)]
struct Collected {
    manifests: Vec<(String, Value)>,
    texts: Vec<(String, String)>,
    missing: Vec<String>,
}

impl Collected {
    fn manifest(&mut self, name: String, object: &impl Serialize) {
        match serde_json::to_value(object) {
            Ok(value) => self.manifests.push((name, value)),
            Err(error) => self.missing.push(format!("{name}: {error}")),
        }
    }

    /// What was had, or a note of why not.
    fn take<T>(&mut self, what: &str, had: anyhow::Result<T>) -> Option<T> {
        had.map_err(|error| self.missing.push(format!("{what}: {error:#}"))).ok()
    }
}

impl ReportArgs {
    /// Collects, redacts, writes.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        crate::cli::block_on(async {
            let access = self.cluster.access().await?;
            let now = Timestamp::now();
            let default = || PathBuf::from(format!("weightsync-report-{}.zip", now.strftime("%Y%m%d-%H%M%S")));
            let path = self.file.clone().unwrap_or_else(default);
            // Before minutes of work; and a file that is there is not overwritten.
            let mut archive = Archive::create(&path).with_context(|| format!("{} cannot be made", path.display()))?;

            let mut collected = Collected::default();
            self.collect(&access, &mut collected).await;
            let about = json!({
                "plugin": env!("CARGO_PKG_VERSION"),
                "made": now.to_string(),
                "namespace": access.namespace,
                "object": self.name,
                "missing": collected.missing,
            });

            // All manifests first: what they hold of secrets is then looked for in logs as well.
            let mut redactor = Redactor::default();
            let manifests: Vec<(String, Value)> =
                collected.manifests.into_iter().map(|(name, value)| (name, redactor.manifest(value))).collect();
            archive.add("report.json", &redactor.text(&serde_json::to_string_pretty(&about)?))?;
            let mut files = 1;
            for (name, value) in manifests {
                archive.add(&name, &redactor.text(&serde_json::to_string_pretty(&value)?))?;
                files += 1;
            }
            for (name, text) in collected.texts {
                archive.add(&name, &redactor.text(&text))?;
                files += 1;
            }
            archive.finish().with_context(|| format!("{} cannot be written", path.display()))?;
            match self.output {
                Output::Human => {
                    println!("{}: {files} files, {} values taken out", path.display(), redactor.taken());
                    collected.missing.iter().for_each(|missing| eprintln!("missing: {missing}"));
                }
                Output::Json => {
                    let written = json!({"file": path, "files": files, "redacted": redactor.taken(), "missing": collected.missing});
                    println!("{written}");
                }
            }
            Ok(ExitCode::SUCCESS)
        })
    }

    async fn collect(&self, access: &Access, into: &mut Collected) {
        if let Ok(version) = within("the version", access.client.apiserver_version()).await {
            into.manifest("cluster-version.json".into(), &json!({"gitVersion": version.git_version, "platform": version.platform}));
        }
        let objects = within("WeightSync objects cannot be listed", access.api::<WeightSync>().list(&ListParams::default())).await;
        let mut objects = into.take("objects", objects).map(|list| list.items).unwrap_or_default();
        objects.retain(|object| self.name.as_ref().is_none_or(|name| *name == object.name_any()));
        if objects.is_empty() {
            into.missing.push("objects: there is none of that name in the namespace".into());
        }
        let pods = into.take("pods", opted_in(access).await).unwrap_or_default();
        let mut wanted = Vec::new();
        for object in &objects {
            let name = object.name_any();
            into.manifest(format!("objects/{name}.json"), object);
            if let Some(events) = into.take("events", super::events::list(access, Some(&name)).await) {
                into.manifest(format!("events/{name}.json"), &events);
            }
            let of = pods_of(object);
            for pod in pods.iter().filter(|pod| self.name.is_none() || of.contains(&pod.name_any())) {
                into.manifest(format!("pods/{}.json", pod.name_any()), pod);
            }
            wanted.extend(into.take("agents", agents(access, object).await).unwrap_or_default());
        }
        let namespaced: Api<Pod> = access.api();
        for agent in &wanted {
            let metrics = super::forward::ask(&namespaced, &agent.pod, STATUS_PORT, Method::GET, "/metrics", String::new()).await;
            if let Some(metrics) = into.take("metrics", metrics) {
                into.texts.push((format!("metrics/{}.txt", agent.pod), metrics));
            }
        }
        let found = operator(&access.client, self.operator_namespace.as_deref()).await;
        if let Some(operator) = into.take("operator", found) {
            into.manifest("operator/deployment.json".into(), &operator.deployment);
            wanted.extend(into.take("operator's pods", controllers(access, Some(&operator.namespace)).await).unwrap_or_default());
            self.controller_pages(access, &operator, into).await;
        }
        for container in &wanted {
            self.log(access, container, into).await;
        }
    }

    async fn controller_pages(&self, access: &Access, operator: &Operator, into: &mut Collected) {
        let pods: Api<Pod> = Api::namespaced(access.client.clone(), &operator.namespace);
        let Some(leader) = into.take("leader", operator.leader(&access.client).await) else { return };
        for (path, name) in [("/metrics", "operator/metrics.txt"), ("/ui/state", "operator/state.json")] {
            let page = super::forward::ask(&pods, &leader, CONTROLLER_STATUS, Method::GET, path, String::new()).await;
            if let Some(page) = into.take(name, page) {
                into.texts.push((name.to_owned(), page));
            }
        }
    }

    async fn log(&self, access: &Access, wanted: &Wanted, into: &mut Collected) {
        let params = |previous| LogParams {
            container: Some(wanted.container.clone()),
            previous,
            tail_lines: Some(self.tail),
            limit_bytes: Some(LOG),
            timestamps: true,
            ..LogParams::default()
        };
        let name = |life: &str| format!("logs/{}-{}{life}.log", wanted.pod, wanted.container);
        if let Some(text) = into.take("logs", text(access, wanted, &params(false)).await) {
            into.texts.push((name(""), text));
        }
        // Most containers had no life before this one, and the API server says so by an error.
        if let Ok(text) = text(access, wanted, &params(true)).await {
            into.texts.push((name("-previous"), text));
        }
    }
}

//! `kubectl weightsync report [NAME]`: one tar file for a bug report: objects, their Events and pods, WeightSync's logs and metrics, and
//! what could not be collected.
//!
//! Decides what is requested, and the names in the file. Of each response it copies only what [`fields`] and [`lines`] list. It never reads
//! a Secret, and a failed request never ends the report.

mod archive;
mod fields;
mod lines;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ListParams, LogParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use self::archive::{Archive, LONGEST_NAME};
use super::agents::{CONTROLLER_STATUS, Operator, agent_of, operator, opted_in, pods_of};
use super::cluster::{Access, ClusterArgs, within};
use super::forward::get;
use crate::api::WeightSync;
use crate::inject::STATUS_PORT;
use weightsync_agent::command::Output;

/// Longest log of one container in bytes.
const LOG: i64 = 4 << 20;
/// The controller's container in the operator's pods.
const CONTROLLER: &str = "controller";

#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Name of the object. Default: all objects of the namespace.
    name: Option<String>,
    /// The cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
    /// File to write; must not exist.
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Lines of each log, from the end.
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    tail: i64,
    /// Namespace of the operator. Default: searched.
    #[arg(long)]
    operator_namespace: Option<String>,
    /// Output format of the summary.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

#[derive(Default)]
struct Collected {
    /// Names in the report, and texts.
    files: Vec<(String, String)>,
    /// Lines of each log that are another program's.
    left_out: BTreeMap<String, usize>,
    missing: Vec<Missing>,
}

struct Missing {
    /// For the report: WeightSync's own text.
    what: String,
    /// For the terminal: with all causes, which may quote anything.
    causes: String,
}

impl Collected {
    /// Adds a text; its name in the report.
    fn text(&mut self, folder: &str, name: &str, ending: &str, text: String) -> String {
        let mut file = format!("{folder}/{name}{ending}");
        if file.len() > LONGEST_NAME {
            let number = format!("~{}", self.files.len());
            let room = LONGEST_NAME.saturating_sub(folder.len() + 1 + number.len() + ending.len());
            file = format!("{folder}/{}{number}{ending}", name.chars().take(room).collect::<String>());
        }
        self.files.push((file.clone(), text));
        file
    }

    fn json(&mut self, folder: &str, name: &str, value: &Value) {
        self.text(folder, name, ".json", format!("{value:#}\n"));
    }

    /// The result, or a note why it is missing.
    fn take<T>(&mut self, what: &str, had: anyhow::Result<T>) -> Option<T> {
        had.map_err(|error| self.missing.push(Missing { what: format!("{what}: {}", short(&error)), causes: format!("{what}: {error:#}") }))
            .ok()
    }
}

/// An error as WeightSync's own text, with the API server's code: foreign texts may contain anything.
fn short(error: &anyhow::Error) -> String {
    let code = error.chain().find_map(|cause| match cause.downcast_ref::<kube::Error>() {
        Some(kube::Error::Api(status)) => Some(status.code),
        _ => None,
    });
    code.map_or_else(|| error.to_string(), |code| format!("{error} (status {code})"))
}

impl ReportArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        crate::cli::block_on(async {
            let access = self.cluster.access().await?;
            let now = Timestamp::now();
            let default = || PathBuf::from(format!("weightsync-report-{}.tar", now.strftime("%Y%m%d-%H%M%S")));
            let path = self.file.clone().unwrap_or_else(default);
            // Before minutes of work; an existing file is not overwritten.
            let mut archive = Archive::create(&path, now.as_second()).with_context(|| format!("{} cannot be made", path.display()))?;

            let mut collected = Collected::default();
            self.collect(&access, &mut collected).await;
            let about = json!({
                "plugin": env!("CARGO_PKG_VERSION"),
                "made": now.to_string(),
                "namespace": access.namespace,
                "object": self.name,
                "missing": collected.missing.iter().map(|missing| &missing.what).collect::<Vec<_>>(),
                "linesLeftOut": collected.left_out,
                "notCollected": fields::NOT_COLLECTED,
                "caution": fields::CAUTION,
            });
            archive.add("report.json", &format!("{about:#}\n"))?;
            for (name, text) in &collected.files {
                archive.add(name, text)?;
            }
            archive.finish().with_context(|| format!("{} cannot be written", path.display()))?;

            let files = collected.files.len() + 1;
            let missing = || collected.missing.iter().map(|missing| &missing.causes);
            match self.output {
                Output::Human => {
                    println!("{}: {files} files; read it before you send it", path.display());
                    missing().for_each(|missing| eprintln!("missing: {missing}"));
                }
                Output::Json => println!("{}", json!({"file": path, "files": files, "missing": missing().collect::<Vec<_>>()})),
            }
            Ok(ExitCode::SUCCESS)
        })
    }

    async fn collect(&self, access: &Access, into: &mut Collected) {
        let version = within("the version of the cluster cannot be read", access.client.apiserver_version()).await;
        if let Some(version) = into.take("cluster", version) {
            into.json("cluster", "version", &json!({"gitVersion": version.git_version, "platform": version.platform}));
        }
        let objects = within("WeightSync objects cannot be listed", access.api::<WeightSync>().list(&ListParams::default())).await;
        let mut objects = into.take("objects", objects).map(|list| list.items).unwrap_or_default();
        objects.retain(|object| self.wants(&object.name_any()));
        if objects.is_empty() {
            into.take::<()>("objects", Err(anyhow::anyhow!("there is none of that name in the namespace")));
        }
        for object in &objects {
            let name = object.name_any();
            into.json("objects", &name, &fields::object(object));
            if let Some(events) = into.take("events", events_of(access, &name).await) {
                into.json("events", &name, &events.iter().filter_map(fields::event).collect::<Value>());
            }
        }
        let mut pods = into.take("pods", opted_in(access).await).unwrap_or_default();
        if self.name.is_some() {
            let members: Vec<String> = objects.iter().flat_map(pods_of).collect();
            pods.retain(|pod| members.contains(&pod.name_any()));
        }
        let api: Api<Pod> = access.api();
        for pod in &pods {
            let name = pod.name_any();
            into.json("pods", &name, &fields::pod(pod));
            let Some(container) = agent_of(pod) else { continue };
            if let Some(page) = into.take("metrics", get(&api, &name, STATUS_PORT, "/metrics").await) {
                into.text("metrics", &name, ".txt", lines::metrics(&page));
            }
            self.log(&api, &name, &container, into).await;
        }
        let found = operator(&access.client, self.operator_namespace.as_deref()).await;
        if let Some(operator) = into.take("operator", found) {
            self.operator(access, &operator, into).await;
        }
    }

    async fn operator(&self, access: &Access, operator: &Operator, into: &mut Collected) {
        into.json("operator", "deployment", &fields::deployment(&operator.deployment));
        let api: Api<Pod> = Api::namespaced(access.client.clone(), &operator.namespace);
        for pod in into.take("operator's pods", operator.pods(&access.client).await).unwrap_or_default() {
            let name = pod.name_any();
            into.json("operator/pods", &name, &fields::pod(&pod));
            self.log(&api, &name, CONTROLLER, into).await;
        }
        let Some(leader) = into.take("leader", operator.leader(&access.client).await) else { return };
        if let Some(page) = into.take("metrics", get(&api, &leader, CONTROLLER_STATUS, "/metrics").await) {
            into.text("operator", "metrics", ".txt", lines::metrics(&page));
        }
        let wanted = |namespace: &str, name: &str| namespace == access.namespace && self.wants(name);
        let page = get(&api, &leader, CONTROLLER_STATUS, "/ui/state").await;
        let state = page.and_then(|page| fields::state(&page, wanted).context("the page is not the controller's"));
        if let Some(state) = into.take("state", state) {
            into.json("operator", "state", &state);
        }
    }

    fn wants(&self, name: &str) -> bool {
        self.name.as_ref().is_none_or(|wanted| wanted == name)
    }

    /// WeightSync's lines of a container's log, of the current and the previous run.
    async fn log(&self, pods: &Api<Pod>, pod: &str, container: &str, into: &mut Collected) {
        let what = format!("the log of {pod}/{container} cannot be read");
        for (previous, ending) in [(false, ".log"), (true, "-previous.log")] {
            let params = LogParams {
                container: Some(container.to_owned()),
                previous,
                tail_lines: Some(self.tail),
                limit_bytes: Some(LOG),
                ..LogParams::default()
            };
            let text = within(&what, pods.logs(pod, &params)).await;
            // Most containers have no previous run; the API server then returns an error.
            let text = if previous { text.ok() } else { into.take("logs", text) };
            if let Some(text) = text {
                let (kept, left_out) = lines::log(&text);
                let file = into.text("logs", &format!("{pod}-{container}"), ending, kept);
                into.left_out.insert(file, left_out);
            }
        }
    }
}

async fn events_of(access: &Access, name: &str) -> anyhow::Result<Vec<Event>> {
    let about = ListParams::default().fields(&format!("regarding.kind=WeightSync,regarding.name={name}"));
    Ok(within("Events cannot be listed", access.api::<Event>().list(&about)).await?.items)
}

#[cfg(test)]
mod tests;

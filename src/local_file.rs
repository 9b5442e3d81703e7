//! The files of `weightsync local`: one `WeightSync`, as a cluster has it, and the processes of this host.
//!
//! Decides defaults of the processes, and refuses invalid values with the field's name. It must never accept a field of the `WeightSync`
//! that would do nothing on one host, unless the documentation names the field.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use kube::ResourceExt;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::api::{Discovery, DocumentError, EngineKind, OnWedged, Pool, WeightSync, check_version, read_document, validate};
use weightsync_coordinator::local::default_policy;
use weightsync_core::protocol::UpdatePolicy;
use weightsync_core::weights::IgnoredTensors;

/// The kind of the document with the processes.
const PROCESSES: &str = "LocalProcesses";

/// What the files say.
#[derive(Debug, Clone, PartialEq)]
pub struct LocalFiles {
    pub object: WeightSync,
    pub processes: LocalProcesses,
    /// Rollouts in the order of their ranks: by pool, and in a pool as listed.
    pub rollouts: Vec<Rollout>,
}

/// A rollout with the settings of its pool.
#[derive(Debug, Clone, PartialEq)]
pub struct Rollout {
    pub process: RolloutProcess,
    pub pool: String,
    pub kind: EngineKind,
    /// Tensors that a version is not compared by.
    pub ignored: IgnoredTensors,
    pub ranks: u32,
    /// Port of its engine on 127.0.0.1.
    pub port: u16,
}

/// The processes of one host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LocalProcesses {
    pub api_version: String,
    pub kind: String,
    /// Folder for logs and the epoch, relative to the file; it is created. Default: `state`.
    #[serde(default = "state")]
    pub directory: PathBuf,
    /// Folder in memory where versions are put for engines. Default: `/dev/shm/weightsync-NAME`.
    #[serde(default)]
    pub versions: Option<PathBuf>,
    #[serde(default)]
    pub trainer: TrainerProcess,
    pub rollouts: Vec<RolloutProcess>,
}

/// The trainer: `weightsync local` starts its agent; the trainer itself is yours.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct TrainerProcess {
    /// Name; `weightsync local` prints how the trainer finds its agent. Default: `trainer`.
    pub name: String,
    /// UUID of the GPU that its agent uses (`nvidia-smi -L`). Default: none; bytes go over TCP.
    pub gpu: Option<String>,
}

/// A rollout: an engine and its agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RolloutProcess {
    pub name: String,
    /// Pool of the `WeightSync`. Default: the only pool.
    #[serde(default)]
    pub pool: Option<String>,
    /// Port of the engine on 127.0.0.1. Default: the first port of the pool.
    #[serde(default)]
    pub port: Option<u16>,
    /// Command that starts the engine, and starts it again after it ends. Default: none; the engine runs already.
    #[serde(default)]
    pub command: Vec<String>,
    /// Environment of that command, added to that of `weightsync local`.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// UUIDs of the GPUs that its agent uses: those of the engine, in the order of its ranks. Default: none; bytes go over TCP.
    #[serde(default)]
    pub gpus: Vec<String>,
}

impl Default for TrainerProcess {
    fn default() -> Self {
        Self { name: "trainer".to_owned(), gpu: None }
    }
}

fn state() -> PathBuf {
    "state".into()
}

impl LocalFiles {
    /// Reads the texts of all files and checks them. Documents of other kinds, such as pods, are ignored.
    pub fn parse(texts: &[String]) -> Result<Self, String> {
        let (mut objects, mut processes) = (Vec::new(), Vec::new());
        for text in texts {
            let documents: Vec<Value> = serde_saphyr::from_multiple(text).map_err(|error| error.to_string())?;
            for document in documents {
                match document.get("kind").and_then(Value::as_str) {
                    Some("WeightSync") => objects.push(document),
                    Some(PROCESSES) => processes.push(document),
                    _ => {}
                }
            }
        }
        let object = weightsync(&only(objects, "WeightSync")?)?;
        let processes = only(processes, PROCESSES)?;
        check_version(PROCESSES, &processes).map_err(with_cause)?;
        let processes: LocalProcesses = serde_path_to_error::deserialize(processes).map_err(|error| format!("{PROCESSES}: {error}"))?;
        let rollouts = check(&object, &processes)?;
        Ok(Self { object, processes, rollouts })
    }

    /// Name of the group; part of the trainer's socket name and of log file names.
    pub fn name(&self) -> String {
        self.object.name_any()
    }

    /// The rules of updates, with the defaults of one host: no TLS between processes, and no measuring of a network that is not there.
    pub fn policy(&self) -> UpdatePolicy {
        let (spec, usual) = (&self.object.spec, default_policy());
        let mut policy = spec.update_policy(u32::try_from(self.rollouts.len()).unwrap_or(u32::MAX));
        policy.data_tls = spec.transport.tls.unwrap_or(usual.data_tls);
        if spec.transport.preflight.is_none() {
            policy.transport.preflight = usual.transport.preflight;
        }
        policy
    }
}

fn only(mut documents: Vec<Value>, kind: &str) -> Result<Value, String> {
    match (documents.pop(), documents.len()) {
        (Some(only), 0) => Ok(only),
        (Some(_), more) => Err(format!("there are {} documents of kind {kind}: give exactly one", more + 1)),
        (None, _) => Err(format!("no document of kind {kind}: give its file with --filename (docs/local.md)")),
    }
}

fn with_cause(error: DocumentError) -> String {
    format!("{:#}", anyhow::Error::new(error))
}

fn weightsync(document: &Value) -> Result<WeightSync, String> {
    let (object, unknown) = read_document(document).map_err(with_cause)?;
    if let Some(field) = unknown.first() {
        return Err(format!("{field}: no such field"));
    }
    if let Some(problem) = validate(&object.spec).first() {
        return Err(problem.to_string());
    }
    let spec = &object.spec;
    let several = spec.rollouts.iter().find(|pool| pool.replica.pods > 1);
    let registered = spec.rollouts.iter().find(|pool| pool.engine.discovery == Discovery::Registered);
    if let Some(pool) = registered {
        let field = format!("spec.rollouts[{}].engine.discovery", pool.name);
        return Err(format!("{field}: on one host the processes file gives each engine's port: set it to Ports, or remove it"));
    }
    match several {
        _ if spec.suspend => Err("spec.suspend: a group of processes cannot be suspended: end weightsync local, or remove suspend".into()),
        _ if spec.update.on_wedged == OnWedged::RestartPod => {
            Err("spec.update.onWedged: RestartPod needs a cluster: set it to Report, or remove it".into())
        }
        Some(pool) => Err(format!("spec.rollouts[{}].replica.pods: on one host a replica is one process: set it to 1", pool.name)),
        None => Ok(object),
    }
}

/// Checks the processes against the object; returns the rollouts in the order of their ranks.
fn check(object: &WeightSync, processes: &LocalProcesses) -> Result<Vec<Rollout>, String> {
    plain("metadata.name", &object.name_any())?;
    plain("trainer.name", &processes.trainer.name)?;
    if processes.rollouts.is_empty() {
        return Err("rollouts: name at least one".into());
    }
    let (mut names, mut ports) = (BTreeSet::from([processes.trainer.name.as_str()]), BTreeSet::new());
    let mut rollouts = Vec::new();
    for process in &processes.rollouts {
        plain("rollouts.name", &process.name)?;
        if !names.insert(&process.name) {
            return Err(format!("rollouts: the name {} is used twice", process.name));
        }
        let (place, pool) = pool_of(object, process)?;
        let first = pool.engine.ports().first().and_then(|port| u16::try_from(*port).ok()).unwrap_or(0);
        let port = process.port.unwrap_or(first);
        if port == 0 || !ports.insert(port) {
            return Err(format!("rollouts {}: port {port} is 0 or used twice: set port", process.name));
        }
        let ranks = u32::try_from(pool.ranks).unwrap_or(1);
        let (kind, ignored) = (pool.engine.kind, pool.engine.ignored());
        rollouts.push((place, Rollout { process: process.clone(), pool: pool.name.clone(), kind, ignored, ranks, port }));
    }
    rollouts.sort_by_key(|(place, _)| *place);
    let most = u32::try_from(rollouts.len()).unwrap_or(u32::MAX);
    let min_ready = object.spec.min_ready(most);
    if min_ready > most {
        return Err(format!("spec.membership.minReady: {min_ready} must be 1 to {most}, the number of rollouts"));
    }
    Ok(rollouts.into_iter().map(|(_, rollout)| rollout).collect())
}

/// The pool of a process, with its place in the spec.
fn pool_of<'a>(object: &'a WeightSync, process: &RolloutProcess) -> Result<(usize, &'a Pool), String> {
    let pools = &object.spec.rollouts;
    let names = || pools.iter().map(|pool| pool.name.as_str()).collect::<Vec<_>>().join(", ");
    match (&process.pool, pools.as_slice()) {
        (None, [only]) => Ok((0, only)),
        (None, _) => Err(format!("rollouts {}: set pool to one of {}", process.name, names())),
        (Some(wanted), _) => pools
            .iter()
            .enumerate()
            .find(|(_, pool)| pool.name == *wanted)
            .ok_or_else(|| format!("rollouts {}: the WeightSync has no pool {wanted}; it has {}", process.name, names())),
    }
}

fn plain(field: &str, name: &str) -> Result<(), String> {
    let good = !name.is_empty() && name.len() <= 63 && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    if good { Ok(()) } else { Err(format!("{field}: \"{name}\" must be 1 to 63 of a-z, 0-9 and -")) }
}

#[cfg(test)]
mod tests;

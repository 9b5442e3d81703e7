//! Versions as steps, for a server that is updated by `POST /v1/update_weights` and whose `checkpoint_transfer` is WeightSync's
//! (`python/weightsync/fastdeploy`).
//!
//! With `FD_USE_GDR_CHECKPOINT_TRANSFER=1`, FastDeploy reads a stream of checkpoint tensors from that library under a step's name, each
//! rank by itself. Its models' own loaders shard them (`update_weights_by_gdr`, `rl/dynamic_weight_manager.py` at 49fe57cb, run on a CPU).
//! Without it the stream has the server's own parameters, and all are compared before the first is set (`update_weights_by_rdma`, run).
//! Decides names and places of steps in a folder, and whether the server's response means that every rank read the whole step. A step is
//! prepared before the server is paused, so the next one is fetched while the current one serves. Several servers may read from one folder:
//! the name of a step holds the pod and port of its server, and an agent removes only steps of that name. A step that is no folder at all
//! comes from memory ([`super::stream`]).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::snapshot::link;
use super::unsupported;
use crate::EngineError;
use weightsync_core::weights::TensorSpec;
use weightsync_core::weights::safetensors::{Checkpoint, SINGLE_FILE};

/// How a server gets a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Steps {
    /// The step that it starts with lies there, and those of its agent if they come as files.
    pub(crate) folder: PathBuf,
    pub(crate) by: By,
    pub(crate) names: Names,
}

/// Where the steps of the agent come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    Folder,
    /// `"updates": "memory"` in `--rsync_config`.
    Memory,
}

/// What the tensors of a step are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Names {
    /// Those of the model's checkpoint.
    Checkpoint,
    /// The server's own parameters, as its start step has them.
    Own,
}

impl Steps {
    /// The step that the server starts with: `step` of its model's `version.yaml`, else 0.
    pub(crate) fn start(&self, model: &Path) -> PathBuf {
        let text = fs::read_to_string(model.join("version.yaml")).unwrap_or_default();
        let named = text.lines().find_map(|line| line.strip_prefix("step:")).map(|step| step.trim().trim_matches(['"', '\'']));
        self.folder.join(named.filter(|step| !step.is_empty() && !step.contains('/')).unwrap_or("0"))
    }

    /// The tensors that a version must have, from the start step.
    pub(crate) fn own_parameters(&self, model: &Path) -> Result<Vec<TensorSpec>, EngineError> {
        let start = self.start(model);
        let checkpoint = Checkpoint::open(&start).map_err(|cause| {
            let what =
                format!("the server's own parameters are those of its start step {}, which cannot be read: {cause}", start.display());
            unsupported(what, "give the agent the \"directory\" of the server's rsync_config at the same path")
        })?;
        Ok(checkpoint.specs())
    }
}

/// Prefix of our steps' names; the start step that `version.yaml` names is the user's own.
const OURS: &str = "weightsync-";

/// A prepared step, and the number of tensors in its stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) directory: PathBuf,
    pub(crate) tensors: usize,
}

/// The answer of every rank that a step must get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted<'a> {
    /// The step's name; none where the server is to name its start step itself.
    pub(crate) name: Option<&'a str>,
    /// Tensors in its stream; none where the server does not count them.
    pub(crate) tensors: Option<usize>,
    pub(crate) ranks: usize,
}

impl Step {
    pub(crate) fn name(&self) -> String {
        self.directory.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Writes a version into the folder under its own name, and removes the earlier ones of the same owner.
    pub(crate) fn lay(folder: &Path, owner: &str, from: &Path) -> Result<Self, EngineError> {
        let laid = Self::try_lay(folder, owner, from).map_err(|cause| {
            let what = format!("the version cannot be laid into {}: {cause}", folder.display());
            unsupported(what, "let the agent write into the \"directory\" of the server's rsync_config (a volume that both mount)")
        })?;
        let checkpoint = Checkpoint::open(&laid)
            .map_err(|cause| unsupported(format!("the version cannot be read: {cause}"), "publish safetensors files"))?;
        Ok(Self { tensors: checkpoint.specs().len(), directory: laid })
    }

    fn try_lay(folder: &Path, owner: &str, from: &Path) -> io::Result<PathBuf> {
        let begin = begin_of(owner);
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            // The whole rest must be a number of ours: another owner's name may begin with this one.
            let is_own = |name: &str| name.strip_prefix(&begin).is_some_and(|number| uuid::Uuid::try_parse(number).is_ok());
            if is_own(&entry.file_name().to_string_lossy()) {
                fs::remove_dir_all(entry.path())?;
            }
        }
        let step = folder.join(format!("{begin}{}", uuid::Uuid::new_v4().simple()));
        fs::create_dir(&step)?;
        if from.is_file() {
            link(from, &step.join(SINGLE_FILE))?;
            return Ok(step);
        }
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            let name = entry.file_name();
            let shown = name.to_string_lossy();
            if shown.ends_with(".safetensors") || shown.ends_with(".safetensors.index.json") {
                link(&entry.path(), &step.join(name))?;
            }
        }
        Ok(step)
    }

    /// A step that lies in the folder already.
    pub(crate) fn there(directory: &Path) -> Result<Self, EngineError> {
        let checkpoint = Checkpoint::open(directory).map_err(|cause| {
            unsupported(format!("the step cannot be read: {cause}"), "look at the \"directory\" of the server's rsync_config")
        })?;
        Ok(Self { tensors: checkpoint.specs().len(), directory: directory.to_owned() })
    }
}

impl Wanted<'_> {
    /// Whether the `result` of the call has one answer of each rank, each with this step and all of its tensors. The server itself compares
    /// none of that.
    pub(crate) fn was_taken(&self, answer: &Value) -> Result<(), String> {
        let answers = answer.pointer("/result").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        if answers.len() != self.ranks {
            return Err(format!("{} of {} ranks answered", answers.len(), self.ranks));
        }
        for (rank, answer) in answers.iter().enumerate() {
            let version = answer.get("version").and_then(Value::as_str).unwrap_or_default();
            if let Some(name) = self.name.filter(|name| *name != version) {
                return Err(format!("rank {rank} took the step {version:?}, not {name}"));
            }
            let count = answer.get("update_count").and_then(Value::as_u64);
            if let Some(tensors) = self.tensors.filter(|tensors| count != u64::try_from(*tensors).ok()) {
                let count = count.map_or_else(|| "no number of".to_owned(), |count| count.to_string());
                return Err(format!("rank {rank} took {count} tensors of the {tensors} that the step has"));
            }
        }
        Ok(())
    }
}

/// The begin of the names of an owner's steps.
fn begin_of(owner: &str) -> String {
    let owner: String = owner.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).collect();
    format!("{OURS}{owner}-")
}

//! The snapshot file from which FastDeploy with `--load_strategy ipc_snapshot` reloads its weights, and how a version replaces it.
//!
//! The server takes no path. It reads `model_state.tp{rank}.{gpu}.pdparams` of its own model directory, which is a safetensors file under
//! another name (`fastdeploy/rl/dynamic_weight_manager.py`, `paddle.load(path, safetensors=True)`; the part files and the legacy name come
//! from the same function). Decides names and places only. A version is staged next to the model before the server is changed, and replaces
//! the snapshot by one rename. So a restarted server always finds a complete file. The first snapshot is kept.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::EngineError;
use weightsync_core::weights::TensorSpec;
use weightsync_core::weights::safetensors::{Checkpoint, SINGLE_FILE};
use weightsync_torch::paddle::{is_legacy_snapshot, snapshot_name};

const CORNER: &str = ".weightsync";

/// One snapshot of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Snapshot {
    directory: PathBuf,
    /// `model_state.tp0.0`, or the legacy `model_state.tp00`.
    base: String,
    /// Names of its files, parts in their order.
    files: Vec<String>,
}

impl Snapshot {
    /// The snapshot in a model directory. Snapshots of several ranks are refused.
    pub(crate) fn find(directory: &Path) -> Result<Self, EngineError> {
        let unreadable = |cause: io::Error| refused(format!("{} cannot be read: {cause}", directory.display()), SAME_DIRECTORY);
        let mut found: Vec<(String, Option<u32>, String)> = Vec::new();
        for entry in fs::read_dir(directory).map_err(unreadable)? {
            let name = entry.map_err(unreadable)?.file_name().to_string_lossy().into_owned();
            if let Some((base, part)) = snapshot_name(&name) {
                found.push((base, part, name));
            }
        }
        if found.iter().any(|(base, ..)| !is_legacy_snapshot(base)) {
            found.retain(|(base, ..)| !is_legacy_snapshot(base));
        }
        let bases: BTreeSet<&String> = found.iter().map(|(base, ..)| base).collect();
        let base = match bases.iter().next() {
            Some(base) if bases.len() == 1 => (*base).clone(),
            Some(_) => {
                let what =
                    format!("{} holds snapshots of {} ranks, and a version has one tensor of each name", directory.display(), bases.len());
                return Err(refused(what, "run FastDeploy with tensor parallel size 1, or move the weights by its own library"));
            }
            None => {
                let what = format!("{} holds no model_state.tpRANK.GPU.pdparams", directory.display());
                return Err(refused(
                    what,
                    "start FastDeploy with --dynamic-load-weight --load_strategy ipc_snapshot, and write its first snapshot",
                ));
            }
        };
        // Part files take precedence over the whole one, as in the server.
        let has_parts = found.iter().any(|(_, part, _)| part.is_some());
        found.retain(|(_, part, _)| part.is_some() == has_parts);
        found.sort_by_key(|(_, part, _)| *part);
        Ok(Self { directory: directory.to_owned(), base, files: found.into_iter().map(|(.., name)| name).collect() })
    }

    /// Names, types and shapes of its contents: every parameter of the model, under the server's own names.
    pub(crate) fn specs(&self) -> Result<Vec<TensorSpec>, EngineError> {
        let mut specs = Vec::new();
        for name in &self.files {
            let open = Checkpoint::open(&self.directory.join(name));
            let next = "write snapshots as safetensors files, which is how FastDeploy reads them";
            specs.extend(open.map_err(|cause| refused(format!("the snapshot {name} cannot be read: {cause}"), next))?.specs());
        }
        Ok(specs)
    }

    fn next(&self) -> PathBuf {
        self.directory.join(CORNER).join("next")
    }

    /// Copies the weights of a version, or kept ones, next to the model, under their final names. Returns their path.
    pub(super) fn stage(&self, from: &Path) -> Result<PathBuf, EngineError> {
        let next = self.next();
        self.try_stage(from, &next).map_err(|cause| {
            let what = format!("the version cannot be laid into {}: {cause}", self.directory.display());
            refused(what, "let the agent write into the server's model directory (a volume that both mount)")
        })?;
        Ok(next)
    }

    fn try_stage(&self, from: &Path, next: &Path) -> io::Result<()> {
        match fs::remove_dir_all(next) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => fs::create_dir_all(next)?,
        }
        self.keep_first()?;
        if let Ok(kept) = Self::find(from) {
            return kept.files.iter().try_for_each(|name| link(&from.join(name), &next.join(name)));
        }
        let file = if from.is_file() { from.to_owned() } else { from.join(SINGLE_FILE) };
        link(&file, &next.join(format!("{}.pdparams", self.base)))
    }

    /// Keeps the snapshot with which the server was first started, once.
    fn keep_first(&self) -> io::Result<()> {
        let kept = kept(&self.directory);
        if kept.is_dir() {
            return Ok(());
        }
        let partial = self.directory.join(CORNER).join("startup.partial");
        match fs::remove_dir_all(&partial) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => fs::create_dir_all(&partial)?,
        }
        self.files.iter().try_for_each(|name| link(&self.directory.join(name), &partial.join(name)))?;
        fs::rename(&partial, &kept)
    }

    /// Replaces the snapshot by the staged files; has no effect if nothing is staged.
    pub(super) fn switch(&self) -> io::Result<()> {
        let next = self.next();
        let mut placed = BTreeSet::new();
        let entries = match fs::read_dir(&next) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            fs::rename(entry.path(), self.directory.join(entry.file_name()))?;
            placed.insert(entry.file_name().to_string_lossy().into_owned());
        }
        if placed.is_empty() {
            return Ok(());
        }
        // Files of the same base that the server would prefer.
        for name in self.files.iter().filter(|name| !placed.contains(*name)) {
            fs::remove_file(self.directory.join(name))?;
        }
        fs::remove_dir_all(next)
    }
}

/// Where the first snapshot of a server is kept: a directory like the model's.
pub(super) fn kept(directory: &Path) -> PathBuf {
    directory.join(CORNER).join("startup")
}

const SAME_DIRECTORY: &str = "give the agent the server's model directory (--model-dir, or a volume at the same path)";

fn refused(what: String, next_step: &str) -> EngineError {
    EngineError::Unsupported { what, next_step: next_step.to_owned() }
}

/// A hard link to a file, or a copy if the two places are on different file systems.
pub(super) fn link(from: &Path, to: &Path) -> io::Result<()> {
    match fs::hard_link(from, to) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(error),
        Err(_) => fs::copy(from, to).map(drop),
        Ok(()) => Ok(()),
    }
}

//! Whether a version is a whole replacement for the checkpoint that a server was started with.
//!
//! Engines do not say so themselves: vLLM 0.32 answers 200 to a directory that lacks a tensor, keeps the old values of a layer of its own
//! and fills the rest of a fused one with uninitialised memory (seen; `model_loader/reload/layerwise.py` takes it for padding).
//! Decides by names and shapes from the two lists, before anything is touched; never looks at values.

use std::collections::BTreeMap;
use std::path::Path;

use super::EngineError;
use weightsync_core::weights::TensorSpec;
use weightsync_core::weights::safetensors::Checkpoint;

/// Absent from many checkpoints and from what many trainers send, because it is the embedding under another name.
const TIED: &str = "lm_head.weight";
/// Names that an error shows.
const NAMED: usize = 3;

/// Compares `tensors` with the safetensors checkpoint at `served`. A checkpoint that cannot be read from here decides nothing.
pub(super) fn check(served: &Path, tensors: &[TensorSpec]) -> Result<(), EngineError> {
    match Checkpoint::open(served) {
        Ok(checkpoint) => compare(&checkpoint.specs(), tensors, is_tied(served)),
        Err(cause) => {
            tracing::debug!(%cause, "the checkpoint that the engine was started with cannot be compared with versions");
            Ok(())
        }
    }
}

/// `tie_word_embeddings` of the model's `config.json`; untied where it is not said.
fn is_tied(served: &Path) -> bool {
    let config = std::fs::read(served.join("config.json")).unwrap_or_default();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap_or_default();
    config.get("tie_word_embeddings").and_then(serde_json::Value::as_bool).unwrap_or(false)
}

pub(super) fn compare(served: &[TensorSpec], version: &[TensorSpec], tied: bool) -> Result<(), EngineError> {
    let offered: BTreeMap<&str, &[u64]> = version.iter().map(|tensor| (tensor.name.as_str(), tensor.shape.as_slice())).collect();
    let needed: BTreeMap<&str, &[u64]> = served.iter().map(|tensor| (tensor.name.as_str(), tensor.shape.as_slice())).collect();
    let free = |name: &str| tied && name == TIED;
    let missing: Vec<_> = needed.keys().filter(|name| !offered.contains_key(*name) && !free(name)).map(|name| (*name).to_owned()).collect();
    let unknown: Vec<_> = offered.keys().filter(|name| !needed.contains_key(*name) && !free(name)).map(|name| (*name).to_owned()).collect();
    let reshaped: Vec<_> = needed
        .iter()
        .filter_map(|(name, shape)| {
            offered.get(name).filter(|other| *other != shape).map(|other| format!("{name} ({other:?}, not {shape:?})"))
        })
        .collect();
    let faults: Vec<_> = [("lacks", missing), ("brings the unknown", unknown), ("brings in another shape", reshaped)]
        .into_iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(what, names)| format!("{what} {}", first(&names)))
        .collect();
    if faults.is_empty() {
        return Ok(());
    }
    Err(EngineError::Unsupported {
        what: format!("the version does not fit the checkpoint that the engine was started with: it {}", faults.join(", and ")),
        next_step: "publish all tensors under their checkpoint names, or start the engine from a checkpoint of the same model".into(),
    })
}

fn first(names: &[String]) -> String {
    let shown = names.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(NAMED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

//! Whether a version replaces all tensors of a server's start-up checkpoint.
//!
//! Engines do not report that themselves. vLLM 0.32 answers 200 to a directory that lacks a tensor: a separate layer keeps its old values,
//! and the rest of a fused layer is uninitialised memory (seen; `model_loader/reload/layerwise.py` takes it for padding). It also copies
//! integers into a parameter of floats, number by number (seen). Decides by names, shapes and element types of the two lists, before
//! anything changes; never reads values.

use std::collections::BTreeMap;
use std::path::Path;

use super::EngineError;
use weightsync_core::protocol::Version;
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_core::weights::{Dtype, TensorSpec};

/// Missing in many checkpoints and in the publishes of many trainers, because it is the embedding under another name.
const TIED: &str = "lm_head.weight";
/// Most names in an error.
const NAMED: usize = 3;

/// The comparison of a version before its engine is changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fit {
    /// It replaces every tensor of the checkpoint that the engine was started with.
    Whole,
    /// There is nothing to compare it with, for this reason.
    Unchecked(String),
}

/// Bytes of all tensors of the safetensors checkpoint at `served`; none where it cannot be read.
pub(super) fn bytes(served: &Path) -> Option<u64> {
    let checkpoint = Checkpoint::open(served).ok()?;
    Some(checkpoint.tensors().iter().fold(0, |sum, tensor| sum.saturating_add(tensor.bytes)))
}

/// Compares `tensors` with the safetensors checkpoint at `served`.
pub(super) fn check(served: &Path, tensors: &[TensorSpec]) -> Result<Fit, EngineError> {
    match Checkpoint::open(served) {
        Ok(checkpoint) => compare(&checkpoint.specs(), tensors, is_tied(served)).map(|()| Fit::Whole),
        Err(cause) => Ok(Fit::Unchecked(format!("the engine's checkpoint {} cannot be read: {cause}", served.display()))),
    }
}

/// Compares the tensors of a version with those of the version that the same start of an engine accepted before. An additional tensor is no
/// fault: the earlier version may have lacked it.
///
/// # Errors
///
/// Missing tensors, and those with another shape or an element type that does not represent the same numbers.
pub fn same_tensors(before: &[TensorSpec], version: Version, offered: &[TensorSpec]) -> Result<(), EngineError> {
    let faults = Faults::of(before, offered, true, |tensor| tensor.full_name().into_owned());
    faults.none_but_unknown().map_err(|what| EngineError::Unsupported {
        what: format!("the version has not all tensors of version {version}, which the engine took before: it {what}"),
        next_step: "publish all tensors, or restart the engine where the version before was wrong".into(),
    })
}

/// `tie_word_embeddings` of the model's `config.json`; untied if it is missing.
fn is_tied(served: &Path) -> bool {
    let config = std::fs::read(served.join("config.json")).unwrap_or_default();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap_or_default();
    config.get("tie_word_embeddings").and_then(serde_json::Value::as_bool).unwrap_or(false)
}

pub(super) fn compare(served: &[TensorSpec], version: &[TensorSpec], tied: bool) -> Result<(), EngineError> {
    Faults::of(served, version, tied, |tensor| tensor.name.clone()).none().map_err(|what| EngineError::Unsupported {
        what: format!("the version does not fit the checkpoint that the engine was started with: it {what}"),
        next_step: "publish all tensors under their checkpoint names, or start the engine from a checkpoint of the same model".into(),
    })
}

/// The differences between two sets of tensors.
struct Faults {
    missing: Vec<String>,
    unknown: Vec<String>,
    reshaped: Vec<String>,
    retyped: Vec<String>,
}

impl Faults {
    fn of(needed: &[TensorSpec], offered: &[TensorSpec], tied: bool, name: impl Fn(&TensorSpec) -> String) -> Self {
        let by_name = |tensors: &'_ [TensorSpec]| -> BTreeMap<String, (Vec<u64>, Dtype)> {
            tensors.iter().map(|tensor| (name(tensor), (tensor.shape.clone(), tensor.dtype))).collect()
        };
        let (needed, offered) = (by_name(needed), by_name(offered));
        let free = |name: &str| tied && name == TIED;
        let both = || needed.iter().filter_map(|(name, needed)| offered.get(name).map(|offered| (name, offered, needed)));
        let reshaped = both().filter(|(_, (offered, _), (needed, _))| offered != needed);
        let retyped = both().filter(|(_, (_, offered), (_, needed))| !converts(*offered, *needed));
        Self {
            missing: needed.keys().filter(|name| !offered.contains_key(*name) && !free(name)).cloned().collect(),
            unknown: offered.keys().filter(|name| !needed.contains_key(*name) && !free(name)).cloned().collect(),
            reshaped: reshaped.map(|(name, (offered, _), (needed, _))| format!("{name} ({offered:?}, not {needed:?})")).collect(),
            retyped: retyped
                .map(|(name, (_, offered), (_, needed))| format!("{name} ({}, not {})", offered.name(), needed.name()))
                .collect(),
        }
    }

    fn none_but_unknown(self) -> Result<(), String> {
        Self { unknown: Vec::new(), ..self }.none()
    }

    fn none(self) -> Result<(), String> {
        let faults = [
            ("lacks", self.missing),
            ("brings the unknown", self.unknown),
            ("brings in another shape", self.reshaped),
            ("brings in another element type", self.retyped),
        ];
        let faults: Vec<_> =
            faults.into_iter().filter(|(_, names)| !names.is_empty()).map(|(what, names)| format!("{what} {}", first(&names))).collect();
        if faults.is_empty() { Ok(()) } else { Err(faults.join(", and ")) }
    }
}

/// Whether engines convert one element type into the other and keep the numbers, except for rounding. True for the plain floats, and for
/// each type to itself. False for integers, and for floats of 8 bits and fewer, which need scales.
fn converts(offered: Dtype, needed: Dtype) -> bool {
    let plain = |dtype| matches!(dtype, Dtype::F16 | Dtype::BF16 | Dtype::F32 | Dtype::F64);
    offered == needed || plain(offered) && plain(needed)
}

fn first(names: &[String]) -> String {
    let shown = names.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(NAMED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

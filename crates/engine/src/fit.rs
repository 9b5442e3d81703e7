//! Whether a version replaces all tensors that a server loaded when it was started.
//!
//! Engines do not report that themselves. vLLM 0.32 answers 200 to a directory that lacks a tensor: a separate layer keeps its old values,
//! and the rest of a fused layer is uninitialised memory (seen; `model_loader/reload/layerwise.py` takes it for padding). It also copies
//! integers into a parameter of floats, number by number (seen). Decides by names, shapes and element types of two lists, before anything
//! changes: that of the version, and that of the files that the engine loads ([`Checkpoint::open_as_engines_do`]) without the tensors that
//! its loader skips ([`buffers`], [`model`], [`heads`]) and those that the user names. Never reads values of a version, and never passes over
//! files that cannot be read: [`Fit::Unchecked`] has the reason.

mod buffers;
mod heads;
mod model;

use std::collections::BTreeMap;
use std::path::Path;

use self::model::{Model, Tie};
use super::EngineError;
use weightsync_core::protocol::Version;
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_core::weights::{Dtype, IgnoredTensors, TensorSpec};

/// Most names in an error.
const NAMED: usize = 3;
/// What a user can do about a tensor that the engine's loader skips.
const WAY_OUT: &str = "or name tensors that the engine's loader skips in spec.rollouts[].engine.tensors.ignore";

/// The comparison of a version before its engine is changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fit {
    /// It replaces every tensor that the engine loaded when it was started.
    Whole {
        /// What is worth a look all the same, such as tensors that lose precision.
        notes: Vec<String>,
    },
    /// There is nothing to compare it with.
    Unchecked {
        /// For this reason.
        why: String,
        /// Whether the head of the model is its embedding, by its configuration.
        tied: bool,
    },
}

impl Fit {
    /// Without a note.
    pub const WHOLE: Self = Self::Whole { notes: Vec::new() };
}

/// Why versions cannot be compared with the engine's checkpoint at `served`, or the bytes of its tensors.
pub(super) fn readable(served: &Path) -> Result<u64, String> {
    let checkpoint = open(served)?;
    Ok(checkpoint.tensors().iter().fold(0, |sum, tensor| sum.saturating_add(tensor.bytes)))
}

/// Compares `tensors` with what an engine loads that is started with the checkpoint at `served`.
pub(super) fn check(served: &Path, tensors: &[TensorSpec], ignored: &IgnoredTensors) -> Result<Fit, EngineError> {
    let model = Model::read(served);
    match open(served) {
        Ok(checkpoint) => {
            let twin = |name: &str| heads::is_an_embedding(&checkpoint, name);
            let faults = Faults::of(&checkpoint.specs(), tensors, &Excuses { ignored, model: &model, twin: &twin });
            let notes = faults.notes();
            faults.none().map(|()| Fit::Whole { notes }).map_err(misfit)
        }
        Err(why) => Ok(Fit::Unchecked { why, tied: model.tie == Tie::Yes }),
    }
}

/// Compares the tensors of a version with those of the version that the same start of an engine accepted before. An additional tensor is no
/// fault: the earlier version may have lacked it. `tied` is that of [`Fit::Unchecked`].
///
/// # Errors
///
/// Missing tensors, and those with another shape or an element type that does not represent the same numbers.
pub fn same_tensors(
    (version, before): (Version, &[TensorSpec]),
    offered: &[TensorSpec],
    ignored: &IgnoredTensors,
    tied: bool,
) -> Result<(), EngineError> {
    let full = |tensors: &[TensorSpec]| -> Vec<TensorSpec> {
        tensors.iter().map(|tensor| TensorSpec { name: tensor.full_name().into_owned(), ..tensor.clone() }).collect()
    };
    let model = Model::tied(tied);
    let faults = Faults::of(&full(before), &full(offered), &Excuses { ignored, model: &model, twin: &|_| tied });
    Faults { unknown: Vec::new(), ..faults }.none().map_err(|what| EngineError::Unsupported {
        what: format!("the version has not all tensors of version {version}, which the engine took before: it {what}"),
        next_step: format!("publish all tensors, restart the engine where the version before was wrong, {WAY_OUT}"),
    })
}

/// Compares with parameters of a server under its own names: what it has no parameter for, it does not take.
pub(super) fn compare_parameters(parameters: &[TensorSpec], version: &[TensorSpec], ignored: &IgnoredTensors) -> Result<(), EngineError> {
    let excuses = Excuses { ignored, model: &Model::default(), twin: &|_| false };
    Faults::of(parameters, version, &excuses).none().map_err(misfit)
}

fn misfit(what: String) -> EngineError {
    EngineError::Unsupported {
        what: format!("the version does not fit the checkpoint that the engine was started with: it {what}"),
        next_step: format!(
            "publish all tensors under their checkpoint names, start the engine from a checkpoint of the same model, {WAY_OUT}"
        ),
    }
}

fn open(served: &Path) -> Result<Checkpoint, String> {
    Checkpoint::open_as_engines_do(served).map_err(|cause| format!("the engine's checkpoint {} cannot be read: {cause}", served.display()))
}

/// What the comparison passes over.
struct Excuses<'a> {
    ignored: &'a IgnoredTensors,
    model: &'a Model,
    /// Whether the tensor of the engine's files has the values of an embedding in them.
    twin: &'a dyn Fn(&str) -> bool,
}

/// A tensor without its name.
type Kind = (Vec<u64>, Dtype);

/// The differences between two sets of tensors.
struct Faults {
    missing: Vec<String>,
    unknown: Vec<String>,
    reshaped: Vec<String>,
    retyped: Vec<String>,
    /// Missing, and named by the user.
    passed_over: Vec<String>,
    /// Missing, and used for drafts only.
    next_n: Vec<String>,
    /// In a type with fewer bits.
    coarser: Vec<String>,
}

impl Faults {
    fn of(needed: &[TensorSpec], offered: &[TensorSpec], excuses: &Excuses<'_>) -> Self {
        let by_name = |tensors: &'_ [TensorSpec]| -> BTreeMap<String, Kind> {
            tensors.iter().map(|tensor| (tensor.name.clone(), (tensor.shape.clone(), tensor.dtype))).collect()
        };
        let (needed, offered) = (by_name(needed), by_name(offered));
        let model = excuses.model;
        let is_there = |name: &str| needed.contains_key(name) || offered.contains_key(name);
        let is_of_next_n = |name: &str| model.is_of_next_n(name, &is_there);
        let predicts = model.predicts() || needed.keys().any(|name| is_of_next_n(name));
        let has_head = needed.keys().any(|name| heads::is_head(name));
        // Its own loader skips it, or has no need of it.
        let spared = |name: &str, shape: &[u64]| {
            buffers::is_buffer(name, shape) || heads::is_head(name) && model.tie == Tie::Yes && (excuses.twin)(name)
        };
        // An engine that was started without a head has none of its own, unless flags say that it must.
        let skipped = |name: &str| {
            let head = || heads::is_head(name) && (model.tie == Tie::Yes || model.tie == Tie::Doubtful && !has_head);
            buffers::is_rotary(name) || predicts && is_of_next_n(name) || head()
        };
        let ignored = |name: &str| excuses.ignored.matches(name);
        let lacking = needed.iter().filter(|(name, _)| !offered.contains_key(*name));
        let unknown = offered.keys().filter(|name| !needed.contains_key(*name) && !skipped(name) && !ignored(name));
        let both = || {
            let counts = |name: &str, shape: &[u64]| !buffers::is_buffer(name, shape);
            let pairs = needed.iter().filter_map(|(name, needed)| Some((name, offered.get(name)?, needed)));
            pairs.filter(move |(name, _, (shape, _))| counts(name, shape))
        };
        let retyped = both().filter(|(_, (_, offered), (_, needed))| !converts(*offered, *needed));
        let coarser = both().filter(|(_, (_, offered), (_, needed))| {
            converts(*offered, *needed) && bits(*offered).zip(bits(*needed)).is_some_and(|(offered, needed)| offered < needed)
        });
        let types =
            |(name, (_, offered), (_, needed)): (&String, &Kind, &Kind)| format!("{name} ({}, not {})", offered.name(), needed.name());
        let mut missing = Vec::new();
        let mut passed_over = Vec::new();
        let mut next_n = Vec::new();
        for (name, (shape, _)) in lacking {
            if ignored(name) {
                passed_over.push(name.clone());
            } else if is_of_next_n(name) {
                next_n.push(name.clone());
            } else if !spared(name, shape) {
                missing.push(name.clone());
            }
        }
        Self {
            missing,
            unknown: unknown.cloned().collect(),
            reshaped: both()
                .filter(|(_, (offered, _), (needed, _))| offered != needed)
                .map(|(name, (offered, _), (needed, _))| format!("{name} ({offered:?}, not {needed:?})"))
                .collect(),
            retyped: retyped.map(types).collect(),
            passed_over,
            next_n,
            coarser: coarser.map(types).collect(),
        }
    }

    /// What is worth a look although it is no fault.
    fn notes(&self) -> Vec<String> {
        let note = |what: &str, names: &[String]| (!names.is_empty()).then(|| format!("{what}: {}", first(names)));
        [
            note("tensors come in less precision than the engine's checkpoint has", &self.coarser),
            note("the version lacks tensors that engine.tensors.ignore names, so the engine keeps its own", &self.passed_over),
            note("the version lacks layers that predict further tokens, so an engine that drafts with them keeps its own", &self.next_n),
        ]
        .into_iter()
        .flatten()
        .collect()
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
    offered == needed || bits(offered).is_some() && bits(needed).is_some()
}

/// Bits of a plain float.
fn bits(dtype: Dtype) -> Option<u32> {
    match dtype {
        Dtype::F16 | Dtype::BF16 => Some(16),
        Dtype::F32 => Some(32),
        Dtype::F64 => Some(64),
        _ => None,
    }
}

fn first(names: &[String]) -> String {
    let shown = names.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(NAMED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests;

//! The weights that a simulated engine serves: digests of the bytes that it really read.
//!
//! Decides what a load does to them, tensor by tensor and in the order of the files, as engines do: one that fails in the middle leaves
//! a mixture, and one that lacks a tensor leaves the old one in place without a word (both seen on vLLM 0.32). Keeps digests, no bytes.

use std::collections::BTreeMap;
use std::path::Path;

use xxhash_rust::xxh3::{Xxh3Default, xxh3_128};

use super::faults::LoadFault;
use super::tensors::{Nan, Taken};
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_core::weights::{Dtype, digest_hex};

/// Bytes read at once.
const PART: usize = 1 << 20;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Parameter {
    dtype: Dtype,
    shape: Vec<u64>,
    digest: u128,
    /// Whether it holds nothing but NaN.
    nan: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Served(BTreeMap<String, Parameter>);

#[derive(Debug, thiserror::Error)]
pub(super) enum LoadError {
    /// Nothing was touched.
    #[error("{0}")]
    Unreadable(String),
    /// Some parameters are new already.
    #[error("{0}")]
    Halfway(String),
    /// As `Halfway`, and the engine has kept a tensor that does not fit.
    #[error("{0}")]
    Misfit(String),
    /// A tensor that the model does not have. vLLM 0.32 takes the next whole load all the same (run).
    #[error("{0}")]
    Unknown(String),
}

impl Served {
    /// What a server starts with: the safetensors files that engines load. Without one, `pytorch_model.bin` stands for pickle, which engines
    /// load and this project never reads: it is a safetensors file under that name.
    pub(super) fn open(directory: &Path) -> Result<Self, String> {
        match (Checkpoint::open_as_engines_do(directory), directory.join("pytorch_model.bin")) {
            (Ok(checkpoint), _) => Ok(Self::of(taken(&checkpoint)?)),
            (Err(_), bin) if bin.is_file() => Self::of_files(std::iter::once(bin.as_path())),
            (Err(error), _) => Err(error.to_string()),
        }
    }

    /// What a server starts with that reads these files.
    pub(super) fn of_files<'a>(files: impl Iterator<Item = &'a Path>) -> Result<Self, String> {
        let read: Vec<_> = files.map(read_file).collect::<Result<_, _>>()?;
        Ok(Self::of(read.into_iter().flatten().collect()))
    }

    fn of(tensors: Vec<Taken>) -> Self {
        let parameter = |Taken { name, dtype, shape, digest, nan }| (name, Parameter { dtype, shape, digest, nan });
        Self(tensors.into_iter().map(parameter).collect())
    }

    /// Reads a directory and replaces parameters. Blocks; `unknown_is_error` as the engine has it.
    pub(super) fn load(&mut self, directory: &Path, fault: Option<LoadFault>, unknown_is_error: bool) -> Result<(), LoadError> {
        if fault == Some(LoadFault::AcknowledgeUnread) {
            return Ok(());
        }
        let checkpoint = Checkpoint::open(directory).map_err(|error| LoadError::Unreadable(error.to_string()))?;
        let half = checkpoint.tensors().len() / 2;
        for (index, tensor) in checkpoint.tensors().iter().enumerate() {
            if index == half && matches!(fault, Some(LoadFault::FailHalfway | LoadFault::FailHalfwayOnce)) {
                return Err(LoadError::Halfway("out of memory".to_owned()));
            }
            let name = &tensor.spec.name;
            let Some(parameter) = self.0.get_mut(name) else {
                if unknown_is_error {
                    return Err(LoadError::Unknown(format!("There is no module or parameter named '{name}' in Qwen3Model")));
                }
                continue;
            };
            if parameter.shape != tensor.spec.shape {
                return Err(LoadError::Misfit(format!("shape {:?} of {name} is not {:?}", tensor.spec.shape, parameter.shape)));
            }
            let (read, nan) = look(&checkpoint, index, tensor.bytes).map_err(LoadError::Halfway)?;
            match fault {
                Some(LoadFault::SkipTensor) if index == 0 => {}
                Some(LoadFault::Corrupt) if index == 0 => parameter.digest = read ^ 1,
                _ => {
                    (parameter.digest, parameter.nan) = (read, nan);
                    parameter.dtype = tensor.spec.dtype;
                }
            }
        }
        Ok(())
    }

    /// Replaces one parameter by what was handed over; `first` of an update is the one that faults hit. Unknown names are passed over, as
    /// most engines' loaders do.
    pub(super) fn take(&mut self, tensor: Taken, fault: Option<LoadFault>, first: bool) -> Result<(), String> {
        if fault == Some(LoadFault::AcknowledgeUnread) {
            return Ok(());
        }
        let Some(parameter) = self.0.get_mut(&tensor.name) else { return Ok(()) };
        if parameter.shape != tensor.shape {
            return Err(format!("AssertionError: shape {:?} of {} is not {:?}", tensor.shape, tensor.name, parameter.shape));
        }
        match fault {
            Some(LoadFault::SkipTensor) if first => {}
            Some(LoadFault::Corrupt) if first => parameter.digest = tensor.digest ^ 1,
            _ => *parameter = Parameter { dtype: tensor.dtype, shape: tensor.shape, digest: tensor.digest, nan: tensor.nan },
        }
        Ok(())
    }

    /// No parameter holds anything.
    pub(super) fn clear(&mut self) {
        self.0.values_mut().for_each(|parameter| (parameter.digest, parameter.nan) = (0, false));
    }

    /// Whether a tensor has the type and shape of its parameter; one without a parameter has both.
    pub(super) fn matches(&self, tensor: &Taken) -> Result<(), String> {
        let Some(parameter) = self.0.get(&tensor.name) else { return Ok(()) };
        if parameter.dtype != tensor.dtype {
            return Err(format!("Type mismatch for {}: {:?} vs {:?}", tensor.name, tensor.dtype, parameter.dtype));
        }
        if parameter.shape != tensor.shape {
            return Err(format!("Shape mismatch for {}: {:?} vs {:?}", tensor.name, tensor.shape, parameter.shape));
        }
        Ok(())
    }

    /// As [`matches`](Self::matches), and there must be a parameter.
    pub(super) fn knows(&self, tensor: &Taken) -> Result<(), String> {
        if self.0.contains_key(&tensor.name) { self.matches(tensor) } else { Err(format!("{} not in old_state_dict", tensor.name)) }
    }

    /// Digest of all that is served: names, types, shapes and bytes.
    pub(super) fn digest(&self) -> u128 {
        let mut hasher = Xxh3Default::new();
        for (name, parameter) in &self.0 {
            hasher.update(format!("{name}\0{:?}\0{:?}\0", parameter.dtype, parameter.shape).as_bytes());
            hasher.update(&parameter.digest.to_le_bytes());
        }
        hasher.digest128()
    }

    /// Whether everything that is computed with it is NaN.
    pub(super) fn computes_nan(&self) -> bool {
        self.0.values().any(|parameter| parameter.nan)
    }

    /// xxh3-128 (hex) of each tensor's bytes, by name.
    pub(super) fn tensors(&self) -> BTreeMap<String, String> {
        self.0.iter().map(|(name, parameter)| (name.clone(), digest_hex(parameter.digest))).collect()
    }
}

pub(super) fn read_file(path: &Path) -> Result<Vec<Taken>, String> {
    taken(&Checkpoint::open(path).map_err(|error| error.to_string())?)
}

fn taken(checkpoint: &Checkpoint) -> Result<Vec<Taken>, String> {
    let tensors = checkpoint.tensors().iter().enumerate();
    let taken = tensors.map(|(index, tensor)| {
        let (digest, nan) = look(checkpoint, index, tensor.bytes)?;
        Ok(Taken { name: tensor.spec.name.clone(), dtype: tensor.spec.dtype, shape: tensor.spec.shape.clone(), digest, nan })
    });
    taken.collect()
}

/// xxh3-128 of the bytes of one tensor, read a part at a time, and whether they are nothing but NaN.
fn look(checkpoint: &Checkpoint, index: usize, bytes: u64) -> Result<(u128, bool), String> {
    let mut hasher = Xxh3Default::new();
    let dtype = checkpoint.tensors().get(index).map_or(Dtype::U8, |tensor| tensor.spec.dtype);
    let mut nan = Nan::new(dtype);
    let mut part = vec![0; usize::try_from(bytes).unwrap_or(PART).min(PART)];
    if part.is_empty() {
        return Ok((xxh3_128(&[]), false));
    }
    let mut offset = 0;
    while offset < bytes {
        let length = usize::try_from(bytes - offset).unwrap_or(PART).min(part.len());
        let into = part.get_mut(..length).unwrap_or_default();
        checkpoint.read_tensor(index, offset, into).map_err(|error| error.to_string())?;
        hasher.update(into);
        nan.look(into);
        offset += length as u64;
    }
    Ok((hasher.digest128(), nan.is_all()))
}

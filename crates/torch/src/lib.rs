//! What torch and the engines built on it read: tensors in another process's GPU memory, lists of what lies in a bucket, and the store
//! in which the ranks of a process group find each other.
//!
//! Decides the values of those messages, by the forms that torch 2.9 to 2.15 (`multiprocessing/reductions.py`, `rebuild_cuda_tensor`),
//! checkpoint-engine 0.4.2 (`worker.py`), LMDeploy 0.18 (`utils.py`, `FlattenedTensorBucket`) and SGLang 0.5.23
//! (`srt/weight_sync/tensor_bucket.py`) take. Never loads torch, never reads a pickle, opens no memory. The store is in [`store`].

pub mod counter;
pub mod paddle;
pub mod pickle;
pub mod store;

use self::counter::Counter;
use self::pickle::Value;
use weightsync_core::weights::Dtype;

/// The name of a counter file that does not exist. Readers count down their uses in it if it exists, and ignore it otherwise (torch 2.9 and
/// 2.15): for routes that have a word of their own for "read".
const NO_COUNTER: &[u8] = b"/weightsync_no_counter";

/// The GPU on which a reader opens a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Device {
    /// The reader puts its own device in: vLLM, LMDeploy, checkpoint-engine.
    Readers,
    /// By UUID, with or without `GPU-` in front: SGLang.
    Uuid(String),
}

/// A one-dimensional tensor in GPU memory that another process shares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedTensor {
    /// `cudaIpcMemHandle_t` of the whole allocation. A bare handle, without torch's two bytes in front, is taken by all versions.
    pub handle: [u8; 64],
    /// Where the storage begins in the allocation, in bytes. A reader opens a storage once for each pair of handle and offset.
    pub storage_offset: u64,
    /// Length of the storage in bytes.
    pub storage_bytes: u64,
    /// Number of elements from the start of the storage on.
    pub elements: u64,
    /// Element type; must have a name in torch ([`dtype`]).
    pub dtype: Dtype,
    /// Who says which GPU it is.
    pub device: Device,
    /// What the reader counts down when it has let the tensor go. Where the reader still holds a tensor on the same handle and offset it
    /// counts at once, before it has read anything.
    pub counter: Option<Counter>,
}

/// Where a tensor lies in a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Piece<'a> {
    pub name: &'a str,
    pub dtype: Dtype,
    pub shape: &'a [u64],
    /// First byte, counted from the start of the bucket.
    pub offset: u64,
    pub bytes: u64,
}

/// Why something has no form in torch.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum TorchError {
    #[error("torch has no element type {0:?} that a tensor of this shape could have")]
    NoDtype(Dtype),
    #[error("tensor {name}: byte {offset} is not a multiple of its element size")]
    Unaligned { name: String, offset: u64 },
    #[error("a bucket for this engine holds one element type, tensor {name} is {other:?} and not {dtype:?}")]
    MixedDtypes { name: String, dtype: Dtype, other: Dtype },
}

/// The name of an element type in torch; none for those that torch packs (their shapes differ there).
pub fn dtype(dtype: Dtype) -> Result<Value, TorchError> {
    dtype_name(dtype).map(|name| Value::Global("torch", name)).ok_or(TorchError::NoDtype(dtype))
}

/// `bfloat16` and the like.
pub fn dtype_name(dtype: Dtype) -> Option<&'static str> {
    Some(match dtype {
        Dtype::BOOL => "bool",
        Dtype::F4 | Dtype::F6_E2M3 | Dtype::F6_E3M2 => return None,
        Dtype::U8 => "uint8",
        Dtype::I8 => "int8",
        Dtype::F8_E5M2 => "float8_e5m2",
        Dtype::F8_E4M3 => "float8_e4m3fn",
        Dtype::F8_E8M0 => "float8_e8m0fnu",
        Dtype::F8_E4M3FNUZ => "float8_e4m3fnuz",
        Dtype::F8_E5M2FNUZ => "float8_e5m2fnuz",
        Dtype::I16 => "int16",
        Dtype::U16 => "uint16",
        Dtype::F16 => "float16",
        Dtype::BF16 => "bfloat16",
        Dtype::I32 => "int32",
        Dtype::U32 => "uint32",
        Dtype::F32 => "float32",
        Dtype::C64 => "complex64",
        Dtype::F64 => "float64",
        Dtype::I64 => "int64",
        Dtype::U64 => "uint64",
    })
}

impl SharedTensor {
    /// The arguments of `rebuild_cuda_tensor`, fifteen in this order in torch 2.9 to 2.15.
    pub fn arguments(&self) -> Result<Vec<Value>, TorchError> {
        let device = match &self.device {
            Device::Readers => Value::Int(0),
            Device::Uuid(uuid) => Value::text(uuid.strip_prefix("GPU-").unwrap_or(uuid)),
        };
        let (counter, slot) = match &self.counter {
            Some(counter) => (counter.name.as_bytes().to_vec(), counter.slot),
            None => (NO_COUNTER.to_vec(), 0),
        };
        Ok(vec![
            Value::Global("torch", "Tensor"),
            size(&[self.elements]),
            Value::Tuple(vec![Value::Int(1)]),
            Value::Int(0),
            Value::Global("torch.storage", "TypedStorage"),
            dtype(self.dtype)?,
            device,
            Value::Bytes(self.handle.to_vec()),
            Value::Int(self.storage_bytes),
            Value::Int(self.storage_offset),
            Value::Bool(false),
            Value::Bytes(counter),
            Value::Int(slot),
            // Nothing to wait for: what is named here was complete before it was named.
            Value::Bytes(Vec::new()),
            Value::Bool(false),
        ])
    }

    /// `(rebuild_cuda_tensor, arguments)`: the reader makes the call, after it put its own device in.
    pub fn unbuilt(&self) -> Result<Value, TorchError> {
        Ok(Value::Tuple(vec![REBUILD, Value::Tuple(self.arguments()?)]))
    }

    /// The call itself: the reader finds a tensor.
    fn built(&self) -> Result<Value, TorchError> {
        Ok(Value::Call(Box::new(REBUILD), self.arguments()?))
    }
}

const REBUILD: Value = Value::Global("torch.multiprocessing.reductions", "rebuild_cuda_tensor");

fn size(shape: &[u64]) -> Value {
    let shape = Value::Tuple(shape.iter().map(|size| Value::Int(*size)).collect());
    Value::Call(Box::new(Value::Global("torch", "Size")), vec![shape])
}

/// What lies in a bucket, for checkpoint-engine's worker: a list of dicts of name, dtype, shape and first byte. Offsets count from the
/// start of the shared tensor, so `base` is added to those of the pieces.
pub fn checkpoint_engine_bucket(pieces: &[Piece<'_>], base: u64) -> Result<Value, TorchError> {
    let item = |piece: &Piece<'_>| {
        aligned(piece)?;
        Ok(Value::dict([
            ("name", Value::text(piece.name)),
            ("dtype", dtype(piece.dtype)?),
            ("shape", size(piece.shape)),
            ("offset", Value::Int(base.saturating_add(piece.offset))),
        ]))
    };
    Ok(Value::List(pieces.iter().map(item).collect::<Result<_, _>>()?))
}

/// What LMDeploy's `/update_weights` takes as a flattened bucket: one element type, places in elements. With an event it waits for it
/// before it reads and records it afterwards; `clone` makes it copy the bucket first.
pub fn lmdeploy_bucket(pieces: &[Piece<'_>], tensor: &SharedTensor, event: Option<[u8; 64]>, clone: bool) -> Result<Value, TorchError> {
    let item = |piece: &Piece<'_>| {
        aligned(piece)?;
        if piece.dtype != tensor.dtype {
            let name = piece.name.to_owned();
            return Err(TorchError::MixedDtypes { name, dtype: tensor.dtype, other: piece.dtype });
        }
        let element = piece.dtype.bits() / 8;
        flattened("lmdeploy.utils", piece, piece.offset / element, piece.bytes / element)
    };
    let mut bucket = vec![
        (Value::text("metadata"), Value::List(pieces.iter().map(item).collect::<Result<_, _>>()?)),
        (Value::text("flattened_tensor"), tensor.unbuilt()?),
        (Value::text("require_clone"), Value::Bool(clone)),
    ];
    if let Some(event) = event {
        bucket.push((Value::text("event_ipc_handle"), Value::Bytes(event.to_vec())));
    }
    Ok(Value::Dict(bucket))
}

/// A flattened bucket for LMDeploy that holds nothing: for the call that only finishes.
pub fn lmdeploy_nothing() -> Value {
    Value::dict([("metadata", Value::List(Vec::new()))])
}

/// What SGLang's `/update_weights_from_tensor` takes as a flattened bucket: a uint8 tensor, places in bytes.
pub fn sglang_bucket(pieces: &[Piece<'_>], tensor: &SharedTensor) -> Result<Value, TorchError> {
    let item = |piece: &Piece<'_>| {
        aligned(piece)?;
        flattened("sglang.srt.weight_sync.tensor_bucket", piece, piece.offset, piece.bytes)
    };
    let metadata = Value::List(pieces.iter().map(item).collect::<Result<_, _>>()?);
    Ok(Value::dict([("flattened_tensor", tensor.built()?), ("metadata", metadata)]))
}

/// `FlattenedTensorMetadata`, a dataclass of the same fields in both engines. `numel` is in elements in both.
fn flattened(module: &'static str, piece: &Piece<'_>, start: u64, length: u64) -> Result<Value, TorchError> {
    let elements = piece.shape.iter().product();
    let state = vec![
        ("name", Value::text(piece.name)),
        ("shape", size(piece.shape)),
        ("dtype", dtype(piece.dtype)?),
        ("start_idx", Value::Int(start)),
        ("end_idx", Value::Int(start.saturating_add(length))),
        ("numel", Value::Int(elements)),
    ];
    Ok(Value::Instance(Box::new(Value::Global(module, "FlattenedTensorMetadata")), state))
}

/// A piece that torch can view in place.
fn aligned(piece: &Piece<'_>) -> Result<(), TorchError> {
    let element = piece.dtype.bits() / 8;
    if element > 0 && piece.offset.is_multiple_of(element) {
        return Ok(());
    }
    Err(TorchError::Unaligned { name: piece.name.to_owned(), offset: piece.offset })
}

#[cfg(test)]
mod tests;

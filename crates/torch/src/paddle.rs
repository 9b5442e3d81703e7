//! What PaddlePaddle reads: a flat buffer in another process's GPU memory, and the message that names it and what lies in it.
//!
//! The buffer is Paddle's own list of seven (`_share_cuda`, `paddle/fluid/pybind/tensor.cc`): handle, offset, bytes, element type, dimensions,
//! level of detail, device. The handle is *text*, each byte a character of Latin-1, because a message of pickled bytes did not pass where
//! FastDeploy first used it; FastDeploy #7472 (`receive_all_buckets`) turns it back with `encode("latin-1")`. That thread shows the handle, the
//! device and that each parameter is a view of a uint8 buffer that is cloned; the names of the other fields are ours.

use super::pickle::Value;
use super::{Piece, TorchError, aligned};
use weightsync_core::weights::Dtype;

/// `phi::DataType::UINT8`.
const UINT8: u64 = 2;

/// A buffer of bytes in GPU memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedBuffer {
    /// `cudaIpcMemHandle_t` of the whole allocation.
    pub handle: [u8; 64],
    /// First byte of the buffer in the allocation.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// The *reader's* number of the GPU. The message contains it, so that no environment variable of the reader decides it.
    pub device: u64,
}

impl SharedBuffer {
    /// The list of seven.
    fn meta(&self) -> Value {
        let handle: String = self.handle.iter().copied().map(char::from).collect();
        Value::List(vec![
            Value::text(handle),
            Value::Int(self.offset),
            Value::Int(self.bytes),
            Value::Int(UINT8),
            Value::List(vec![Value::Int(self.bytes)]),
            Value::List(Vec::new()),
            Value::Int(self.device),
        ])
    }
}

/// `bfloat16` and the like; none for what Paddle 3 has no name for.
pub fn dtype_name(dtype: Dtype) -> Option<&'static str> {
    Some(match dtype {
        Dtype::BOOL => "bool",
        Dtype::U8 => "uint8",
        Dtype::I8 => "int8",
        Dtype::F8_E5M2 => "float8_e5m2",
        Dtype::F8_E4M3 => "float8_e4m3fn",
        Dtype::I16 => "int16",
        Dtype::F16 => "float16",
        Dtype::BF16 => "bfloat16",
        Dtype::I32 => "int32",
        Dtype::F32 => "float32",
        Dtype::I64 => "int64",
        Dtype::F64 => "float64",
        Dtype::C64 => "complex64",
        _ => return None,
    })
}

/// One bucket: the buffer, and each parameter's name, element type, shape and first byte.
pub fn bucket(pieces: &[Piece<'_>], buffer: &SharedBuffer) -> Result<Value, TorchError> {
    let item = |piece: &Piece<'_>| {
        aligned(piece)?;
        let dtype = dtype_name(piece.dtype).ok_or(TorchError::NoDtype(piece.dtype))?;
        let shape = piece.shape.iter().map(|size| Value::Int(*size)).collect();
        Ok(Value::dict([
            ("name", Value::text(piece.name)),
            ("dtype", Value::text(dtype)),
            ("shape", Value::List(shape)),
            ("offset", Value::Int(piece.offset)),
        ]))
    };
    let params = pieces.iter().map(item).collect::<Result<_, _>>()?;
    Ok(Value::dict([("buffer_meta", buffer.meta()), ("params", Value::List(params))]))
}

/// The message after which the reader gives up, with the reason.
pub fn failure(reason: &str) -> Value {
    Value::dict([("error", Value::text(reason))])
}

/// What the name of a snapshot file of FastDeploy says (`model_state.tp{rank}.{gpu}.pdparams`, `fastdeploy/rl/dynamic_weight_manager.py`):
/// the base, and the number of the part if it is one.
pub fn snapshot_name(name: &str) -> Option<(String, Option<u32>)> {
    let inner = name.strip_prefix("model_state.tp")?.strip_suffix(".pdparams")?;
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let mut words = inner.split('.');
    let base = |words: &[&str]| format!("model_state.tp{}", words.join("."));
    match (words.next(), words.next(), words.next(), words.next()) {
        // Legacy: tp0 and the GPU in one word.
        (Some(both), None, ..) if number(both) && both.starts_with('0') && both.len() > 1 => Some((base(&[both]), None)),
        (Some(rank), Some(gpu), None, _) if number(rank) && number(gpu) => Some((base(&[rank, gpu]), None)),
        (Some(rank), Some(gpu), Some(part), None) if number(rank) && number(gpu) => {
            let part = part.strip_prefix("part").filter(|part| number(part))?.parse().ok()?;
            Some((base(&[rank, gpu]), Some(part)))
        }
        _ => None,
    }
}

/// Whether the base of a snapshot's name is the older form, which the server looks for last.
pub fn is_legacy_snapshot(base: &str) -> bool {
    base.matches('.').count() < 2
}

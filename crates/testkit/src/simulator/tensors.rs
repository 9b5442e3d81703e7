//! Tensors that are named in a message and lie in memory of another process: what a simulated worker makes of a bucket.
//!
//! Decides by the values alone, as torch and the engines do, and digests the bytes that it really found there.

use xxhash_rust::xxh3::xxh3_128;

use super::memory::{GpuMemory, Opened};
use weightsync_core::weights::Dtype;
use weightsync_torch::dtype_name;
use weightsync_torch::pickle::Value;

#[derive(Debug, Clone)]
pub(super) struct Taken {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) digest: u128,
    /// Whether it holds nothing but NaN.
    pub(super) nan: bool,
}

impl Taken {
    /// What was read at once.
    pub(super) fn of(name: String, dtype: Dtype, shape: Vec<u64>, bytes: &[u8]) -> Self {
        let mut nan = Nan::new(dtype);
        nan.look(bytes);
        Self { name, dtype, shape, digest: xxh3_128(bytes), nan: nan.is_all() }
    }
}

/// Looks whether a tensor holds nothing but NaN. One NaN is enough to spoil a real model; test weights are random bits, of which some are one.
pub(super) struct Nan {
    dtype: Dtype,
    seen: bool,
    other: bool,
}

impl Nan {
    /// Nothing was looked at.
    pub(super) fn new(dtype: Dtype) -> Self {
        Self { dtype, seen: false, other: false }
    }

    /// Looks at the next part, which ends where an element does.
    pub(super) fn look(&mut self, part: &[u8]) {
        self.seen |= !part.is_empty();
        if !self.other {
            let bytes = usize::try_from(self.dtype.bits() / 8).unwrap_or(1).max(1);
            self.other = !part.chunks(bytes).all(|element| is_nan(self.dtype, element));
        }
    }

    pub(super) fn is_all(&self) -> bool {
        self.seen && !self.other
    }
}

fn is_nan(dtype: Dtype, element: &[u8]) -> bool {
    match (dtype, element) {
        (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]).is_nan(),
        (Dtype::BF16, &[a, b]) => f32::from_le_bytes([0, 0, a, b]).is_nan(),
        (Dtype::F16, &[a, b]) => u16::from_le_bytes([a, b]) & 0x7fff > 0x7c00,
        (Dtype::F64, &[a, b, c, d, e, f, g, h]) => f64::from_le_bytes([a, b, c, d, e, f, g, h]).is_nan(),
        _ => false,
    }
}

/// A one-dimensional tensor on a given storage.
#[derive(Debug)]
pub(super) struct Rebuilt {
    memory: Opened,
    /// First byte in the memory, and length.
    start: u64,
    bytes: u64,
    pub(super) dtype: Dtype,
}

impl Rebuilt {
    /// `(rebuild_cuda_tensor, arguments)`, or the call of it.
    pub(super) fn from(value: &Value, memory: &GpuMemory) -> Result<Self, String> {
        let arguments = match value {
            Value::Tuple(parts) => match parts.as_slice() {
                [function, Value::Tuple(arguments)] if is_rebuild(function) => arguments,
                _ => return Err("not (rebuild_cuda_tensor, args)".into()),
            },
            Value::Call(function, arguments) if is_rebuild(function) => arguments,
            _ => return Err("not a tensor".into()),
        };
        Self::from_arguments(arguments, memory)
    }

    /// The arguments of `rebuild_cuda_tensor` alone.
    pub(super) fn from_arguments(arguments: &[Value], memory: &GpuMemory) -> Result<Self, String> {
        let [_, Value::Call(_, size), _, Value::Int(0), _, dtype, _, Value::Bytes(handle), Value::Int(storage), Value::Int(offset), ..] =
            arguments
        else {
            return Err("rebuild_cuda_tensor() takes other arguments".into());
        };
        if arguments.len() != 15 {
            return Err(format!("rebuild_cuda_tensor() takes 15 positional arguments but {} were given", arguments.len()));
        }
        let [Value::Tuple(size)] = size.as_slice() else { return Err("a size".into()) };
        let [Value::Int(elements)] = size.as_slice() else { return Err("one dimension".into()) };
        let dtype = element(dtype)?;
        let bytes = elements.saturating_mul(dtype.bits() / 8);
        if bytes > *storage {
            return Err(format!("setStorage: sizes [{elements}] are out of bounds for storage of size {storage}"));
        }
        Ok(Self { memory: memory.open(handle)?, start: *offset, bytes, dtype })
    }

    /// A clone of it in the worker's own memory.
    pub(super) fn cloned(self) -> Result<Self, String> {
        Ok(Self { memory: self.memory.copy()?, ..self })
    }

    /// A tensor in it, from a byte on.
    pub(super) fn tensor(&self, name: &str, dtype: Dtype, shape: Vec<u64>, offset: u64) -> Result<Taken, String> {
        let bytes = dtype.tensor_bytes(&shape).map_err(|_| "a shape".to_owned())?;
        if offset.saturating_add(bytes) > self.bytes {
            return Err(format!("shape '{shape:?}' is invalid for input"));
        }
        if !offset.is_multiple_of((dtype.bits() / 8).max(1)) {
            return Err("storage_offset must be divisible by the element size".into());
        }
        let read = self.memory.read(self.start.saturating_add(offset), bytes)?;
        Ok(Taken::of(name.to_owned(), dtype, shape, &read))
    }
}

fn is_rebuild(function: &Value) -> bool {
    matches!(function, Value::Global("torch.multiprocessing.reductions", "rebuild_cuda_tensor"))
}

pub(super) fn field<'a>(dict: &'a Value, name: &str) -> Result<&'a Value, String> {
    let found = match dict {
        Value::Dict(items) => items.iter().find(|(key, _)| *key == Value::text(name)).map(|(_, value)| value),
        Value::Instance(_, state) => state.iter().find(|(key, _)| *key == name).map(|(_, value)| value),
        _ => None,
    };
    found.ok_or_else(|| format!("KeyError: '{name}'"))
}

pub(super) fn text<'a>(dict: &'a Value, name: &str) -> Result<&'a str, String> {
    match field(dict, name)? {
        Value::Text(text) => Ok(text),
        _ => Err(format!("{name} is not str")),
    }
}

pub(super) fn number(dict: &Value, name: &str) -> Result<u64, String> {
    match field(dict, name)? {
        Value::Int(number) => Ok(*number),
        _ => Err(format!("{name} is not int")),
    }
}

/// `torch.bfloat16` and the like.
pub(super) fn element(value: &Value) -> Result<Dtype, String> {
    let Value::Global("torch", name) = value else { return Err("not a torch.dtype".into()) };
    Dtype::ALL.into_iter().find(|dtype| dtype_name(*dtype) == Some(name)).ok_or_else(|| format!("torch has no {name}"))
}

/// `torch.Size`, a tuple or a list.
pub(super) fn shape(value: &Value) -> Result<Vec<u64>, String> {
    let sizes = match value {
        Value::Call(_, arguments) => return arguments.first().map_or_else(|| Err("a size".into()), shape),
        Value::Tuple(sizes) | Value::List(sizes) => sizes,
        _ => return Err("not a shape".into()),
    };
    sizes.iter().map(|size| if let Value::Int(size) = size { Ok(*size) } else { Err("not a shape".to_owned()) }).collect()
}

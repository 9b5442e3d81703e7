//! How the tensors of a version lie in one run of bytes, and where that run is cut into buckets.
//!
//! The run ("stream") is the tensors in the order given, each at the next multiple of [`ALIGNMENT`]; the gaps are zero.
//! A bucket is a contiguous part of the stream, so one tensor may span several buckets and a bucket may hold many tensors.
//! Decides offsets and cuts only; it never looks at a value and never allocates by a number that it was given.

use serde::{Deserialize, Serialize};

use super::Dtype;

/// Every tensor starts at a multiple of this many bytes, so that any element type can be read in place.
pub const ALIGNMENT: u64 = 64;

/// A tensor as a trainer names it: no place yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Name that the engine knows the parameter by (checkpoint name).
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, in elements; empty for a scalar.
    pub shape: Vec<u64>,
    /// Tensors with the same load unit are loaded together by the engine (q, k, v of one fused layer).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_unit: Option<String>,
}

/// How an entry's bytes become the tensor. Only plain bytes today; deltas and quantised forms would be added here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Encoding {
    /// The tensor's elements, little-endian, row-major.
    #[default]
    Plain,
}

/// A tensor with its place in the stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// What the tensor is.
    #[serde(flatten)]
    pub tensor: TensorSpec,
    /// How its bytes become the tensor.
    #[serde(default)]
    pub encoding: Encoding,
    /// First byte in the stream.
    pub offset: u64,
    /// Length in bytes; 0 for a tensor with a zero dimension.
    pub bytes: u64,
}

/// A contiguous part of the stream, moved in one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bucket {
    /// Position in the order of sending, from 0.
    pub sequence: u32,
    /// First byte in the stream.
    pub offset: u64,
    /// Length in bytes, at least 1.
    pub bytes: u64,
}

/// All tensors of one artifact with their places, and the size of a bucket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Layout {
    /// Which artifact of the model this is; `model` today, an adapter or a draft model one day.
    pub artifact: String,
    /// Tensors in stream order.
    pub entries: Vec<Entry>,
    /// Length of the stream in bytes.
    pub total_bytes: u64,
    /// Length of every bucket but the last, in bytes.
    pub bucket_bytes: u64,
}

/// Why a list of tensors cannot be laid out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum LayoutError {
    #[error("tensor {name}: its size does not fit 64 bits")]
    TooLarge { name: String },
    #[error("tensor {name}: {bits} bits do not fill whole bytes")]
    PartialByte { name: String, bits: u64 },
    #[error("tensor {name} appears twice")]
    Duplicate { name: String },
    #[error("a bucket must hold at least {ALIGNMENT} bytes, {bytes} were asked for")]
    BucketTooSmall { bytes: u64 },
    #[error("{buckets} buckets are more than a sequence number can count: choose larger buckets")]
    TooManyBuckets { buckets: u64 },
    #[error("layout is not what its tensors say: {what}")]
    Inconsistent { what: String },
}

//! The safetensors format: reading checkpoints of one or many files, and planning files that are written as their bytes arrive.
//!
//! Format (safetensors 0.7, README "Format"): u64 little-endian length of the header, the header as a JSON object, the tensors. It never
//! reads pickle, never trusts a length before it is compared with the file's, and never shows a tensor's contents.

mod checkpoint;
mod error;
mod header;
mod index;
mod plan;

pub use checkpoint::{Checkpoint, CheckpointTensor, FileStamp};
pub use error::SafetensorsError;
pub use header::{Header, HeaderTensor, MAX_HEADER_BYTES, header_length, parse_header};
pub use index::{MAX_INDEX_BYTES, parse_index};
pub use plan::{PlannedFile, SafetensorsPlan, Segment};

/// Name of the only file of a checkpoint that is not sharded (transformers: `SAFE_WEIGHTS_NAME`).
pub const SINGLE_FILE: &str = "model.safetensors";
/// Name of the index of a sharded checkpoint (transformers: `SAFE_WEIGHTS_INDEX_NAME`).
pub const INDEX_FILE: &str = "model.safetensors.index.json";

//! Messages about GPU memory between a trainer and its agent: parts of [`super::ClientRequest`] and [`super::ClientReply`].
//!
//! The memory is the agent's worker's: one block, made by the worker, opened by the trainer through a CUDA IPC handle, and used again for
//! every version. A trainer's own allocations are never shared, so it does not matter how its allocator makes them
//! (`expandable_segments`, a pluggable allocator). Before a tensor is written, both sides prove that they mean the same memory: the trainer
//! writes the agent's random bytes at the end of the block, and the worker reads them there.
//!
//! Order: `publish` with [`GpuOffer`] -> `ring` with [`GpuRing`] -> `opened` or `unopened` -> `ready`, or a second `ring` in host memory with
//! the reason. A ring that was opened on this connection before is announced as `proven`, and nothing is to be answered.

use serde::{Deserialize, Serialize};

/// What a trainer has, so that its agent can offer memory on the same GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuOffer {
    /// GPUs on which its tensors lie, most bytes first, as the driver names them (`GPU-` or, for a slice, `MIG-`, and a UUID).
    pub gpus: Vec<String>,
    /// Version of torch, for logs.
    pub torch: String,
    /// Whether torch's allocator uses expandable segments. No obstacle here; logged, because it is one for every export of torch's own
    /// memory.
    pub expandable_segments: bool,
    /// Inode of the trainer's PID namespace, where it can be read. Legacy CUDA IPC does not cross PID namespaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid_namespace: Option<u64>,
}

/// A ring in GPU memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuRing {
    /// Its number: another block has another one, for as long as the agent lives.
    pub ring: u64,
    /// The GPU that it lies on.
    pub gpu: String,
    /// The 64 bytes of a `CUipcMemHandle` (base64); it names the start of the block.
    pub handle: String,
    /// Length of the block, at least slots x slot bytes.
    pub bytes: u64,
    /// Random bytes (base64), to be written at the very end of the last slot.
    pub check: String,
    /// Whether it was opened and proven on this connection before: buckets may be written at once.
    pub proven: bool,
}

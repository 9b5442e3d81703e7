//! Messages about GPU memory between a trainer and its agent: parts of [`super::ClientRequest`] and [`super::ClientReply`].
//!
//! The memory belongs to the agent's worker: one block, made by the worker, opened by the trainer through a CUDA IPC handle, and reused for
//! every version. A trainer's own allocations are never shared, so its allocator does not matter (`expandable_segments`, a pluggable
//! allocator). Before a tensor is written, both sides prove that they use the same memory: the trainer writes the agent's random bytes at
//! the end of the block, and the worker reads them there.
//!
//! Order: `publish` with [`GpuOffer`] -> `ring` with [`GpuRing`] -> `opened` or `unopened` -> `ready`, or a second `ring` in host memory
//! with the reason. A ring that was opened on this connection before is announced as `proven`, and needs no reply.

use serde::{Deserialize, Serialize};

/// The trainer's GPUs, so that its agent can offer memory on one of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuOffer {
    /// GPUs of its tensors, most bytes first, with the driver's names (`GPU-` or, for a slice, `MIG-`, and a UUID).
    pub gpus: Vec<String>,
    /// Version of torch, for logs.
    pub torch: String,
    /// Whether torch's allocator uses expandable segments. Logged only: it prevents exports of torch's own memory, but not this.
    pub expandable_segments: bool,
    /// Inode of the trainer's PID namespace, where it can be read. Legacy CUDA IPC does not cross PID namespaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid_namespace: Option<u64>,
}

/// A ring in GPU memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuRing {
    /// Number of the block; another block of the same agent has another number.
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

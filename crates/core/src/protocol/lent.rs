//! Messages about memory between the source and a member on its GPU: NCCL refuses two ranks on one GPU, so such a member opens the source's
//! ring by CUDA IPC and copies each bucket from there.
//!
//! The handle travels in [`LendRequest`] only, over mutual TLS. Events are not shared: a piece is announced when the source's GPU has
//! written it, and its slot is written again only when the borrower reported that its own copy ended.

use serde::{Deserialize, Serialize};

use super::worker::IpcHandle;
use super::{BucketHeader, EpochId};

/// Memory of the source's worker, and how the process that opens it can verify it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LentMemory {
    /// The GPU that it lies on (`GPU-` and the UUID).
    pub gpu: String,
    /// What another process on the same host opens it with.
    pub handle: IpcHandle,
    /// Slots in it, back to back.
    pub slots: u32,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// Random bytes (base64), [`LentMemory::CHECK_BYTES`] of them, that the lender wrote at `check_at`.
    pub check: String,
    /// Where they are, in bytes from the start.
    pub check_at: u64,
    /// Inode of the lender's PID namespace, where it can be read. CUDA IPC does not cross PID namespaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid_namespace: Option<u64>,
}

impl LentMemory {
    /// Length of the check.
    pub const CHECK_BYTES: usize = 64;
}

/// Asks a member without a rank to open the source's ring (`POST /v1/epoch/lend`, over mutual TLS, from the agent that proves the epoch).
/// It answers `null` when it opened it and found the check there; a refusal says why its bytes must come over a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LendRequest {
    /// The epoch.
    pub id: EpochId,
    /// The memory; open until the epoch ends.
    pub memory: LentMemory,
    /// Answer within this long.
    pub deadline_ms: u64,
}

/// A piece of the bucket that was announced last: it lies in a slot of the lent memory. 24 bytes on the wire, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LentPiece {
    /// Counts the pieces of a stream, from 0: what the borrower says when it has copied this one.
    pub number: u32,
    /// The slot.
    pub slot: u32,
    /// First byte in the bucket.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
}

impl LentPiece {
    /// Length on the wire in bytes.
    pub const LENGTH: usize = BucketHeader::LENGTH;

    /// As it travels.
    pub fn encode(&self) -> [u8; Self::LENGTH] {
        BucketHeader { sequence: self.number, flags: self.slot, offset: self.offset, bytes: self.bytes }.encode()
    }

    /// Reads a piece; says nothing about whether its numbers make sense.
    pub fn decode(wire: &[u8; Self::LENGTH]) -> Self {
        let BucketHeader { sequence: number, flags: slot, offset, bytes } = BucketHeader::decode(wire);
        Self { number, slot, offset, bytes }
    }
}

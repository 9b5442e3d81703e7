//! Messages about memory that the source lends to a member on its GPU. NCCL refuses two ranks on one GPU, so such a member opens the
//! source's ring by CUDA IPC and copies each bucket from there.
//!
//! Only [`LendRequest`] contains the handle, over mutual TLS. Events are not shared. A piece is announced once the source's GPU has written
//! it; its slot is reused only after the borrower reported the end of its copy.

use serde::{Deserialize, Serialize};

use super::worker::IpcHandle;
use super::{BucketHeader, EpochId};

/// Memory of the source's worker, and how the process that opens it can verify it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LentMemory {
    /// The GPU that it lies on (`GPU-` and the UUID).
    pub gpu: String,
    /// The handle by which another process on the same host opens it.
    pub handle: IpcHandle,
    /// Slots in it, back to back.
    pub slots: u32,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// Random bytes (base64), [`LentMemory::CHECK_BYTES`] of them, that the lender wrote at `check_at`.
    pub check: String,
    /// Their offset in bytes from the start.
    pub check_at: u64,
    /// Inode of the lender's PID namespace, where it can be read. CUDA IPC does not cross PID namespaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid_namespace: Option<u64>,
}

impl LentMemory {
    /// Length of the check.
    pub const CHECK_BYTES: usize = 64;
}

/// Requests that a member without a rank opens the source's ring. The response is `null` if it opened it and found the check there. A
/// refusal has the reason why its bytes must come over a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LendRequest {
    /// The epoch.
    pub id: EpochId,
    /// The memory; open until the epoch ends.
    pub memory: LentMemory,
    /// Deadline for the response, in ms.
    pub deadline_ms: u64,
}

/// A piece of the bucket that was announced last, in a slot of the lent memory. 24 bytes on the wire, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LentPiece {
    /// Number of the piece in its stream, from 0. The borrower confirms it after its copy.
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

    /// The piece in wire format.
    pub fn encode(&self) -> [u8; Self::LENGTH] {
        BucketHeader { sequence: self.number, flags: self.slot, offset: self.offset, bytes: self.bytes }.encode()
    }

    /// Reads a piece, without a check of its numbers.
    pub fn decode(wire: &[u8; Self::LENGTH]) -> Self {
        let BucketHeader { sequence: number, flags: slot, offset, bytes } = BucketHeader::decode(wire);
        Self { number, slot, offset, bytes }
    }
}

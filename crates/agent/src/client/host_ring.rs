//! A ring in shared host memory (a memfd) that a trainer writes into and the update reads in place.
//!
//! A slot is lent out as [`Bytes`] and given back to the trainer when the last clone is dropped.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::memfd::SharedMemory;
use super::turn::Turn;

/// The shared memory of a connection. It outlives a publish, and serves the next one if that needs the same size.
pub(super) struct HostRing {
    memory: SharedMemory,
    pub(super) slots: u32,
    pub(super) slot_bytes: u64,
}

impl HostRing {
    /// Zeroed memory; blocks for as long as its pages take.
    pub(super) fn create(slots: u32, slot_bytes: u64) -> std::io::Result<Self> {
        let length = slot_bytes.checked_mul(u64::from(slots)).and_then(|bytes| usize::try_from(bytes).ok());
        let length = length.ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(Self { memory: SharedMemory::create("weightsync-ring", length)?, slots, slot_bytes })
    }

    pub(super) fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// The bytes of a filled slot of the ring, which was announced in the attempt `since`; none when they do not lie in it. Dropping them lends
    /// the slot to the trainer again.
    pub(super) fn filled(self: &Arc<Self>, turn: &Arc<Turn>, since: u32, slot: u32, bytes: u64) -> Option<Bytes> {
        let start = usize::try_from(u64::from(slot).checked_mul(self.slot_bytes)?).ok()?;
        let range = start..start.checked_add(usize::try_from(bytes).ok()?)?;
        Some(Bytes::from_owner(Lent { ring: Arc::clone(self), turn: Arc::clone(turn), since, slot, range }))
    }
}

/// A slot that is read. Given back when dropped.
struct Lent {
    ring: Arc<HostRing>,
    turn: Arc<Turn>,
    since: u32,
    slot: u32,
    range: Range<usize>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.ring.memory.bytes(self.range.clone()).unwrap_or_default()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.turn.free(self.since, self.slot, || true);
    }
}

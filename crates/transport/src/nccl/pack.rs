//! Puts what one broadcast to engines carries into one run of GPU memory: where it lies already, or in a slot that it is copied into.
//!
//! Tensors lie at multiples of 64 bytes in our buckets and back to back in those of engines. Decides only where bytes lie; what a broadcast
//! carries is decided by [`Layout::wire`](weightsync_core::weights::Layout::wire).

use std::time::Duration;

use bytes::Bytes;

use super::cut;
use super::staging::{Bringing, Staging};
use crate::{DevicePayload, Payload};
use weightsync_core::weights::{Layout, WireBucket, WireError};
use weightsync_gpu::worker::{Copy, Event, Ring, Slot, Span, Worker, WorkerError};

/// Slots: one is filled while the other travels.
const SLOTS: u32 = 2;
/// A slot is made once.
const MAKE: Duration = Duration::from_secs(30);
/// Broadcasts of one bucket begin at multiples of this in their slot.
const APART: u64 = 256;

pub struct Packed {
    pub span: Span,
    pub bytes: u64,
    /// Event to wait for before it is sent.
    pub after: Option<Event>,
}

/// A bucket that is ready to be sent. Its memory is given back when it is dropped.
pub struct PackedBucket {
    /// Its broadcasts, in order.
    pub broadcasts: Vec<Packed>,
    /// Copies that are under way into its memory. On the GPU they are before the broadcasts; they must end well.
    pub copies: Vec<Bringing>,
    /// Kept until all was sent.
    pub held: Held,
}

/// Memory that is read until a broadcast ended.
#[allow(dead_code, reason = "held, never read")]
pub struct Held {
    lent: Option<DevicePayload>,
    slot: Option<Slot>,
}

/// Packs for one worker. Its slots are made when the first is needed.
pub struct Packer {
    worker: Worker,
    staging: Staging,
    slot_bytes: u64,
    ring: Option<Ring>,
}

impl Packer {
    /// For buckets of this layout.
    pub fn new(worker: Worker, staging: Staging, layout: &Layout) -> Result<Self, WireError> {
        let mut longest = 64;
        for bucket in layout.buckets() {
            let wire = layout.wire(&bucket)?;
            longest = wire.iter().fold(0_u64, |sum, wire| sum.saturating_add(wire.bytes.next_multiple_of(APART))).max(longest);
        }
        Ok(Self { worker, staging, slot_bytes: longest.next_multiple_of(4096), ring: None })
    }

    /// Places the broadcasts of one bucket whose bytes are `payload`. Waits for a slot that long.
    pub async fn pack(&mut self, payload: &Payload, wire: &[WireBucket], within: Duration) -> Result<PackedBucket, WorkerError> {
        let lent = match payload {
            Payload::Device(device) => Some(device.clone()),
            Payload::Host(_) => None,
        };
        let mut packed = PackedBucket { broadcasts: Vec::new(), copies: Vec::new(), held: Held { lent, slot: None } };
        let mut at = 0_u64;
        for wire in wire {
            if let (Payload::Device(device), Some(offset)) = (payload, wire.in_place()) {
                let (span, after) = (device.memory.at(device.offset.saturating_add(offset)), device.after.clone());
                packed.broadcasts.push(Packed { span, bytes: wire.bytes, after });
                continue;
            }
            let slot = match &packed.held.slot {
                Some(slot) => slot.clone(),
                None => packed.held.slot.insert(self.slot(within).await?).clone(),
            };
            match payload {
                Payload::Device(device) => {
                    let mut to = at;
                    for (offset, bytes) in &wire.runs {
                        let from = device.memory.at(device.offset.saturating_add(*offset));
                        let copy = Copy { from, to: slot.at(to), bytes: *bytes, after: device.after.clone(), then: None };
                        packed.copies.push(Box::pin(self.worker.copy_now(copy, within)));
                        to = to.saturating_add(*bytes);
                    }
                }
                Payload::Host(bytes) => {
                    let whole = gather(bytes, wire);
                    packed.copies.extend(self.staging.bring_all(&whole, &slot, at, within).await?);
                }
            }
            packed.broadcasts.push(Packed { span: slot.at(at), bytes: wire.bytes, after: None });
            at = at.saturating_add(wire.bytes.next_multiple_of(APART));
        }
        Ok(packed)
    }

    async fn slot(&mut self, within: Duration) -> Result<Slot, WorkerError> {
        let ring = match &self.ring {
            Some(ring) => ring.clone(),
            None => self.ring.insert(self.worker.ring(SLOTS, self.slot_bytes, MAKE).await?).clone(),
        };
        ring.take(within).await
    }
}

/// The bytes of one broadcast, back to back.
fn gather(bytes: &Bytes, wire: &WireBucket) -> Bytes {
    if let [(offset, length)] = wire.runs.as_slice() {
        return cut(bytes, *offset, *length);
    }
    let mut whole = Vec::with_capacity(usize::try_from(wire.bytes).unwrap_or(0));
    for (offset, length) in &wire.runs {
        whole.extend_from_slice(&cut(bytes, *offset, *length));
    }
    whole.into()
}

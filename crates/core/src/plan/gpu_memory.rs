//! The size of the ring of buckets on each GPU, the GPU memory that a group needs in total, and whether it is free.
//!
//! Pure, and evaluated before anything is allocated or an engine is paused: too little memory is refused with both numbers. A ring of its
//! own choice takes at most half of the free memory, because the engine or the trainer on that GPU may still grow. A ring that the user
//! requests only has to fit.

use serde::{Deserialize, Serialize};

use super::units::{show_bytes, show_free};

const MIB: u64 = 1 << 20;

/// GPU memory of one NCCL communicator: an estimate. Buffers take 4 MiB for each channel and peer (`NCCL_BUFFSIZE`), and as much again for
/// low-latency protocols. With the 16 to 24 channels of NVLink machines that is 200 to 500 MiB.
pub const NCCL_ESTIMATE: u64 = 512 * MIB;

/// GPU memory of a process's CUDA context: an estimate (H200, driver 580). The free memory that a worker reports already accounts for it.
pub const CONTEXT_ESTIMATE: u64 = 512 * MIB;

/// The longest slot that is chosen without a request. An engine's update call costs 7 to 8 ms, whatever its size, so few long buckets are
/// best (LMDeploy 0.18 `/update_weights`, 5.7 GB: 0.05 s in slots of 1 GiB, 0.17 s in slots of 256 MiB).
const LONGEST: u64 = 1024 * MIB;

/// The shortest slot that is chosen without a request.
const SHORTEST: u64 = MIB;

/// Numbers of slots that are chosen without a request. With three, one fills, one travels, and one is handed over; with two, the first and
/// the last step alternate.
const SLOTS: [u32; 2] = [3, 2];

/// Least buckets of a version, so that they overlap in flight and the ring is never as large as the model.
const LEAST_BUCKETS: u64 = 4;

/// A source that copies its buckets to the host uses at most this share of its GPU's free memory for slots beyond [`SLOTS`].
const FREE_PER_COPIES: u64 = 16;

/// The assumed load of a ring that is made before the first version is known, and that outlives it: the size of most models that one GPU
/// serves.
pub const USUAL_LOAD: RingLoad = RingLoad { bytes: 4 << 30, largest: 0 };

/// The block that a worker allocates once on its GPU; buckets travel through its slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuRing {
    /// Slots.
    pub slots: u32,
    /// Bytes of one slot: the longest bucket.
    pub slot_bytes: u64,
}

impl GpuRing {
    /// Bytes of the block.
    pub fn bytes(&self) -> u64 {
        self.slot_bytes.saturating_mul(u64::from(self.slots))
    }
}

/// The ring settings of the object; the rest is chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RingWish {
    /// Slots.
    pub slots: Option<u32>,
    /// Bytes of one slot.
    pub slot_bytes: Option<u64>,
}

impl RingWish {
    /// From the values in policies: 0 means "choose".
    pub fn of(slots: u32, slot_bytes: u64) -> Self {
        Self { slots: (slots > 0).then_some(slots), slot_bytes: (slot_bytes > 0).then_some(slot_bytes) }
    }
}

/// What travels through the ring.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RingLoad {
    /// Bytes of a version.
    pub bytes: u64,
    /// Bytes of the largest item that one slot must hold completely (a tensor, if engines take only whole tensors); 0 if buckets may be cut
    /// anywhere.
    pub largest: u64,
}

/// Free memory of one GPU, as its worker reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuRoom {
    /// The GPU and its member, for messages.
    pub gpu: String,
    /// Bytes free now.
    pub free: u64,
    /// Bytes in all.
    pub total: u64,
}

/// A ring, and the reason for its size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingChoice {
    /// The ring.
    pub ring: GpuRing,
    /// The reason, for status and logs.
    pub why: String,
}

/// Memory that a group takes of one GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuNeed {
    /// The ring.
    pub ring: u64,
    /// NCCL's own buffers: [`NCCL_ESTIMATE`].
    pub nccl: u64,
    /// The worker's context: [`CONTEXT_ESTIMATE`].
    pub context: u64,
}

impl GpuNeed {
    /// The memory of a worker with this ring.
    pub fn of(ring: &GpuRing) -> Self {
        Self { ring: ring.bytes(), nccl: NCCL_ESTIMATE, context: CONTEXT_ESTIMATE }
    }

    /// The sum.
    pub fn total(&self) -> u64 {
        self.ring.saturating_add(self.nccl).saturating_add(self.context)
    }
}

/// Why there is no ring.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum NoRing {
    #[error(
        "{gpu}: {} are needed (a ring of {} slots of {}, and about {} for NCCL), {} of {} are free; give the engine or trainer a smaller \
         share of the GPU, or the ring fewer or shorter slots",
        show_bytes(.ring.bytes().saturating_add(NCCL_ESTIMATE)), .ring.slots, show_bytes(.ring.slot_bytes), show_bytes(NCCL_ESTIMATE),
        show_free(*.free), show_bytes(*.total)
    )]
    TooLittle { gpu: String, ring: GpuRing, free: u64, total: u64 },
    #[error(
        "a slot of {} cannot hold the largest tensor, which is {} and is handed to the engine as a whole; give the ring slots of at least \
         {} MiB, or leave their length out",
        show_bytes(*.slot_bytes), show_bytes(*.largest), .largest.div_ceil(MIB)
    )]
    SlotTooShort { slot_bytes: u64, largest: u64 },
    #[error("a ring needs at least one slot of at least one byte")]
    Empty,
}

/// The ring that every member of a group makes on its GPU. The object's settings are kept; the rest follows from the model's size and the
/// GPU with the least free memory. Without `rooms`, the GPUs are not known yet.
pub fn gpu_ring(wish: RingWish, load: RingLoad, rooms: &[GpuRoom]) -> Result<RingChoice, NoRing> {
    if wish.slots == Some(0) || wish.slot_bytes == Some(0) {
        return Err(NoRing::Empty);
    }
    if let Some(slot_bytes) = wish.slot_bytes.filter(|bytes| *bytes < load.largest) {
        return Err(NoRing::SlotTooShort { slot_bytes, largest: load.largest });
    }
    let candidates = candidates(wish, load);
    let tightest = rooms.iter().min_by_key(|room| room.free);
    let given = wish.slots.is_some() && wish.slot_bytes.is_some();
    let half = tightest.map_or(u64::MAX, |room| room.free.saturating_sub(NCCL_ESTIMATE) / 2);
    let chosen = candidates.iter().find(|ring| !given && ring.bytes() <= half);
    // The second half stays free for the engine, unless nothing works without it.
    let found = chosen.or_else(|| smallest(&candidates).filter(|ring| holds(ring, tightest)));
    match (found, smallest(&candidates), tightest) {
        (Some(ring), _, _) => Ok(RingChoice { ring: *ring, why: why(ring, wish, load, tightest) }),
        (None, Some(ring), Some(room)) => Err(NoRing::TooLittle { gpu: room.gpu.clone(), ring: *ring, free: room.free, total: room.total }),
        (None, _, _) => Err(NoRing::Empty),
    }
}

/// Slots of the ring of a source whose buckets are also copied to its host. That copy takes twice as long as the wire and the engine's
/// load: 50 and 100 GB/s on H200. With two thirds of `buckets` in the ring, the last bucket waits for no copy: in rings of 3, 4 and 6
/// slots, the transfer of 6 buckets takes 73, 55 and 60 ms. Never fewer slots than `ring` has.
pub fn slots_with_copies(ring: &GpuRing, buckets: u32, free: u64) -> u32 {
    let wanted = u64::from(buckets).saturating_mul(2).div_ceil(3);
    let most = (free / FREE_PER_COPIES).checked_div(ring.slot_bytes).unwrap_or(0);
    u32::try_from(wanted.min(most)).unwrap_or(u32::MAX).max(ring.slots)
}

fn holds(ring: &GpuRing, room: Option<&GpuRoom>) -> bool {
    room.is_none_or(|room| ring.bytes().saturating_add(NCCL_ESTIMATE) <= room.free)
}

fn smallest(rings: &[GpuRing]) -> Option<&GpuRing> {
    rings.iter().min_by_key(|ring| ring.bytes())
}

/// Rings that keep the object's settings, the best first.
fn candidates(wish: RingWish, load: RingLoad) -> Vec<GpuRing> {
    let longest = (load.bytes / LEAST_BUCKETS).clamp(SHORTEST, LONGEST);
    let whole = load.largest.div_ceil(MIB).saturating_mul(MIB);
    let lengths: Vec<u64> = match wish.slot_bytes {
        Some(bytes) => vec![bytes],
        None if whole > longest => vec![whole],
        None => {
            let powers = std::iter::successors(Some(LONGEST), |bytes| (*bytes > SHORTEST).then_some(bytes / 2));
            powers.filter(|bytes| *bytes <= longest && *bytes >= whole.max(SHORTEST)).collect()
        }
    };
    // If no power of two lies between the largest tensor and the limit, use the largest tensor's own length.
    let lengths = if lengths.is_empty() { vec![whole.max(SHORTEST)] } else { lengths };
    let slots = wish.slots.map_or_else(|| SLOTS.to_vec(), |slots| vec![slots]);
    let mut rings: Vec<GpuRing> =
        lengths.iter().flat_map(|slot_bytes| slots.iter().map(|slots| GpuRing { slots: *slots, slot_bytes: *slot_bytes })).collect();
    rings.sort_by_key(|ring| std::cmp::Reverse(ring.bytes()));
    rings
}

fn why(ring: &GpuRing, wish: RingWish, load: RingLoad, tightest: Option<&GpuRoom>) -> String {
    let shape =
        format!("{} slots of {}, in addition to about {} for NCCL", ring.slots, show_bytes(ring.slot_bytes), show_bytes(NCCL_ESTIMATE));
    let said = match (wish.slots.is_some(), wish.slot_bytes.is_some()) {
        (true, true) => "as the object says".to_owned(),
        (false, false) => format!("chosen for a model of {}", show_bytes(load.bytes)),
        (true, false) => format!("their number as the object says, their length chosen for a model of {}", show_bytes(load.bytes)),
        (false, true) => "their length as the object says, their number chosen".to_owned(),
    };
    match tightest {
        Some(room) => {
            format!("{shape}; {said}; {} of {} are free on {}", show_free(room.free), show_bytes(room.total), room.gpu)
        }
        None => format!("{shape}; {said}"),
    }
}

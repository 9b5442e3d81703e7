//! Whether a trainer writes its tensors into GPU memory of the agent's worker, or into host memory, and why.
//!
//! Decides before anything is allocated or opened, and always names the reason for host memory: the group does not move weights between
//! GPUs, the worker is on another GPU, a slice of a GPU, another PID namespace. It never guesses that something will work that the driver
//! has not shown; what only the driver knows is proven afterwards, when the memory is opened.

use tokio::sync::watch;

use weightsync_core::plan::{GpuRing, GpuRoom, NoSharing, RingLoad, RingWish, gpu_ring, slots_with_copies};
use weightsync_core::protocol::GpuOffer;
use weightsync_core::weights::{Layout, LayoutError, TensorSpec};
use weightsync_gpu::worker::Worker;

#[derive(Clone)]
#[allow(missing_docs)]
pub struct SourceWorker {
    pub worker: Worker,
    /// Its GPU (`GPU-...`).
    pub gpu: String,
    pub wish: RingWish,
    /// Bytes of the GPU that were free when the worker took it, before any ring, and all of them. Not renewed: what a version is cut into
    /// must not change from one publish to the next.
    pub room: (u64, u64),
    /// How many bytes of versions are kept on the host: what fits there is copied out of the ring.
    pub retain: u64,
}

impl std::fmt::Debug for SourceWorker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a worker on {}", self.gpu)
    }
}

/// What the source sends from: its worker, or why there is none. Kept up to date by anyone who starts workers.
pub type SourceGpu = watch::Receiver<Result<SourceWorker, String>>;

pub fn no_source_gpu() -> SourceGpu {
    watch::channel(Err("the group does not move weights between GPUs".to_owned())).1
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RingSize {
    pub(super) slots: u32,
    pub(super) slot_bytes: u64,
}

/// Slots start at multiples of this many bytes.
const PAGE: u64 = 4096;

impl SourceWorker {
    pub(super) fn ring_for(&self, layout: &Layout) -> Result<RingSize, String> {
        let largest = layout.largest_bucket();
        let wish = RingWish { slots: self.wish.slots, slot_bytes: Some(largest.max(1)) };
        let ring = self.choose(wish, RingLoad { bytes: layout.total_bytes, largest })?;
        let copied = self.wish.slots.is_none() && layout.total_bytes <= self.retain;
        let slots = if copied { slots_with_copies(&ring, layout.bucket_count(), self.room.0) } else { ring.slots };
        let slots = slots.min(layout.bucket_count()).max(1);
        Ok(RingSize { slots, slot_bytes: ring.slot_bytes.next_multiple_of(PAGE) })
    }

    /// Bytes of a bucket of a version of so many bytes; none where there is no room for a ring.
    pub fn bucket_bytes(&self, bytes: u64) -> Option<u64> {
        self.choose(self.wish, RingLoad { bytes, largest: 0 }).ok().map(|ring| ring.slot_bytes)
    }

    fn choose(&self, wish: RingWish, load: RingLoad) -> Result<GpuRing, String> {
        let room = GpuRoom { gpu: format!("{} of the source", self.gpu), free: self.room.0, total: self.room.1 };
        gpu_ring(wish, load, &[room]).map(|choice| choice.ring).map_err(|error| error.to_string())
    }
}

/// Lays a version out: cut between tensors where it travels between GPUs, because engines take whole tensors from GPU memory; else evenly,
/// in buckets of `bucket_bytes` (0: chosen by size).
pub(super) fn lay_out(tensors: Vec<TensorSpec>, bucket_bytes: u64, gpu: &SourceGpu) -> Result<Layout, LayoutError> {
    let layout = Layout::new("model", tensors, bucket_bytes)?;
    let source = gpu.borrow();
    let Ok(source) = source.as_ref() else { return Ok(layout) };
    // A tensor that is longer than a bucket gets one of its own.
    match source.choose(source.wish, RingLoad { bytes: layout.total_bytes, largest: 0 }) {
        Ok(ring) => {
            let tensors = layout.entries.into_iter().map(|entry| entry.tensor).collect();
            Layout::new("model", tensors, ring.slot_bytes).map(Layout::cut_between_tensors)
        }
        Err(reason) => {
            tracing::warn!(reason, "no ring on the GPU");
            Ok(layout)
        }
    }
}

/// Why a trainer with this offer cannot write into memory of a worker on `gpu`; `own_pid_namespace` is this process's.
pub(super) fn obstacle(offer: &GpuOffer, gpu: &str, own_pid_namespace: Option<u64>) -> Option<String> {
    if let Some(slice) = offer.gpus.iter().find(|gpu| gpu.starts_with("MIG-")) {
        return Some(NoSharing::Mig { gpu: slice.clone() }.to_string());
    }
    if !offer.gpus.iter().any(|offered| offered == gpu) {
        let theirs = offer.gpus.join(", ");
        return Some(format!("the agent's worker is on {gpu}, the tensors lie on {theirs}: give both the same GPU"));
    }
    match (offer.pid_namespace, own_pid_namespace) {
        (Some(theirs), Some(own)) if theirs != own => {
            let detail = format!("{theirs}, the agent is in {own}");
            Some(NoSharing::PidNamespace { who: "the trainer", detail }.to_string())
        }
        _ => None,
    }
}

/// Inode of this process's PID namespace (pid_namespaces(7)).
pub(super) fn own_pid_namespace() -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self/ns/pid").ok().map(|metadata| metadata.ino())
}

#[cfg(test)]
mod tests;

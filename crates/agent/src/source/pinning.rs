//! Pinned host memory for the copy of the next version, made between updates.
//!
//! Pinning takes longer than copying, and the copy of a version slows its own update down where it waits for it. Decides when memory is pinned
//! ahead: in a group whose source copies versions out of its GPU, while no update runs. The next version is expected to be as long as the last
//! one; the first one, as the engines' own checkpoint. It takes no memory that `retain` or the pod does not have. Before the first version, when
//! the trainer may need more for itself, it leaves as much free as it takes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::Source;
use crate::group::Epoch;
use crate::lead::peers::Peer;
use crate::locks::lock;
use crate::space::{Cgroups, NoSpace, Reservation};
use weightsync_core::protocol::MemberName;
use weightsync_core::weights::Layout;
use weightsync_transport::nccl::Staging;

/// What is known of the next copy, and how pinning for it ends.
#[derive(Debug, Default)]
pub(super) struct Pinning {
    /// Lengths of the buckets of the last version; none before the first.
    lengths: Mutex<Option<Arc<[u64]>>>,
    /// Whether its copy was made of what lay on the GPU: others take no pinned memory.
    on_gpu: AtomicBool,
    stop: Mutex<CancellationToken>,
}

/// What the next copy will need, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Next {
    /// No version was laid out yet: as much as the engines' own checkpoint.
    LikeEngines,
    /// Buckets of these lengths, as the last version had.
    LikeLast(Arc<[u64]>),
    /// The last version did not come from the GPU.
    Nothing,
}

impl Next {
    /// Room to pin so many bytes for it. Before the first version as much again must be free: the trainer may need it for itself.
    fn room(&self, cgroups: &Cgroups, bytes: u64) -> Result<Reservation, NoSpace> {
        let times = if matches!(self, Self::LikeEngines) { 2 } else { 1 };
        cgroups.reserve(bytes.saturating_mul(times))
    }
}

impl Pinning {
    /// `kept`: whether copies lie in pinned memory now.
    fn next(&self, kept: bool) -> Next {
        let Some(lengths) = lock(&self.lengths).clone() else { return Next::LikeEngines };
        if kept {
            self.on_gpu.store(true, Ordering::Relaxed);
        }
        if self.on_gpu.load(Ordering::Relaxed) { Next::LikeLast(lengths) } else { Next::Nothing }
    }

    /// An update begins: nothing more is pinned ahead. What the driver is at comes to its end.
    pub(super) fn stop(&self) {
        lock(&self.stop).cancel();
    }

    /// A version was laid out: the next one most likely is as well.
    pub(super) fn laid_out(&self, layout: &Layout) {
        *lock(&self.lengths) = Some(layout.buckets().map(|bucket| bucket.bytes).collect());
    }
}

impl Source {
    /// Pins memory for the copy of the next version whenever a group formed; never returns. To be dropped when an update begins.
    pub(super) async fn pin_between_updates(&self) {
        let mut standing = self.core.standing();
        loop {
            let epoch = standing.borrow_and_update().committed().cloned();
            if let Some(epoch) = epoch {
                tokio::select! {
                    () = self.pin(&epoch) => {}
                    changed = standing.changed() => if changed.is_ok() { continue },
                }
            }
            if standing.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Has memory pinned for the next copy in a group, as soon as its length is known.
    async fn pin(&self, epoch: &Arc<Epoch>) {
        let Some(staging) = self.leader.gpus().and_then(|gpus| gpus.first()).map(|(_, staging)| staging) else { return };
        staging.reuse(epoch.prepared.policy.retain_bytes);
        let next = self.pinning.next(staging.has_kept());
        match &next {
            Next::LikeEngines => {
                if let Some(lengths) = self.expected(epoch).await {
                    self.pin_lengths(&staging, &lengths, &next);
                }
            }
            Next::LikeLast(lengths) => self.pin_lengths(&staging, lengths, &next),
            // What was pinned for it serves nothing.
            Next::Nothing => staging.forget(),
        }
    }

    /// Lengths of the buckets of the first version, by the longest checkpoint that an engine of this group was started with. None where the
    /// versions of this group do not come from a GPU.
    async fn expected(&self, epoch: &Arc<Epoch>) -> Option<Vec<u64>> {
        let gpus = self.leader.gpus()?;
        let peers = self.leader.peers(epoch);
        let bytes = longest_model(peers.watch()).await?;
        gpus.expected_buckets(bytes)
    }

    /// Pins memory for buckets of these lengths in the background, if there is room.
    fn pin_lengths(&self, staging: &Staging, lengths: &[u64], next: &Next) {
        let missing = staging.missing(lengths);
        let bytes = missing.iter().fold(0_u64, |sum, length| sum.saturating_add(*length));
        if bytes == 0 {
            return;
        }
        let room = match next.room(&self.cgroups, bytes) {
            Ok(room) => room,
            Err(why) => return tracing::info!(%why, "no memory is pinned for the copy of the next version"),
        };
        let stop = CancellationToken::new();
        std::mem::replace(&mut *lock(&self.pinning.stop), stop.clone()).cancel();
        let staging = staging.clone();
        tokio::spawn(async move {
            match staging.prepare(&missing, &stop, |bytes| room.used(bytes)).await {
                Ok(()) => tracing::info!(bytes, stopped = stop.is_cancelled(), "memory is pinned for the copy of the next version"),
                Err(error) => tracing::warn!(%error, "no memory can be pinned for the copy of the next version"),
            }
        });
    }
}

/// Waits until every rollout reported its engine's checkpoint, or is lost. Bytes of the longest one.
async fn longest_model(mut peers: watch::Receiver<BTreeMap<MemberName, Peer>>) -> Option<u64> {
    let known = peers.wait_for(|peers| peers.values().all(|peer| peer.state.is_some() || peer.lost.is_some())).await.ok()?;
    known.values().filter_map(|peer| peer.state.as_ref()?.engine.as_ref()?.model_bytes).max()
}

#[cfg(test)]
mod tests;

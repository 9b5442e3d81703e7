//! Opens an install into which a stream goes through a ring of shared memory, and hands the engine's workers what came.
//!
//! Decides how large the ring is (all of the version where that fits, so that the engine serves until the last byte is there), and that the
//! engine counts as being changed from the moment that it loads.

use std::collections::VecDeque;
use std::sync::Arc;

use async_trait::async_trait;

use super::{Arrived, FromMemory, MemoryReceiver, Order, least_ring};
use crate::group::Epoch;
use crate::rollout::Rollout;
use crate::rollout::receive::agree;
use crate::rollout::receiver::{Limits, Undone, Way};
use crate::rollout::ring::Ring;
use crate::rollout::update::mark;
use weightsync_core::protocol::{BeginRequest, FinishRequest, HeldVersion};
use weightsync_core::weights::{Coverage, Layout, Manifest};
use weightsync_engine::{HostMemory, InstallError, InstallReport, Left};
use weightsync_net::memfd::SharedMemory;
use weightsync_transport::TensorDigests;

impl Rollout {
    /// Opens an install that takes the version as it comes, for a machine without room for it in files. The engine is only looked at, and
    /// its workers connect.
    pub(in crate::rollout) async fn open_memory(
        self: &Arc<Self>,
        epoch: &Epoch,
        request: &BeginRequest,
        layout: &Arc<Layout>,
    ) -> Result<Arc<MemoryReceiver>, String> {
        if request.manual {
            return Err("the trainer switches later, and the engine would be held until then".into());
        }
        if epoch.gpu_slot_bytes().is_some() && !request.feeding {
            return Err("its bytes travel between GPUs".into());
        }
        if self.memory_route().await.is_none() {
            return Err("the engine's workers do not read shared memory".into());
        }
        let cut = Layout::clone(layout).cut_between_tensors();
        // All of it where that fits, so that the engine serves until the last byte is there.
        let (all, least) = (cut.total_bytes.max(64), least_ring(layout, &cut));
        let reserved = self.cgroups.reserve(all).map(|room| (room, Some(all)));
        let reserved = reserved.or_else(|_| self.cgroups.reserve(least).map(|room| (room, None)));
        let (room, whole) = reserved.map_err(|error| error.to_string())?;
        let capacity = whole.unwrap_or(least);
        let length = usize::try_from(capacity.next_multiple_of(64)).map_err(|error| error.to_string())?;
        let made = tokio::task::spawn_blocking(move || SharedMemory::create_writable("weightsync-feed", length)).await;
        let memory = made.map_err(|ended| ended.to_string())?.map_err(|error| format!("no shared memory can be made: {error}"))?;
        // All pages are taken by now.
        drop(room);
        let shared = HostMemory::of(&memory.fd(), length as u64).map_err(|error| format!("the memory cannot be shared: {error}"))?;
        let policy = Self::policy_of(epoch);
        let job = Self::host_job(mark(request), layout.clone(), shared, &policy);
        let install = self.engine.begin_host(&job).await.map_err(|error| error.to_string())?;
        let arrived = Arrived {
            digest: install.digest(),
            freed: Arc::default(),
            hasher: TensorDigests::new(layout.clone(), request.algorithm),
            coverage: Coverage::new(layout.total_bytes),
            memory,
            ring: Ring::new(length as u64),
            to_come: cut.buckets().collect(),
            open: VecDeque::new(),
            reported: 0,
            taken: 0,
            asked: false,
            goes_round: whole.is_none(),
        };
        tracing::info!(
            version = request.update.version,
            bytes = length,
            "the version goes into the engine through a ring of shared memory"
        );
        let limits = Limits { timeout: job.terms.timeout, silence: job.silence };
        Ok(self.receive_by(request, layout, limits, arrived, FromMemory(install)))
    }
}

#[async_trait]
impl Way for FromMemory {
    type Arrived = Arrived;
    type Order = Order;
    const FAILED: &'static str = "the engine did not take a bucket";
    const UNSETTLED: &'static str = "the engine's workers did not get all buckets announced";

    fn changes(order: &Order) -> bool {
        matches!(order, Order::Room(_))
    }

    async fn carry_out(&mut self, receiver: &MemoryReceiver, order: Order) -> Result<(), Undone> {
        match order {
            Order::Bucket(bucket) => self.0.bucket(bucket).await?,
            Order::Room(more_than) => receiver.taken(self.0.taken(more_than).await?),
        }
        Ok(())
    }

    fn compare(receiver: &MemoryReceiver, Arrived { hasher, coverage, .. }: Arrived, request: &FinishRequest) -> Result<Manifest, String> {
        agree(&receiver.update, &receiver.layout, receiver.algorithm, || hasher.finish(), &coverage, request)
    }

    fn close(arrived: Arrived) {
        arrived.freed.notify_one();
    }

    async fn finish(self, version: HeldVersion) -> Result<InstallReport, InstallError> {
        self.0.finish(version).await
    }

    async fn abandon(self, reason: &str) -> Left {
        self.0.abandon(reason).await
    }
}

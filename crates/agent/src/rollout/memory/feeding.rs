//! Opens an install into which a stream goes through a ring of shared memory, and feeds the engine's workers in the order of what came.
//!
//! Decides how large the ring is (all of the version where that fits, so that the engine serves until the last byte is there), when the engine
//! counts as being switched (from the moment that it loads), and what an end of it means for the machine.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use super::{Arriving, MemoryReceiver, Order, least_ring};
use crate::core::lock;
use crate::group::Epoch;
use crate::rollout::Rollout;
use crate::rollout::ring::Ring;
use crate::rollout::switch::Switch;
use weightsync_core::protocol::BeginRequest;
use weightsync_core::weights::{Coverage, Layout};
use weightsync_engine::{HostInstall, HostMemory, InstallError};
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
        if epoch.communicator().is_some() && !request.feeding {
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
        let held = (request.update.version, request.manifest_digest.clone());
        let job = Self::host_job(held, layout.clone(), shared, &policy);
        let install = self.engine.begin_host(&job).await.map_err(|error| error.to_string())?;
        let (orders, inbox) = mpsc::unbounded_channel();
        let arriving = Arriving {
            hasher: TensorDigests::new(layout.clone(), request.algorithm),
            coverage: Coverage::new(layout.total_bytes),
            memory,
            ring: Ring::new(length as u64),
            to_come: cut.buckets().collect(),
            open: VecDeque::new(),
            told: 0,
            taken: 0,
            asked: false,
            goes_round: whole.is_none(),
        };
        tracing::info!(
            version = request.update.version,
            bytes = length,
            "the version goes into the engine through a ring of shared memory"
        );
        let receiver = Arc::new(MemoryReceiver {
            update: request.update.clone(),
            layout: layout.clone(),
            algorithm: request.algorithm,
            digest: install.digest(),
            begun: Instant::now(),
            silence: job.silence,
            listener: Box::new(Arc::downgrade(self)),
            arriving: Mutex::new(Some(arriving)),
            freed: Notify::new(),
            failed: Mutex::new(None),
            orders,
        });
        tokio::spawn(self.clone().feed_workers(Arc::downgrade(&receiver), install, inbox, job.timeout));
        Ok(receiver)
    }

    /// Feeds the engine in the order of what it is told, until the end of the attempt.
    async fn feed_workers(
        self: Arc<Self>,
        receiver: Weak<MemoryReceiver>,
        mut install: Box<dyn HostInstall>,
        mut orders: mpsc::UnboundedReceiver<Order>,
        limit: Duration,
    ) {
        // Held from the first load on: nobody else changes the engine, and it is not judged by its health.
        let mut switching = None;
        let mut begun = None;
        while let Some(order) = orders.recv().await {
            let failed = match order {
                Order::Bucket(bucket) => install.bucket(bucket).await.err(),
                Order::Room(more_than) => {
                    if switching.is_none() {
                        switching = Some(self.switching.lock().await);
                        begun = Some(self.begin_switch(limit));
                    }
                    match install.taken(more_than).await {
                        Ok(buckets) => {
                            if let Some(receiver) = receiver.upgrade() {
                                receiver.taken(buckets);
                            }
                            None
                        }
                        Err(error) => Some(error),
                    }
                }
                Order::Settle(done) => {
                    let _gone = done.send(());
                    None
                }
                Order::Finish(held) => {
                    if switching.is_none() {
                        switching = Some(self.switching.lock().await);
                    }
                    let switch = begun.unwrap_or_else(|| self.begin_switch(limit));
                    let outcome = install.finish(held.clone()).await;
                    self.end_switch(&held, None, Ok(outcome), switch, limit);
                    self.probe_now.notify_one();
                    drop(switching);
                    return;
                }
                Order::GiveUp(reason) => {
                    let left = install.abandon(&reason).await;
                    self.given_up(&reason, left, begun);
                    return;
                }
            };
            if let Some(error) = failed {
                self.memory_failed(&receiver, &error, begun);
                return;
            }
        }
        let reason = "the attempt was dropped";
        let left = install.abandon(reason).await;
        self.given_up(reason, left, begun);
    }

    /// The engine or a worker of it refused a bucket, or failed with it.
    fn memory_failed(&self, receiver: &Weak<MemoryReceiver>, error: &InstallError, switch: Option<Switch>) {
        let reason = format!("the engine did not take a bucket: {error}");
        tracing::warn!(left = ?error.left, %error, "the engine did not take a bucket");
        let receiver = receiver.upgrade();
        if let Some(receiver) = &receiver {
            *lock(&receiver.failed) = Some(reason.clone());
            lock(&receiver.arriving).take();
            receiver.freed.notify_one();
        }
        self.with(|inner| {
            if let Some(receiver) = &receiver {
                inner.machine.abort(&receiver.update, &reason);
            }
            // One that was never begun changed nothing.
            if let Some(switch) = switch {
                inner.spoiled(reason, error.left, switch);
            }
        });
        self.probe_now.notify_one();
    }
}

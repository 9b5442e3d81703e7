//! Takes the stream of one attempt in the memory of this member's GPUs, and has the engine take each bucket while others still travel.
//!
//! Decides what arrived (order, coverage, digests, as [`super::receive`] does for files) and when the engine's install is carried on, finished
//! or given up. Whatever ends the attempt after the first bucket ends with the adapter's word on whether the engine holds a mixture. Nothing
//! is kept: a version that was installed so lies in no directory, and others are fed by members that have one.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};

use super::receive::{Listener, agree, cut_as_laid_out};
use super::switch::Switch;
use super::{Inner, Rollout};
use crate::core::lock;
use crate::group::{Epoch, refusal};
use crate::hand_over::HandOver;
use weightsync_core::protocol::{BeginRequest, BucketHeader, FinishRequest, HeldVersion, Refusal, RefusalCode, UpdateId};
use weightsync_core::weights::{Bucket, Coverage, Cuts, DigestAlgorithm, DigestPart, Layout, TensorHasher};
use weightsync_engine::{InstallError, Left};
use weightsync_gpu::worker::Slot;
use weightsync_transport::{BucketStore, DeviceBucket, Fault, Wants};

/// What the task that feeds the engine is told, in order.
pub(super) enum Order {
    /// Pause the engine, and say when it is paused.
    Open(oneshot::Sender<()>),
    /// Hand this over: its slots, and the gsum64 of each of its tensors.
    Bucket(Bucket, Vec<Slot>, Vec<u64>),
    /// Say when all before this was handed over.
    Settle(oneshot::Sender<()>),
    /// The version is what its manifest says: the engine takes its last step.
    Finish(HeldVersion),
    GiveUp(String),
}

pub struct DeviceReceiver {
    update: UpdateId,
    layout: Arc<Layout>,
    algorithm: DigestAlgorithm,
    begun: Instant,
    silence: Duration,
    listener: Box<dyn Listener>,
    arriving: Mutex<Option<Arriving>>,
    /// Why the engine took no more.
    failed: Mutex<Option<String>>,
    orders: mpsc::UnboundedSender<Order>,
}

struct Arriving {
    hasher: TensorHasher,
    coverage: Coverage,
}

impl DeviceReceiver {
    /// Nothing is taken any more, and the engine's install is given up.
    pub(super) fn discard(&self, reason: &str) {
        lock(&self.arriving).take();
        // The task is gone when the engine failed before, or finished.
        let _gone = self.orders.send(Order::GiveUp(reason.to_owned()));
    }

    /// Has the engine take its last step. False when there is nobody to do so any more.
    pub(super) fn finish(&self, held: HeldVersion) -> bool {
        self.orders.send(Order::Finish(held)).is_ok()
    }

    /// Waits until the engine took every bucket, and compares coverage and digests with what the leader sent.
    pub(super) async fn conclude(&self, request: &FinishRequest) -> Result<HeldVersion, String> {
        let (done, settled) = oneshot::channel();
        let sent = self.orders.send(Order::Settle(done)).is_ok();
        let settled = sent && timeout(self.silence, settled).await.is_ok_and(|settled| settled.is_ok());
        if let Some(reason) = self.failed() {
            return Err(reason);
        }
        if !settled {
            return Err(format!("the engine did not take all buckets within {:?}", self.silence));
        }
        let Some(arrived) = lock(&self.arriving).take() else { return Err("nothing was received".into()) };
        let manifest = agree(&self.update, &self.layout, self.algorithm, || arrived.hasher.finish(), &arrived.coverage, request)?;
        Ok(HeldVersion { version: self.update.version, manifest: manifest.digest() })
    }

    fn failed(&self) -> Option<String> {
        lock(&self.failed).clone()
    }

    fn take(&self, bucket: DeviceBucket) -> Result<(), Refusal> {
        let mut arriving = lock(&self.arriving);
        // This member's attempt is over, and its status says so. The others' goes on: a collective needs every rank, so what comes is dropped.
        let Some(arriving) = arriving.as_mut() else { return Ok(()) };
        let BucketHeader { offset, bytes, .. } = bucket.header;
        let known = cut_as_laid_out(&self.layout, &bucket.header)?;
        let invalid = |what: String| refusal(RefusalCode::Invalid, what);
        if offset != arriving.hasher.position() {
            let expected = arriving.hasher.position();
            return Err(invalid(format!("bytes from {offset} on came, those from {expected} on were expected")));
        }
        arriving.coverage.record(offset, bytes).map_err(|error| invalid(error.to_string()))?;
        arriving.hasher.add(bytes, &bucket.shares).map_err(|error| invalid(error.to_string()))?;
        // A task that is gone said why; the next bucket finds nothing arriving.
        let _gone = self.orders.send(Order::Bucket(known, bucket.slots, bucket.shares));
        Ok(())
    }
}

impl BucketStore for DeviceReceiver {
    fn write(&self, _: u64, _: &[u8]) -> Result<(), Refusal> {
        Err(refusal(RefusalCode::Internal, "bytes came over a connection where GPU memory was expected"))
    }

    fn wants(&self) -> Wants {
        Wants::Device
    }

    fn digest_parts(&self, header: &BucketHeader) -> Vec<DigestPart> {
        self.layout.digest_parts(header.offset, header.bytes)
    }

    fn device(&self, bucket: DeviceBucket) -> Result<(), Refusal> {
        self.take(bucket)?;
        self.listener.moving();
        Ok(())
    }

    fn complete(&self, header: &BucketHeader, _digest: u128) -> Result<(), Refusal> {
        self.listener.received(&self.update, header.offset.saturating_add(header.bytes));
        Ok(())
    }

    fn end(&self) -> Result<(), Refusal> {
        if lock(&self.arriving).is_none() {
            return Ok(());
        }
        let took_ms = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.listener.streamed(&self.update, took_ms)
    }

    fn broken(&self, fault: Fault<'_>, cause: &str) {
        self.listener.broken(&self.update, fault, cause);
    }
}

impl Rollout {
    /// Whether this attempt's buckets can go to the engine from GPU memory; else why not.
    pub(super) fn takes_device(&self, epoch: &Epoch, request: &BeginRequest) -> Result<(), String> {
        // What is fed to joiners goes over connections.
        let Some(plan) = epoch.communicator().filter(|_| !request.feeding) else {
            return Err("its bytes do not travel between GPUs".into());
        };
        let opened = || self.gpus.get().is_some_and(|gpus| gpus.transport().communicator(epoch.id()).is_some());
        if !epoch.has_rank(epoch.me()) && !opened() {
            return Err("it has no rank and did not open the source's ring: its bytes come over a connection".into());
        }
        if request.layout.cuts != Cuts::BetweenTensors || request.algorithm != DigestAlgorithm::Gsum64 {
            return Err("the version was laid out for a transport that passes hosts".into());
        }
        let largest = request.layout.largest_bucket();
        if largest > plan.slot_bytes {
            let mib = largest.div_ceil(1 << 20);
            return Err(format!("its longest tensor does not fit a bucket: set spec.transport.nccl.bucketMiB to {mib} or more"));
        }
        if request.manual {
            return Err("the trainer switches later, and the engine would be held until then".into());
        }
        self.with(|inner| match &inner.no_device {
            Some((start, why)) if inner.engine.start() == Some(start) => Err(why.clone()),
            _ => Ok(()),
        })
    }

    /// Opens an install from GPU memory. An engine that serves on meanwhile is only looked at; one that does not is paused before the leader
    /// hears that bytes may come: a pause that takes seconds would look like a member that hangs in a broadcast.
    pub(super) async fn open_device(
        self: &Arc<Self>,
        epoch: &Epoch,
        request: &BeginRequest,
        layout: &Arc<Layout>,
    ) -> Result<Arc<DeviceReceiver>, Refusal> {
        let policy = Self::policy_of(epoch);
        let job = self.device_job(request.update.version, request.manifest_digest.clone(), layout.clone(), &policy);
        let (timeout, silence) = (job.timeout, job.silence);
        let over = HandOver::begin(self.engine.as_ref(), &job).await;
        let over = over.map_err(|error| refusal(RefusalCode::EngineRefused, error.to_string()))?;
        let holds = over.holds();
        let (orders, inbox) = mpsc::unbounded_channel();
        let arriving =
            Arriving { hasher: TensorHasher::new(layout.clone(), request.algorithm), coverage: Coverage::new(layout.total_bytes) };
        let receiver = Arc::new(DeviceReceiver {
            update: request.update.clone(),
            layout: layout.clone(),
            algorithm: request.algorithm,
            begun: Instant::now(),
            silence,
            listener: Box::new(Arc::downgrade(self)),
            arriving: Mutex::new(Some(arriving)),
            failed: Mutex::new(None),
            orders,
        });
        tokio::spawn(self.clone().feed_engine(Arc::downgrade(&receiver), over, inbox, timeout));
        if holds {
            let (done, opened) = oneshot::channel();
            let sent = receiver.orders.send(Order::Open(done)).is_ok();
            if !sent || opened.await.is_err() {
                let why = receiver.failed().unwrap_or_else(|| "the engine's install ended before".to_owned());
                return Err(refusal(RefusalCode::EngineRefused, why));
            }
        }
        Ok(receiver)
    }

    /// Feeds the engine in the order of what it is told, until the end of the attempt.
    async fn feed_engine(
        self: Arc<Self>,
        receiver: std::sync::Weak<DeviceReceiver>,
        mut over: HandOver,
        mut orders: mpsc::UnboundedReceiver<Order>,
        limit: Duration,
    ) {
        // Held from the first bucket on: nobody else changes the engine, and it is not judged by its health.
        let mut switching = None;
        let mut begun = None;
        while let Some(order) = orders.recv().await {
            match order {
                Order::Open(done) => {
                    switching = Some(self.switching.lock().await);
                    begun = Some(self.begin_switch(limit));
                    if let Err(error) = over.open().await {
                        self.device_failed(&receiver, &error, begun.unwrap_or_default());
                        return;
                    }
                    // Whoever gave up waiting discards the receiver, which is heard next.
                    let _told = done.send(());
                }
                Order::Bucket(bucket, slots, sums) => {
                    if switching.is_none() {
                        switching = Some(self.switching.lock().await);
                        begun = Some(self.begin_switch(limit));
                    }
                    if let Err(error) = over.bucket(bucket, slots, sums).await {
                        self.device_failed(&receiver, &error, begun.unwrap_or_default());
                        return;
                    }
                }
                Order::Settle(done) => drop(done.send(())),
                Order::Finish(held) => {
                    let switch = begun.unwrap_or_else(|| self.begin_switch(limit));
                    let outcome = over.finish(held.clone()).await;
                    self.end_switch(&held, None, Ok(outcome), switch, limit);
                    self.probe_now.notify_one();
                    return;
                }
                Order::GiveUp(reason) => {
                    let left = over.abandon(&reason).await;
                    self.given_up(&reason, left, begun);
                    return;
                }
            }
        }
        let reason = "the attempt was dropped";
        let left = over.abandon(reason).await;
        self.given_up(reason, left, begun);
    }

    /// The engine refused a bucket, or failed with it.
    fn device_failed(&self, receiver: &std::sync::Weak<DeviceReceiver>, error: &InstallError, switch: Switch) {
        let reason = format!("the engine did not take a bucket: {error}");
        tracing::warn!(left = ?error.left, %error, "the engine did not take a bucket");
        let update = receiver.upgrade().map(|receiver| {
            *lock(&receiver.failed) = Some(reason.clone());
            lock(&receiver.arriving).take();
            receiver.update.clone()
        });
        self.with(|inner| {
            // One that refuses this way cleanly is fed another way next time, as long as it is the same start.
            if error.left == Left::AsBefore
                && let Some(start) = inner.engine.start().cloned()
            {
                inner.no_device = Some((start, reason.clone()));
            }
            if let Some(update) = &update {
                inner.machine.abort(update, &reason);
            }
            inner.spoiled(reason, error.left, switch);
        });
        self.probe_now.notify_one();
    }

    pub(super) fn given_up(&self, reason: &str, left: Left, begun: Option<Switch>) {
        // One that was never begun changed nothing: the engine is as dirty as it was.
        let Some(switch) = begun else { return };
        self.with(|inner| inner.spoiled(format!("an install was given up: {reason}"), left, switch));
        self.probe_now.notify_one();
    }
}

impl Inner {
    /// The install ended before its last step.
    pub(super) fn spoiled(&mut self, reason: String, left: Left, switch: Switch) {
        self.switching = false;
        if left == Left::AsBefore {
            self.paused_until = None;
        } else {
            self.machine.install_failed(reason, left, None, switch.start);
        }
    }
}

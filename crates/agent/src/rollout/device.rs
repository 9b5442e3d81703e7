//! Takes the stream of one attempt in the memory of this member's GPUs, and has the engine take each bucket while others still travel.
//!
//! Decides what arrived (order, coverage, digests, as [`super::receive`] does for files) and which attempts may come so. The life of the
//! engine's install is the [receiver's](super::receiver).

use std::sync::Arc;

use async_trait::async_trait;

use super::receive::{agree, cut_as_laid_out, in_order, invalid};
use super::receiver::{EngineReceiver, Limits, Undone, Way};
use super::state::State;
use super::update::mark;
use super::{Rollout, Version};
use crate::group::{Epoch, refusal};
use crate::hand_over::HandOver;
use crate::locks::lock;
use weightsync_core::protocol::{BeginRequest, BucketHeader, FinishRequest, HeldVersion, Refusal, RefusalCode};
use weightsync_core::weights::{Bucket, Coverage, Cuts, DigestAlgorithm, DigestPart, Layout, Manifest, TensorHasher};
use weightsync_engine::{InstallError, InstallReport, Left};
use weightsync_gpu::worker::Slot;
use weightsync_transport::{BucketStore, DeviceBucket, Fault, Transfer, Wants};

pub(super) type DeviceReceiver = EngineReceiver<HandOver>;

pub(super) enum Order {
    /// Pause the engine.
    Open,
    /// Hand this over: its slots, and the gsum64 of each of its tensors.
    Bucket(Bucket, Vec<Slot>, Vec<u64>),
}

pub(super) struct Arrived {
    hasher: TensorHasher,
    coverage: Coverage,
}

#[async_trait]
impl Way for HandOver {
    type Arrived = Arrived;
    type Order = Order;
    const FAILED: &'static str = "the engine did not take a bucket";
    const UNSETTLED: &'static str = "the engine did not take all buckets";

    async fn carry_out(&mut self, _: &DeviceReceiver, order: Order) -> Result<(), Undone> {
        match order {
            Order::Open => self.open().await?,
            Order::Bucket(bucket, slots, sums) => self.bucket(bucket, slots, sums).await?,
        }
        Ok(())
    }

    fn compare(receiver: &DeviceReceiver, Arrived { hasher, coverage }: Arrived, request: &FinishRequest) -> Result<Manifest, String> {
        agree(&receiver.update, &receiver.layout, receiver.algorithm, || hasher.finish(), &coverage, request)
    }

    /// One that refuses this way cleanly is fed another way next time, as long as it is the same start.
    fn note(state: &mut State<Version>, error: &InstallError, reason: &str) {
        if error.left == Left::AsBefore
            && let Some(start) = state.engine.start().cloned()
        {
            state.refusals.refuses_device(start, reason.to_owned());
        }
    }

    async fn finish(self, version: HeldVersion) -> Result<InstallReport, InstallError> {
        self.finish(version).await
    }

    async fn abandon(self, reason: &str) -> Left {
        self.abandon(reason).await
    }
}

impl DeviceReceiver {
    fn take(&self, bucket: DeviceBucket) -> Result<(), Refusal> {
        let mut arrived = lock(&self.arrived);
        // This member's attempt is over, and its status says so. The others' goes on: a collective needs every rank, so what comes is dropped.
        let Some(Arrived { hasher, coverage }) = arrived.as_mut() else { return Ok(()) };
        let BucketHeader { offset, bytes, .. } = bucket.header;
        let known = cut_as_laid_out(&self.layout, &bucket.header)?;
        in_order(coverage, hasher.position(), offset, bytes)?;
        hasher.add(bytes, &bucket.shares).map_err(invalid)?;
        self.order(Order::Bucket(known, bucket.slots, bucket.shares));
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

    fn measured(&self, transfer: &Transfer) {
        self.listener.measured(&self.update, transfer);
    }

    fn end(&self) -> Result<(), Refusal> {
        if lock(&self.arrived).is_none() { Ok(()) } else { self.streamed() }
    }

    fn broken(&self, fault: Fault<'_>, cause: &str) {
        self.listener.broken(&self.update, fault, cause);
    }
}

impl Rollout {
    /// Whether this attempt's buckets can go to the engine from GPU memory; else why not.
    pub(super) fn takes_device(&self, epoch: &Epoch, request: &BeginRequest) -> Result<(), String> {
        // What is fed to joiners goes over connections.
        let Some(slot_bytes) = epoch.gpu_slot_bytes().filter(|_| !request.feeding) else {
            return Err("its bytes do not travel between GPUs".into());
        };
        let opened = || self.gpus.get().is_some_and(|gpus| gpus.transport().communicator(epoch.id()).is_some());
        if !epoch.has_rank(epoch.me()) && !opened() {
            return Err("it has no rank, no ring that others read, and did not open the source's: its bytes pass its host".into());
        }
        if request.layout.cuts != Cuts::BetweenTensors || request.algorithm != DigestAlgorithm::Gsum64 {
            return Err("the version was laid out for a transport that passes hosts".into());
        }
        let largest = request.layout.largest_bucket();
        if largest > slot_bytes {
            let (mib, transport) = (largest.div_ceil(1 << 20), if epoch.communicator().is_some() { "nccl" } else { "gdr" });
            return Err(format!("its longest tensor does not fit a bucket: set spec.transport.{transport}.bucketMiB to {mib} or more"));
        }
        if request.manual {
            return Err("the trainer switches later, and the engine would be held until then".into());
        }
        let refused = self.read(|state| state.refusals.no_device(state.engine.start()).map(str::to_owned));
        refused.map_or(Ok(()), Err)
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
        let job = self.device_job(mark(request), layout.clone(), &policy);
        let over = HandOver::begin(self.engine.as_ref(), &job).await;
        let over = over.map_err(|error| refusal(RefusalCode::EngineRefused, error.to_string()))?;
        let holds = over.holds();
        let arrived = Arrived { hasher: TensorHasher::new(layout.clone(), request.algorithm), coverage: Coverage::new(layout.total_bytes) };
        let limits = Limits { timeout: job.terms.timeout, silence: job.silence };
        let receiver = self.receive_by(request, layout, limits, arrived, over);
        if holds && let Err(refused) = receiver.ask(Order::Open).await {
            return Err(receiver.failed().map_or(refused, |why| refusal(RefusalCode::EngineRefused, why)));
        }
        Ok(receiver)
    }
}

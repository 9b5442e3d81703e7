//! The engine next to this agent as a member of a group that it joins by itself.
//!
//! Carries out what the source's agent asks for: join, open, receive a bucket. No byte of weights passes here; what the engine answers is the
//! only word of it. So a version counts as delivered when the engine took every bucket of the layout once, in order, and it is installed only
//! after the engine's last step, its own check and one generated token. The life of the engine's install is the [receiver's](super::receiver).

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::sync::watch;
use tokio::time::timeout;

use super::receiver::{EngineReceiver, Limits, Undone, Way};
use super::update::mark;
use super::{Arriving, Rollout};
use crate::group::{Epoch, refusal};
use crate::locks::lock;
use weightsync_core::protocol::{
    BeginRequest, EngineChecksum, EngineJoinRequest, EngineJoinResponse, FinishRequest, GroupFacts, HeldVersion, ProvenBy, Receive,
    ReceiveRequest, ReceiveResponse, Refusal, RefusalCode, TransportKind,
};
use weightsync_core::weights::{Cuts, Layout, Manifest, parse_digest_hex};
use weightsync_engine::{DeviceBucket, DeviceInstall, GroupJoin, InstallError, InstallReport, Left, no_groups};
use weightsync_transport::Transfer;

/// Part of the time of a call that is kept for its answer to travel.
const TO_ANSWER: Duration = Duration::from_millis(200);

pub(super) type GroupReceiver = EngineReceiver<FromGroup>;

/// An install that the engine feeds from its group.
pub(super) struct FromGroup {
    install: Box<dyn DeviceInstall>,
    /// So many buckets were taken.
    taken: u32,
    /// When the first one was asked for.
    begun: Option<Instant>,
}

/// What the engine is to do.
pub(super) enum Asked {
    ToReceive(Receive),
    /// Take its last step, and compute checksums of its own.
    ToSeal,
}

pub(super) struct Arrived {
    /// The highest sequence that was asked for.
    asked: watch::Sender<Option<u32>>,
    /// So many buckets were taken.
    taken: u32,
    /// The engine's own checksums.
    checksum: Option<EngineChecksum>,
}

#[async_trait]
impl Way for FromGroup {
    type Arrived = Arrived;
    type Order = Asked;
    const FAILED: &'static str = "the engine did not receive";
    const UNSETTLED: &'static str = "the engine did not take all buckets";
    const PROVEN_BY: ProvenBy = ProvenBy::Nothing;

    async fn carry_out(&mut self, receiver: &GroupReceiver, what: Asked) -> Result<(), Undone> {
        match what {
            Asked::ToReceive(Receive::Open) => self.install.open().await?,
            Asked::ToSeal => {
                let checksum = self.install.seal().await?;
                if let Some(arrived) = lock(&receiver.arrived).as_mut() {
                    arrived.checksum = checksum;
                }
                return Ok(());
            }
            Asked::ToReceive(Receive::Bucket(sequence)) => {
                let Some(bucket) = receiver.layout.bucket(sequence).filter(|_| sequence == self.taken) else {
                    let message = format!("bucket {sequence} was named, and the engine took {} so far", self.taken);
                    return Err(Undone::Refused(refusal(RefusalCode::Invalid, message)));
                };
                let begun = *self.begun.get_or_insert_with(Instant::now);
                self.install.bucket(DeviceBucket { bucket, places: Vec::new(), sums: Vec::new() }).await?;
                self.taken += 1;
                if let Some(arrived) = lock(&receiver.arrived).as_mut() {
                    arrived.taken = self.taken;
                }
                let bytes = bucket.offset.saturating_add(bucket.bytes);
                receiver.listener.received(&receiver.update, bytes);
                if self.taken == receiver.layout.bucket_count() {
                    let transfer = Transfer { from: None, by: TransportKind::Nccl, bytes, took: begun.elapsed() };
                    receiver.listener.measured(&receiver.update, &transfer);
                }
            }
        }
        if self.taken == receiver.layout.bucket_count() {
            receiver.streamed().map_err(Undone::Refused)?;
        }
        Ok(())
    }

    /// Sees that the engine took every bucket, and that the manifest is the one that the leader named.
    fn compare(receiver: &GroupReceiver, Arrived { taken, .. }: Arrived, request: &FinishRequest) -> Result<Manifest, String> {
        let wanted = receiver.layout.bucket_count();
        if taken != wanted {
            return Err(format!("the engine took {taken} of {wanted} buckets"));
        }
        let digests = request.tensor_digests.iter().map(|hex| parse_digest_hex(hex)).collect::<Option<Vec<u128>>>();
        let digests = digests.ok_or("a tensor digest of the manifest is not 32 lower-case hex digits")?;
        let manifest = Manifest::new(receiver.update.version, Layout::clone(&receiver.layout), receiver.algorithm, &digests);
        let manifest = manifest.map_err(|error| error.to_string())?;
        let digest = manifest.digest();
        if digest != request.manifest_digest {
            return Err(format!("the manifest is {} by the leader and {digest} by its digests", request.manifest_digest));
        }
        Ok(manifest)
    }

    async fn finish(self, version: HeldVersion) -> Result<InstallReport, InstallError> {
        self.install.finish(version).await
    }

    async fn abandon(self, reason: &str) -> Left {
        self.install.abandon(reason).await
    }
}

impl GroupReceiver {
    /// Has the engine take its last step, and returns checksums of its own, where it has some. What failed is found when the attempt is
    /// concluded.
    pub(super) async fn seal(&self) -> Option<EngineChecksum> {
        self.ask(Asked::ToSeal).await.ok()?;
        lock(&self.arrived).as_ref()?.checksum.clone()
    }
}

impl Rollout {
    /// Asks the engine whether it can join a group, for anyone who plans.
    pub(super) async fn ask_group(&self, deadline: Duration) -> Result<(), Refusal> {
        let facts = match self.engine.group() {
            Some(group) => group.facts(deadline).await.map_err(|error| refusal(RefusalCode::EngineRefused, error.to_string()))?,
            None => GroupFacts::cannot(no_groups(self.engine.kind()).to_string()),
        };
        self.with(|state| state.engine.learn_groups(facts));
        Ok(())
    }

    /// Brings the engine into a group of a committing epoch; what it was in before is left first.
    pub async fn join_group(
        self: &Arc<Self>,
        epoch: &Epoch,
        request: &EngineJoinRequest,
        within: Duration,
    ) -> Result<EngineJoinResponse, Refusal> {
        let of_plan = epoch.engines().and_then(|plan| plan.of(epoch.me())).map(|(_, group)| (group.offset(epoch.me()), group.world()));
        if of_plan != Some((Some(request.offset), request.world)) {
            let message =
                format!("rank {} of {} is not the place that the epoch's plan gives to {}", request.offset, request.world, epoch.me());
            return Err(refusal(RefusalCode::Invalid, message));
        }
        let refused = |what: String| refusal(RefusalCode::EngineRefused, what);
        let group = self.engine.group().ok_or_else(|| refused(no_groups(self.engine.kind()).to_string()))?;
        let Ok(_switching) = timeout(within, self.switching.lock()).await else {
            return Err(refused("the engine is still being switched to another version".into()));
        };
        // One that is stuck would not answer the join either, and the others would wait for it as long as a commit may take.
        let deadline = Duration::from_millis(epoch.prepared.policy.health.timeout_ms).min(within);
        self.ask_engine(deadline, deadline).await?;
        let join = GroupJoin { name: request.group.clone(), place: request.place.clone(), offset: request.offset, world: request.world };
        let joined = group.join(&join, within.saturating_sub(TO_ANSWER)).await.map_err(|error| refused(error.to_string()))?;
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Ok(EngineJoinResponse { cleared_ms: ms(joined.cleared), joined_ms: ms(joined.joined) })
    }

    /// Whether this attempt's buckets go to the engine through its own group.
    pub(super) fn takes_from_group(epoch: &Epoch, request: &BeginRequest) -> bool {
        !request.feeding && epoch.engines().is_some_and(|plan| plan.of(epoch.me()).is_some())
    }

    /// Opens an install from the engine's group; the engine is only looked at.
    pub(super) async fn open_group(
        self: &Arc<Self>,
        epoch: &Epoch,
        request: &BeginRequest,
        layout: &Arc<Layout>,
    ) -> Result<Arc<GroupReceiver>, Refusal> {
        let refused = |what: String| refusal(RefusalCode::EngineRefused, what);
        if layout.cuts != Cuts::BetweenTensors {
            return Err(refusal(RefusalCode::Invalid, "the version was laid out for a transport that tears tensors: publish it again"));
        }
        if request.manual {
            return Err(refused("an engine that receives by itself cannot stage a version: publish without `activation: manual`, or set spec.delivery to Agent".into()));
        }
        let policy = Self::policy_of(epoch);
        let job = self.device_job(mark(request), layout.clone(), &policy);
        let group = self.engine.group().ok_or_else(|| refused(no_groups(self.engine.kind()).to_string()))?;
        let asked = watch::Sender::new(None);
        let install = group.begin(&job, asked.subscribe()).await.map_err(|error| refused(error.to_string()))?;
        let limits = Limits { timeout: job.terms.timeout, silence: job.silence };
        Ok(self.receive_by(
            request,
            layout,
            limits,
            Arrived { asked, taken: 0, checksum: None },
            FromGroup { install, taken: 0, begun: None },
        ))
    }

    /// Does what the leader asks of the engine, and answers when the engine did.
    pub async fn receive(&self, request: &ReceiveRequest) -> Result<ReceiveResponse, Refusal> {
        let Some(Arriving::Group(receiver)) = self.receiver_of(&request.update) else {
            return Err(refusal(RefusalCode::WrongPhase, "the attempt is over here"));
        };
        self.heard_leader(&request.update);
        let begun = Instant::now();
        if let Receive::Bucket(sequence) = request.what
            && let Some(arrived) = lock(&receiver.arrived).as_ref()
        {
            // Before its turn: an engine that queues requests is informed of it while it loads the bucket before.
            arrived.asked.send_if_modified(|asked| asked.replace(sequence).is_none_or(|before| before < sequence));
        }
        receiver.ask(Asked::ToReceive(request.what)).await?;
        self.heard_leader(&request.update);
        let ahead = self.engine.group().is_some_and(|group| group.ahead());
        Ok(ReceiveResponse { took_ms: u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX), ahead })
    }
}

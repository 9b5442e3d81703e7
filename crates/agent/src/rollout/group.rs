//! The engine beside this agent as a member of a group that it joins by itself.
//!
//! Carries out what the source's agent asks for: join, open, receive a bucket. No byte of weights passes here; what the engine answers is the
//! only word of it. So a version counts as delivered when the engine took every bucket of the layout once, in order, and it is installed only
//! after the engine's last step, its own check and one generated token. Whatever ends an attempt after the first bucket leaves the engine
//! marked and paused.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use super::switch::Switch;
use super::{Arriving, Rollout};
use crate::core::lock;
use crate::group::{Epoch, refusal};
use weightsync_core::protocol::{
    BeginRequest, EngineJoinRequest, EngineJoinResponse, FinishRequest, GroupFacts, HeldVersion, Receive, ReceiveRequest, ReceiveResponse,
    Refusal, RefusalCode, UpdateId,
};
use weightsync_core::weights::{Bucket, Cuts, DigestAlgorithm, Layout, Manifest, parse_digest_hex};
use weightsync_engine::{DeviceBucket, DeviceInstall, GroupJoin, InstallError, no_groups};

/// Part of the time of a call that is kept for its answer to travel.
const TO_ANSWER: Duration = Duration::from_millis(200);

/// What the task that speaks to the engine is told, in order.
enum Order {
    /// Do this, and say how it went.
    Do(Receive, oneshot::Sender<Result<(), Refusal>>),
    /// The version is what its manifest says: the engine takes its last step.
    Finish(HeldVersion),
    GiveUp(String),
}

/// Receives one attempt through the engine's own group.
pub(super) struct GroupReceiver {
    update: UpdateId,
    layout: Arc<Layout>,
    algorithm: DigestAlgorithm,
    buckets: Vec<Bucket>,
    taken: Mutex<usize>,
    /// The highest sequence that was asked for.
    asked: watch::Sender<Option<u32>>,
    orders: mpsc::UnboundedSender<Order>,
}

impl GroupReceiver {
    /// Nothing is taken any more, and the engine's install is given up.
    pub(super) fn discard(&self, reason: &str) {
        // The task is gone when the engine failed before, or finished.
        let _gone = self.orders.send(Order::GiveUp(reason.to_owned()));
    }

    /// Has the engine take its last step. False when there is nobody to do so any more.
    pub(super) fn finish(&self, held: HeldVersion) -> bool {
        self.orders.send(Order::Finish(held)).is_ok()
    }

    /// Sees that the engine took every bucket, and that the manifest is the one that the leader named.
    pub(super) fn conclude(&self, request: &FinishRequest) -> Result<HeldVersion, String> {
        let (taken, wanted) = (*lock(&self.taken), self.buckets.len());
        if taken != wanted {
            return Err(format!("the engine took {taken} of {wanted} buckets"));
        }
        let digests = request.tensor_digests.iter().map(|hex| parse_digest_hex(hex)).collect::<Option<Vec<u128>>>();
        let digests = digests.ok_or("a tensor digest of the manifest is not 32 lower-case hex digits")?;
        let manifest = Manifest::new(self.update.version, Layout::clone(&self.layout), self.algorithm, &digests);
        let digest = manifest.map_err(|error| error.to_string())?.digest();
        if digest != request.manifest_digest {
            return Err(format!("the manifest is {} by the leader and {digest} by its digests", request.manifest_digest));
        }
        Ok(HeldVersion { version: self.update.version, manifest: digest })
    }
}

impl Rollout {
    /// Asks the engine whether it can join a group, for whoever plans.
    pub(super) async fn ask_group(&self, deadline: Duration) -> Result<(), Refusal> {
        let facts = match self.engine.group() {
            Some(group) => group.facts(deadline).await.map_err(|error| refusal(RefusalCode::EngineRefused, error.to_string()))?,
            None => GroupFacts::cannot(no_groups(self.engine.kind()).to_string()),
        };
        self.with(|inner| {
            if let Some(known) = &mut inner.engine.facts {
                known.groups = Some(facts);
            }
        });
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
        self.ask_engine(Duration::from_millis(epoch.prepared.policy.health.timeout_ms).min(within)).await?;
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
        let job = self.device_job(request.update.version, request.manifest_digest.clone(), layout.clone(), &policy);
        let group = self.engine.group().ok_or_else(|| refused(no_groups(self.engine.kind()).to_string()))?;
        let asked = watch::Sender::new(None);
        let install = group.begin(&job, asked.subscribe()).await.map_err(|error| refused(error.to_string()))?;
        let (orders, inbox) = mpsc::unbounded_channel();
        let receiver = Arc::new(GroupReceiver {
            update: request.update.clone(),
            layout: layout.clone(),
            algorithm: request.algorithm,
            buckets: layout.buckets().collect(),
            taken: Mutex::default(),
            asked,
            orders,
        });
        tokio::spawn(self.clone().speak(Arc::downgrade(&receiver), install, inbox, job.timeout));
        Ok(receiver)
    }

    /// Does what the leader asks of the engine, and answers when the engine did.
    pub async fn receive(&self, request: &ReceiveRequest) -> Result<ReceiveResponse, Refusal> {
        let of_attempt = self.with(|inner| match inner.receiving.as_ref().map(|receiving| (&receiving.update, &receiving.receiver)) {
            Some((of, Some(Arriving::Group(receiver)))) if *of == request.update => Some(receiver.clone()),
            _ => None,
        });
        let receiver = of_attempt.ok_or_else(|| refusal(RefusalCode::WrongPhase, "the attempt is over here"))?;
        self.heard_leader(&request.update);
        let begun = Instant::now();
        let (answer, answered) = oneshot::channel();
        let gone = || refusal(RefusalCode::EngineRefused, "the engine's install ended before");
        if let Receive::Bucket(sequence) = request.what {
            // Before its turn: an engine that queues requests is told of it while it loads the bucket before.
            receiver.asked.send_if_modified(|asked| asked.replace(sequence).is_none_or(|before| before < sequence));
        }
        receiver.orders.send(Order::Do(request.what, answer)).map_err(|_| gone())?;
        answered.await.unwrap_or_else(|_| Err(gone()))?;
        self.heard_leader(&request.update);
        let ahead = self.engine.group().is_some_and(|group| group.ahead());
        Ok(ReceiveResponse { took_ms: u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX), ahead })
    }

    /// Speaks to the engine in the order of what it is told, until the end of the attempt.
    async fn speak(
        self: Arc<Self>,
        receiver: std::sync::Weak<GroupReceiver>,
        mut install: Box<dyn DeviceInstall>,
        mut orders: mpsc::UnboundedReceiver<Order>,
        limit: Duration,
    ) {
        // Held from the pause on: nobody else changes the engine, and it is not judged by its health.
        let mut switching = None;
        let mut begun: Option<Switch> = None;
        let received = Instant::now();
        while let Some(order) = orders.recv().await {
            match order {
                Order::Do(what, answer) => {
                    if switching.is_none() {
                        switching = Some(self.switching.lock().await);
                        begun = Some(self.begin_switch(limit));
                    }
                    let Some(receiver) = receiver.upgrade() else { break };
                    match self.carry_out(&receiver, install.as_mut(), what, received).await {
                        Ok(()) => drop(answer.send(Ok(()))),
                        Err(Undone::Refused(refusal)) => drop(answer.send(Err(refusal))),
                        Err(Undone::Failed(error)) => {
                            drop(answer.send(Err(refusal(RefusalCode::EngineRefused, error.to_string()))));
                            self.group_failed(&receiver.update, &error, begun.take().unwrap_or_default());
                            return;
                        }
                    }
                }
                Order::Finish(held) => {
                    let switch = begun.take().unwrap_or_else(|| self.begin_switch(limit));
                    let outcome = install.finish(held.clone()).await;
                    self.end_switch(&held, None, Ok(outcome), switch, limit);
                    self.probe_now.notify_one();
                    return;
                }
                Order::GiveUp(reason) => {
                    let left = install.abandon(&reason).await;
                    self.given_up(&reason, left, begun);
                    return;
                }
            }
        }
        let reason = "the attempt was dropped";
        let left = install.abandon(reason).await;
        self.given_up(reason, left, begun);
    }

    async fn carry_out(
        &self,
        receiver: &GroupReceiver,
        install: &mut dyn DeviceInstall,
        what: Receive,
        begun: Instant,
    ) -> Result<(), Undone> {
        let taken = *lock(&receiver.taken);
        match what {
            Receive::Open => install.open().await.map_err(Undone::Failed)?,
            Receive::Bucket(sequence) => {
                let next = receiver.buckets.get(taken).filter(|bucket| bucket.sequence == sequence);
                let Some(bucket) = next else {
                    let message = format!("bucket {sequence} was named, and the engine took {taken} so far");
                    return Err(Undone::Refused(refusal(RefusalCode::Invalid, message)));
                };
                install.bucket(DeviceBucket { bucket: *bucket, places: Vec::new(), sums: Vec::new() }).await.map_err(Undone::Failed)?;
                *lock(&receiver.taken) = taken + 1;
                let bytes = bucket.offset.saturating_add(bucket.bytes);
                self.with(|inner| inner.machine.received(&receiver.update, bytes));
            }
        }
        if *lock(&receiver.taken) == receiver.buckets.len() {
            let took_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
            self.with(|inner| inner.machine.streamed(&receiver.update, took_ms)).map_err(Undone::Refused)?;
        }
        Ok(())
    }

    /// The engine refused, or failed in the middle.
    fn group_failed(&self, update: &UpdateId, error: &InstallError, switch: Switch) {
        let reason = format!("the engine did not receive: {error}");
        tracing::warn!(left = ?error.left, %error, "the engine did not receive a bucket from its group");
        self.with(|inner| {
            inner.machine.abort(update, &reason);
            inner.spoiled(reason, error.left, switch);
        });
        self.probe_now.notify_one();
    }
}

enum Undone {
    /// It makes no sense; the install goes on.
    Refused(Refusal),
    /// The install is over.
    Failed(InstallError),
}

//! Groups that engines join by themselves, as rank 0 sees them: how they are formed on commit, and how they end.
//!
//! Binds a store before anybody hears of it, has all engines join at once, and names those that cannot. The communicator of a group with a
//! store is made with the first bucket, because that is when the engines make theirs. Whatever ends a group aborts it (never destroys it, which
//! is a rendezvous), and no engine is asked to join again before that abort is done: leaving would wait for us otherwise. It never repairs one.

mod admitted;

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::admitted::addresses_of_group;
use super::Leader;
use super::agreement::comparable;
use super::calls::Calls;
use crate::group::{Epoch, refusal};
use weightsync_core::protocol::worker::{NcclId, Proof};
use weightsync_core::protocol::{EngineGroup, EngineJoinRequest, EpochId, GroupPlace, MemberName, Refusal, RefusalCode, Rendezvous};
use weightsync_gpu::worker::{Worker, WorkerError};
use weightsync_net::https::CallError;
use weightsync_torch::store::{Server, nccl_id_keys};
use weightsync_transport::nccl::Staging;

/// Making an id takes no time, unless the worker hangs.
const UNIQUE_ID: Duration = Duration::from_secs(2);
/// An abort takes 0.5 s where a peer is gone (NCCL 2.28.9).
const ABORT: Duration = Duration::from_secs(20);
/// Engines that compute their checksums within this long do so for every version; others for the first one that a group brings.
const FAST_CHECKSUMS_MS: u64 = 200;
/// Groups of one epoch at most, as far as their numbers at the worker go.
const MOST_GROUPS: u64 = 1 << 10;
/// Numbers of these groups at the worker do not meet those of communicators between agents, which are epochs.
const NUMBERS: u64 = 1 << 48;

/// All groups of one epoch, as rank 0 of each.
pub(super) struct EngineGroupsLed {
    epoch: EpochId,
    pub(super) worker: Worker,
    pub(super) staging: Staging,
    pub(super) groups: Vec<Arc<Led>>,
    /// Time that the engines took for their own checksums when they were last asked, in ms; none before.
    checked_ms: Mutex<Option<u64>>,
    broken: watch::Sender<Option<String>>,
}

pub(super) struct Led {
    pub(super) plan: EngineGroup,
    worker: Worker,
    number: u64,
    id: NcclId,
    /// Closed with the epoch.
    store: Option<Server>,
    /// Held while the communicator is made.
    making: tokio::sync::Mutex<()>,
    stands: AtomicBool,
}

impl Led {
    /// Number of the group at the worker.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn stands(&self) -> bool {
        self.stands.load(Ordering::Acquire)
    }

    /// Makes the communicator, if it is not there: its other ranks make theirs at the same time.
    pub(super) async fn communicate(&self, within: Duration) -> Result<(), WorkerError> {
        let _making = self.making.lock().await;
        if !self.stands() {
            let proof = match self.plan.rendezvous {
                Rendezvous::Store => Proof::Nothing,
                Rendezvous::UniqueId => Proof::AllReduce,
            };
            let made = self.worker.join_as(self.number, self.id, (0, self.plan.world()), proof, within).await?;
            tracing::info!(world = made.world, init = ?made.init, "the communicator of a group of engines stands");
            self.stands.store(true, Ordering::Release);
        }
        Ok(())
    }
}

impl EngineGroupsLed {
    /// Whether engines are to be asked for their own checksums of the next version: of the first one that these groups bring, and of each one
    /// while they answer fast.
    pub(super) fn is_to_be_checked(&self) -> bool {
        let members: Vec<MemberName> = self.groups.iter().flat_map(|group| &group.plan.members).map(|(name, _)| name.clone()).collect();
        comparable(&members) && crate::locks::lock(&self.checked_ms).is_none_or(|took| took <= FAST_CHECKSUMS_MS)
    }

    /// Engines were asked, and the slowest of those that could be compared took so long; none could without it.
    pub(super) fn checked(&self, slowest_ms: Option<u64>) {
        *crate::locks::lock(&self.checked_ms) = Some(slowest_ms.unwrap_or(u64::MAX));
    }

    /// Why they cannot be used any more, if so.
    pub(super) fn broken(&self) -> Option<String> {
        self.broken.borrow().clone()
    }

    /// Waits until they cannot be used any more.
    pub(super) async fn breaks(&self) -> String {
        let mut broken = self.broken.subscribe();
        let why = broken.wait_for(Option::is_some).await.ok().and_then(|why| why.clone());
        why.unwrap_or_else(|| "it was given up".into())
    }

    /// Aborts one of them, whatever it is doing. The others can still end what they are at.
    pub(super) fn abort(&self, group: usize) {
        if let Some(group) = self.groups.get(group) {
            drop(group.worker.abort(group.number, ABORT));
        }
    }

    /// Ends all of them: aborted, whatever is under way. The first reason stays. The returned future is the end of the aborts; they are asked
    /// for when this returns.
    pub(super) fn break_off(&self, why: &str) -> impl Future<Output = ()> + Send + use<> {
        self.broken.send_if_modified(|broken| {
            let first = broken.is_none();
            broken.get_or_insert_with(|| why.to_owned());
            first
        });
        let aborts: Vec<_> = self.groups.iter().map(|group| group.worker.abort(group.number, ABORT)).collect();
        async move {
            for aborted in futures::future::join_all(aborts).await {
                if let Err(error) = aborted {
                    tracing::debug!(%error, "a group of engines could not be aborted: its worker is gone, and the group with it");
                }
            }
        }
    }
}

impl Drop for EngineGroupsLed {
    fn drop(&mut self) {
        if self.broken.borrow().is_none() {
            drop(self.break_off("it was dropped"));
        }
    }
}

impl Leader {
    pub(super) fn engines_of(&self, epoch: &Epoch) -> Option<Arc<EngineGroupsLed>> {
        crate::locks::lock(&self.engines).clone().filter(|led| led.epoch == *epoch.id())
    }

    pub(super) async fn form_engines(&self, epoch: &Arc<Epoch>, deadline: Instant) -> Result<(), Refusal> {
        let internal = |what: String| refusal(RefusalCode::Internal, what);
        let before = crate::locks::lock(&self.engines).take();
        if let Some(before) = before {
            // An abort that hangs costs this epoch no more than half of its time.
            let aborted = before.break_off("another epoch took its place");
            let half = deadline.saturating_duration_since(Instant::now()) / 2;
            if tokio::time::timeout(half, aborted).await.is_err() {
                tracing::warn!("the groups of the epoch before are still being aborted: engines may not be able to leave them");
            }
        }
        let (worker, staging) =
            self.gpus().and_then(|gpus| gpus.first()).ok_or_else(|| internal("the source's agent has no GPU worker".into()))?;
        let plan = epoch.engines().cloned().ok_or_else(|| internal("no engine joins this epoch by itself".into()))?;
        let over = self.core.over(epoch.id());
        let begun = Instant::now();
        let mut groups = Vec::new();
        for (number, group) in (0_u64..).zip(&plan.groups) {
            let id = worker.unique_id(UNIQUE_ID).await.map_err(|error| internal(error.to_string()))?;
            let name = EngineGroup::name(epoch.id(), usize::try_from(number).unwrap_or(usize::MAX));
            let store = match group.rendezvous {
                Rendezvous::Store => Some(self.store(epoch, &name, &id, &over).await?),
                Rendezvous::UniqueId => None,
            };
            let number = NUMBERS | (epoch.id().epoch * MOST_GROUPS + number);
            let (making, stands) = (tokio::sync::Mutex::new(()), AtomicBool::new(false));
            groups.push(Arc::new(Led { plan: group.clone(), worker: worker.clone(), number, id, store, making, stands }));
        }
        let led = Arc::new(EngineGroupsLed {
            epoch: epoch.id().clone(),
            worker,
            staging,
            groups,
            checked_ms: Mutex::new(None),
            broken: watch::Sender::new(None),
        });
        if let Err(refusal) = self.join_all(epoch, &led, deadline).await {
            // Engines that wait for a rank that never comes are let go.
            led.break_off(&refusal.message).await;
            return Err(refusal);
        }
        *crate::locks::lock(&self.engines) = Some(led.clone());
        let (core, me) = (self.core.clone(), epoch.me().clone());
        tokio::spawn(async move {
            tokio::select! {
                () = over.cancelled() => led.break_off("its epoch is over").await,
                why = led.breaks() => tracing::info!(epoch = %led.epoch, why, "the groups of engines ended before their epoch"),
                // Their rank 0 is gone: the engines hear nothing of it, the coordinator does.
                cause = led.worker.ended() => core.peer_lost(&led.epoch, &me, &format!("its GPU worker ended: {cause}")),
            }
        });
        let took = begun.elapsed();
        tracing::info!(epoch = %epoch.id(), groups = plan.groups.len(), ?took, "the engines joined");
        Ok(())
    }

    async fn store(&self, epoch: &Epoch, name: &str, id: &NcclId, over: &CancellationToken) -> Result<Server, Refusal> {
        let failed = |what: String| refusal(RefusalCode::Internal, format!("the engines' store: {what}"));
        let own: SocketAddr = self.transport.address().parse().map_err(|_| failed("this agent has no address".into()))?;
        let group = addresses_of_group(&epoch.prepared.roster, &epoch.commit.addresses).map_err(failed)?;
        let store = Server::bind(SocketAddr::new(own.ip(), 0), move |from: IpAddr| group.contains(&from.to_canonical()), over)
            .await
            .map_err(|error| failed(error.to_string()))?;
        for key in nccl_id_keys(name) {
            store.set(&key, &id.0).map_err(|error| failed(error.to_string()))?;
        }
        Ok(store)
    }

    /// Has all engines join at once, and rank 0 of those groups whose communicator is made by that.
    async fn join_all(&self, epoch: &Arc<Epoch>, led: &EngineGroupsLed, deadline: Instant) -> Result<(), Refusal> {
        let calls = Calls::new(self.client.clone(), epoch.clone());
        let mut joins: JoinSet<(MemberName, Result<(), Refusal>)> = JoinSet::new();
        for (number, group) in led.groups.iter().enumerate() {
            let place = match &group.store {
                Some(store) => GroupPlace::Store { address: store.address().ip().to_string(), port: store.address().port() },
                None => GroupPlace::UniqueId { id: group.id },
            };
            for (member, _) in &group.plan.members {
                let within = deadline.saturating_duration_since(Instant::now());
                let request = EngineJoinRequest {
                    id: epoch.id().clone(),
                    group: EngineGroup::name(epoch.id(), number),
                    place: place.clone(),
                    offset: group.plan.offset(member).unwrap_or(0),
                    world: group.plan.world(),
                    deadline_ms: u64::try_from(within.as_millis()).unwrap_or(u64::MAX),
                };
                let (calls, member) = (calls.clone(), member.clone());
                joins.spawn(async move {
                    let answer = calls.ask(&member, &request, within).await;
                    if let Ok(joined) = &answer {
                        tracing::debug!(%member, joined.cleared_ms, joined.joined_ms, "its engine joined");
                    }
                    (member, answer.map(drop).map_err(|error| said(&error)))
                });
            }
            let (group, me) = (group.clone(), epoch.me().clone());
            joins.spawn(async move { (me, group.prove(deadline).await) });
        }
        while let Some(joined) = joins.join_next().await {
            let Ok((member, Err(why))) = joined else { continue };
            if member == *epoch.me() {
                // A rank 0 that waited in vain names no one, unless its own worker failed: an engine that refused says so in a moment.
                if let Some((at_fault, why)) = next_fault(&mut joins, epoch.me()).await {
                    return Err(self.cannot_join(epoch, &at_fault, &why));
                }
                return Err(why);
            }
            return Err(self.cannot_join(epoch, &member, &why));
        }
        Ok(())
    }

    fn cannot_join(&self, epoch: &Epoch, member: &MemberName, why: &Refusal) -> Refusal {
        self.core.peer_lost(epoch.id(), member, &why.message);
        refusal(RefusalCode::PeerUnreachable, format!("the engine of {member} cannot join the group: {}", why.message))
    }
}

impl Led {
    /// A group with a store: every rank of every engine sent its hello there. Else: the communicator exists.
    async fn prove(&self, deadline: Instant) -> Result<(), Refusal> {
        let within = deadline.saturating_duration_since(Instant::now());
        if let Some(store) = &self.store {
            let ranks = usize::try_from(self.plan.world().saturating_sub(1)).unwrap_or(usize::MAX);
            let all = store.wait_for_clients(ranks, within).await;
            return all.map_err(|error| refusal(RefusalCode::PeerUnreachable, error.to_string()));
        }
        let within = within.saturating_sub(weightsync_gpu::worker::GRACE + Duration::from_millis(200)).max(Duration::from_millis(100));
        let made = self.communicate(within).await;
        made.map_err(|error| refusal(RefusalCode::PeerUnreachable, format!("the communicator cannot be made: {error}")))
    }
}

/// An engine that failed to join, among those that still answer.
async fn next_fault(joins: &mut JoinSet<(MemberName, Result<(), Refusal>)>, me: &MemberName) -> Option<(MemberName, Refusal)> {
    while let Some(joined) = joins.join_next().await {
        match joined {
            Ok((member, Err(why))) if member != *me => return Some((member, why)),
            _ => {}
        }
    }
    None
}

/// What a call that failed says about the member.
pub(super) fn said(error: &CallError) -> Refusal {
    match error {
        CallError::Refused { refusal, .. } => refusal.clone(),
        CallError::Timeout { .. } => refusal(RefusalCode::Timeout, error.to_string()),
        _ => refusal(RefusalCode::Internal, error.to_string()),
    }
}

//! The control server of one endpoint, over mutual TLS: messages of the coordinator about groups, messages of leaders about updates.
//!
//! Decides who may call: the controller, and the pods of the latest roster. The controller alone forms and ends groups; the agent of a pod that
//! leads the present epoch leads updates. What a message does is decided by [`Group`](super::group::Group) and the rollout's machine.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Query, Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use futures::StreamExt;
use tokio::time::{Instant, timeout};

use super::core::Core;
use super::group::{Epoch, LedBy, Step, refusal};
use super::lead::{Leader, now_ms};
use super::rollout::{PAUSING, Rollout};
use super::source::Source;
use weightsync_core::protocol::{
    AbortRequest, ActivateRequest, AssignmentChanged, BeginRequest, Call, ClockAnswer, ClockRequest, CommitRequest, Delivery, EVENTS_PATH,
    EdgeRequest, EngineJoinRequest, EpochId, ExternalBegin, ExternalEnd, FabricReport, FenceRequest, FinishRequest, GpuReport, JoinRequest,
    LendRequest, MemberState, PrepareRequest, PrepareResponse, ReceiveRequest, Refusal, RefusalCode, ReleaseRequest, Role, StateRequest,
    StatusRequest, TransportWish,
};
use weightsync_net::https::{Answered, Failed, Valid, ndjson};
use weightsync_net::identity::PeerIdentity;

#[derive(Clone)]
pub enum Part {
    /// Held, not read: the source lives as long as its endpoint.
    Source(#[allow(dead_code)] Arc<Source>),
    Rollout(Arc<Rollout>),
}

/// One endpoint: a member of a group, or one that waits to become one.
pub struct Endpoint {
    pub core: Arc<Core>,
    pub leader: Arc<Leader>,
    pub part: Part,
    pub data_address: String,
}

/// The routes of an endpoint; serve them with [`Access::Group`](weightsync_net::https::Access::Group).
pub fn router(endpoint: Arc<Endpoint>) -> Router {
    Router::new()
        .route(PrepareRequest::PATH, post(prepare))
        .route(CommitRequest::PATH, post(commit))
        .route(JoinRequest::PATH, post(join))
        .route(LendRequest::PATH, post(lend))
        .route(EngineJoinRequest::PATH, post(engine_join))
        .route(FenceRequest::PATH, post(fence))
        .route(EdgeRequest::PATH, post(measure_edge))
        .route(ClockRequest::PATH, get(clock))
        .route(ReleaseRequest::PATH, post(release))
        .route(AssignmentChanged::PATH, post(announce))
        .route(BeginRequest::PATH, post(begin))
        .route(ReceiveRequest::PATH, post(receive))
        .route(FinishRequest::PATH, post(finish))
        .route(ActivateRequest::PATH, post(activate))
        .route(AbortRequest::PATH, post(abort))
        .route(ExternalBegin::PATH, post(begin_external))
        .route(ExternalEnd::PATH, post(end_external))
        .route(StatusRequest::PATH, get(status))
        .route(StateRequest::PATH, get(state))
        .route(EVENTS_PATH, get(events))
        .layer(from_fn_with_state(endpoint.clone(), members_only))
        .with_state(endpoint)
}

type Here = State<Arc<Endpoint>>;

/// Serves the controller and the pods of the latest roster: a pod that left has a certificate, and no rights.
async fn members_only(State(endpoint): Here, peer: PeerIdentity, request: Request, next: Next) -> Result<Response, Failed<Refusal>> {
    match &peer {
        PeerIdentity::Agent { pod_uid, .. } if !endpoint.core.knows(pod_uid) => {
            Err(refusal(RefusalCode::Forbidden, format!("{} is no member of the group of this agent", peer.uri())).into())
        }
        _ => Ok(next.run(request).await),
    }
}

async fn prepare(State(endpoint): Here, peer: PeerIdentity, Valid(request): Valid<PrepareRequest>) -> Answered<PrepareRequest> {
    by_controller(&peer)?;
    let limit = Duration::from_millis(request.deadline_ms);
    // On a task of its own: a coordinator that hangs up must not leave the endpoint between two phases.
    on_its_own(limit, async move {
        let step = endpoint.core.prepare(&request)?;
        let gpus = gpus_for(&endpoint, &request, limit / 2);
        let fabric = fabric_for(&endpoint, &request, limit / 2);
        if let Part::Rollout(rollout) = &endpoint.part {
            if let Step::Taken { ended: Some(_) } = step {
                rollout.epoch_over(&request.ends_others_because());
            }
            rollout.prepare(&request).await?;
        }
        let (gpus, fabric) = tokio::join!(gpus, fabric);
        tracing::info!(epoch = %request.id, member = %request.member, "prepared");
        Ok(Json(PrepareResponse {
            incarnation: endpoint.core.me().incarnation.clone(),
            data_address: endpoint.data_address.clone(),
            gpus,
            fabric,
            state: MemberState::clone(&endpoint.core.events().state()),
        }))
    })
    .await
}

/// What this endpoint has for a communicator. No one waits for GPUs that the object does not want.
async fn gpus_for(endpoint: &Endpoint, request: &PrepareRequest, within: Duration) -> GpuReport {
    let policy = &request.policy.transport;
    match endpoint.leader.gpus() {
        Some(gpus) if policy.wish != TransportWish::Tcp && request.policy.delivery != Delivery::External => {
            let ranks = request.roster.member(&request.member).map_or(1, |member| member.size);
            gpus.configure(policy, ranks);
            gpus.report(within).await
        }
        _ => GpuReport { reason: "its agent uses no GPU".into(), ..GpuReport::default() },
    }
}

/// What this endpoint has for reads from members.
async fn fabric_for(endpoint: &Endpoint, request: &PrepareRequest, within: Duration) -> FabricReport {
    match endpoint.leader.fabric() {
        Some(fabric) if request.policy.delivery == Delivery::Agent => fabric.report(&request.policy.transport, within).await,
        _ => FabricReport { reason: "its agent does not use NIXL".into(), ..FabricReport::default() },
    }
}

async fn join(State(endpoint): Here, peer: PeerIdentity, Valid(request): Valid<JoinRequest>) -> Answered<JoinRequest> {
    let epoch = endpoint.core.joining(&request.id)?;
    leads(&epoch, &peer)?;
    let limit = Duration::from_millis(request.deadline_ms);
    let deadline = Instant::now() + limit.mul_f32(0.95);
    on_its_own(limit, async move {
        let gpus = endpoint.leader.gpus().ok_or_else(|| refusal(RefusalCode::Internal, "its agent uses no GPU"))?;
        gpus.join(&epoch, request.nccl, deadline).await.map(Json)
    })
    .await
}

async fn lend(State(endpoint): Here, peer: PeerIdentity, Valid(request): Valid<LendRequest>) -> Answered<LendRequest> {
    let epoch = endpoint.core.joining(&request.id)?;
    leads(&epoch, &peer)?;
    let limit = Duration::from_millis(request.deadline_ms);
    let deadline = Instant::now() + limit.mul_f32(0.95);
    on_its_own(limit, async move {
        let gpus = endpoint.leader.gpus().ok_or_else(|| refusal(RefusalCode::Internal, "its agent uses no GPU"))?;
        gpus.borrow(&epoch, &request, deadline).await.map(Json)
    })
    .await
}

async fn engine_join(State(endpoint): Here, peer: PeerIdentity, Valid(request): Valid<EngineJoinRequest>) -> Answered<EngineJoinRequest> {
    let epoch = endpoint.core.joining(&request.id)?;
    leads(&epoch, &peer)?;
    let rollout = rollout(&endpoint)?.clone();
    let limit = Duration::from_millis(request.deadline_ms);
    on_its_own(limit, async move { rollout.join_group(&epoch, &request, limit.mul_f32(0.95)).await.map(Json) }).await
}

async fn receive(State(endpoint): Here, peer: PeerIdentity, Valid(request): Valid<ReceiveRequest>) -> Answered<ReceiveRequest> {
    let (rollout, _, by) = led(&endpoint, &peer, &request.update.epoch)?;
    rollout.check_leader(&request.update, &by)?;
    let limit = Duration::from_millis(request.deadline_ms);
    on_its_own(limit, async move { rollout.receive(&request).await.map(Json) }).await
}

/// Measures the edge from here to another member, for the agent that leads.
async fn measure_edge(State(endpoint): Here, peer: PeerIdentity, Valid(request): Valid<EdgeRequest>) -> Answered<EdgeRequest> {
    let epoch = endpoint.core.acting(&request.id)?;
    leads(&epoch, &peer)?;
    // Not on a task of its own: a leader that begins an update hangs up, and the measurement is over.
    let within = Duration::from_millis(request.deadline_ms).mul_f32(0.9);
    Ok(Json(endpoint.leader.measure(&epoch, &request.to, within).await))
}

async fn clock() -> Answered<ClockRequest> {
    Ok(Json(ClockAnswer { now_ms: now_ms() }))
}

async fn commit(State(endpoint): Here, peer: PeerIdentity, Valid(request): Valid<CommitRequest>) -> Answered<CommitRequest> {
    by_controller(&peer)?;
    let limit = Duration::from_millis(request.deadline_ms);
    let until = Instant::now() + limit.mul_f32(0.9);
    on_its_own(limit, async move {
        let (step, epoch) = endpoint.core.commit(&request)?;
        if step == Step::Again {
            endpoint.core.acting(epoch.id())?;
        } else {
            if let (Some(plan), Some(fabric)) = (epoch.commit.transport.gdr, endpoint.leader.fabric())
                && let Err(refusal) = fabric.enter(&epoch, plan, until).await
            {
                endpoint.core.unconfirmed(epoch.id());
                return Err(refusal);
            }
            if epoch.prober() == Some(epoch.me())
                && let Err(refusal) = endpoint.leader.prove(&epoch, until).await
            {
                endpoint.core.unconfirmed(epoch.id());
                return Err(refusal);
            }
            if !endpoint.core.confirm(&epoch) {
                return Err(refusal(RefusalCode::StaleEpoch, format!("epoch {} ended while it was committed", epoch.id())));
            }
            tracing::info!(epoch = %epoch.id(), members = epoch.prepared.roster.members.len(), "committed");
            if let (Some(_), Part::Rollout(rollout)) = (epoch.returned(), &endpoint.part) {
                rollout.look_now();
            }
        }
        Ok(Json(MemberState::clone(&endpoint.core.events().state())))
    })
    .await
}

async fn fence(State(endpoint): Here, peer: PeerIdentity, Valid(request): Valid<FenceRequest>) -> Answered<FenceRequest> {
    by_controller(&peer)?;
    if endpoint.core.fence(&request) {
        tracing::info!(epoch = %request.id, reason = %request.reason, "fenced");
        if let Part::Rollout(rollout) = &endpoint.part {
            rollout.epoch_over(&format!("epoch {} was fenced: {}", request.id.epoch, request.reason));
        }
    }
    Ok(Json(MemberState::clone(&endpoint.core.events().state())))
}

async fn release(State(endpoint): Here, peer: PeerIdentity, Valid(request): Valid<ReleaseRequest>) -> Answered<ReleaseRequest> {
    by_controller(&peer)?;
    let leaving = if let Part::Rollout(rollout) = &endpoint.part { Some((rollout.clone(), rollout.will_leave())) } else { None };
    endpoint.core.release(&request)?;
    tracing::info!(epoch = %request.id, reason = %request.reason, "released");
    if let Some((rollout, left)) = leaving {
        tokio::spawn(async move {
            rollout.release().await;
            drop(left);
        });
    }
    Ok(Json(MemberState::clone(&endpoint.core.events().state())))
}

/// The controller has another assignment than the one that it gave with the last announcement.
async fn announce(State(endpoint): Here, peer: PeerIdentity) -> Answered<AssignmentChanged> {
    by_controller(&peer)?;
    endpoint.core.events().refresh().notify_one();
    Ok(Json(()))
}

async fn begin(State(endpoint): Here, peer: PeerIdentity, Valid(request): Valid<BeginRequest>) -> Answered<BeginRequest> {
    let (rollout, epoch, by) = led(&endpoint, &peer, &request.update.epoch)?;
    // An engine may have to be paused first.
    let limit = Duration::from_millis(epoch.prepared.policy.silence_ms).saturating_mul(PAUSING);
    on_its_own(limit, async move { rollout.begin(&epoch, by, request).await.map(Json) }).await
}

async fn finish(State(endpoint): Here, peer: PeerIdentity, Valid(request): Valid<FinishRequest>) -> Answered<FinishRequest> {
    let (rollout, epoch, by) = led(&endpoint, &peer, &request.update.epoch)?;
    rollout.check_leader(&request.update, &by)?;
    let limit = Duration::from_millis(epoch.prepared.policy.update_timeout_ms);
    on_its_own(limit, async move { rollout.finish(request).await.map(Json) }).await
}

async fn activate(State(endpoint): Here, peer: PeerIdentity, Valid(request): Valid<ActivateRequest>) -> Answered<ActivateRequest> {
    let (rollout, epoch, by) = led(&endpoint, &peer, &request.update.epoch)?;
    rollout.check_leader(&request.update, &by)?;
    rollout.activate(&epoch, &request).map(Json).map_err(Failed)
}

async fn begin_external(State(endpoint): Here, peer: PeerIdentity, Valid(request): Valid<ExternalBegin>) -> Answered<ExternalBegin> {
    let (rollout, epoch, by) = led(&endpoint, &peer, &request.update.epoch)?;
    if by.role != Role::Source {
        return Err(refusal(RefusalCode::Forbidden, "only a source announces what the trainer's own data plane brings").into());
    }
    let limit = Duration::from_millis(epoch.prepared.policy.silence_ms).saturating_mul(2);
    on_its_own(limit, async move {
        let update = request.update.clone();
        if let Some(statement) = &request.statement {
            endpoint.core.statements().learn(statement, &request.held, "")?;
        }
        let status = rollout.begin_external(&epoch, request).await?;
        rollout.is_led(&update, by);
        Ok(Json(status))
    })
    .await
}

async fn end_external(State(endpoint): Here, peer: PeerIdentity, Valid(request): Valid<ExternalEnd>) -> Answered<ExternalEnd> {
    let (rollout, _, by) = led(&endpoint, &peer, &request.update.epoch)?;
    rollout.check_leader(&request.update, &by)?;
    rollout.end_external(request).map(Json).map_err(Failed)
}

async fn abort(State(endpoint): Here, peer: PeerIdentity, Valid(request): Valid<AbortRequest>) -> Answered<AbortRequest> {
    // Of an epoch that is over nothing runs any more: harmless.
    let Ok((rollout, _, by)) = led(&endpoint, &peer, &request.update.epoch) else { return Ok(Json(None)) };
    if rollout.check_leader(&request.update, &by).is_ok() {
        rollout.abort(&request);
    }
    Ok(Json(rollout.status(None, &peer).await.ok()))
}

async fn status(State(endpoint): Here, peer: PeerIdentity, Query(request): Query<StatusRequest>) -> Answered<StatusRequest> {
    rollout(&endpoint)?.status(request.after, &peer).await.map(Json).map_err(Failed)
}

async fn state(State(endpoint): Here) -> Answered<StateRequest> {
    Ok(Json(MemberState::clone(&endpoint.core.events().state())))
}

async fn events(State(endpoint): Here, peer: PeerIdentity) -> Response {
    let events = endpoint.core.events().stream(peer == PeerIdentity::Controller);
    match peer {
        PeerIdentity::Controller => ndjson(events),
        // Until its pod is off the roster.
        PeerIdentity::Agent { pod_uid, .. } => ndjson(events.take_while(move |_| std::future::ready(endpoint.core.knows(&pod_uid)))),
    }
}

fn by_controller(peer: &PeerIdentity) -> Result<(), Refusal> {
    match peer {
        PeerIdentity::Controller => Ok(()),
        PeerIdentity::Agent { .. } => Err(refusal(RefusalCode::Forbidden, "only the controller forms and ends groups")),
    }
}

fn rollout(endpoint: &Endpoint) -> Result<&Arc<Rollout>, Refusal> {
    match &endpoint.part {
        Part::Rollout(rollout) => Ok(rollout),
        Part::Source(_) => Err(refusal(RefusalCode::WrongPhase, "this is a source: it receives no update")),
    }
}

/// The rollout and the epoch that a leader's message is about, and who leads.
fn led(endpoint: &Endpoint, peer: &PeerIdentity, id: &EpochId) -> Result<(Arc<Rollout>, Arc<Epoch>, LedBy), Refusal> {
    let rollout = rollout(endpoint)?;
    let epoch = endpoint.core.acting(id)?;
    let by = leads(&epoch, peer)?;
    Ok((rollout.clone(), epoch, by))
}

/// Refuses anyone who does not lead that epoch.
fn leads(epoch: &Epoch, peer: &PeerIdentity) -> Result<LedBy, Refusal> {
    let by = match peer {
        PeerIdentity::Agent { pod_uid, .. } => epoch.leader(pod_uid),
        PeerIdentity::Controller => None,
    };
    by.ok_or_else(|| refusal(RefusalCode::Forbidden, format!("{} does not lead epoch {}", peer.uri(), epoch.id().epoch)))
}

/// Runs a handler to its end whatever becomes of the connection; the answer comes within `limit` or is a refusal.
async fn on_its_own<T: Send + 'static>(
    limit: Duration,
    work: impl Future<Output = Result<T, Refusal>> + Send + 'static,
) -> Result<T, Failed<Refusal>> {
    match timeout(limit, tokio::spawn(work)).await {
        Ok(Ok(outcome)) => outcome.map_err(Failed),
        Ok(Err(ended)) => Err(Failed(refusal(RefusalCode::Internal, format!("the agent failed at this: {ended}")))),
        Err(_) => Err(Failed(refusal(RefusalCode::Timeout, format!("not done within {limit:?}")))),
    }
}

//! An agent that enrols, announces itself and reports its state by the product's own code. Only its work is simulated: it takes part in
//! every group at once and moves no byte.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use anyhow::Result;
use axum::extract::State;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use weightsync_agent::enrollment::{Announcer, Applicant, TokenSource, enroll};
use weightsync_agent::events::Events;
use weightsync_core::protocol::{
    Announcement, AssignmentChanged, Call, CommitRequest, EVENTS_PATH, EngineFacts, EpochId, FabricReport, FenceRequest, GpuReport,
    Incarnation, MemberPhase, MemberState, PrepareRequest, PrepareResponse, Protocols, Refusal, RefusalCode, ReleaseRequest, Role,
};
use weightsync_net::https::{Access, Answered, ControllerClient, Failed, Limits, Valid, ndjson, serve_https};
use weightsync_net::identity::Identity;

use super::fill::Place;

const CONTROL_PORT: u16 = 8470;
const DATA_PORT: u16 = 8471;

pub struct Agent {
    pub events: Events,
    data_address: String,
    fenced: Mutex<Option<EpochId>>,
    identity: OnceLock<Identity>,
}

impl Agent {
    pub fn new(place: &Place) -> Arc<Self> {
        let engine = EngineFacts {
            kind: "vllm".into(),
            server_version: "0.32.0".into(),
            size: 1,
            url: format!("http://{}:8000", place.ip),
            delivery: "reload_weights from a directory".into(),
            answer_version: "none".into(),
            unchecked: None,
            model_bytes: None,
            groups: None,
        };
        let state = MemberState {
            member: None,
            incarnation: Incarnation { pod_uid: place.uid.clone(), instance: uuid::Uuid::new_v4().simple().to_string() },
            role: place.role,
            phase: MemberPhase::Idle,
            epoch: None,
            roster_digest: None,
            transport: None,
            retained: None,
            earlier: Vec::new(),
            returned: None,
            installed: None,
            proven_by: None,
            refused: Vec::new(),
            statements: Vec::new(),
            engine: (place.role == Role::Rollout).then_some(engine),
            engine_restarts: 0,
            healthy: true,
            wedged: false,
            paused_until: None,
            received: None,
            fabric: None,
            mixed: Vec::new(),
            preflight: None,
            reason: None,
        };
        let data_address = SocketAddr::new(place.ip, DATA_PORT).to_string();
        Arc::new(Self { events: Events::new(state), data_address, fenced: Mutex::default(), identity: OnceLock::new() })
    }

    /// Changes what it says of itself.
    pub fn change(&self, change: impl FnOnce(&mut MemberState)) {
        let mut state = MemberState::clone(&self.events.state());
        change(&mut state);
        // A source signs what it claims.
        if let Some(identity) = self.identity.get().filter(|_| state.role == Role::Source) {
            let epoch = state.epoch.as_ref().map_or(1, |id| id.epoch);
            let claimed: Vec<_> = state.keeps().chain(&state.installed).cloned().collect();
            for held in claimed {
                if state.statements.iter().all(|statement| statement.held != held) {
                    state.statements.extend(identity.state(&held, "", epoch).ok());
                }
            }
        }
        self.events.set_state(state);
    }

    /// Runs until `cancel`: enrols as often as it takes, serves, announces itself.
    pub async fn run(self: Arc<Self>, place: Place, controller: String, ca_pem: Arc<str>, cancel: CancellationToken) -> Result<()> {
        let identity = Identity::new(&ca_pem)?;
        let client = ControllerClient::new(identity.clone(), controller);
        let incarnation = self.events.state().incarnation.clone();
        let applicant = Applicant {
            namespace: place.namespace.clone(),
            pod: place.pod.clone(),
            incarnation: incarnation.clone(),
            token: TokenSource::Given(place.token),
        };
        let enrolled = enroll(&client, &identity, &applicant, |_| (), &cancel).await?;
        let _ = self.identity.set(identity.clone());
        let listener = TcpListener::bind(SocketAddr::new(place.ip, CONTROL_PORT)).await?;
        let announcement = Announcement {
            namespace: place.namespace,
            pod: place.pod,
            incarnation,
            role: place.role,
            engine_port: (place.role == Role::Rollout).then_some(8000),
            control_address: listener.local_addr()?.to_string(),
            program: env!("CARGO_PKG_VERSION").into(),
            speaks: Protocols::OURS,
            attached: false,
        };
        let limits = Limits { stalled: Duration::from_secs(2), ..Limits::default() };
        let serving = serve_https(listener, identity, Access::Group, routes(self.clone()), limits, cancel.clone());
        let attached = self.clone();
        let announcer = Announcer {
            client,
            announcement,
            refresh: self.events.refresh().clone(),
            attached: Arc::new(move || attached.events.has_coordinator()),
            assignment: watch::Sender::new(enrolled.assignment),
        };
        let (served, _) = tokio::join!(serving, announcer.run(cancel));
        Ok(served?)
    }

    fn check(&self, id: &EpochId) -> Result<(), Refusal> {
        match &*self.fenced.lock().unwrap() {
            Some(fenced) if !id.supersedes(fenced) => {
                Err(Refusal { code: RefusalCode::StaleEpoch, message: format!("{id} is not newer than {fenced}") })
            }
            _ => Ok(()),
        }
    }

    fn leave(&self, id: EpochId, reason: &str) {
        let over = |epoch: &EpochId| !epoch.supersedes(&id);
        if self.events.state().epoch.as_ref().is_some_and(over) {
            self.change(|state| {
                (state.phase, state.epoch, state.roster_digest) = (MemberPhase::Idle, None, None);
                state.reason = Some(reason.to_owned());
            });
        }
        *self.fenced.lock().unwrap() = Some(id);
    }
}

fn routes(agent: Arc<Agent>) -> Router {
    Router::new()
        .route(PrepareRequest::PATH, post(prepare))
        .route(CommitRequest::PATH, post(commit))
        .route(FenceRequest::PATH, post(fence))
        .route(ReleaseRequest::PATH, post(release))
        .route(AssignmentChanged::PATH, post(announce))
        .route(EVENTS_PATH, get(events))
        .with_state(agent)
}

async fn announce(State(agent): State<Arc<Agent>>) -> Json<()> {
    agent.events.refresh().notify_one();
    Json(())
}

async fn prepare(State(agent): State<Arc<Agent>>, Valid(request): Valid<PrepareRequest>) -> Answered<PrepareRequest> {
    agent.check(&request.id)?;
    agent.change(|state| {
        state.phase = MemberPhase::Prepared;
        state.roster_digest = Some(request.roster.digest());
        (state.member, state.epoch, state.reason) = (Some(request.member), Some(request.id), None);
    });
    let state = MemberState::clone(&agent.events.state());
    let (incarnation, data_address) = (state.incarnation.clone(), agent.data_address.clone());
    Ok(Json(PrepareResponse { incarnation, data_address, gpus: GpuReport::default(), fabric: FabricReport::default(), state }))
}

async fn commit(State(agent): State<Arc<Agent>>, Valid(request): Valid<CommitRequest>) -> Result<(), Failed<Refusal>> {
    agent.check(&request.id)?;
    if agent.events.state().epoch.as_ref() != Some(&request.id) {
        return Err(Refusal { code: RefusalCode::WrongPhase, message: "another epoch was prepared".into() }.into());
    }
    agent.change(|state| {
        state.phase = MemberPhase::Ready;
        state.transport = Some(request.transport);
    });
    Ok(())
}

async fn fence(State(agent): State<Arc<Agent>>, Valid(request): Valid<FenceRequest>) {
    agent.leave(request.id, &request.reason);
}

async fn release(State(agent): State<Arc<Agent>>, Valid(request): Valid<ReleaseRequest>) {
    agent.leave(request.id, &request.reason);
}

async fn events(State(agent): State<Arc<Agent>>) -> Response {
    ndjson(agent.events.stream(true))
}

//! An agent that follows the protocol and moves no bytes. It enrols, announces itself while no controller is connected, and can be killed
//! or struck dumb.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use futures::{Stream, StreamExt};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_stream::wrappers::{IntervalStream, WatchStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use weightsync_core::protocol::{
    AgentEvent, AnnounceResponse, Announcement, AssignmentChanged, Call, CommitRequest, EVENTS_PATH, EngineFacts, EnrollRequest,
    EnrollResponse, EpochId, FabricReport, FenceRequest, GpuReport, Incarnation, MemberPhase, MemberState, PrepareRequest, PrepareResponse,
    Refusal, RefusalCode, RegisteredEngines, ReleaseRequest, Role, UpdateView,
};
use weightsync_net::https::{Access, Answered, CallError, ControllerClient, Failed, Limits, Valid, ndjson, serve_https};
use weightsync_net::identity::Identity;

const SOON: Duration = Duration::from_secs(5);
pub const HEARTBEAT: Duration = Duration::from_millis(50);

#[derive(Clone)]
struct Shared {
    state: watch::Sender<MemberState>,
    /// What it says of the update that it leads.
    update: watch::Sender<Option<UpdateView>>,
    fenced: watch::Sender<Option<EpochId>>,
    /// The last commit: its secret and the addresses of all members.
    commit: watch::Sender<Option<CommitRequest>>,
    controller: watch::Sender<String>,
    /// Listeners of the event stream.
    listeners: watch::Sender<usize>,
    /// Set: no messages or responses any more, connections stay open.
    dumb: watch::Sender<bool>,
    /// Set: prepares are never answered; all else is.
    hangs: watch::Sender<bool>,
    prepared: Arc<AtomicUsize>,
    /// Where it says that it takes bytes.
    data_address: watch::Sender<String>,
    /// How often it was asked to announce itself.
    called: watch::Sender<usize>,
    /// Event streams that were opened.
    opened: watch::Sender<usize>,
    /// Heartbeats on all of them.
    beats: watch::Sender<usize>,
}

pub struct FakeAgent {
    pub name: String,
    pub address: String,
    shared: Shared,
    identity: Identity,
    announcement: Announcement,
    _tasks: Vec<AbortOnDropHandle<()>>,
}

pub fn engine() -> EngineFacts {
    EngineFacts {
        kind: "simulated".into(),
        server_version: "1".into(),
        size: 1,
        url: "http://127.0.0.1:1".into(),
        delivery: "none".into(),
        answer_version: "none".into(),
        unchecked: None,
        model_bytes: None,
        groups: None,
    }
}

pub struct Pod {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub role: Role,
    pub token: String,
}

/// Enrols like an agent does; the identity has a certificate when this succeeds.
pub async fn enroll(identity: &Identity, controller: &str, pod: &Pod, instance: &str) -> Result<EnrollResponse, CallError> {
    let incarnation = Incarnation { pod_uid: pod.uid.clone(), instance: instance.into() };
    let request = EnrollRequest {
        token: pod.token.clone(),
        namespace: pod.namespace.clone(),
        pod: pod.name.clone(),
        incarnation,
        csr_pem: identity.csr_pem().unwrap(),
    };
    let client = ControllerClient::new(identity.clone(), controller.to_owned());
    let response = client.ask(&request, SOON).await?;
    identity.install(&response.certificate_pem).unwrap();
    Ok(response)
}

impl FakeAgent {
    /// Starts one life of the agent of `pod` on this machine.
    pub async fn start(ca_pem: &str, controller: &str, pod: &Pod, instance: &str) -> Self {
        Self::start_at(Ipv4Addr::LOCALHOST.into(), ca_pem, controller, pod, instance).await
    }

    /// The same, at an address of its own.
    pub async fn start_at(ip: IpAddr, ca_pem: &str, controller: &str, pod: &Pod, instance: &str) -> Self {
        Self::start_with(ip, ca_pem, controller, pod, instance, Router::new()).await
    }

    /// The same, and it answers messages of updates too.
    pub async fn start_with(ip: IpAddr, ca_pem: &str, controller: &str, pod: &Pod, instance: &str, updates: Router) -> Self {
        let identity = Identity::new(ca_pem).unwrap();
        // The object may not be known yet; agents ask again.
        let enrolled = async {
            while enroll(&identity, controller, pod, instance).await.is_err() {
                tokio::time::sleep(HEARTBEAT).await;
            }
        };
        tokio::time::timeout(SOON * 2, enrolled).await.expect("enrolment");
        Self::serve((ip, 8000), identity, controller, pod, instance, updates).await
    }

    /// Another endpoint of the same agent, for the engine at that port.
    pub async fn endpoint(&self, (ip, port): (IpAddr, u16), controller: &str, pod: &Pod, updates: Router) -> Self {
        let instance = format!("{}-{port}", self.announcement.incarnation.instance);
        Self::serve((ip, port), self.identity.clone(), controller, pod, &instance, updates).await
    }

    async fn serve((ip, port): (IpAddr, u16), identity: Identity, controller: &str, pod: &Pod, instance: &str, updates: Router) -> Self {
        let listener = TcpListener::bind((ip, 0)).await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let incarnation = Incarnation { pod_uid: pod.uid.clone(), instance: instance.into() };
        let state = MemberState {
            member: None,
            incarnation: incarnation.clone(),
            role: pod.role,
            phase: MemberPhase::Idle,
            epoch: None,
            transport: None,
            roster_digest: None,
            retained: None,
            earlier: Vec::new(),
            returned: None,
            installed: None,
            proven_by: None,
            refused: Vec::new(),
            statements: Vec::new(),
            engine: (pod.role == Role::Rollout).then(engine),
            healthy: true,
            wedged: false,
            engine_restarts: 0,
            paused_until: None,
            received: None,
            fabric: None,
            mixed: Vec::new(),
            preflight: None,
            reason: None,
        };
        let shared = Shared {
            state: watch::Sender::new(state),
            update: watch::Sender::new(None),
            fenced: watch::Sender::new(None),
            commit: watch::Sender::new(None),
            controller: watch::Sender::new(controller.to_owned()),
            listeners: watch::Sender::new(0),
            dumb: watch::Sender::new(false),
            hangs: watch::Sender::new(false),
            prepared: Arc::default(),
            data_address: watch::Sender::new(SocketAddr::new(ip, 9).to_string()),
            called: watch::Sender::new(0),
            opened: watch::Sender::new(0),
            beats: watch::Sender::new(0),
        };
        let routes = routes(shared.clone()).merge(updates);
        let serving = serve_https(listener, identity.clone(), Access::Group, routes, Limits::default(), CancellationToken::new());
        let announcement = Announcement {
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            incarnation,
            role: pod.role,
            engine_port: (pod.role == Role::Rollout).then_some(port),
            control_address: address.clone(),
            program: "fake".into(),
            speaks: weightsync_core::protocol::Protocols::OURS,
            attached: false,
        };
        let tasks = vec![
            AbortOnDropHandle::new(tokio::spawn(async move { serving.await.unwrap() })),
            AbortOnDropHandle::new(tokio::spawn(announce(identity.clone(), announcement.clone(), shared.clone()))),
        ];
        Self { name: pod.name.clone(), address, shared, identity, announcement, _tasks: tasks }
    }

    pub fn state(&self) -> MemberState {
        self.shared.state.borrow().clone()
    }

    /// Changes what it says about itself. As a source it signs what it claims, with the certificate that it has.
    pub fn change(&self, change: impl FnOnce(&mut MemberState)) {
        self.shared.state.send_modify(|state| {
            change(state);
            if state.role != Role::Source {
                return;
            }
            let epoch = state.epoch.as_ref().map_or(1, |id| id.epoch);
            let claimed: Vec<_> = state.keeps().chain(&state.installed).cloned().collect();
            for held in claimed {
                if state.statements.iter().all(|statement| statement.held != held) {
                    state.statements.push(self.identity.state(&held, "", epoch).unwrap());
                }
            }
        });
    }

    /// Reports that these engines are registered with it.
    pub async fn register(&self, ports: Vec<u16>) -> Result<AnnounceResponse, CallError> {
        let client = ControllerClient::new(self.identity.clone(), self.shared.controller.borrow().clone());
        let Announcement { namespace, incarnation, .. } = self.announcement.clone();
        client.ask(&RegisteredEngines { namespace, incarnation, ports }, SOON).await
    }

    /// Says how the update stands that it leads.
    pub fn tell_update(&self, view: UpdateView) {
        self.shared.update.send_replace(Some(view));
    }

    pub fn secret(&self) -> Option<String> {
        self.commit().map(|commit| commit.secret)
    }

    /// The last commit that it took.
    pub fn commit(&self) -> Option<CommitRequest> {
        self.shared.commit.borrow().clone()
    }

    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    pub fn prepares(&self) -> usize {
        self.shared.prepared.load(Ordering::SeqCst)
    }

    /// Says from now on that it takes bytes there.
    pub fn take_bytes_at(&self, address: &str) {
        self.shared.data_address.send_replace(address.to_owned());
    }

    pub fn calls(&self) -> watch::Receiver<usize> {
        self.shared.called.subscribe()
    }

    pub fn opened(&self) -> watch::Receiver<usize> {
        self.shared.opened.subscribe()
    }

    /// Waits for so many more heartbeats.
    pub async fn beat(&self, more: usize) {
        let mut beats = self.shared.beats.subscribe();
        let wanted = *beats.borrow() + more;
        tokio::time::timeout(SOON, beats.wait_for(|beats| *beats >= wanted)).await.expect("heartbeats").unwrap();
    }

    /// Announces itself once, as one that is listened to or not.
    pub async fn announce(&self, attached: bool) {
        self.try_announce(attached).await.unwrap();
    }

    /// The same, with the controller's answer.
    pub async fn try_announce(&self, attached: bool) -> Result<AnnounceResponse, CallError> {
        let client = ControllerClient::new(self.identity.clone(), self.shared.controller.borrow().clone());
        let announcement = Announcement { attached, ..self.announcement.clone() };
        client.ask(&announcement, SOON).await
    }

    /// Like SIGSTOP: connections stay open, nothing comes.
    pub fn strike_dumb(&self, dumb: bool) {
        self.shared.dumb.send_replace(dumb);
    }

    /// Announces itself there from now on: the controller's Service leads to another pod.
    pub fn follow(&self, controller: &str) {
        self.shared.controller.send_replace(controller.to_owned());
    }

    /// Answers everything but prepares from now on.
    pub fn hang_prepares(&self) {
        self.shared.hangs.send_replace(true);
    }

    /// Waits until a coordinator reads its events.
    pub async fn listened_to(&self) {
        let mut listeners = self.shared.listeners.subscribe();
        tokio::time::timeout(SOON, listeners.wait_for(|listeners| *listeners > 0)).await.expect("somebody listens").unwrap();
    }

    pub async fn until(&self, what: &str, holds: impl Fn(&MemberState) -> bool) {
        let mut state = self.shared.state.subscribe();
        let waited = tokio::time::timeout(SOON * 2, state.wait_for(|state| holds(state))).await;
        assert!(waited.is_ok(), "{}: not {what}: {:?}", self.name, self.state());
    }
}

async fn announce(identity: Identity, announcement: Announcement, shared: Shared) {
    loop {
        let client = ControllerClient::new(identity.clone(), shared.controller.borrow().clone());
        if *shared.listeners.borrow() == 0 && !*shared.dumb.borrow() {
            let answer = client.ask(&announcement, SOON).await;
            if matches!(&answer, Err(CallError::Rejected { rejection, .. }) if !rejection.retryable) {
                shared.state.send_modify(|state| forget(state, "no one claims this pod"));
            }
        }
        tokio::time::sleep(HEARTBEAT).await;
    }
}

fn forget(state: &mut MemberState, reason: &str) {
    state.phase = MemberPhase::Idle;
    state.epoch = None;
    state.roster_digest = None;
    state.reason = Some(reason.to_owned());
}

fn routes(shared: Shared) -> Router {
    Router::new()
        .route(PrepareRequest::PATH, post(prepare))
        .route(CommitRequest::PATH, post(commit))
        .route(FenceRequest::PATH, post(fence))
        .route(ReleaseRequest::PATH, post(release))
        .route(AssignmentChanged::PATH, post(called))
        .route(EVENTS_PATH, get(events))
        .with_state(shared)
}

impl Shared {
    async fn speak(&self) {
        self.dumb.subscribe().wait_for(|dumb| !dumb).await.unwrap();
    }

    fn check(&self, id: &EpochId) -> Result<(), Refusal> {
        let fenced = self.fenced.borrow().clone();
        match fenced {
            Some(fenced) if !id.supersedes(&fenced) => {
                Err(Refusal { code: RefusalCode::StaleEpoch, message: format!("{id} is not newer than {fenced}") })
            }
            _ => Ok(()),
        }
    }
}

async fn prepare(State(shared): State<Shared>, Valid(request): Valid<PrepareRequest>) -> Answered<PrepareRequest> {
    shared.speak().await;
    shared.hangs.subscribe().wait_for(|hangs| !hangs).await.unwrap();
    shared.check(&request.id)?;
    let pods = request.roster.member(&request.member).map(|member| member.pods.clone()).unwrap_or_default();
    let incarnation = shared.state.borrow().incarnation.clone();
    if !pods.iter().any(|pod| pod.uid == incarnation.pod_uid) {
        return Err(Refusal { code: RefusalCode::WrongIncarnation, message: "the roster names another pod".into() }.into());
    }
    shared.prepared.fetch_add(1, Ordering::SeqCst);
    shared.state.send_modify(|state| {
        state.member = Some(request.member.clone());
        state.phase = MemberPhase::Prepared;
        state.epoch = Some(request.id.clone());
        state.roster_digest = Some(request.roster.digest());
    });
    let state = shared.state.borrow().clone();
    Ok(Json(PrepareResponse {
        incarnation,
        data_address: shared.data_address.borrow().clone(),
        gpus: GpuReport::default(),
        fabric: FabricReport::default(),
        state,
    }))
}

async fn commit(State(shared): State<Shared>, Valid(request): Valid<CommitRequest>) -> Result<(), Failed<Refusal>> {
    shared.speak().await;
    shared.check(&request.id)?;
    if shared.state.borrow().epoch.as_ref() != Some(&request.id) {
        return Err(Refusal { code: RefusalCode::WrongPhase, message: "another epoch was prepared".into() }.into());
    }
    shared.commit.send_replace(Some(request));
    shared.state.send_modify(|state| state.phase = MemberPhase::Ready);
    Ok(())
}

async fn fence(State(shared): State<Shared>, Valid(request): Valid<FenceRequest>) {
    shared.speak().await;
    shared.fenced.send_replace(Some(request.id.clone()));
    shared.state.send_modify(|state| {
        if state.epoch.as_ref().is_some_and(|epoch| !epoch.supersedes(&request.id)) {
            forget(state, &request.reason);
        }
    });
}

async fn release(State(shared): State<Shared>, Valid(request): Valid<ReleaseRequest>) {
    shared.speak().await;
    shared.state.send_modify(|state| forget(state, &request.reason));
}

async fn called(State(shared): State<Shared>) -> Json<()> {
    shared.called.send_modify(|called| *called += 1);
    Json(())
}

/// Counts a listener for as long as its stream is read.
struct Listening(watch::Sender<usize>);

impl Drop for Listening {
    fn drop(&mut self) {
        self.0.send_modify(|listeners| *listeners -= 1);
    }
}

async fn events(State(shared): State<Shared>) -> Response {
    shared.speak().await;
    shared.listeners.send_modify(|listeners| *listeners += 1);
    shared.opened.send_modify(|opened| *opened += 1);
    let listening = Listening(shared.listeners.clone());
    let snapshots = WatchStream::new(shared.state.subscribe()).map(|state| AgentEvent::Snapshot { state: Box::new(state) });
    let beats = shared.beats.clone();
    let heartbeats = IntervalStream::new(tokio::time::interval(HEARTBEAT)).map(move |_| {
        beats.send_modify(|beats| *beats += 1);
        AgentEvent::Heartbeat
    });
    let updates = WatchStream::new(shared.update.subscribe());
    let updates = updates.filter_map(|update| std::future::ready(update.map(|update| AgentEvent::Update { update })));
    let lines = futures::stream::select(snapshots, futures::stream::select(updates, heartbeats));
    let spoken = lines.then(move |line| {
        let shared = shared.clone();
        async move {
            shared.speak().await;
            line
        }
    });
    ndjson(holding(listening, spoken))
}

fn holding<T>(held: Listening, stream: impl Stream<Item = T> + Send + 'static) -> impl Stream<Item = T> + Send + 'static {
    stream.map(move |item| {
        let _ = &held;
        item
    })
}

//! One object, its enrolment server, and pods with fake agents.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::{
    Addresses, Context, Coordinator, CoordinatorEvent, CoordinatorHandle, Directory, Enrollment, EpochStore, EventSink, PersistError,
    ProvenPod, SingleUseTokens, Timing, Wanted, router,
};
use weightsync_core::membership::{BackoffConfig, MembershipConfig, MembershipView, Restored};
use weightsync_core::plan::Candidate;
use weightsync_core::protocol::{
    Assignment, EngineAssignment, EpochId, HealthPolicy, KvCachePolicy, MemberName, PausePolicy, PodRef, Role, TransportPolicy,
    UpdatePolicy,
};
use weightsync_core::weights::IgnoredTensors;
use weightsync_net::https::{Access, AgentClient, Limits, serve_https};
use weightsync_net::identity::{Ca, PeerIdentity};
use weightsync_testkit::fake_agent::{FakeAgent, Pod};

pub(super) const OBJECT: &str = "ws-1";
pub(super) const SOON: Duration = Duration::from_secs(10);
const HOUR: Duration = Duration::from_secs(3600);

/// Keeps what was written, like the API server.
#[derive(Default)]
pub(super) struct Store {
    pub(super) epoch: Mutex<u64>,
    pub(super) conflict: Mutex<bool>,
}

#[async_trait]
impl EpochStore for Store {
    async fn persist(&self, id: &EpochId) -> Result<(), PersistError> {
        if *self.conflict.lock() {
            return Err(PersistError::Conflict("another leader was here".into()));
        }
        *self.epoch.lock() = id.epoch;
        Ok(())
    }
}

#[derive(Default)]
pub(super) struct Reported(pub(super) Mutex<Vec<CoordinatorEvent>>);

impl EventSink for Reported {
    fn publish(&self, event: CoordinatorEvent) {
        self.0.lock().push(event);
    }
}

pub(super) struct World {
    pub(super) ca: Arc<Ca>,
    pub(super) controller: String,
    pub(super) directory: Directory,
    pub(super) tokens: SingleUseTokens,
    pub(super) store: Arc<Store>,
    pub(super) reported: Arc<Reported>,
    client: AgentClient,
    _server: AbortOnDropHandle<()>,
}

pub(super) fn policy() -> UpdatePolicy {
    UpdatePolicy {
        pause: PausePolicy::Keep,
        kv_cache: KvCachePolicy::Reset,
        min_ready: 1,
        max_unavailable: 0,
        max_skew: None,
        silence_ms: 1100,
        update_timeout_ms: 9_000,
        retain_bytes: 0,
        keep: 5,
        bucket_bytes: 0,
        delivery: weightsync_core::protocol::Delivery::default(),
        digest: weightsync_core::protocol::Digest::Blake3,
        data_tls: false,
        transport: TransportPolicy::default(),
        health: HealthPolicy { period_ms: 700, timeout_ms: 600, failure_threshold: 3, success_threshold: 2 },
        canary: None,
    }
}

/// Short times, so that tests wait for tenths of seconds. They differ from each other: one cannot stand for another. But no agent is silent,
/// however busy the machine: a test of one sets its own time.
pub(super) fn config() -> MembershipConfig {
    let usual = MembershipConfig::new(OBJECT, 1, policy());
    let backoff = BackoffConfig { base_ms: 950, ..usual.backoff };
    MembershipConfig {
        debounce_ms: 50,
        prepare_deadline_ms: 900,
        commit_deadline_ms: 1200,
        agent_silence_ms: 3_600_000,
        adopt_window_ms: 1000,
        leave_grace_ms: 10_000,
        resend_ms: 1050,
        backoff,
        ..usual
    }
}

#[test]
fn no_two_settings_of_the_tests_are_equal() {
    let MembershipConfig { policy: UpdatePolicy { silence_ms, update_timeout_ms, keep, min_ready, health, .. }, backoff, .. } = config();
    let config = config();
    let all = [
        config.debounce_ms,
        config.prepare_deadline_ms,
        config.commit_deadline_ms,
        config.agent_silence_ms,
        config.adopt_window_ms,
        config.persist_retry_ms,
        config.leave_grace_ms,
        config.feed_grace_ms,
        config.resend_ms,
        backoff.base_ms,
        backoff.max_ms,
        backoff.reset_ms,
        silence_ms,
        update_timeout_ms,
        health.period_ms,
        health.timeout_ms,
        health.failure_threshold.into(),
        health.success_threshold.into(),
        keep.into(),
        min_ready.into(),
    ];
    assert_eq!(std::collections::BTreeSet::from(all).len(), all.len(), "{all:?}");
}

pub(super) fn assignment(role: Role) -> Assignment {
    let engines = match role {
        Role::Source => vec![],
        Role::Rollout => vec![EngineAssignment { kind: "simulated".into(), port: 8000 }],
    };
    Assignment {
        role,
        engines,
        registered: false,
        serve_before_first_version: true,
        current: None,
        returned: None,
        newest: None,
        suspended: false,
        transport: TransportPolicy::default(),
        hindrance: None,
        ignored: IgnoredTensors::default(),
    }
}

pub(super) fn role_of(pod: &str) -> Role {
    if pod.starts_with("trainer") { Role::Source } else { Role::Rollout }
}

pub(super) fn candidate(pod: &str, uid: &str) -> Candidate {
    let role = role_of(pod);
    let pool = if role == Role::Source { "trainer" } else { "actors" };
    Candidate {
        name: MemberName(format!("{pool}/{pod}")),
        role,
        size: 1,
        pods: vec![PodRef { name: pod.into(), uid: uid.into(), node: None, ips: Vec::new() }],
        port: (role == Role::Rollout).then_some(8000),
    }
}

impl World {
    pub(super) async fn new() -> Self {
        let ca = Arc::new(Ca::generate().unwrap());
        let identity = ca.issue(&PeerIdentity::Controller, HOUR).unwrap();
        let (directory, tokens) = (Directory::default(), SingleUseTokens::new(HOUR));
        let enrollment = Enrollment { ca: ca.clone(), verifier: Arc::new(tokens.clone()), directory: directory.clone(), lifetime: HOUR };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let controller = listener.local_addr().unwrap().to_string();
        let serving = serve_https(
            listener,
            identity.clone(),
            Access::Open,
            router(Arc::new(enrollment)),
            Limits::default(),
            CancellationToken::new(),
        );
        let server = AbortOnDropHandle::new(tokio::spawn(async move { serving.await.unwrap() }));
        let client = AgentClient::new(identity);
        let (store, reported) = (Arc::default(), Arc::default());
        Self { ca, controller, directory, tokens, store, reported, client, _server: server }
    }

    /// Starts a coordinator for the pods (name, UID), as the leader of that term.
    pub(super) fn coordinate(&self, term: u64, pods: &[(&str, &str)]) -> CoordinatorHandle {
        self.coordinate_by(config(), term, pods)
    }

    pub(super) fn coordinate_by(&self, config: MembershipConfig, term: u64, pods: &[(&str, &str)]) -> CoordinatorHandle {
        let restored = Restored { term, epoch: *self.store.epoch.lock(), version: None, highest: 0, refused: Vec::new() };
        let wanted = Wanted { config, members: None, suspend: false, delete: false };
        let context = Context {
            client: self.client.clone(),
            directory: self.directory.clone(),
            store: self.store.clone(),
            events: self.reported.clone(),
            timing: Timing { attach: Duration::from_millis(300), tell: Duration::from_millis(500), ..Timing::default() },
        };
        let handle = Coordinator::start(wanted, restored, context, CancellationToken::new());
        self.plan(&handle, pods);
        self.directory.settle();
        handle
    }

    /// Sets the pods that take part now.
    pub(super) fn plan(&self, handle: &CoordinatorHandle, pods: &[(&str, &str)]) {
        let claims: HashMap<_, _> = pods.iter().map(|(pod, uid)| ((*uid).to_owned(), assignment(role_of(pod)))).collect();
        self.directory.claim(OBJECT, claims, Addresses::Callers);
        let candidates = pods.iter().map(|(pod, uid)| candidate(pod, uid)).collect();
        handle.change(|wanted| wanted.members = Some((candidates, vec![])));
    }

    pub(super) fn pod(&self, name: &str, uid: &str) -> Pod {
        let proven = ProvenPod { namespace: "local".into(), pod: name.into(), pod_uid: uid.into() };
        Pod {
            namespace: "local".into(),
            name: name.into(),
            uid: uid.into(),
            role: role_of(name),
            token: self.tokens.mint(proven, Vec::new()),
        }
    }

    pub(super) async fn agent(&self, name: &str, uid: &str, instance: &str) -> FakeAgent {
        FakeAgent::start(self.ca.certificate_pem(), &self.controller, &self.pod(name, uid), instance).await
    }
}

/// Waits until the view fulfils the condition.
pub(super) async fn until(handle: &CoordinatorHandle, what: &str, holds: impl Fn(&MembershipView) -> bool) -> MembershipView {
    let mut view = handle.view.clone();
    let seen = tokio::time::timeout(SOON, view.wait_for(|view| holds(view))).await.map(|seen| seen.unwrap().clone());
    seen.unwrap_or_else(|_| panic!("not {what}: {:#?}", handle.view.borrow().clone()))
}

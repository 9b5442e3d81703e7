//! An agent's process from its start to its end, with a real enrolment server and coordinator: when its pod may serve, and what is left.

mod idle;
mod registered;
mod watched;

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use weightsync_agent::client::{ClientServerConfig, SocketName};
use weightsync_agent::enrollment::{Applicant, TokenSource};
use weightsync_agent::fabric::FabricSettings;
use weightsync_agent::gpu::{GpuChoice, GpuSettings};
use weightsync_agent::process::{AgentError, EngineFactory, Settings, run};
use weightsync_agent::rollout::Places;
use weightsync_agent::space::Cgroups;
use weightsync_coordinator::{
    Addresses, Context, Coordinator, CoordinatorEvent, CoordinatorHandle, Directory, Enrollment, EpochStore, EventSink, PersistError,
    Presented, ProvenPod, Timing, TokenVerifier, Wanted, router,
};
use weightsync_core::membership::{LeftOut, MembershipConfig, Restored};
use weightsync_core::plan::Candidate;
use weightsync_core::protocol::*;
use weightsync_core::weights::IgnoredTensors;
use weightsync_net::https::{Access, AgentClient, Limits, serve_https};
use weightsync_net::identity::{Ca, PeerIdentity};

pub(super) use self::idle::Idle;

const HOUR: Duration = Duration::from_secs(3600);
const SOON: Duration = Duration::from_secs(20);

struct Anybody;

#[async_trait]
impl TokenVerifier for Anybody {
    async fn verify(&self, presented: &Presented<'_>) -> Result<ProvenPod, Rejection> {
        let token = presented.token;
        Ok(ProvenPod { namespace: "ns".into(), pod: token.into(), pod_uid: format!("uid-{token}") })
    }
}

struct Nowhere;

#[async_trait]
impl EpochStore for Nowhere {
    async fn persist(&self, _id: &EpochId) -> Result<(), PersistError> {
        Ok(())
    }
}

/// What the coordinators of an operator reported, each with the member that it is about.
struct Reported(watch::Sender<Vec<CoordinatorEvent>>);

impl EventSink for Reported {
    fn publish(&self, event: CoordinatorEvent) {
        self.0.send_modify(|reported| reported.push(event));
    }
}

/// The controller's side.
pub struct Operator {
    pub ca: Arc<Ca>,
    pub address: SocketAddr,
    directory: Directory,
    cancel: CancellationToken,
    reported: Arc<Reported>,
}

impl Operator {
    pub async fn start() -> Self {
        let ca = Arc::new(Ca::generate().unwrap());
        let identity = ca.issue(&PeerIdentity::Controller, HOUR).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (directory, cancel) = (Directory::default(), CancellationToken::new());
        let enrollment = Enrollment { ca: ca.clone(), verifier: Arc::new(Anybody), directory: directory.clone(), lifetime: HOUR };
        let routes = router(Arc::new(enrollment));
        tokio::spawn(serve_https(listener, identity, Access::Open, routes, Limits::default(), cancel.clone()));
        directory.settle();
        Self { ca, address, directory, cancel, reported: Arc::new(Reported(watch::Sender::default())) }
    }

    /// Waits until something was informed for this reason that says this.
    pub async fn reported(&self, reason: Reason, says: &str) {
        let mut reported = self.reported.0.subscribe();
        let found = |events: &Vec<CoordinatorEvent>| events.iter().any(|event| event.reason == reason && event.message.contains(says));
        let waited = tokio::time::timeout(SOON, reported.wait_for(found)).await.is_ok();
        assert!(waited, "{reason} with {says:?} was never reported: {:?}", self.reported.0.borrow());
    }

    /// An object that claims these pods.
    fn claim(&self, object: &str, pods: &[&str], serve_before_first_version: bool) -> CoordinatorHandle {
        let assignment = Assignment {
            role: Role::Rollout,
            engines: vec![EngineAssignment { kind: "idle".into(), port: 8000 }],
            registered: false,
            serve_before_first_version,
            current: None,
            returned: None,
            newest: None,
            suspended: false,
            hindrance: None,
            ignored: IgnoredTensors::default(),
            transport: TransportPolicy::default(),
        };
        self.claim_with(object, pods, &assignment, None)
    }

    /// An object that claims these pods for this assignment, with these members.
    pub fn claim_with(
        &self,
        object: &str,
        pods: &[&str],
        assignment: &Assignment,
        members: Option<(Vec<Candidate>, Vec<LeftOut>)>,
    ) -> CoordinatorHandle {
        let health = HealthPolicy { period_ms: 100, timeout_ms: 1_000, failure_threshold: 3, success_threshold: 1 };
        let policy = UpdatePolicy {
            pause: PausePolicy::Keep,
            kv_cache: KvCachePolicy::Reset,
            min_ready: 1,
            silence_ms: 5_000,
            update_timeout_ms: 10_000,
            retain_bytes: 0,
            keep: 1,
            max_unavailable: 0,
            max_skew: None,
            bucket_bytes: 0,
            delivery: weightsync_core::protocol::Delivery::default(),
            digest: weightsync_core::protocol::Digest::Blake3,
            data_tls: true,
            transport: TransportPolicy::default(),
            health,
            canary: None,
        };
        let wanted = Wanted { config: MembershipConfig::new(object, 1, policy), members, suspend: false, delete: false };
        let context = Context {
            client: AgentClient::new(self.ca.issue(&PeerIdentity::Controller, HOUR).unwrap()),
            directory: self.directory.clone(),
            store: Arc::new(Nowhere),
            events: self.reported.clone(),
            timing: Timing::default(),
        };
        let handle = Coordinator::start(wanted, Restored::default(), context, self.cancel.child_token());
        let claims: HashMap<String, Assignment> = pods.iter().map(|pod| (format!("uid-{pod}"), assignment.clone())).collect();
        self.directory.claim(object, claims, Addresses::Callers);
        handle
    }
}

/// One agent.
struct Agent {
    pages: String,
    versions: PathBuf,
    cancel: CancellationToken,
    task: JoinHandle<Result<(), AgentError>>,
}

impl Agent {
    fn start(operator: &Operator, pod: &str, folder: &Path) -> Self {
        Self::start_on(operator, pod, folder, 0)
    }

    fn start_on(operator: &Operator, pod: &str, folder: &Path, control_port: u16) -> Self {
        Self::start_with(operator, pod, folder, control_port, None)
    }

    fn start_with(operator: &Operator, pod: &str, folder: &Path, control_port: u16, serve_unclaimed_after: Option<Duration>) -> Self {
        let idle: EngineFactory = Arc::new(|_, _| Ok(Arc::new(Idle)));
        Self::start_as(operator, pod, folder, |settings| Settings {
            control_port,
            serve_unclaimed_after,
            engines: idle.clone(),
            ..settings
        })
    }

    /// With these engines.
    fn start_over(operator: &Operator, pod: &str, folder: &Path, engines: EngineFactory) -> Self {
        Self::start_as(operator, pod, folder, |settings| Settings { engines: engines.clone(), ..settings })
    }

    fn start_as(operator: &Operator, pod: &str, folder: &Path, change: impl Fn(Settings) -> Settings) -> Self {
        let token = folder.join(format!("{pod}.token"));
        std::fs::write(&token, pod).unwrap();
        let status = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let versions = folder.join("versions");
        let pod_uid = format!("uid-{pod}");
        let settings = Settings {
            role: Role::Rollout,
            applicant: Applicant {
                namespace: "ns".into(),
                pod: pod.into(),
                incarnation: Incarnation { pod_uid: pod_uid.clone(), instance: "1".into() },
                token: TokenSource::File(token),
            },
            ip: IpAddr::V4(Ipv4Addr::LOCALHOST),
            control_port: 0,
            data_port: 0,
            status,
            probes: (Ipv4Addr::LOCALHOST, 0).into(),
            controller: operator.address.to_string(),
            ca_pem: operator.ca.certificate_pem().into(),
            places: Places { versions: versions.clone(), versions_in_engine: None, model: None, name: pod_uid.clone() },
            socket: ClientServerConfig::at(SocketName::of_pod(&pod_uid).unwrap()),
            engines: Arc::new(|_, _| Ok(Arc::new(Idle))),
            cgroups: Cgroups::of_this_process(),
            serve_unclaimed_after: None,
            command: None,
            fabric: FabricSettings::default(),
            gpus: GpuSettings { choice: GpuChoice::None, ..GpuSettings::default() },
        };
        let cancel = CancellationToken::new();
        let task = tokio::spawn(run(change(settings), cancel.clone()));
        Self { pages: format!("http://{status}"), versions, cancel, task }
    }

    /// Status and text of a page; status 0 and the cause while the agent does not listen yet.
    async fn page(&self, path: &str) -> (u16, String) {
        let answer = match reqwest::get(format!("{}{path}", self.pages)).await {
            Ok(answer) => answer,
            Err(error) => return (0, error.to_string()),
        };
        (answer.status().as_u16(), answer.text().await.unwrap_or_default())
    }

    async fn until_ready_says(&self, status: u16, text: &str) {
        self.until_ready_within(SOON, status, text).await;
    }

    async fn until_ready_within(&self, limit: Duration, status: u16, text: &str) {
        let mut last = (0, String::new());
        let asked = tokio::time::timeout(limit, async {
            loop {
                last = self.page("/readyz").await;
                if last.0 == status && last.1.contains(text) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        assert!(asked.await.is_ok(), "never {status} {text:?}, last {last:?}");
    }

    /// The directory of the endpoint of the engine at `port`, with its number in the file system: another one is of another endpoint.
    fn directory_of(&self, port: u16) -> Option<(String, u64)> {
        let entries = std::fs::read_dir(&self.versions).unwrap().flatten();
        let mut of_port =
            entries.filter(|entry| entry.path().is_dir() && entry.file_name().to_string_lossy().ends_with(&format!("-{port}")));
        of_port.next().map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.metadata().unwrap().ino()))
    }

    /// Holds the directory of an engine as an endpoint does, until the file is dropped.
    fn hold_directory_of(&self, port: u16) -> std::fs::File {
        let entries = std::fs::read_dir(&self.versions).unwrap().flatten().filter(|entry| entry.path().is_dir());
        let names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        let (name, _) = names.first().unwrap().rsplit_once('-').unwrap();
        let file = std::fs::File::create(self.versions.join(format!("{name}-{port}.lock"))).unwrap();
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        file
    }

    async fn end(self) {
        self.cancel.cancel();
        tokio::time::timeout(SOON, self.task).await.expect("an agent ends when it is asked to").unwrap().unwrap();
        let left: Vec<_> = std::fs::read_dir(&self.versions).into_iter().flatten().map(|entry| entry.unwrap().file_name()).collect();
        assert!(left.is_empty(), "left behind: {left:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pod_serves_as_its_object_says_and_when_unclaimed() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let operator = Operator::start().await;
    let agent = Agent::start(&operator, "a", folder.path());
    agent.until_ready_says(503, "not enrolled yet").await;
    let held = operator.claim("holds", &["a"], false);
    agent.until_ready_says(503, "no version yet").await;
    // The controller is gone, and then the object: the agent hears of it by its own announcements.
    drop(held);
    operator.directory.remove("holds");
    agent.until_ready_says(200, "ok").await;
    // Another object may claim the pod after that.
    let _serves = operator.claim("serves", &["a"], false);
    agent.until_ready_says(503, "no version yet").await;
    agent.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pod_serves_before_first_version_where_asked() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let operator = Operator::start().await;
    let _handle = operator.claim("serves", &["b"], true);
    let agent = Agent::start(&operator, "b", folder.path());
    agent.until_ready_says(200, "ok").await;
    // Without any controller it stays as it is.
    operator.cancel.cancel();
    for _ in 0..50 {
        assert_eq!(agent.page("/readyz").await.0, 200);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let metrics = reqwest::get(format!("{}/metrics", agent.pages)).await.unwrap().text().await.unwrap();
    assert!(metrics.contains("weightsync_agent_engine_healthy{port=\"8000\"} 1"), "{metrics}");
    assert!(metrics.contains("weightsync_agent_update_total_bytes{port=\"8000\"} 0"), "{metrics}");
    let roster: RosterView =
        serde_json::from_str(&reqwest::get(format!("{}/v1/roster", agent.pages)).await.unwrap().text().await.unwrap()).unwrap();
    assert_eq!(roster.epoch, None);
    agent.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pod_that_is_never_claimed_serves_once_its_time_is_over() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let operator = Operator::start().await;
    let agent = Agent::start_with(&operator, "e", folder.path(), 0, Some(Duration::from_secs(1)));
    agent.until_ready_says(503, "not enrolled yet").await;
    agent.until_ready_says(200, "ok").await;
    let _handle = operator.claim("holds", &["e"], false);
    agent.until_ready_says(503, "no version yet").await;
    agent.end().await;
}

/// vllm-project/vllm#51018 and six more: a fixed port, or one that was probed free and taken minutes later.
/// Story F21.
#[tokio::test(flavor = "multi_thread")]
async fn held_port_is_named_and_taken_when_free() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let operator = Operator::start().await;
    let _handle = operator.claim("object", &["c", "d"], true);
    let holder = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = holder.local_addr().unwrap().port();
    let agent = Agent::start_on(&operator, "c", folder.path(), port);
    agent.until_ready_says(503, &format!("cannot listen on 127.0.0.1:{port}")).await;
    drop(holder);
    agent.until_ready_says(200, "ok").await;
    // It holds the port now, and a second agent that is reported the same one does not get in its way.
    assert!(std::net::TcpListener::bind(("127.0.0.1", port)).is_err());
    let second = folder.path().join("second");
    std::fs::create_dir(&second).unwrap();
    let late = Agent::start_on(&operator, "d", &second, port);
    late.until_ready_says(503, &format!("cannot listen on 127.0.0.1:{port}")).await;
    assert_eq!(agent.page("/readyz").await.0, 200);
    late.end().await;
    agent.end().await;
}

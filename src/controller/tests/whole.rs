//! A whole controller against an API server in memory, with agents that are fake and TLS that is not.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::api_server::{ApiServer, Mode, projected_token};
use super::fixtures;
use crate::controller::lease::{LeaseConfig, LeaseLost};
use crate::controller::readiness::GATE;
use crate::controller::run::{ControllerError, Listeners, Settings, run_with};
use crate::controller::{Injection, Ui};
use weightsync_core::protocol::{MemberPhase, Role};
use weightsync_net::identity::Identity;
use weightsync_testkit::fake_agent::{FakeAgent, Pod, enroll};

pub(super) const SOON: Duration = Duration::from_secs(10);

pub(super) struct Controller {
    pub(super) enroll: String,
    pub(super) status: String,
    cancel: CancellationToken,
    task: JoinHandle<Result<(), ControllerError>>,
}

impl Controller {
    pub(super) async fn start(server: &ApiServer) -> Self {
        Self::start_with(server, Ui::Local).await
    }

    pub(super) async fn start_with(server: &ApiServer, ui: Ui) -> Self {
        Self::start_at(server, ui, "", None).await
    }

    /// One to which agents come at this address, `HOST:PORT`.
    pub(super) async fn start_on(server: &ApiServer, enroll: &str) -> Self {
        Self::start_over(server, enroll, Ui::Local, "", None).await
    }

    /// One that sends traces to a collector, or serves the webhook.
    pub(super) async fn start_at(server: &ApiServer, ui: Ui, otlp_endpoint: &str, webhook: Option<Injection>) -> Self {
        Self::start_over(server, "127.0.0.1:0", ui, otlp_endpoint, webhook).await
    }

    async fn start_over(server: &ApiServer, enroll: &str, ui: Ui, otlp_endpoint: &str, webhook: Option<Injection>) -> Self {
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let bind = || async { TcpListener::bind(any).await.unwrap() };
        let listeners = Listeners { enroll: TcpListener::bind(enroll).await.unwrap(), status: bind().await, probes: bind().await };
        let enroll = listeners.enroll.local_addr().unwrap().to_string();
        let status = listeners.status.local_addr().unwrap().to_string();
        let settings = Settings {
            pod_name: "controller-0".into(),
            namespace: "system".into(),
            name: "weightsync".into(),
            watch_namespaces: vec!["default".into()],
            agent_image: "ours:1".into(),
            agent_image_pull_policy: "Never".into(),
            controller_url: format!("https://{enroll}"),
            enroll_address: any,
            status_address: any,
            probe_address: any,
            ui,
            webhook,
            otlp_endpoint: otlp_endpoint.to_owned(),
        };
        let lease = LeaseConfig {
            duration: Duration::from_secs(2),
            period: Duration::from_millis(200),
            call: Duration::from_millis(500),
            ..LeaseConfig::new("weightsync", "controller-0")
        };
        let cancel = CancellationToken::new();
        let task = tokio::spawn(run_with(settings, lease, listeners, server.client(), server.client(), cancel.clone()));
        Self { enroll, status, cancel, task }
    }

    pub(super) async fn stop(self) {
        self.cancel.cancel();
        tokio::time::timeout(SOON, self.task).await.expect("it ends").unwrap().unwrap();
    }

    /// Status code and body of a status page.
    pub(super) async fn page(&self, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.status).await.unwrap();
        stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }
}

/// An API server with what the chart installs, one object, a trainer and two rollouts.
pub(super) fn cluster() -> ApiServer {
    let server = ApiServer::new();
    server.put("secrets", json!({"metadata": {"name": "weightsync-ca", "namespace": "system", "uid": "s"}, "type": "Opaque"}));
    server.put("configmaps", json!({"metadata": {"name": "weightsync-ca", "namespace": "system", "uid": "c"}}));
    server.put("weightsyncs", serde_json::to_value(fixtures::object("ws", 1)).unwrap());
    for name in ["trainer-0", "actor-0", "actor-1"] {
        server.put("pods", serde_json::to_value(fixtures::plain(name)).unwrap());
    }
    server
}

pub(super) async fn agent(server: &ApiServer, controller: &Controller, name: &str, instance: &str) -> FakeAgent {
    let token = projected_token(name, &format!("uid-{name}"));
    agent_with(server, controller, name, instance, token).await
}

pub(super) async fn agent_with(server: &ApiServer, controller: &Controller, name: &str, instance: &str, token: String) -> FakeAgent {
    let published =
        |server: &ApiServer| server.get("configmaps", "system", "weightsync-ca").unwrap()["data"]["ca.crt"].as_str().map(str::to_owned);
    server.until("the authority is published", |server| published(server).is_some()).await;
    let role = if name.starts_with("trainer") { Role::Source } else { Role::Rollout };
    let pod = Pod { namespace: "default".into(), name: name.into(), uid: format!("uid-{name}"), role, token };
    FakeAgent::start(&published(server).unwrap(), &controller.enroll, &pod, instance).await
}

pub(super) async fn all_agents(server: &ApiServer, controller: &Controller) -> Vec<FakeAgent> {
    let mut agents = Vec::new();
    for name in ["trainer-0", "actor-0", "actor-1"] {
        agents.push(agent(server, controller, name, "a").await);
    }
    agents
}

pub(super) fn status(server: &ApiServer) -> Value {
    server.get("weightsyncs", "default", "ws").map(|object| object["status"].clone()).unwrap_or_default()
}

/// Status and reason of a condition of the object.
pub(super) fn condition(server: &ApiServer, kind: &str) -> (String, String) {
    condition_of(server, "ws", kind)
}

pub(super) fn condition_of(server: &ApiServer, name: &str, kind: &str) -> (String, String) {
    let status = server.get("weightsyncs", "default", name).map(|object| object["status"].clone()).unwrap_or_default();
    let found =
        status["conditions"].as_array().into_iter().flatten().find(|condition| condition["type"] == kind).cloned().unwrap_or_default();
    let text = |field: &str| found[field].as_str().unwrap_or_default().to_owned();
    (text("status"), text("reason"))
}

pub(super) fn is_ready(server: &ApiServer) -> bool {
    condition(server, "Ready").0 == "True" && status(server)["worldSize"] == 3
}

#[tokio::test]
async fn labelled_pods_become_a_group_and_status_tells_of_it() {
    let server = cluster();
    server.race(2);
    let controller = Controller::start(&server).await;
    let agents = all_agents(&server, &controller).await;
    server.until("ready", is_ready).await;
    let status = status(&server);
    assert_eq!((status["term"].as_u64(), status["replicas"]["display"].as_str()), (Some(0), Some("2/2")));
    assert_eq!(status["trainer"]["uid"], "uid-trainer-0");
    for agent in &agents {
        agent.until("in the group", |state| state.phase == MemberPhase::Ready).await;
        assert_eq!(agent.state().epoch.map(|id| id.epoch), status["epoch"].as_u64());
    }
    server.until("an Event tells", |server| server.all("events").iter().any(|event| event["reason"] == "GroupFormed")).await;
    assert_eq!(controller.page("/readyz").await.0, 200);
    assert_eq!(controller.page("/healthz").await.0, 200);
    let metrics = controller.page("/metrics").await.1;
    for line in ["weightsync_leader 1", "weightsync_cache_objects{kind=\"Pod\"} 3", "weightsync_reconcile_total{outcome=\"success\"}"] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    controller.stop().await;
    assert!(server.get("leases", "system", "weightsync").unwrap()["spec"]["holderIdentity"].is_null(), "the lease is given back");
}

#[tokio::test]
async fn a_restarted_controller_keeps_authority_epoch_and_group() {
    let server = cluster();
    let controller = Controller::start(&server).await;
    let agents = all_agents(&server, &controller).await;
    server.until("ready", is_ready).await;
    for agent in &agents {
        agent.until("in the group", |state| state.phase == MemberPhase::Ready).await;
    }
    let (epoch, prepares) = (status(&server)["epoch"].clone(), agents[1].prepares());
    controller.stop().await;

    let controller = Controller::start(&server).await;
    for agent in &agents {
        agent.follow(&controller.enroll);
    }
    server
        .until("the lease is taken again", |server| server.get("leases", "system", "weightsync").unwrap()["spec"]["leaseTransitions"] == 1)
        .await;
    for agent in &agents {
        agent.listened_to().await;
    }
    server.until("ready", is_ready).await;
    assert_eq!(status(&server)["epoch"], epoch);
    assert_eq!(agents[1].prepares(), prepares);
    controller.stop().await;
}

#[tokio::test]
async fn a_killed_agent_is_named_in_status_and_in_an_event() {
    let server = cluster();
    let controller = Controller::start(&server).await;
    let mut agents = all_agents(&server, &controller).await;
    server.until("ready", is_ready).await;
    agents.pop();
    server.until("two ranks left", |server| status(server)["worldSize"] == 2).await;
    server
        .until("degraded, by name", |server| {
            let status = status(server);
            let degraded = status["conditions"].as_array().into_iter().flatten().find(|condition| condition["type"] == "Degraded").cloned();
            degraded.is_some_and(|condition| condition["message"].as_str().is_some_and(|message| message.contains("actors/actor-1")))
        })
        .await;
    let lost = |event: &Value| event["reason"] == "AgentLost" && event["related"]["name"] == "actor-1" && event["type"] == "Warning";
    server.until("an Event names the pod", |server| server.all("events").iter().any(lost)).await;
    controller.stop().await;
}

#[tokio::test]
async fn a_deleted_object_leaves_its_pods_serving_and_its_agents_free() {
    let server = cluster();
    let holding = fixtures::changed("ws", 1, |object| object["spec"]["readiness"] = json!({"beforeFirstVersion": "Hold"}));
    server.put("weightsyncs", serde_json::to_value(holding).unwrap());
    server.put(
        "pods",
        serde_json::to_value(fixtures::pod("actor-0", |pod| pod["spec"]["readinessGates"] = json!([{"conditionType": GATE}]))).unwrap(),
    );
    let controller = Controller::start(&server).await;
    let agents = all_agents(&server, &controller).await;
    server.until("ready", is_ready).await;
    let gate = |server: &ApiServer| {
        let pod = server.get("pods", "default", "actor-0").unwrap();
        let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().find(|condition| condition["type"] == GATE).map(|condition| condition["status"] == "True")
    };
    server.until("held back before the first version", |server| gate(server) == Some(false)).await;
    server.delete("weightsyncs", "default", "ws");
    for agent in &agents {
        agent.until("released", |state| state.epoch.is_none()).await;
    }
    server.until("serving", |server| gate(server) == Some(true)).await;
    controller.stop().await;
}

#[tokio::test]
async fn a_suspended_object_releases_its_pods_and_takes_them_up_again() {
    let server = cluster();
    let controller = Controller::start(&server).await;
    let agents = all_agents(&server, &controller).await;
    server.until("ready", is_ready).await;
    let suspend = |suspend: bool| {
        let mut object = server.get("weightsyncs", "default", "ws").unwrap();
        object["spec"]["suspend"] = json!(suspend);
        server.put("weightsyncs", object);
    };
    suspend(true);
    server.until("released", |server| condition(server, "Progressing") == ("False".into(), "Suspended".into())).await;
    agents[1].until("released", |state| state.epoch.is_none()).await;
    assert!(agents[1].try_announce(false).await.unwrap().assignment.suspended, "a pod that starts now hears of it");
    suspend(false);
    server.until("ready", is_ready).await;
    assert!(!agents[1].try_announce(false).await.unwrap().assignment.suspended);
    controller.stop().await;
}

#[tokio::test]
async fn unreadable_object_is_named_and_stops_no_other() {
    let server = cluster();
    let mut broken = serde_json::to_value(fixtures::object("broken", 0)).unwrap();
    broken["spec"]["rollouts"] = json!("none");
    server.put("weightsyncs", broken);
    let controller = Controller::start(&server).await;
    let _agents = all_agents(&server, &controller).await;
    server.until("the other one ready", is_ready).await;
    server
        .until("the Event", |server| {
            let broken = server.get("weightsyncs", "default", "broken").unwrap();
            broken["status"]["conditions"][0]["reason"] == "InvalidSpec"
        })
        .await;
    controller.stop().await;
}

#[tokio::test]
async fn controller_without_api_server_ends_and_group_goes_on() {
    let server = cluster();
    let controller = Controller::start(&server).await;
    let agents = all_agents(&server, &controller).await;
    server.until("ready", is_ready).await;
    let epoch = agents[1].state().epoch;
    server.set(Mode::Fails);
    let ended = tokio::time::timeout(SOON, controller.task).await.expect("it ends").unwrap();
    assert!(matches!(ended, Err(ControllerError::LeaseLost(LeaseLost::NotRenewed(_)))), "{ended:?}");
    assert_eq!(agents[1].state().epoch, epoch);
    assert_eq!(agents[1].state().phase, MemberPhase::Ready);
}

#[tokio::test]
async fn a_running_pod_gets_an_ephemeral_agent_whose_token_works_once() {
    let server = cluster();
    server.put(
        "weightsyncs",
        serde_json::to_value(fixtures::changed("ws", 1, |object| object["spec"]["agent"] = json!({"launch": "Ephemeral"}))).unwrap(),
    );
    let controller = Controller::start(&server).await;
    let added = |server: &ApiServer, pod: &str| server.get("pods", "default", pod).unwrap()["spec"]["ephemeralContainers"][0].clone();
    server.until("an agent is added", |server| !added(server, "actor-0").is_null() && !added(server, "trainer-0").is_null()).await;
    let container = added(&server, "actor-0");
    assert_eq!((container["image"].as_str(), container["name"].as_str()), (Some("ours:1"), Some("weightsync-agent-1")));
    let env = container["env"].as_array().unwrap().clone();
    let token = env.iter().find(|entry| entry["name"] == "WEIGHTSYNC_TOKEN").unwrap()["value"].as_str().unwrap().to_owned();
    let seen = token.clone();
    let agent = agent_with(&server, &controller, "actor-0", "a", token).await;
    agent.listened_to().await;
    server.until("the Event", |server| server.all("events").iter().any(|event| event["reason"] == "AgentLaunched")).await;
    assert_eq!(server.calls("patch", "pods/ephemeralcontainers"), 3, "one for each pod, and no second one");

    // Anyone who may read the pod sees the token.
    let authority = server.get("configmaps", "system", "weightsync-ca").unwrap()["data"]["ca.crt"].as_str().unwrap().to_owned();
    let thief = Identity::new(&authority).unwrap();
    let pod = Pod { namespace: "default".into(), name: "actor-0".into(), uid: "uid-actor-0".into(), role: Role::Rollout, token: seen };
    assert!(enroll(&thief, &controller.enroll, &pod, "b").await.is_err());
    server.until("an Event tells", |server| server.all("events").iter().any(|event| event["reason"] == "ClaimRefused")).await;
    controller.stop().await;
}

#[tokio::test]
async fn agent_at_a_foreign_address_is_named_in_status() {
    let server = cluster();
    let mut foreign = server.get("pods", "default", "actor-1").unwrap();
    foreign["status"]["podIP"] = json!("10.9.9.9");
    server.put("pods", foreign);
    let controller = Controller::start(&server).await;
    // They announce 127.0.0.1, which is the address of the two others only.
    let _agents = all_agents(&server, &controller).await;
    let named = |server: &ApiServer| {
        let status = status(server);
        let members = status["members"].as_array().cloned().unwrap_or_default();
        members.iter().any(|member| {
            let message = member["message"].as_str().unwrap_or_default();
            member["reason"] == "PodMismatch" && message.contains("10.9.9.9") && message.contains("127.0.0.1")
        })
    };
    server.until("the member is named with the cause", named).await;
    server.until("the others form a group", |server| status(server)["worldSize"] == 2).await;
    controller.stop().await;
}

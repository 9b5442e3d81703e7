//! What an operator looks at: metrics that are all defined, and the web page with its data.

use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::api_server::ApiServer;
use super::whole::{Controller, all_agents, cluster, is_ready};
use crate::controller::{METRICS, Ui};
use weightsync_core::protocol::{InstallStep, MemberName, MemberProgress, UpdatePhase, UpdateView};
use weightsync_net::metrics::differences;
use weightsync_testkit::fake_agent::FakeAgent;

const SOON: Duration = Duration::from_secs(20);

/// A publish of version 7 as its leader sees it.
pub(super) fn update(source: &FakeAgent, attempt: u32, phase: UpdatePhase) -> UpdateView {
    let member = |name: &str| MemberProgress { member: MemberName(name.into()), bytes: 9, step: InstallStep::Installed, reason: None };
    UpdateView {
        id: source.state().epoch.expect("it is in a group"),
        version: 7,
        attempt,
        phase,
        total_bytes: 1_500_000,
        members: vec![member("actors/actor-0"), member("actors/actor-1")],
        phases_ms: [("begin", 12), ("transfer", 500), ("verify", 20), ("activate", 90)].map(|(name, ms)| (name.to_owned(), ms)).into(),
        failure: (phase == UpdatePhase::Failed).then(|| "the stream broke at <b>actors/actor-1</b>".to_owned()),
        feeding: false,
    }
}

/// Status, head and body of a page that is asked for under a name.
pub(super) async fn ask(status: &str, host: &str, path: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(status).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), head.to_lowercase(), body.to_owned())
}

async fn state(controller: &Controller) -> Value {
    let (code, _, body) = ask(&controller.status, "localhost", "/ui/state").await;
    assert_eq!(code, 200, "{body}");
    serde_json::from_str(&body).unwrap()
}

pub(super) async fn until(controller: &Controller, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
    let waited = async {
        loop {
            let state = state(controller).await;
            if holds(&state) {
                return state;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(SOON, waited).await.unwrap_or_else(|_| panic!("waited for {what}"))
}

/// An attempt that fails, the new group that follows it, and an attempt in it that ends well.
pub(super) async fn two_attempts(server: &ApiServer, controller: &Controller, agents: &[FakeAgent]) {
    let before = agents[0].state().epoch.expect("it is in a group").epoch;
    agents[0].tell_update(update(&agents[0], 1, UpdatePhase::Failed));
    until(controller, "the failed attempt", |state| state["objects"][0]["updates"][0]["phase"] == "Failed").await;
    let regrouped = |state: &Value| {
        let object = &state["objects"][0];
        object["epoch"].as_u64() > Some(before) && object["worldSize"] == 3 && object["ready"] == 2
    };
    until(controller, "a new group", regrouped).await;
    agents[0].until("in the new group", |state| state.epoch.as_ref().is_some_and(|id| id.epoch > before)).await;
    agents[0].tell_update(update(&agents[0], 2, UpdatePhase::Done));
    until(controller, "the good attempt", |state| state["objects"][0]["updates"][0]["phase"] == "Done").await;
    server.until("ready", is_ready).await;
}

async fn a_group_with_updates() -> (ApiServer, Controller, Vec<FakeAgent>) {
    let server = cluster();
    let controller = Controller::start(&server).await;
    let agents = all_agents(&server, &controller).await;
    server.until("ready", is_ready).await;
    two_attempts(&server, &controller, &agents).await;
    (server, controller, agents)
}

#[tokio::test]
async fn every_controller_series_is_defined_and_counts() {
    let (server, controller, _agents) = a_group_with_updates().await;
    server.until("an Event tells", |server| server.all("events").iter().any(|event| event["reason"] == "GroupFormed")).await;
    let text = controller.page("/metrics").await.1;
    assert_eq!(differences(&text, METRICS), Vec::<String>::new());
    for line in [
        r#"weightsync_updates_total{kind="publish",outcome="done"} 1"#,
        r#"weightsync_updates_total{kind="publish",outcome="failed"} 1"#,
        r#"weightsync_sync_bytes_total{transport="tcp"} 1500000"#,
        r#"weightsync_sync_duration_seconds_count{phase="transfer"} 1"#,
        r#"weightsync_events_total{reason="GroupFormed",type="Normal"} 2"#,
        "weightsync_plan_depth 2",
        r#"weightsync_object_info{object_namespace="default",object="ws",ready="True""#,
        r#"weightsync_replicas{state="ready","#,
        r#"weightsync_api_requests_total{method="watch",code="200"}"#,
        r#"weightsync_api_requests_total{method="put",code="200"}"#,
        r#"weightsync_api_duration_seconds_count{method="patch"}"#,
        "weightsync_leader 1",
    ] {
        assert!(text.contains(line), "{line} is not in {text}");
    }
    server.delete("weightsyncs", "default", "ws");
    let gone = async {
        while controller.page("/metrics").await.1.contains("weightsync_object_info{") {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(SOON, gone).await.expect("an object that is gone has no series");
    controller.stop().await;
}

#[tokio::test]
async fn page_shows_members_reasons_and_last_phases() {
    let (_server, controller, _agents) = a_group_with_updates().await;
    let state = state(&controller).await;
    let object = &state["objects"][0];
    assert_eq!((&state["leads"], &state["total"], &state["pod"]), (&true.into(), &1.into(), &"controller-0".into()));
    assert_eq!((&object["name"], &object["worldSize"], &object["ready"]), (&"ws".into(), &3.into(), &2.into()));
    let member = object["members"].as_array().unwrap().iter().find(|member| member["name"] == "actors/actor-1").unwrap();
    assert_eq!((&member["state"], &member["rankOffset"]), (&"ready".into(), &2.into()));
    assert!(object["conditions"].as_array().unwrap().iter().any(|condition| condition["type"] == "Ready" && condition["status"] == "True"));
    let (done, failed) = (&object["updates"][0], &object["updates"][1]);
    assert_eq!((&done["attempt"], &done["installed"], &failed["attempt"]), (&2.into(), &2.into(), &1.into()));
    assert_eq!(done["phases"][1], serde_json::json!(["transfer", 500]));
    assert!(failed["failure"].as_str().unwrap().contains("the stream broke"));

    for (path, kind) in [("/ui/", "text/html"), ("/ui/app.js", "text/javascript"), ("/ui/style.css", "text/css")] {
        let (code, head, body) = ask(&controller.status, "127.0.0.1:8080", path).await;
        assert_eq!(code, 200, "{path}");
        assert!(head.contains(kind) && !body.is_empty(), "{head}");
        for header in
            ["content-security-policy: default-src 'none'; script-src 'self'", "x-content-type-options: nosniff", "cache-control: no-store"]
        {
            assert!(head.contains(header), "{header} is not in {head}");
        }
        // The policy allows nothing inline, and nothing from elsewhere.
        assert!(!body.contains("http://") || path == "/ui/app.js", "{path}");
        assert!(!body.contains(" onclick") && !body.contains("style=\"") && !body.contains("innerHTML"), "{path}");
    }
    assert_eq!(ask(&controller.status, "localhost", "/ui").await.0, 308);
    assert_eq!(ask(&controller.status, "evil.example", "/ui/state").await.0, 403, "a name that was made to lead here");
    controller.stop().await;
}

#[tokio::test]
async fn there_is_no_page_where_it_is_off() {
    let server = cluster();
    let controller = Controller::start_with(&server, Ui::Off).await;
    for path in ["/ui", "/ui/", "/ui/state"] {
        assert_eq!(ask(&controller.status, "localhost", path).await.0, 404, "{path}");
    }
    let open = Controller::start_with(&ApiServer::new(), Ui::Open).await;
    assert_eq!(ask(&open.status, "weightsync.example", "/ui/state").await.0, 200);
    controller.stop().await;
    open.stop().await;
}

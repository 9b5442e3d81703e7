//! What a controller takes over: terms of an earlier Lease, statuses that others changed, and objects that it cannot follow.

use serde_json::{Value, json};

use super::api_server::ApiServer;
use super::whole::{Controller, SOON, all_agents, cluster, condition, is_ready, status};
use weightsync_core::protocol::{HeldVersion, MemberPhase, Rejection};
use weightsync_net::https::CallError;
use weightsync_testkit::fake_agent::FakeAgent;

fn change(server: &ApiServer, change: impl Fn(&mut Value)) {
    let mut object = server.get("weightsyncs", "default", "ws").unwrap();
    change(&mut object);
    server.put("weightsyncs", object);
}

#[tokio::test]
async fn fresh_lease_takes_over_above_the_terms_in_status() {
    let server = cluster();
    change(&server, |object| object["status"] = json!({"epoch": 7, "term": 9}));
    let controller = Controller::start(&server).await;
    let _agents = all_agents(&server, &controller).await;
    server.until("ready", is_ready).await;
    assert_eq!((status(&server)["term"].as_u64(), status(&server)["epoch"].as_u64()), (Some(10), Some(8)));
    controller.stop().await;
}

#[tokio::test]
async fn epoch_of_another_controller_is_named_and_then_passed() {
    let server = cluster();
    let controller = Controller::start(&server).await;
    let mut agents = all_agents(&server, &controller).await;
    server.until("ready", is_ready).await;
    change(&server, |object| {
        object["status"]["epoch"] = json!(100);
        object["status"]["term"] = json!(50);
    });
    // The group must be formed again without it.
    agents.pop();
    let named = |server: &ApiServer, kind: &str| condition(server, kind) == ("False".into(), "PersistFailed".into());
    server.until("the conflict is named", |server| named(server, "Ready")).await;
    let again = |server: &ApiServer| status(server)["worldSize"] == 2 && status(server)["epoch"].as_u64() > Some(100);
    server.until("formed above it", again).await;
    server.until("the conflict is over", |server| condition(server, "Degraded").1 != "PersistFailed").await;
    controller.stop().await;
}

#[tokio::test]
async fn status_that_others_changed_is_written_again() {
    let server = cluster();
    let controller = Controller::start(&server).await;
    let _agents = all_agents(&server, &controller).await;
    server.until("ready", is_ready).await;
    change(&server, |object| {
        object["status"]["worldSize"] = json!(9);
        object["status"].as_object_mut().unwrap().remove("members");
    });
    server.until("healed", |server| status(server)["worldSize"] == 3 && status(server)["members"].as_array().is_some()).await;
    controller.stop().await;
}

/// A group that serves version 3, on a controller that stopped.
async fn serving_group(server: &ApiServer) -> Vec<FakeAgent> {
    let controller = Controller::start(server).await;
    let agents = all_agents(server, &controller).await;
    server.until("ready", is_ready).await;
    for agent in &agents {
        agent.until("in the group", |state| state.phase == MemberPhase::Ready).await;
        agent.change(|state| state.installed = Some(HeldVersion { version: 3, manifest: "m".into() }));
    }
    server.until("version 3", |server| status(server)["version"] == 3 && is_ready(server)).await;
    controller.stop().await;
    agents
}

/// What an announcement is answered once the object was looked at.
async fn rejection_that_names_the_object(agent: &FakeAgent) -> Rejection {
    let asked = async {
        loop {
            match agent.try_announce(false).await {
                Err(CallError::Rejected { rejection, .. }) if rejection.message.contains("default/ws") || !rejection.retryable => {
                    return rejection;
                }
                _ => tokio::task::yield_now().await,
            }
        }
    };
    tokio::time::timeout(SOON, asked).await.expect("an answer about the object")
}

/// Restarts the controller while the object cannot be followed, and makes it good again.
async fn outlives_a_controller(broken: impl Fn(&mut Value)) {
    let server = cluster();
    let agents = serving_group(&server).await;
    let good = server.get("weightsyncs", "default", "ws").unwrap()["spec"].clone();
    let (before, prepares) = (status(&server), agents[1].prepares());
    change(&server, |object| broken(&mut object["spec"]));

    let controller = Controller::start(&server).await;
    for agent in &agents {
        agent.follow(&controller.enroll);
    }
    let accepted = |server: &ApiServer| condition(server, "Accepted") == ("False".into(), "InvalidSpec".into());
    server.until("what is wrong is said", accepted).await;
    assert_eq!(condition(&server, "Ready"), ("False".into(), "InvalidSpec".into()));
    for field in ["version", "manifest", "members", "worldSize", "trainer", "epoch", "term", "replicas"] {
        assert_eq!(status(&server)[field], before[field], "{field}");
    }
    let rejection = rejection_that_names_the_object(&agents[1]).await;
    assert!(rejection.retryable, "{rejection:?}");
    assert_eq!(agents[1].state().phase, MemberPhase::Ready, "it keeps what it holds");

    change(&server, |object| object["spec"] = good.clone());
    server.until("ready", is_ready).await;
    assert_eq!((status(&server)["version"].as_u64(), &status(&server)["epoch"]), (Some(3), &before["epoch"]));
    assert_eq!(agents[1].prepares(), prepares, "the group was taken over as it is");
    controller.stop().await;
}

#[tokio::test]
async fn unreadable_object_keeps_its_status_and_its_agents() {
    outlives_a_controller(|spec| spec["rollouts"] = json!("none")).await;
}

#[tokio::test]
async fn invalid_object_keeps_its_status_and_its_agents() {
    outlives_a_controller(|spec| spec["rollouts"][0]["engine"] = json!({})).await;
}

#[tokio::test]
async fn object_that_becomes_unreadable_keeps_its_group() {
    let server = cluster();
    let controller = Controller::start(&server).await;
    let agents = all_agents(&server, &controller).await;
    server.until("ready", is_ready).await;
    let before = status(&server);
    change(&server, |object| object["spec"]["rollouts"] = json!("none"));
    server.until("what is wrong is said", |server| condition(server, "Accepted").0 == "False").await;
    for field in ["members", "worldSize", "epoch", "transport"] {
        assert_eq!(status(&server)[field], before[field], "{field}");
    }
    assert!(agents[1].try_announce(false).await.is_ok(), "its claim stands");
    controller.stop().await;
}

/// A status of the object before would count as what an earlier controller knew: the group waited for a version that no member has.
#[tokio::test]
async fn status_of_a_deleted_object_is_not_written_to_the_next() {
    let server = cluster();
    let controller = Controller::start(&server).await;
    let agents = all_agents(&server, &controller).await;
    server.until("ready", is_ready).await;
    for agent in &agents {
        agent.change(|state| state.installed = Some(HeldVersion { version: 3, manifest: "m".into() }));
    }
    server.until("version 3", |server| status(server)["version"] == 3 && is_ready(server)).await;
    let mut successor = serde_json::to_value(super::fixtures::object("ws", 2)).unwrap();
    successor["metadata"]["uid"] = json!("another");
    server.replace_before_conditions(successor);
    agents[2].change(|state| state.healthy = false);
    let written = |server: &ApiServer| {
        let object = server.get("weightsyncs", "default", "ws").unwrap();
        object["metadata"]["uid"] == "another" && object["status"]["conditions"].is_array()
    };
    server.until("the next object has a status", written).await;
    assert_eq!(status(&server)["version"], serde_json::Value::Null);
    controller.stop().await;
}

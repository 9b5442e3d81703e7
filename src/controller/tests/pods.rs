//! What a whole controller does to pods: readiness gates, ephemeral containers, deletions.

use serde_json::{Value, json};

use super::api_server::ApiServer;
use super::fixtures;
use super::many::looks;
use super::whole::{Controller, SOON, agent_with, all_agents, cluster, condition_of, is_ready};
use crate::controller::readiness::GATE;

fn gate(server: &ApiServer, pod: &str) -> Option<bool> {
    let pod = server.get("pods", "default", pod)?;
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.iter().find(|condition| condition["type"] == GATE).map(|condition| condition["status"] == "True")
}

/// Waits until objects were looked at so many more times.
async fn look_again(controller: &Controller, more: u64) {
    let wanted = looks(controller).await + more;
    let looked = async { while looks(controller).await < wanted {} };
    tokio::time::timeout(SOON, looked).await.expect("objects are looked at");
}

fn gated(pod: &mut Value) {
    pod["spec"]["readinessGates"] = json!([{"conditionType": GATE}]);
}

#[tokio::test]
async fn gate_of_a_pod_is_written_by_the_object_that_claims_it() {
    let server = cluster();
    let holding = fixtures::changed("ws", 1, |object| object["spec"]["readiness"] = json!({"beforeFirstVersion": "Hold"}));
    server.put("weightsyncs", serde_json::to_value(holding).unwrap());
    // The younger one would open the gate.
    let younger = fixtures::changed("younger", 2, |object| object["spec"]["suspend"] = json!(true));
    server.put("weightsyncs", serde_json::to_value(younger).unwrap());
    server.put("pods", serde_json::to_value(fixtures::pod("actor-0", gated)).unwrap());
    let controller = Controller::start(&server).await;
    let _agents = all_agents(&server, &controller).await;
    server.until("the younger object is refused", |server| condition_of(server, "younger", "Accepted").1 == "PodClaimed").await;
    server.until("held back", |server| gate(server, "actor-0") == Some(false)).await;
    let mut touched = server.get("pods", "default", "actor-0").unwrap();
    touched["metadata"]["annotations"] = json!({"touched": "yes"});
    server.put("pods", touched);
    look_again(&controller, 2).await;
    assert_eq!(gate(&server, "actor-0"), Some(false));
    let writes = server.calls("patch", "pods/status");
    assert_eq!(writes, 1, "one verdict, one write");
    controller.stop().await;
}

#[tokio::test]
async fn pod_in_a_stale_cache_gets_no_second_ephemeral_agent() {
    let server = cluster();
    let ephemeral = fixtures::changed("ws", 1, |object| object["spec"]["agent"] = json!({"launch": "Ephemeral"}));
    server.put("weightsyncs", serde_json::to_value(ephemeral).unwrap());
    // What the controller writes does not come back to it.
    server.freeze_watches();
    let controller = Controller::start(&server).await;
    server.until("agents are added", |server| server.calls("patch", "pods/ephemeralcontainers") >= 3).await;
    let container = server.get("pods", "default", "actor-0").unwrap()["spec"]["ephemeralContainers"][0].clone();
    let env = container["env"].as_array().unwrap().clone();
    let token = env.iter().find(|entry| entry["name"] == "WEIGHTSYNC_TOKEN").unwrap()["value"].as_str().unwrap().to_owned();
    let agent = agent_with(&server, &controller, "actor-0", "a", token).await;
    agent.listened_to().await;
    look_again(&controller, 1).await;
    assert_eq!(server.calls("patch", "pods/ephemeralcontainers"), 3, "one for each pod");
    controller.stop().await;
}

#[tokio::test]
async fn wedged_pod_is_deleted_where_the_object_asks_for_that() {
    let server = cluster();
    let restarting = fixtures::changed("ws", 1, |object| object["spec"]["update"] = json!({"onWedged": "RestartPod"}));
    server.put("weightsyncs", serde_json::to_value(restarting).unwrap());
    let owned = |pod: &mut Value| {
        pod["metadata"]["ownerReferences"] =
            json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "u", "controller": true}]);
    };
    server.put("pods", serde_json::to_value(fixtures::pod("actor-0", owned)).unwrap());
    let controller = Controller::start(&server).await;
    let agents = all_agents(&server, &controller).await;
    server.until("ready", is_ready).await;
    agents[1].change(|state| {
        state.healthy = false;
        state.wedged = true;
        state.reason = Some("it computes nothing".into());
    });
    server.until("deleted", |server| server.get("pods", "default", "actor-0").is_none()).await;
    server.until("the Event", |server| server.all("events").iter().any(|event| event["reason"] == "EngineWedged")).await;
    controller.stop().await;
}

#[tokio::test]
async fn secret_that_the_pod_does_not_name_is_given_to_no_agent() {
    let server = cluster();
    let keyed = fixtures::changed("ws", 1, |object| {
        object["spec"]["agent"] = json!({"launch": "Ephemeral"});
        object["spec"]["rollouts"][0]["engine"] = json!({"kind": "VLLM", "apiKeySecretRef": {"name": "prod-database", "key": "password"}});
    });
    server.put("weightsyncs", serde_json::to_value(keyed).unwrap());
    let allow =
        |secret: &'static str| move |pod: &mut Value| pod["metadata"]["annotations"] = json!({"weightsync.dev/api-key-secret": secret});
    server.put("pods", serde_json::to_value(fixtures::pod("actor-0", allow("prod-database/password"))).unwrap());
    server.put("pods", serde_json::to_value(fixtures::pod("actor-1", allow("keys/vllm"))).unwrap());
    let controller = Controller::start(&server).await;
    let agents = |server: &ApiServer, pod: &str| server.get("pods", "default", pod).unwrap()["spec"]["ephemeralContainers"].clone();
    server.until("the pod that allows it has an agent", |server| agents(server, "actor-0").is_array()).await;
    server.until("the other one is named", |server| condition_of(server, "ws", "Degraded").1 == "AgentLaunchFailed").await;
    server.until("an Event tells", |server| server.all("events").iter().any(|event| event["reason"] == "AgentLaunchFailed")).await;
    assert!(agents(&server, "actor-1").is_null());
    let key =
        agents(&server, "actor-0")[0]["env"].as_array().unwrap().iter().find(|entry| entry["name"] == "WEIGHTSYNC_ENGINE_API_KEY").cloned();
    assert_eq!(key.unwrap()["valueFrom"]["secretKeyRef"], json!({"name": "prod-database", "key": "password"}));
    server.put("pods", serde_json::to_value(fixtures::pod("actor-1", allow("prod-database/password"))).unwrap());
    server.until("allowed by now", |server| agents(server, "actor-1").is_array()).await;
    controller.stop().await;
}

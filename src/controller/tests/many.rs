//! One controller and many objects: who is looked at when a pod changes, and how often an update is reported.

use std::collections::HashMap;
use std::time::Instant;

use k8s_openapi::api::core::v1::Pod;
use kube::runtime::reflector;
use kube::runtime::watcher::Event;
use serde_json::{Value, json};

use super::api_server::ApiServer;
use super::fixtures::{changed, idle, object, plain, pod};
use super::whole::{Controller, all_agents, cluster, is_ready};
use crate::api::{WeightSync, WeightSyncStatus};
use crate::controller::decide::decide;
use crate::controller::hold::{HOLD, may_wait};
use crate::controller::object::Object;
use crate::controller::stores::concerned;
use weightsync_core::membership::MembershipView;
use weightsync_core::protocol::{EpochId, HeldVersion, InstallStep, MemberName, MemberPhase, MemberProgress, UpdatePhase, UpdateView};

/// An object whose pods have another label than those of [`object`].
fn other(name: &str) -> WeightSync {
    changed(name, 0, |object| {
        object["spec"]["trainer"]["selector"]["matchLabels"]["app"] = json!("other-trainer");
        object["spec"]["rollouts"][0]["selector"]["matchLabels"]["app"] = json!("other-actor");
    })
}

fn labelled(name: &str, app: &str) -> Pod {
    pod(name, |pod| pod["metadata"]["labels"]["app"] = json!(app))
}

#[test]
fn pod_change_concerns_objects_that_select_or_selected_it() {
    let (store, mut writer) = reflector::store::<Object>();
    let elsewhere = changed("elsewhere", 0, |object| object["metadata"]["namespace"] = json!("elsewhere"));
    for object in [object("one", 0), other("two"), elsewhere] {
        writer.apply_watcher_event(&Event::Apply(Object(Ok(object))));
    }
    let names = |pod: &Pod, before: Option<&Pod>| {
        let mut names: Vec<String> =
            concerned(&store, pod, before).iter().filter_map(|object| object.0.as_ref().ok()?.metadata.name.clone()).collect();
        names.sort();
        names
    };
    let (actor, moved) = (plain("actor-0"), labelled("actor-0", "other-actor"));
    assert_eq!(names(&actor, None), ["one"]);
    assert_eq!(names(&actor, Some(&actor)), ["one"]);
    assert_eq!(names(&moved, Some(&actor)), ["one", "two"], "the one that it leaves must know");
    assert!(names(&labelled("actor-0", "no one's"), None).is_empty());
}

#[test]
fn pods_of_others_change_nothing_in_what_is_decided() {
    let (one, two) = (object("one", 0), other("two"));
    let (own, foreign) =
        ([plain("trainer-0"), plain("actor-0")], [labelled("trainer-1", "other-trainer"), labelled("actor-1", "other-actor")]);
    let alone: Vec<&Pod> = own.iter().collect();
    let together: Vec<&Pod> = own.iter().chain(&foreign).collect();
    assert_eq!(decide(&one, &[&one, &two], &together, &HashMap::new()), decide(&one, &[&one], &alone, &HashMap::new()));
    assert_eq!(decide(&two, &[&one, &two], &together, &HashMap::new()).members.0.len(), 2);
}

fn update(phase: UpdatePhase) -> UpdateView {
    UpdateView {
        id: EpochId { weightsync: "w".into(), created: 1, term: 0, epoch: 1 },
        version: 1,
        attempt: 1,
        phase,
        total_bytes: 18,
        members: Vec::new(),
        phases_ms: Vec::new(),
        failure: None,
        feeding: false,
    }
}

fn status(change: impl Fn(&mut Value)) -> WeightSyncStatus {
    let condition = |kind: &str, status: &str| json!({"type": kind, "status": status, "reason": "AsWanted", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let member = |name: &str| json!({"name": name, "pods": [name], "rankOffset": 1, "size": 1, "state": "Ready", "version": 1, "reason": "MemberReady", "message": ""});
    let mut value = json!({
        "conditions": [condition("Ready", "True"), condition("Progressing", "False"), condition("Degraded", "False")],
        "worldSize": 3, "version": 1, "replicas": {"total": 2, "ready": 2, "display": "2/2"},
        "members": [member("actors/actor-0"), member("actors/actor-1")],
    });
    change(&mut value);
    serde_json::from_value(value).unwrap()
}

#[test]
fn only_what_a_running_update_moves_waits_for_more() {
    let view = |phase| MembershipView { update: Some(update(phase)), ..idle(&object("ws", 0)) };
    let before = status(|_| {});
    let waits = |change: &dyn Fn(&mut Value), phase| may_wait(&before, &status(change), &view(phase));
    let step = |status: &mut Value| {
        status["version"] = json!(2);
        status["conditions"][1]["status"] = json!("True");
        status["members"][0]["state"] = json!("Updating");
        status["members"][1]["version"] = json!(2);
        status["lastUpdate"] = json!({"version": 2, "attempt": 1, "state": "Activate", "bytes": 18, "feeding": false, "phases": []});
    };
    assert!(waits(&step, UpdatePhase::Activate));
    assert!(!waits(&step, UpdatePhase::Done), "the end is reported at once");
    assert!(!waits(&step, UpdatePhase::Failed));
    assert!(!may_wait(&before, &status(step), &idle(&object("ws", 0))), "without an update nothing waits");
    let at_once: [&dyn Fn(&mut Value); 5] = [
        &|status| status["members"][0]["state"] = json!("Dirty"),
        &|status| status["members"][0]["state"] = json!("Out"),
        &|status| status["conditions"][0]["status"] = json!("False"),
        &|status| status["conditions"][2]["status"] = json!("True"),
        &|status| status["worldSize"] = json!(2),
    ];
    for (number, change) in at_once.into_iter().enumerate() {
        assert!(!waits(change, UpdatePhase::Transfer), "{number}");
    }
}

pub(super) async fn looks(controller: &Controller) -> u64 {
    let metrics = controller.page("/metrics").await.1;
    let line = metrics.lines().find_map(|line| line.strip_prefix("weightsync_reconcile_total{outcome=\"success\"} ").map(str::to_owned));
    line.and_then(|count| count.parse().ok()).unwrap_or(0)
}

fn settled(server: &ApiServer) -> bool {
    let status = server.get("weightsyncs", "default", "ws").unwrap()["status"].clone();
    let ready = |member: &Value| member["state"] == "Ready";
    let at_rest = |condition: &Value| condition["type"] == "Progressing" && condition["status"] == "False";
    is_ready(server)
        && status["members"].as_array().is_some_and(|members| members.iter().all(ready))
        && status["conditions"].as_array().is_some_and(|conditions| conditions.iter().any(at_rest))
}

#[tokio::test]
async fn update_costs_two_status_writes() {
    let server = cluster();
    let controller = Controller::start(&server).await;
    let agents = all_agents(&server, &controller).await;
    server.until("at rest", settled).await;
    let (writes, begun) = (server.calls("patch", "weightsyncs/status"), Instant::now());
    let (source, rollouts) = agents.split_first().unwrap();
    let id = source.state().epoch.unwrap();
    let tell = |phase, step| {
        let progress = |name: &str| MemberProgress { member: MemberName(format!("actors/{name}")), bytes: 0, step, reason: None };
        let members = ["actor-0", "actor-1"].map(progress).into();
        source.tell_update(UpdateView { id: id.clone(), members, ..update(phase) });
    };
    for agent in rollouts {
        agent.change(|state| state.phase = MemberPhase::Updating);
    }
    for phase in [UpdatePhase::Begin, UpdatePhase::Transfer, UpdatePhase::Verify, UpdatePhase::Activate] {
        let before = looks(&controller).await;
        tell(phase, InstallStep::Receiving);
        tokio::time::timeout(super::whole::SOON, async { while looks(&controller).await == before {} }).await.expect("it is looked at");
    }
    for agent in &agents {
        agent.change(|state| {
            state.phase = MemberPhase::Ready;
            state.installed = Some(HeldVersion { version: 1, manifest: "m".into() });
        });
    }
    tell(UpdatePhase::Done, InstallStep::Installed);
    server
        .until("the Event", |server| {
            let status = server.get("weightsyncs", "default", "ws").unwrap()["status"].clone();
            settled(server) && status["version"] == 1 && status["lastUpdate"]["state"] == "Done"
        })
        .await;
    // A machine that is busy may need longer than a change waits.
    let most = 2 + usize::try_from(begun.elapsed().as_secs() / HOLD.as_secs()).unwrap();
    let written = server.calls("patch", "weightsyncs/status") - writes;
    assert!(written <= most, "{written} writes, at most {most}");
    controller.stop().await;
}

//! When a running pod gets an agent, and what that agent's container is like.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::fixtures::{plain, pod};
use crate::controller::ephemeral::{MAX_LAUNCHES, Need, Recipe, container, need, uninjected, unwrapped};

fn now() -> Timestamp {
    "2026-01-01T01:00:00Z".parse().unwrap()
}

/// A pod with ephemeral agents in these states.
fn with_agents(states: &[Value]) -> Pod {
    pod("actor-0", |pod| {
        let name = |number: usize| format!("weightsync-agent-{}", number + 1);
        let entries: Vec<Value> = (0..states.len()).map(|number| json!({"name": name(number)})).collect();
        pod["spec"]["ephemeralContainers"] = json!(entries);
        let statuses = states.iter().enumerate().filter(|(_, state)| !state.is_null());
        let statuses = statuses.map(
            |(number, state)| json!({"name": name(number), "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state, "lastState": state.get("last").cloned().unwrap_or_default()}),
        );
        pod["status"]["ephemeralContainerStatuses"] = json!(statuses.collect::<Vec<Value>>());
    })
}

fn ended(at: &str) -> Value {
    json!({"terminated": {"exitCode": 137, "finishedAt": at}})
}

#[test]
fn a_running_pod_without_an_agent_gets_one() {
    assert_eq!(need(&plain("actor-0"), "engine", now()), Need::Launch("weightsync-agent-1".into()));
}

#[test]
fn nothing_is_added_to_a_pod_that_has_an_agent_or_is_down() {
    let starting =
        pod("actor-0", |pod| pod["status"]["containerStatuses"][0]["state"] = json!({"waiting": {"reason": "ContainerCreating"}}));
    let unknown = pod("actor-0", |pod| pod["status"] = json!({"phase": "Pending"}));
    let sidecar = pod("actor-0", |pod| pod["spec"]["initContainers"] = json!([{"name": "weightsync-agent", "restartPolicy": "Always"}]));
    let leaving = pod("actor-0", |pod| pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"));
    let running = with_agents(&[json!({"running": {}})]);
    let not_reported_yet = with_agents(&[Value::Null]);
    let pulling = with_agents(&[json!({"waiting": {"reason": "ContainerCreating"}})]);
    let wrapped = pod("actor-0", |pod| pod["spec"]["initContainers"] = json!([{"name": "weightsync-program"}]));
    for pod in [&starting, &unknown, &sidecar, &wrapped, &leaving, &running, &not_reported_yet, &pulling] {
        assert_eq!(need(pod, "engine", now()), Need::Nothing, "{pod:?}");
    }
}

#[test]
fn ended_agent_is_replaced_after_a_doubling_wait() {
    let old = ended("2026-01-01T00:00:00Z");
    assert_eq!(need(&with_agents(std::slice::from_ref(&old)), "engine", now()), Need::Launch("weightsync-agent-2".into()));
    let recent = ended("2026-01-01T00:59:59Z");
    let seconds = |need: Need| match need {
        Need::Wait(wait) => wait.as_secs(),
        other => panic!("{other:?}"),
    };
    assert_eq!(seconds(need(&with_agents(std::slice::from_ref(&recent)), "engine", now())), 1);
    assert_eq!(seconds(need(&with_agents(&[old.clone(), old.clone(), recent]), "engine", now())), 7);
}

#[test]
fn a_pod_gets_so_many_agents_and_no_more() {
    let old = ended("2026-01-01T00:00:00Z");
    let at_cap = need(&with_agents(&vec![old.clone(); MAX_LAUNCHES]), "engine", now());
    assert!(matches!(&at_cap, Need::Exhausted(message) if message.contains("actor-0")), "{at_cap:?}");
    assert!(matches!(need(&with_agents(&vec![old; MAX_LAUNCHES - 1]), "engine", now()), Need::Launch(_)));
}

#[test]
fn image_that_cannot_be_pulled_is_reported() {
    let stuck = with_agents(&[json!({"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}})]);
    assert!(matches!(need(&stuck, "engine", now()), Need::Stuck(message) if message.contains("no such image")));
}

#[test]
fn agent_the_runtime_failed_to_start_is_replaced() {
    // As Kubernetes 1.36 reports it when runc fails (seen: "unable to freeze"); no one starts that container again.
    let failed = |at: &str| {
        let end = json!({"exitCode": 128, "reason": "StartError", "finishedAt": at});
        json!({"waiting": {"reason": "RunContainerError", "message": "runc create failed"}, "last": {"terminated": end}})
    };
    assert_eq!(need(&with_agents(&[failed("2026-01-01T00:00:00Z")]), "engine", now()), Need::Launch("weightsync-agent-2".into()));
    assert!(matches!(need(&with_agents(&[failed("2026-01-01T00:59:59Z")]), "engine", now()), Need::Wait(_)));
    let not_over = with_agents(&[json!({"waiting": {"reason": "RunContainerError", "message": "runc create failed"}})]);
    assert!(matches!(need(&not_over, "engine", now()), Need::Stuck(message) if message.contains("runc create failed")));
}

#[test]
fn container_has_targets_user_and_no_privilege() {
    let target = pod("actor-0", |pod| {
        pod["spec"]["containers"][0]["securityContext"] = json!({"privileged": true, "capabilities": {"drop": ["ALL"]}});
        pod["spec"]["containers"][0]["volumeMounts"] =
            json!([{"name": "shm", "mountPath": "/dev/shm"}, {"name": "other", "mountPath": "/data"}]);
        pod["status"]["containerStatuses"][0]["user"] = json!({"linux": {"uid": 1000, "gid": 2000}});
    });
    let recipe = Recipe {
        name: "weightsync-agent-1".into(),
        target: "engine",
        image: "ours:1",
        pull_policy: "Never",
        role: "rollout",
        controller_url: "https://weightsync.system.svc:8443",
        controller_ca: "PEM",
        token: "once".into(),
        api_key: None,
    };
    let made = serde_json::to_value(container(&target, recipe)).unwrap();
    assert_eq!(made["securityContext"]["runAsUser"], 1000);
    assert_eq!(made["securityContext"]["runAsGroup"], 2000);
    assert_eq!(made["securityContext"]["capabilities"], json!({"drop": ["ALL"]}));
    assert_eq!(made["securityContext"]["allowPrivilegeEscalation"], false);
    assert_eq!(made["securityContext"].get("privileged"), None, "the fence refuses a privileged agent");
    assert_eq!(made["targetContainerName"], "engine");
    assert_eq!(made["volumeMounts"], json!([{"name": "shm", "mountPath": "/dev/shm"}]));
    let env = made["env"].as_array().unwrap();
    assert!(env.iter().any(|entry| entry["name"] == "WEIGHTSYNC_TOKEN" && entry["value"] == "once"));
    assert!(env.iter().any(|entry| entry["name"] == "POD_UID" && entry["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.uid"));
}

#[test]
fn pod_that_lacks_its_wrapper_is_named_with_the_remedy() {
    let annotated = |how: &'static str| move |pod: &mut Value| pod["metadata"]["annotations"] = json!({"weightsync.dev/inject": how});
    let wrapped = pod("actor-0", |pod| pod["spec"]["initContainers"] = json!([{"name": "weightsync-program"}]));
    assert_eq!(unwrapped(&wrapped), None);
    assert_eq!(unwrapped(&pod("actor-0", annotated("false"))), None, "it starts its agent itself");
    assert_eq!(unwrapped(&pod("actor-0", |pod| pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"))), None);
    let message = unwrapped(&plain("actor-0")).unwrap();
    assert!(message.contains("pod actor-0") && message.contains("weightsync.dev/inject: wrap"), "{message}");
    let sidecar = pod("actor-0", |pod| pod["spec"]["initContainers"] = json!([{"name": "weightsync-agent"}]));
    assert!(unwrapped(&sidecar).is_some(), "a sidecar shares no GPU");
    let early = unwrapped(&pod("actor-0", annotated("wrap"))).unwrap();
    assert!(early.contains("recreate it"), "{early}");
}

#[test]
fn labelled_pod_without_an_agent_is_named_with_the_remedy() {
    let message = uninjected(&plain("actor-0")).unwrap();
    assert!(
        message.contains("pod actor-0") && message.contains("recreate it") && message.contains("kubectl weightsync inject"),
        "{message}"
    );
    for container in ["weightsync-agent", "weightsync-program"] {
        let injected = pod("actor-0", |pod| pod["spec"]["initContainers"] = json!([{"name": container}]));
        assert_eq!(uninjected(&injected), None, "{container}");
    }
    assert_eq!(uninjected(&with_agents(&[json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}})])), None, "it has an ephemeral agent");
    let opts_out = pod("actor-0", |pod| pod["metadata"]["annotations"] = json!({"weightsync.dev/inject": "false"}));
    assert_eq!(uninjected(&opts_out), None, "it starts its agent itself");
    assert_eq!(uninjected(&pod("actor-0", |pod| pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"))), None);
}

//! Pods as the plan sees them.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::api::{container_name, not_ready, pod_facts};
use weightsync_core::plan::PodPhase;

fn pod(value: Value) -> Pod {
    let mut object = json!({
        "metadata": {"name": "actor-3", "uid": "u", "labels": {"app": "actor"}},
        "spec": {"nodeName": "n", "containers": [{"name": "engine"}, {"name": "proxy"}], "initContainers": [{"name": "setup"}]},
        "status": {"phase": "Running"},
    });
    for (key, value) in value.as_object().unwrap() {
        for (inner, value) in value.as_object().unwrap() {
            object[key][inner] = value.clone();
        }
    }
    serde_json::from_value(object).unwrap()
}

fn owner(kind: &str, name: &str) -> Value {
    json!([{"apiVersion": "apps/v1", "kind": kind, "name": name, "uid": "o", "controller": true}])
}

#[test]
fn the_usual_facts_are_read() {
    let facts = pod_facts(&pod(json!({})), Some("why".to_owned()));
    assert_eq!((facts.name.as_str(), facts.uid.as_str(), facts.node.as_deref()), ("actor-3", "u", Some("n")));
    assert_eq!(facts.labels["app"], "actor");
    assert_eq!(facts.missing_container, None);
    assert_eq!(facts.unready.as_deref(), Some("why"));
}

#[test]
fn phases_are_three() {
    for (phase, expected) in [
        ("Pending", PodPhase::Pending),
        ("Running", PodPhase::Running),
        ("Succeeded", PodPhase::Terminal),
        ("Failed", PodPhase::Terminal),
        ("Unknown", PodPhase::Pending),
    ] {
        assert_eq!(pod_facts(&pod(json!({"status": {"phase": phase}})), None).phase, expected, "{phase}");
    }
    let deleted = pod(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
    assert!(pod_facts(&deleted, None).terminating && !pod_facts(&deleted, None).is_live());
}

#[test]
fn index_comes_from_stateful_set_or_indexed_job_only() {
    let index = |metadata: Value| pod_facts(&pod(json!({"metadata": metadata})), None).index;
    assert_eq!(index(json!({})), None, "a name that ends in a number is no index");
    assert_eq!(index(json!({"ownerReferences": owner("StatefulSet", "actor")})), Some(3));
    assert_eq!(index(json!({"ownerReferences": owner("StatefulSet", "other")})), None);
    assert_eq!(index(json!({"ownerReferences": owner("ReplicaSet", "actor")})), None);
    assert_eq!(index(json!({"labels": {"apps.kubernetes.io/pod-index": "7"}})), Some(7));
    assert_eq!(index(json!({"labels": {"batch.kubernetes.io/job-completion-index": "2"}})), Some(2));
    assert_eq!(index(json!({"annotations": {"batch.kubernetes.io/job-completion-index": "4"}})), Some(4));
    assert_eq!(index(json!({"labels": {"apps.kubernetes.io/pod-index": "x"}})), None);
}

#[test]
fn pending_pod_names_the_container_or_node_it_lacks() {
    let stuck = |status: Value| {
        let mut status = status;
        status["phase"] = json!("Pending");
        pod_facts(&pod(json!({"status": status})), None).stuck
    };
    let waiting = |reason: &str| {
        let status = json!({"name": "weightsync-agent", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"waiting": {"reason": reason, "message": "Back-off pulling image \"registry.example.com/weightsync:1\""}}});
        stuck(json!({"initContainerStatuses": [status]}))
    };
    let found = waiting("ImagePullBackOff").unwrap();
    assert!(found.starts_with("container weightsync-agent cannot start: ImagePullBackOff Back-off pulling image"), "{found}");
    assert!(found.ends_with("check the image's name, and the pull Secret that the pod needs (imagePullSecrets)"), "{found}");
    assert!(!waiting("CreateContainerConfigError").unwrap().contains("pull Secret"));
    assert_eq!(waiting("PodInitializing"), None);
    let unscheduled = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes are available: Insufficient nvidia.com/gpu."});
    let found = stuck(json!({"conditions": [unscheduled]})).unwrap();
    assert_eq!(found, "no node takes it: 0/1 nodes are available: Insufficient nvidia.com/gpu.");
}

#[test]
fn a_name_is_stable_when_the_next_pod_would_have_it_too() {
    let stable = |metadata: Value| pod_facts(&pod(json!({"metadata": metadata})), None).stable_name;
    assert!(stable(json!({})));
    assert!(stable(json!({"generateName": "actor-", "ownerReferences": owner("StatefulSet", "actor")})));
    assert!(!stable(json!({"generateName": "actor-7d9f-", "ownerReferences": owner("ReplicaSet", "actor-7d9f")})));
    assert!(!stable(json!({"generateName": "train-", "ownerReferences": owner("Job", "train")})));
}

#[test]
fn readiness_is_the_kubelets_word_with_its_reason() {
    let with = |condition: Value| not_ready(&pod(json!({"status": {"conditions": [condition]}})));
    assert_eq!(with(json!({"type": "Ready", "status": "True"})), None);
    let why = json!({"type": "Ready", "status": "False", "reason": "ContainersNotReady", "message": "engine"});
    assert_eq!(with(why).as_deref(), Some("not ready (ContainersNotReady: engine)"));
    assert_eq!(with(json!({"type": "Ready", "status": "False"})).as_deref(), Some("not ready"));
    assert!(with(json!({"type": "Initialized", "status": "True"})).is_some());
}

#[test]
fn the_container_is_the_annotated_or_the_first_one() {
    let plain = pod(json!({}));
    let annotated = pod(json!({"metadata": {"annotations": {"weightsync.dev/container": "proxy"}}}));
    assert_eq!(container_name(&plain).as_deref(), Some("engine"));
    assert_eq!(container_name(&annotated).as_deref(), Some("proxy"));
    assert_eq!(pod_facts(&annotated, None).missing_container, None);
    let init = pod(json!({"metadata": {"annotations": {"weightsync.dev/container": "setup"}}}));
    assert_eq!(pod_facts(&init, None).missing_container.as_deref(), Some("setup"), "init containers run no engine");
}

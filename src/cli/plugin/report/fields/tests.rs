use super::*;

/// Stands in every place that no report may copy.
const PLANTED: &str = "planted";

fn planted_metadata(name: &str) -> Value {
    json!({
        "name": name, "namespace": "rl", "uid": "u", "managedFields": [{"manager": PLANTED}],
        "labels": {"weightsync.dev/role": "rollout", "example.com/key": PLANTED},
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": PLANTED, "weightsync.dev/api-key-secret": PLANTED},
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": PLANTED, "uid": PLANTED}],
    })
}

fn planted_container(name: &str) -> Value {
    json!({
        "name": name, "image": "vllm:1", "command": ["sh", "-c", "serve --api-key planted"], "args": ["--hf-token=planted"],
        "env": [{"name": "DATABASE_URL", "value": "https://user:planted@host"}, {"name": "NCCL_DEBUG", "value": PLANTED}],
        "envFrom": [{"secretRef": {"name": PLANTED}}], "volumeMounts": [{"name": PLANTED, "mountPath": "/planted"}],
        "lifecycle": {"preStop": {"exec": {"command": [PLANTED]}}},
    })
}

fn planted_status(name: &str) -> Value {
    json!({
        "name": name, "image": "vllm:1", "imageID": PLANTED, "ready": false, "restartCount": 3,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": PLANTED}},
        "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137, "message": PLANTED, "containerID": PLANTED}},
    })
}

fn condition() -> Value {
    json!({"type": "Ready", "status": "False", "reason": "ContainersNotReady", "message": PLANTED})
}

#[test]
fn pod_with_a_secret_in_every_other_field_leaves_none() {
    let of: Pod = serde_json::from_value(json!({
        "metadata": planted_metadata("a-0"),
        "spec": {
            "nodeName": "node-1",
            "initContainers": [planted_container("weightsync-agent")],
            "containers": [planted_container("engine")],
            "ephemeralContainers": [planted_container("weightsync-agent-1")],
            "volumes": [{"name": PLANTED, "csi": {"driver": "d", "volumeAttributes": {"key": PLANTED}}}],
        },
        "status": {
            "phase": "Running", "message": PLANTED, "conditions": [condition()],
            "containerStatuses": [planted_status("engine")], "initContainerStatuses": [planted_status("weightsync-agent")],
        },
    }))
    .unwrap();
    let copied = pod(&of);
    assert!(!copied.to_string().contains(PLANTED), "{copied:#}");
    assert_eq!(copied["metadata"]["labels"], json!({"weightsync.dev/role": "rollout"}));
    assert_eq!(copied["metadata"]["owners"], json!(["StatefulSet"]));
    assert_eq!((&copied["node"], &copied["phase"]), (&json!("node-1"), &json!("Running")));
    assert_eq!(copied["conditions"][0]["reason"], "ContainersNotReady");
    let engine = &copied["containers"][1];
    assert_eq!((&engine["name"], &engine["image"], &engine["restarts"]), (&json!("engine"), &json!("vllm:1"), &json!(3)));
    assert_eq!(engine["state"]["waiting"]["reason"], "CrashLoopBackOff");
    assert_eq!(engine["lastState"]["terminated"]["exitCode"], 137);
    assert_eq!(copied["containers"][2]["kind"], "ephemeral");
}

#[test]
fn object_with_a_prompt_and_foreign_fields_leaves_neither() {
    let of: WeightSync = serde_json::from_value(json!({
        "apiVersion": "weightsync.dev/v1alpha1", "kind": "WeightSync", "metadata": planted_metadata("run"),
        "spec": {
            "trainer": {"selector": {"matchLabels": {"app": "trainer"}}, "unknown": PLANTED},
            "rollouts": [{"name": "actors", "selector": {"matchLabels": {"app": "actor"}}, "engine": {"kind": "VLLM", "ports": [8000]}}],
            "canary": {"prompt": PLANTED, "minLogProb": -4},
            "transport": {"type": "NCCL", "ncclEnv": {"NCCL_DEBUG": "INFO", "NCCL_NET_PLUGIN": PLANTED}},
        },
        "status": {"version": 7, "members": [
            {"name": "actors/a", "size": 1, "state": "Out", "reason": "AgentLost", "message": "the connection closed"},
        ]},
    }))
    .unwrap();
    let copied = object(&of);
    assert!(!copied.to_string().contains(PLANTED), "{copied:#}");
    assert_eq!(copied["spec"]["transport"]["ncclEnv"], json!({"NCCL_DEBUG": "INFO"}));
    assert_eq!(copied["spec"]["rollouts"][0]["name"], "actors");
    assert_eq!(copied["status"]["members"][0]["message"], "the connection closed");
}

#[test]
fn event_of_another_program_is_left_out() {
    let reported = |by: &str| {
        let reported = json!({
            "metadata": planted_metadata("e"), "type": "Warning", "reason": "AgentLost", "note": "actors/a: gone",
            "reportingController": by, "reportingInstance": PLANTED, "action": PLANTED, "deprecatedCount": 4,
            "regarding": {"kind": "WeightSync", "name": "run", "fieldPath": PLANTED},
        });
        event(&serde_json::from_value(reported).unwrap())
    };
    assert_eq!(reported("kubelet"), None);
    let copied = reported(REPORTER).unwrap();
    assert!(!copied.to_string().contains(PLANTED), "{copied:#}");
    assert_eq!((&copied["note"], &copied["count"]), (&json!("actors/a: gone"), &json!(4)));
    assert_eq!(copied["regarding"], json!({"kind": "WeightSync", "name": "run"}));
}

#[test]
fn deployment_with_secrets_in_its_template_leaves_none() {
    let of: Deployment = serde_json::from_value(json!({
        "metadata": planted_metadata("weightsync"),
        "spec": {
            "replicas": 2, "selector": {},
            "template": {"metadata": planted_metadata("t"), "spec": {"containers": [planted_container("controller")]}},
        },
        "status": {"readyReplicas": 1, "conditions": [condition()]},
    }))
    .unwrap();
    let copied = deployment(&of);
    assert!(!copied.to_string().contains(PLANTED), "{copied:#}");
    assert_eq!((&copied["replicas"], &copied["readyReplicas"]), (&json!(2), &json!(1)));
    assert_eq!(copied["containers"], json!([{"name": "controller", "image": "vllm:1"}]));
}

#[test]
fn state_of_other_objects_and_unknown_fields_is_left_out() {
    let text = json!({
        "program": "1", "leads": true, "secret": PLANTED,
        "objects": [{"namespace": "rl", "name": "run", "epoch": 3, "secret": PLANTED}, {"namespace": PLANTED, "name": "run"}],
    });
    let copied = state(&text.to_string(), |namespace, name| (namespace, name) == ("rl", "run")).unwrap();
    assert_eq!(copied, json!({"program": "1", "leads": true, "objects": [{"namespace": "rl", "name": "run", "epoch": 3}]}));
    assert!(state("<html>", |_, _| true).is_none() && state("{}", |_, _| true).is_none());
}

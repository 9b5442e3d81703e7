//! What a report copies of objects of the cluster: the fields that this file names, and no other.
//!
//! Decides by name what may leave a cluster. A field that is not named here stays there, whatever it holds: it looks for no secrets, and
//! takes nothing out of a text. Pure.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ContainerState, Pod};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Map, Value, json};

use crate::api::{NCCL_ENV, WeightSync};
use crate::controller::REPORTER;

/// What a report says of itself.
pub(super) const NOT_COLLECTED: [&str; 6] = [
    "objects other than WeightSync objects, their Events, pods that take part, and the operator's Deployment and pods; never a Secret",
    "of every object: annotations, managed fields, and labels outside weightsync.dev/",
    "of pods: environment variables, commands, arguments, volumes, and messages of conditions and states",
    "of WeightSync objects: the canary's prompt, and variables of NCCL that the API does not list",
    "of Events: what another program than the controller reported",
    "of logs: lines that no program of WeightSync wrote, what GPU workers print, and fields that the report does not name",
];

/// What the reader of a report must know of the texts in it.
pub(super) const CAUTION: &str =
    "messages and errors are WeightSync's own texts; one of them may quote what an engine answered or a GPU worker printed";

const OUR_LABELS: &str = "weightsync.dev/";

const STATE: [&str; 5] = ["program", "pod", "leads", "total", "objects"];
const STATE_OBJECT: [&str; 14] = [
    "namespace",
    "name",
    "suspended",
    "epoch",
    "worldSize",
    "version",
    "transport",
    "transportReason",
    "ready",
    "minReady",
    "total",
    "conditions",
    "members",
    "updates",
];

/// A WeightSync object: all of its spec and status that the API knows, but the canary's prompt.
pub(super) fn object(object: &WeightSync) -> Value {
    let mut spec = object.spec.clone();
    if let Some(canary) = &mut spec.canary {
        canary.prompt.clear();
    }
    if let Some(nccl) = &mut spec.transport.nccl {
        nccl.env.retain(|name, _| NCCL_ENV.contains(&name.as_str()));
    }
    json!({"metadata": metadata(&object.metadata), "spec": spec, "status": object.status})
}

/// An Event; none that another program reported.
pub(super) fn event(event: &Event) -> Option<Value> {
    let ours = event.reporting_controller.as_deref() == Some(REPORTER);
    ours.then(|| {
        json!({
            "type": event.type_,
            "reason": event.reason,
            "note": event.note,
            "regarding": event.regarding.as_ref().map(|object| json!({"kind": object.kind, "name": object.name})),
            "related": event.related.as_ref().map(|object| json!({"kind": object.kind, "name": object.name})),
            "eventTime": event.event_time,
            "firstTime": event.deprecated_first_timestamp,
            "lastTime": event.deprecated_last_timestamp,
            "count": event.deprecated_count,
            "series": event.series.as_ref().map(|series| json!({"count": series.count, "lastObservedTime": series.last_observed_time})),
        })
    })
}

/// A pod: where it runs, and how it and its containers stand.
pub(super) fn pod(pod: &Pod) -> Value {
    let status = pod.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_ref()).into_iter().flatten().map(|condition| {
        condition_of(&condition.type_, &condition.status, condition.reason.as_ref(), &json!(condition.last_transition_time))
    });
    json!({
        "metadata": metadata(&pod.metadata),
        "node": pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()),
        "phase": status.and_then(|status| status.phase.as_ref()),
        "reason": status.and_then(|status| status.reason.as_ref()),
        "conditions": conditions.collect::<Vec<_>>(),
        "containers": containers(pod),
    })
}

pub(super) fn deployment(deployment: &Deployment) -> Value {
    let (spec, status) = (deployment.spec.as_ref(), deployment.status.as_ref());
    let conditions = status.and_then(|status| status.conditions.as_ref()).into_iter().flatten().map(|condition| {
        condition_of(&condition.type_, &condition.status, condition.reason.as_ref(), &json!(condition.last_transition_time))
    });
    let containers = spec.and_then(|spec| spec.template.spec.as_ref()).into_iter().flat_map(|pod| &pod.containers);
    json!({
        "metadata": metadata(&deployment.metadata),
        "replicas": spec.and_then(|spec| spec.replicas),
        "observedGeneration": status.and_then(|status| status.observed_generation),
        "updatedReplicas": status.and_then(|status| status.updated_replicas),
        "readyReplicas": status.and_then(|status| status.ready_replicas),
        "availableReplicas": status.and_then(|status| status.available_replicas),
        "conditions": conditions.collect::<Vec<_>>(),
        "containers": containers.map(|container| json!({"name": container.name, "image": container.image})).collect::<Vec<_>>(),
    })
}

/// The JSON behind the controller's web page, of the objects that are asked for; none if it is no such JSON.
pub(super) fn state(text: &str, wanted: impl Fn(&str, &str) -> bool) -> Option<Value> {
    let mut state: Map<String, Value> = serde_json::from_str(text).ok()?;
    state.retain(|name, _| STATE.contains(&name.as_str()));
    let objects = state.get_mut("objects")?.as_array_mut()?;
    let word = |object: &Value, field: &str| object.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
    objects.retain(|object| wanted(&word(object, "namespace"), &word(object, "name")));
    for object in objects.iter_mut().filter_map(Value::as_object_mut) {
        object.retain(|name, _| STATE_OBJECT.contains(&name.as_str()));
    }
    Some(Value::Object(state))
}

fn metadata(metadata: &ObjectMeta) -> Value {
    let labels = metadata.labels.iter().flatten().filter(|(name, _)| name.starts_with(OUR_LABELS));
    json!({
        "namespace": metadata.namespace,
        "name": metadata.name,
        "uid": metadata.uid,
        "generation": metadata.generation,
        "creationTimestamp": metadata.creation_timestamp,
        "deletionTimestamp": metadata.deletion_timestamp,
        "labels": labels.map(|(name, value)| (name.clone(), json!(value))).collect::<Map<_, _>>(),
        "owners": metadata.owner_references.iter().flatten().map(|owner| &owner.kind).collect::<Vec<_>>(),
    })
}

fn condition_of(kind: &str, status: &str, reason: Option<&String>, since: &Value) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "lastTransitionTime": since})
}

fn containers(pod: &Pod) -> Vec<Value> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let init = spec.init_containers.iter().flatten().map(|container| ("init", &container.name, &container.image));
    let main = spec.containers.iter().map(|container| ("main", &container.name, &container.image));
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|container| ("ephemeral", &container.name, &container.image));
    let statuses = |name: &str| {
        let status = pod.status.as_ref()?;
        let lists = [&status.init_container_statuses, &status.container_statuses, &status.ephemeral_container_statuses];
        lists.into_iter().flatten().flatten().find(|status| status.name == name)
    };
    let described = init.chain(main).chain(ephemeral).map(|(kind, name, image)| {
        let status = statuses(name);
        json!({
            "name": name,
            "kind": kind,
            "image": image,
            "ready": status.map(|status| status.ready),
            "restarts": status.map(|status| status.restart_count),
            "state": status.and_then(|status| status.state.as_ref()).map(state_of),
            "lastState": status.and_then(|status| status.last_state.as_ref()).map(state_of),
        })
    });
    described.collect()
}

fn state_of(state: &ContainerState) -> Value {
    json!({
        "waiting": state.waiting.as_ref().map(|waiting| json!({"reason": waiting.reason})),
        "running": state.running.as_ref().map(|running| json!({"startedAt": running.started_at})),
        "terminated": state.terminated.as_ref().map(|ended| json!({
            "reason": ended.reason, "exitCode": ended.exit_code, "signal": ended.signal,
            "startedAt": ended.started_at, "finishedAt": ended.finished_at,
        })),
    })
}

#[cfg(test)]
mod tests {
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
                "rollouts": [{"name": "actors", "selector": {"matchLabels": {"app": "actor"}}, "engine": {"vllm": {"ports": [8000]}}}],
                "canary": {"prompt": PLANTED, "minLogProb": -4},
                "transport": {"nccl": {"env": {"NCCL_DEBUG": "INFO", "NCCL_NET_PLUGIN": PLANTED}}},
            },
            "status": {"version": 7, "members": [
                {"name": "actors/a", "size": 1, "state": "Out", "reason": "AgentLost", "message": "the connection closed"},
            ]},
        }))
        .unwrap();
        let copied = object(&of);
        assert!(!copied.to_string().contains(PLANTED), "{copied:#}");
        assert_eq!(copied["spec"]["transport"]["nccl"]["env"], json!({"NCCL_DEBUG": "INFO"}));
        assert_eq!(copied["spec"]["rollouts"][0]["name"], "actors");
        assert_eq!(copied["status"]["members"][0]["message"], "the connection closed");
    }

    #[test]
    fn event_of_another_program_is_left_out() {
        let told = |by: &str| {
            let told = json!({
                "metadata": planted_metadata("e"), "type": "Warning", "reason": "AgentLost", "note": "actors/a: gone",
                "reportingController": by, "reportingInstance": PLANTED, "action": PLANTED, "deprecatedCount": 4,
                "regarding": {"kind": "WeightSync", "name": "run", "fieldPath": PLANTED},
            });
            event(&serde_json::from_value(told).unwrap())
        };
        assert_eq!(told("kubelet"), None);
        let copied = told(REPORTER).unwrap();
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
}

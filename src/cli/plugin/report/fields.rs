//! The fields of cluster objects that a report copies: those listed here, and no others.
//!
//! Decides by field name what may leave a cluster. It does not search texts for secrets. Pure.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ContainerState, Pod};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Map, Value, json};

use crate::api::{NCCL_ENV, WeightSync};
use crate::controller::REPORTER;

/// What a report never contains, written into it.
pub(super) const NOT_COLLECTED: [&str; 6] = [
    "objects other than WeightSync objects, their Events, pods that take part, and the operator's Deployment and pods; never a Secret",
    "of every object: annotations, managed fields, and labels outside weightsync.dev/",
    "of pods: environment variables, commands, arguments, volumes, and messages of conditions and states",
    "of WeightSync objects: the canary's prompt, and variables of NCCL that the API does not list",
    "of Events: what another program than the controller reported",
    "of logs: lines that no program of WeightSync wrote, what GPU workers print, and fields that the report does not name",
];

/// A note for readers about the texts in a report.
pub(super) const CAUTION: &str =
    "messages and errors are WeightSync's own texts; one of them may quote an engine's response or a GPU worker's output";

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

/// A WeightSync object: all known fields of spec and status, without the canary's prompt.
pub(super) fn object(object: &WeightSync) -> Value {
    let mut spec = object.spec.clone();
    if let Some(canary) = &mut spec.canary {
        canary.prompt.clear();
    }
    spec.transport.nccl_env.retain(|name, _| NCCL_ENV.contains(&name.as_str()));
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

/// A pod: its node, and the state of the pod and its containers.
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

/// The JSON of the controller's web page, for the requested objects; `None` if it is other JSON.
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
mod tests;

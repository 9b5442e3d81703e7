//! The pods that a workload would create, with the fields that a plan needs: names, labels, indices, containers.
//!
//! Names of pods that a controller would generate (Deployment, Job) are generated here, and marked as not stable for the plan.

use anyhow::Context;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

/// Most pods that one workload is expanded to; a larger one is refused, so that a typing error does not fill the memory.
const MOST: u64 = 10_000;

/// The pods of one document; none for kinds that create no pods.
pub(super) fn pods(kind: &str, document: Value) -> anyhow::Result<Vec<Pod>> {
    let made = match kind {
        "Pod" => vec![document],
        "StatefulSet" => stateful_set(&document)?,
        "Deployment" | "ReplicaSet" => (0..number(&document, "/spec/replicas", 1)?).map(|index| brief(&document, kind, index)).collect(),
        "Job" => job(&document)?,
        "LeaderWorkerSet" => leader_worker_set(&document)?,
        "RayCluster" => ray_cluster(&document)?,
        _ => Vec::new(),
    };
    made.into_iter().map(|pod| serde_path_to_error::deserialize(pod).context("its pod template cannot be parsed")).collect()
}

fn number(document: &Value, pointer: &str, default: u64) -> anyhow::Result<u64> {
    let number = match document.pointer(pointer) {
        None | Some(Value::Null) => default,
        Some(value) => value.as_u64().with_context(|| format!("{pointer} is not a count"))?,
    };
    anyhow::ensure!(number <= MOST, "{pointer} is {number}; at most {MOST} pods of one workload are planned");
    Ok(number)
}

fn name(document: &Value) -> &str {
    document.pointer("/metadata/name").and_then(Value::as_str).unwrap_or("unnamed")
}

fn pod(document: &Value, template: &Value, name: &str, owner: &str, labels: &[(&str, String)]) -> Value {
    let mut metadata = template.get("metadata").filter(|metadata| metadata.is_object()).cloned().unwrap_or_else(|| json!({}));
    if !metadata.get("labels").is_some_and(Value::is_object) {
        set(&mut metadata, "labels", json!({}));
    }
    for (key, value) in labels {
        if let Some(all) = metadata.get_mut("labels") {
            set(all, key, json!(value));
        }
    }
    set(&mut metadata, "name", json!(name));
    if let Some(namespace) = document.pointer("/metadata/namespace") {
        set(&mut metadata, "namespace", namespace.clone());
    }
    let owner = json!([{"apiVersion": "v1", "kind": owner, "name": self::name(document), "uid": "planned", "controller": true}]);
    set(&mut metadata, "ownerReferences", owner);
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template.get("spec").cloned().unwrap_or_else(|| json!({}))})
}

fn set(object: &mut Value, key: &str, value: Value) {
    if let Some(fields) = object.as_object_mut() {
        fields.insert(key.to_owned(), value);
    }
}

fn template(document: &Value) -> Value {
    document.pointer("/spec/template").cloned().unwrap_or_default()
}

/// A pod whose name a controller generates.
fn brief(document: &Value, owner: &str, index: u64) -> Value {
    let mut made = pod(document, &template(document), &format!("{}-{index}", name(document)), owner, &[]);
    if let Some(metadata) = made.get_mut("metadata") {
        set(metadata, "generateName", json!(format!("{}-", name(document))));
    }
    made
}

fn stateful_set(document: &Value) -> anyhow::Result<Vec<Value>> {
    let start = number(document, "/spec/ordinals/start", 0)?;
    let ordinals = start..start + number(document, "/spec/replicas", 1)?;
    let made = ordinals.map(|ordinal| {
        let labels = [("apps.kubernetes.io/pod-index", ordinal.to_string())];
        pod(document, &template(document), &format!("{}-{ordinal}", name(document)), "StatefulSet", &labels)
    });
    Ok(made.collect())
}

fn job(document: &Value) -> anyhow::Result<Vec<Value>> {
    let count = number(document, "/spec/parallelism", 1)?;
    let indexed = document.pointer("/spec/completionMode").and_then(Value::as_str) == Some("Indexed");
    let made = (0..count).map(|index| {
        let mut made = brief(document, "Job", index);
        if let Some(labels) = made.pointer_mut("/metadata/labels").filter(|_| indexed) {
            set(labels, "batch.kubernetes.io/job-completion-index", json!(index.to_string()));
        }
        made
    });
    Ok(made.collect())
}

fn leader_worker_set(document: &Value) -> anyhow::Result<Vec<Value>> {
    let set_name = name(document);
    let worker = document.pointer("/spec/leaderWorkerTemplate/workerTemplate").cloned().unwrap_or_default();
    let leader = document.pointer("/spec/leaderWorkerTemplate/leaderTemplate").cloned().unwrap_or_else(|| worker.clone());
    let groups = number(document, "/spec/replicas", 1)?;
    let size = number(document, "/spec/leaderWorkerTemplate/size", 1)?;
    anyhow::ensure!(groups * size <= MOST, "{groups} groups of {size} pods; at most {MOST} pods of one workload are planned");
    let mut made = Vec::new();
    for group in 0..groups {
        for index in 0..size {
            let (template, name, ordinal) = match index {
                0 => (&leader, format!("{set_name}-{group}"), group),
                _ => (&worker, format!("{set_name}-{group}-{index}"), index),
            };
            let labels = [
                ("leaderworkerset.sigs.k8s.io/name", set_name.to_owned()),
                ("leaderworkerset.sigs.k8s.io/group-index", group.to_string()),
                // The real one is a digest of the same name.
                ("leaderworkerset.sigs.k8s.io/group-key", format!("{set_name}-{group}")),
                ("leaderworkerset.sigs.k8s.io/worker-index", index.to_string()),
                ("apps.kubernetes.io/pod-index", ordinal.to_string()),
            ];
            made.push(pod(document, template, &name, "StatefulSet", &labels));
        }
    }
    Ok(made)
}

/// The head and the workers of a `RayCluster`, with KubeRay's labels and names of its kind (`constant.go` of KubeRay 000cda4d, read).
fn ray_cluster(document: &Value) -> anyhow::Result<Vec<Value>> {
    let cluster = name(document);
    let made = |group: &Value, group_name: &str, node_type: &str, index: u64| {
        let labels = [
            ("ray.io/cluster", cluster.to_owned()),
            ("ray.io/group", group_name.to_owned()),
            ("ray.io/node-type", node_type.to_owned()),
            ("ray.io/is-ray-node", "yes".to_owned()),
        ];
        let pod_name = format!("{cluster}-{group_name}-{node_type}-{index}");
        let mut pod = pod(document, &template_of(group), &pod_name, "RayCluster", &labels);
        if let Some(metadata) = pod.get_mut("metadata") {
            set(metadata, "generateName", json!(format!("{cluster}-{group_name}-{node_type}-")));
        }
        pod
    };
    let head = document.pointer("/spec/headGroupSpec").map(|group| made(group, "headgroup", "head", 0));
    let mut pods: Vec<Value> = head.into_iter().collect();
    let groups = document.pointer("/spec/workerGroupSpecs").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    for group in groups {
        let group_name = group.get("groupName").and_then(Value::as_str).unwrap_or("unnamed");
        pods.extend((0..number(group, "/replicas", 0)?).map(|index| made(group, group_name, "worker", index)));
    }
    Ok(pods)
}

fn template_of(group: &Value) -> Value {
    group.get("template").cloned().unwrap_or_default()
}

//! The files of a world: a `WeightSync` and its processes, as `weightsync local` reads them; and the one file of the earlier build.

use std::ffi::OsString;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::Actor;

pub const OBJECT: &str = "weightsync.json";
pub const PROCESSES: &str = "processes.json";
/// The file that builds before the `LocalProcesses` read.
const EARLIER: &str = "group.yaml";

/// Arguments that name the files in a folder.
pub fn arguments(folder: &Path) -> Vec<OsString> {
    let earlier = folder.join(EARLIER);
    let files = if earlier.exists() { vec![earlier] } else { vec![folder.join(OBJECT), folder.join(PROCESSES)] };
    files.into_iter().flat_map(|file| ["--filename".into(), file.into_os_string()]).collect()
}

/// The pool of each actor: actors in a row that are alike share one. The first is called `rollouts`.
pub fn pools(actors: &[Actor]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    let mut number = 0;
    for (at, actor) in actors.iter().enumerate() {
        let alike = at == 0 || (actors[at - 1].kind, actors[at - 1].said) == (actor.kind, actor.said);
        number += usize::from(!alike);
        names.push(if number == 0 { "rollouts".to_owned() } else { format!("rollouts-{number}") });
    }
    names
}

/// The object of a group; `update` may have fields of the parts `update`, `membership` and `transport`, and the parts `canary` and
/// `health`, and `tensors` of all engines.
pub fn object(name: &str, actors: &[Actor], mut transport: Value, delivery: &str, update: Value) -> Value {
    let kind = |kind: &str| match kind {
        "vllm" => "VLLM",
        "sglang" => "SGLang",
        "lmdeploy" => "LMDeploy",
        "fastdeploy" => "FastDeploy",
        other => panic!("no engine is called {other}"),
    };
    let mut rollouts: Vec<Value> = Vec::new();
    for (pool, actor) in pools(actors).into_iter().zip(actors) {
        if rollouts.last().is_none_or(|last| last["name"] != json!(pool)) {
            let selector = json!({"matchLabels": {"pool": pool}});
            rollouts.push(json!({"name": pool, "selector": selector, "engine": {"kind": kind(actor.kind)}, "ranks": actor.said}));
        }
    }
    let mut fields: Map<String, Value> = update.as_object().unwrap().clone();
    let mut taken = |names: &[&str]| -> Map<String, Value> { names.iter().filter_map(|name| fields.remove_entry(*name)).collect() };
    let membership = taken(&["minReady", "keep", "maxSkew", "maxUnavailable"]);
    transport.as_object_mut().unwrap().extend(taken(&["bucketMiB"]));
    let canary = taken(&["canary"]);
    if let Some(tensors) = taken(&["tensors"]).remove("tensors") {
        for rollout in &mut rollouts {
            rollout["engine"]["tensors"] = tensors.clone();
        }
    }
    let health = taken(&["health"]).remove("health");
    let timeout = fields.get("timeoutSeconds").map_or(20, |seconds| seconds.as_u64().unwrap());
    let silence = fields.entry("silenceSeconds").or_insert(json!(timeout.min(5))).as_u64().unwrap();
    fields.entry("timeoutSeconds").or_insert(json!(timeout.max(silence)));
    let mut spec = json!({
        "trainer": {"selector": {"matchLabels": {"pool": "trainer"}}},
        "rollouts": rollouts, "delivery": delivery, "transport": transport, "membership": membership, "update": fields,
        // Only an engine that hangs is measured by the timeout: a test of one sets its own. On a busy machine, others take seconds.
        "health": health.unwrap_or_else(|| json!({"periodSeconds": 1, "timeoutSeconds": 10, "failureThreshold": 2})),
    });
    spec.as_object_mut().unwrap().extend(canary);
    json!({"apiVersion": "weightsync.dev/v1alpha1", "kind": "WeightSync", "metadata": {"name": name}, "spec": spec})
}

/// Writes the file of an earlier build next to the others, which counts from then on.
pub fn write_earlier(folder: &Path) {
    let read = |name| -> Value { serde_json::from_slice(&std::fs::read(folder.join(name)).unwrap()).unwrap() };
    let (object, processes) = (read(OBJECT), read(PROCESSES));
    let rollouts = processes["rollouts"].as_array().unwrap().iter().map(
        |rollout| json!({"name": rollout["name"], "engine": {"kind": "vllm", "port": rollout["port"], "command": rollout["command"]}}),
    );
    let file = json!({
        "name": object["metadata"]["name"], "directory": "state", "versions": processes["versions"], "trainer": {"name": "trainer"},
        "rollouts": rollouts.collect::<Vec<_>>(), "transport": {"tcp": {}},
        "update": {"healthPeriodMilliseconds": 200, "timeoutSeconds": 20},
    });
    std::fs::write(folder.join(EARLIER), file.to_string()).unwrap();
}

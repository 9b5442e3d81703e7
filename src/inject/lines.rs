//! What both ways of injection add: a token of its own audience, shared memory for weights, and the agent's variables.
//!
//! Equal to the chart's injection policies (charts/weightsync/templates); an end-to-end test compares the two.

use serde_json::{Map, Value, json};

use super::{Options, Resources, Wishes};

const TOKEN_DIR: &str = "/var/run/weightsync";

/// The volumes of a pod's spec, with those that the agent needs.
pub(super) struct Volumes {
    pub(super) shm: String,
    /// Whether the pod had it before.
    pub(super) existed: bool,
}

/// Adds the volumes; an error names the field at fault.
pub(super) fn volumes(spec: &mut Map<String, Value>, target: &str, options: &Options) -> Result<Volumes, &'static str> {
    let existing = shm_volume(spec, target);
    let existed = existing.is_some();
    pull_secrets(spec, options)?;
    let shm = existing.unwrap_or_else(|| "weightsync-shm".to_owned());
    let volumes = array(spec, "volumes").ok_or("spec.volumes")?;
    if !existed {
        let memory = match &options.shared_memory {
            Some(limit) => json!({"medium": "Memory", "sizeLimit": limit}),
            None => json!({"medium": "Memory"}),
        };
        volumes.push(json!({"name": shm, "emptyDir": memory}));
    }
    let token = json!({"serviceAccountToken": {"audience": "weightsync.dev", "expirationSeconds": 3600, "path": "token"}});
    volumes.push(json!({"name": "weightsync-token", "projected": {"sources": [token]}}));
    Ok(Volumes { shm, existed })
}

/// Adds the Secrets for pulling the image to those that the pod has.
fn pull_secrets(spec: &mut Map<String, Value>, options: &Options) -> Result<(), &'static str> {
    if options.image_pull_secrets.is_empty() {
        return Ok(());
    }
    let present = array(spec, "imagePullSecrets").ok_or("spec.imagePullSecrets")?;
    for name in &options.image_pull_secrets {
        if !present.iter().any(|secret| secret.get("name").and_then(Value::as_str) == Some(name)) {
            present.push(json!({"name": name}));
        }
    }
    Ok(())
}

/// Many engine pods mount their own /dev/shm: then that volume is shared, not replaced.
fn shm_volume(spec: &Map<String, Value>, target: &str) -> Option<String> {
    let containers = spec.get("containers")?.as_array()?;
    let container = containers.iter().find(|c| c.get("name").and_then(Value::as_str) == Some(target))?;
    let mounts = container.get("volumeMounts")?.as_array()?;
    let mount = mounts.iter().find(|m| m.get("mountPath").and_then(Value::as_str) == Some("/dev/shm"))?;
    mount.get("name")?.as_str().map(str::to_owned)
}

pub(super) fn target_container<'a>(spec: &'a mut Map<String, Value>, target: &str) -> Result<&'a mut Map<String, Value>, &'static str> {
    let containers = spec.get_mut("containers").and_then(Value::as_array_mut).ok_or("spec.containers")?;
    let container = containers.iter_mut().find(|c| c.get("name").and_then(Value::as_str) == Some(target));
    container.and_then(Value::as_object_mut).ok_or("spec.containers")
}

pub(super) fn array<'a>(object: &'a mut Map<String, Value>, key: &str) -> Option<&'a mut Vec<Value>> {
    object.entry(key).or_insert_with(|| Value::Array(Vec::new())).as_array_mut()
}

pub(super) fn shm_mount(shm: &str) -> Value {
    json!({"name": shm, "mountPath": "/dev/shm"})
}

pub(super) fn token_mount() -> Value {
    json!({"name": "weightsync-token", "mountPath": TOKEN_DIR, "readOnly": true})
}

pub(super) fn env(on_host: bool, wishes: &Wishes<'_>, options: &Options) -> Vec<Value> {
    let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    // An abstract socket ends at the pod's network namespace: only on a host's network would strangers reach it.
    let users = wishes.users.unwrap_or(if on_host { "" } else { "any" });
    let mut env = vec![
        field("POD_NAME", "metadata.name"),
        field("POD_NAMESPACE", "metadata.namespace"),
        field("POD_UID", "metadata.uid"),
        field("POD_IP", "status.podIP"),
        json!({"name": "WEIGHTSYNC_ROLE", "value": wishes.role}),
        json!({"name": "WEIGHTSYNC_CONTROLLER_URL", "value": options.controller_url}),
        json!({"name": "WEIGHTSYNC_CONTROLLER_CA", "value": options.controller_ca}),
        json!({"name": "WEIGHTSYNC_TOKEN_FILE", "value": format!("{TOKEN_DIR}/token")}),
        json!({"name": "WEIGHTSYNC_TRAINER_UIDS", "value": users}),
        json!({"name": "WEIGHTSYNC_LOG_FORMAT", "value": "json"}),
    ];
    if let Some(seconds) = wishes.serve_unclaimed_after {
        env.push(json!({"name": "WEIGHTSYNC_SERVE_UNCLAIMED_AFTER_SECONDS", "value": seconds.to_string()}));
    }
    if let Some((secret, key)) = wishes.api_key {
        env.push(json!({"name": "WEIGHTSYNC_ENGINE_API_KEY", "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}));
    }
    env
}

/// Readiness probe of the agent: whether the engine's present start holds the version that it should. A "no" counts at once; for a response
/// a busy node has three times as long as it takes from one probe to the next, or a late one would take the only replica from its users.
pub(super) fn readiness_probe() -> Value {
    json!({"httpGet": {"path": "/readyz", "port": super::PROBE_PORT}, "periodSeconds": 1, "timeoutSeconds": 3, "failureThreshold": 1})
}

/// The agent's port, so that people find it.
pub(super) fn port() -> Value {
    json!({"name": "weightsync", "containerPort": super::STATUS_PORT})
}

/// Security context of an added container: by itself as `restricted` of Pod Security Standards wants it, because a pod may have its own
/// context on its containers alone. Only a pod whose own context says user 0 has its agent as root, as its files are root's.
pub(super) fn confine(container: &mut Value, spec: &Map<String, Value>, options: &Options) {
    let of_root = spec.get("securityContext").and_then(|context| context.get("runAsUser")).and_then(Value::as_i64) == Some(0);
    container["image"] = json!(options.image);
    container["imagePullPolicy"] = json!(options.image_pull_policy);
    if options.resources != Resources::default() {
        container["resources"] = json!(options.resources);
    }
    container["securityContext"] = json!({
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "runAsNonRoot": !of_root,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"}
    });
}

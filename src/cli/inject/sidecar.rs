//! The lines that make a pod take part: the agent as a native sidecar, a token of its own audience, shared memory for weights.
//!
//! Says what the chart's injection policy says (charts/weightsync/templates/injection.yaml); an end-to-end test compares the two.

use serde_json::{Map, Value, json};

/// Name of the sidecar.
pub const AGENT_CONTAINER: &str = "weightsync-agent";
/// Port of the agent's readiness, metrics and roster.
pub const STATUS_PORT: u16 = 8472;

/// What the lines need to know about the installation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Image of the agent.
    pub image: String,
    /// Its pull policy.
    pub image_pull_policy: String,
    /// URL of the controller's enrolment service.
    pub controller_url: String,
    /// PEM of the CA that the controller's certificate is checked with.
    pub controller_ca: String,
    /// CPU and memory that the sidecar requests.
    pub requests: (String, String),
}

/// What the pod itself says by labels and annotations.
pub(super) struct Wishes<'a> {
    pub(super) role: &'a str,
    pub(super) api_key: Option<&'a (String, String)>,
    pub(super) users: Option<&'a str>,
}

/// Adds the sidecar to a pod's spec; on an error nothing useful was added, and the name of the field at fault is returned.
pub(super) fn add(spec: &mut Map<String, Value>, target: &str, wishes: &Wishes<'_>, options: &Options) -> Result<(), &'static str> {
    let existing = shm_volume(spec, target);
    let shm = existing.clone().unwrap_or_else(|| "weightsync-shm".to_owned());
    let volumes = array(spec, "volumes").ok_or("spec.volumes")?;
    if existing.is_none() {
        volumes.push(json!({"name": shm, "emptyDir": {"medium": "Memory"}}));
    }
    let token = json!({"serviceAccountToken": {"audience": "weightsync.dev", "expirationSeconds": 3600, "path": "token"}});
    volumes.push(json!({"name": "weightsync-token", "projected": {"sources": [token]}}));
    if existing.is_none() {
        let containers = spec.get_mut("containers").and_then(Value::as_array_mut).ok_or("spec.containers")?;
        let container = containers.iter_mut().find(|c| c.get("name").and_then(Value::as_str) == Some(target));
        let container = container.and_then(Value::as_object_mut).ok_or("spec.containers")?;
        array(container, "volumeMounts").ok_or("volumeMounts")?.push(json!({"name": shm, "mountPath": "/dev/shm"}));
    }
    // First, so that it runs before any other sidecar that might wait for readiness.
    // An abstract socket ends at the pod's network namespace: only on a host's network would strangers reach it.
    let on_host = spec.get("hostNetwork").and_then(Value::as_bool) == Some(true);
    let users = wishes.users.unwrap_or(if on_host { "" } else { "any" });
    array(spec, "initContainers").ok_or("spec.initContainers")?.insert(0, container(wishes, users, &shm, options));
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

fn array<'a>(object: &'a mut Map<String, Value>, key: &str) -> Option<&'a mut Vec<Value>> {
    object.entry(key).or_insert_with(|| Value::Array(Vec::new())).as_array_mut()
}

fn container(wishes: &Wishes<'_>, users: &str, shm: &str, options: &Options) -> Value {
    let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let mut env = vec![
        field("POD_NAME", "metadata.name"),
        field("POD_NAMESPACE", "metadata.namespace"),
        field("POD_UID", "metadata.uid"),
        field("POD_IP", "status.podIP"),
        json!({"name": "WEIGHTSYNC_ROLE", "value": wishes.role}),
        json!({"name": "WEIGHTSYNC_CONTROLLER_URL", "value": options.controller_url}),
        json!({"name": "WEIGHTSYNC_CONTROLLER_CA", "value": options.controller_ca}),
        json!({"name": "WEIGHTSYNC_TOKEN_FILE", "value": "/var/run/weightsync/token"}),
        json!({"name": "WEIGHTSYNC_TRAINER_UIDS", "value": users}),
        json!({"name": "WEIGHTSYNC_LOG_FORMAT", "value": "json"}),
    ];
    if let Some((secret, key)) = wishes.api_key {
        env.push(json!({"name": "WEIGHTSYNC_ENGINE_API_KEY", "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}));
    }
    let (cpu, memory) = &options.requests;
    json!({
        "name": AGENT_CONTAINER,
        "image": options.image,
        "imagePullPolicy": options.image_pull_policy,
        "restartPolicy": "Always",
        "command": ["/weightsync", "agent"],
        "env": env,
        "ports": [{"name": "weightsync", "containerPort": STATUS_PORT}],
        "resources": {"requests": {"cpu": cpu, "memory": memory}},
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": STATUS_PORT}, "periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 1},
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"}
        },
        "volumeMounts": [
            {"name": shm, "mountPath": "/dev/shm"},
            {"name": "weightsync-token", "mountPath": "/var/run/weightsync", "readOnly": true}
        ]
    })
}

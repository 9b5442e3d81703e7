//! Whether a running pod needs an agent in an ephemeral container (`agent.launch: Ephemeral`), and the spec of that container.
//!
//! Pure. Ephemeral containers cannot be changed, removed or restarted, share the pod's memory, and die with the first process of their
//! target (all tested on Kubernetes 1.36), so they are added late, rarely, and at most [`MAX_LAUNCHES`] times for a pod.

use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::{
    Container, ContainerStateTerminated, ContainerStatus, EnvVar, EnvVarSource, EphemeralContainer, ObjectFieldSelector, Pod, PodSpec,
    SecretKeySelector, SecurityContext,
};
use k8s_openapi::jiff::Timestamp;

use crate::api::{NOT_STARTED, SecretKey, cannot_start};

/// Most ephemeral agents of one pod.
pub(super) const MAX_LAUNCHES: usize = 20;
/// Prefix of the names of ephemeral agents, followed by a number from 1. The chart's admission policy refuses others.
const PREFIX: &str = "weightsync-agent-";
/// Names of the sidecar, and of the init container of a pod that was wrapped; a pod that has either needs nothing else.
const INJECTED: [&str; 2] = ["weightsync-agent", WRAPPED];
/// Name of the init container that copies the program into a pod whose command the agent starts.
const WRAPPED: &str = "weightsync-program";
/// Annotation that chooses how the agent is added to a pod.
const INJECT: &str = "weightsync.dev/inject";
/// Annotation that names the Secret and key that the pod's agent may use, as SECRET/KEY.
const API_KEY: &str = "weightsync.dev/api-key-secret";
const BASE: Duration = Duration::from_secs(2);
const CAP: Duration = Duration::from_secs(300);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Need {
    /// Nothing: it has an agent, or its containers do not run yet.
    Nothing,
    /// An ephemeral container of this name.
    Launch(String),
    /// An ephemeral container, after this long: the last one ended.
    Wait(Duration),
    /// It had too many; the text describes what to do.
    Exhausted(String),
    /// The last one cannot start; the text is the cause.
    Stuck(String),
}

/// The message for a pod that is not wrapped although its object has `agent.launch: Wrap`. `None` if it is wrapped, opts out by its
/// annotation, or terminates.
pub(super) fn unwrapped(pod: &Pod) -> Option<String> {
    let spec = pod.spec.as_ref().filter(|_| pod.metadata.deletion_timestamp.is_none())?;
    let says = pod.metadata.annotations.iter().flatten().find(|(key, _)| *key == INJECT).map(|(_, value)| value.as_str());
    if has(spec, &[WRAPPED]) || says == Some("false") {
        return None;
    }
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    Some(if says == Some("wrap") {
        format!("pod {name} has the annotation to be wrapped, but was created before the chart could inject it: recreate it")
    } else {
        format!(
            "pod {name} is not wrapped: put the annotation {INJECT}: wrap into its template, with the container's command, and recreate it"
        )
    })
}

/// The message for a pod that has the label and got no agent when it was created. `None` if it has one, opts out by its annotation, or
/// terminates.
pub(super) fn uninjected(pod: &Pod) -> Option<String> {
    let spec = pod.spec.as_ref().filter(|_| pod.metadata.deletion_timestamp.is_none())?;
    let opts_out = pod.metadata.annotations.iter().flatten().any(|(key, value)| key == INJECT && value == "false");
    if opts_out || has(spec, &INJECTED) || launches(pod) > 0 {
        return None;
    }
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    Some(format!(
        "pod {name} has the label and no agent: it was created before the chart could inject it, or in a namespace where the chart does not; \
         recreate it, or add the agent to its template with `kubectl weightsync inject`"
    ))
}

fn has(spec: &PodSpec, names: &[&str]) -> bool {
    spec.init_containers.iter().flatten().any(|container| names.contains(&container.name.as_str()))
}

/// What the pod needs now, for an agent of the container `target`.
pub(super) fn need(pod: &Pod, target: &str, now: Timestamp) -> Need {
    let (Some(spec), Some(status)) = (&pod.spec, &pod.status) else { return Need::Nothing };
    if pod.metadata.deletion_timestamp.is_some() || has(spec, &INJECTED) {
        return Need::Nothing;
    }
    // Its token is accepted from the pod's address only.
    if addresses(pod).is_empty() {
        return Need::Nothing;
    }
    // If the engine is not up, the agent would die with the engine's first restart.
    let up = status.container_statuses.iter().flatten().find(|status| status.name == target);
    if up.and_then(|status| status.state.as_ref()).is_none_or(|state| state.running.is_none()) {
        return Need::Nothing;
    }
    let launched = launches(pod);
    let mut statuses = status.ephemeral_container_statuses.iter().flatten().filter(|status| status.name.starts_with(PREFIX));
    let ended: Vec<&ContainerStatus> = statuses.clone().filter(|status| is_ended(status)).collect();
    if ended.len() < launched {
        return statuses.find_map(cannot_start).map_or(Need::Nothing, Need::Stuck);
    }
    if launched >= MAX_LAUNCHES {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        return Need::Exhausted(format!(
            "pod {name} had {launched} ephemeral agents, the limit for one pod; delete the pod, or use agent.launch: Sidecar"
        ));
    }
    if let Some(wait) = back_off(&ended, now) {
        return Need::Wait(wait);
    }
    Need::Launch(format!("{PREFIX}{}", launched + 1))
}

/// Addresses of the pod, as the kubelet reports them.
pub(super) fn addresses(pod: &Pod) -> Vec<IpAddr> {
    let status = pod.status.as_ref();
    let all = status.and_then(|status| status.pod_ips.as_ref()).into_iter().flatten().map(|ip| ip.ip.as_str());
    let first = status.and_then(|status| status.pod_ip.as_deref());
    all.chain(first).filter_map(|ip| ip.parse().ok()).collect()
}

/// Ephemeral agents that were added to the pod so far.
pub(super) fn launches(pod: &Pod) -> usize {
    let containers = pod.spec.iter().flat_map(|spec| spec.ephemeral_containers.iter().flatten());
    containers.filter(|container| container.name.starts_with(PREFIX)).count()
}

fn is_ended(status: &ContainerStatus) -> bool {
    end(status).is_some()
}

/// How an ephemeral container ended. If the runtime created it and could not start it, the kubelet (1.36) reports it as waiting, with its
/// end as the last state, in pods that restart containers. It never starts an ephemeral container again, so such a container has ended.
fn end(status: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    let state = status.state.as_ref()?;
    let not_started = state.waiting.as_ref().is_some_and(|waiting| waiting.reason.as_deref() == Some(NOT_STARTED));
    let last = status.last_state.as_ref().filter(|_| not_started);
    state.terminated.as_ref().or_else(|| last?.terminated.as_ref())
}

/// Remaining wait: doubles with each launch, counted from the last end.
fn back_off(ended: &[&ContainerStatus], now: Timestamp) -> Option<Duration> {
    let ends = ended.iter().filter_map(|status| end(status)?.finished_at.as_ref());
    let last = ends.map(|time| time.0).max()?;
    let doublings = u32::try_from(ended.len().saturating_sub(1)).unwrap_or(u32::MAX);
    let wait = BASE.saturating_mul(2u32.saturating_pow(doublings)).min(CAP);
    let passed = Duration::try_from(now.duration_since(last)).unwrap_or_default();
    wait.checked_sub(passed).filter(|left| !left.is_zero())
}

/// Why the pod's agent must not have this key; `None` if it may. The right to write objects must not give access to Secrets, so the pod
/// itself names the Secret for its agent.
pub(super) fn key_not_allowed(pod: &Pod, key: Option<&SecretKey>) -> Option<String> {
    let wanted = key.map(|key| format!("{}/{}", key.name, key.key))?;
    let allowed = pod.metadata.annotations.as_ref().and_then(|annotations| annotations.get(API_KEY));
    if allowed == Some(&wanted) {
        return None;
    }
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    Some(format!(
        "the object names the API key {wanted} for pod {name}, and the pod does not allow that: put the annotation {API_KEY}: {wanted} on the \
         pod, and into its template"
    ))
}

/// Inputs of the container, in addition to the pod.
pub(super) struct Recipe<'a> {
    pub(super) name: String,
    pub(super) target: &'a str,
    pub(super) image: &'a str,
    pub(super) pull_policy: &'a str,
    pub(super) role: &'a str,
    pub(super) controller_url: &'a str,
    pub(super) controller_ca: &'a str,
    /// Readable by every user who may read pods; so it belongs to the first key that uses it from the pod's address.
    pub(super) token: String,
    pub(super) api_key: Option<&'a SecretKey>,
}

/// The container. User, group and capabilities are the target's: with fewer, it cannot enter `/proc/PID/root` of the target.
pub(super) fn container(pod: &Pod, recipe: Recipe<'_>) -> EphemeralContainer {
    let text = |name: &str, value: &str| EnvVar { name: name.to_owned(), value: Some(value.to_owned()), ..EnvVar::default() };
    let mut env = vec![
        field("POD_NAME", "metadata.name"),
        field("POD_NAMESPACE", "metadata.namespace"),
        field("POD_UID", "metadata.uid"),
        field("POD_IP", "status.podIP"),
        text("WEIGHTSYNC_ROLE", recipe.role),
        text("WEIGHTSYNC_CONTROLLER_URL", recipe.controller_url),
        text("WEIGHTSYNC_CONTROLLER_CA", recipe.controller_ca),
        text("WEIGHTSYNC_TOKEN", &recipe.token),
        text("WEIGHTSYNC_LOG_FORMAT", "json"),
    ];
    env.extend(recipe.api_key.map(|key| EnvVar {
        name: "WEIGHTSYNC_ENGINE_API_KEY".to_owned(),
        value_from: Some(EnvVarSource {
            secret_key_ref: Some(SecretKeySelector { name: key.name.clone(), key: key.key.clone(), optional: None }),
            ..EnvVarSource::default()
        }),
        ..EnvVar::default()
    }));
    let target = pod.spec.iter().flat_map(|spec| &spec.containers).find(|container| container.name == recipe.target);
    let mounts = target.and_then(|target| target.volume_mounts.as_ref());
    let shared_memory = mounts.into_iter().flatten().find(|mount| mount.mount_path == "/dev/shm").cloned();
    EphemeralContainer {
        name: recipe.name,
        image: Some(recipe.image.to_owned()),
        image_pull_policy: Some(recipe.pull_policy.to_owned()),
        command: Some(vec!["/weightsync".to_owned(), "agent".to_owned()]),
        target_container_name: Some(recipe.target.to_owned()),
        env: Some(env),
        volume_mounts: shared_memory.map(|mount| vec![mount]),
        security_context: Some(security_context(pod, target, recipe.target)),
        ..EphemeralContainer::default()
    }
}

fn field(name: &str, path: &str) -> EnvVar {
    let field_ref = Some(ObjectFieldSelector { field_path: path.to_owned(), ..ObjectFieldSelector::default() });
    EnvVar { name: name.to_owned(), value_from: Some(EnvVarSource { field_ref, ..EnvVarSource::default() }), ..EnvVar::default() }
}

fn security_context(pod: &Pod, target: Option<&Container>, name: &str) -> SecurityContext {
    let theirs = target.and_then(|target| target.security_context.as_ref());
    let statuses = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref());
    let user = statuses.into_iter().flatten().find(|status| status.name == name).and_then(|status| status.user.as_ref()?.linux.as_ref());
    SecurityContext {
        // The kubelet fills this in from the running container.
        run_as_user: user.map(|user| user.uid).or_else(|| theirs?.run_as_user),
        run_as_group: user.map(|user| user.gid).or_else(|| theirs?.run_as_group),
        run_as_non_root: theirs.and_then(|theirs| theirs.run_as_non_root),
        capabilities: theirs.and_then(|theirs| theirs.capabilities.clone()),
        allow_privilege_escalation: Some(false),
        seccomp_profile: theirs.and_then(|theirs| theirs.seccomp_profile.clone()),
        ..SecurityContext::default()
    }
}

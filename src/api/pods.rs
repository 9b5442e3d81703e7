//! Converts pods into inputs of the plan. Makes no decisions.

use std::collections::BTreeSet;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};

use weightsync_core::plan::{PodFacts, PodPhase};

/// Labels and annotations that carry a pod's index: StatefulSet, then Indexed Job.
const INDEX: [&str; 2] = ["apps.kubernetes.io/pod-index", "batch.kubernetes.io/job-completion-index"];

/// The facts of a pod for the plan. `unready` is the caller's reason to leave it out now; [`not_ready`] reads it from the pod's conditions.
pub fn pod_facts(pod: &Pod, unready: Option<String>) -> PodFacts {
    let metadata = &pod.metadata;
    let name = metadata.name.clone().unwrap_or_default();
    let labels = metadata.labels.clone().unwrap_or_default();
    let annotations = metadata.annotations.as_ref();
    let stateful = metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true) && owner.kind == "StatefulSet");
    // The controller of a StatefulSet also sets generateName, although its names are stable.
    let stable_name = stateful.is_some() || metadata.generate_name.is_none();
    let index = INDEX
        .iter()
        .filter_map(|key| labels.get(*key).or_else(|| annotations?.get(*key)))
        .find_map(|value| value.parse().ok())
        .or_else(|| name.strip_prefix(&stateful?.name)?.strip_prefix('-')?.parse().ok());
    let status = pod.status.as_ref();
    let phase = match status.and_then(|status| status.phase.as_deref()) {
        Some("Running") => PodPhase::Running,
        Some("Succeeded" | "Failed") => PodPhase::Terminal,
        _ => PodPhase::Pending,
    };
    PodFacts {
        ips: addresses(pod),
        uid: metadata.uid.clone().unwrap_or_default(),
        node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
        missing_container: missing_container(pod),
        registered: None,
        gpus: gpus(pod),
        stuck: stuck(pod),
        phase,
        terminating: metadata.deletion_timestamp.is_some(),
        index,
        stable_name,
        unready,
        name,
        labels,
    }
}

/// GPUs that the containers of a pod ask for, by the names of device plugins: `nvidia.com/gpu`, `amd.com/gpu`, `nvidia.com/mig-1g.10gb`.
fn gpus(pod: &Pod) -> u32 {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let limits = containers.filter_map(|container| container.resources.as_ref()?.limits.as_ref()).flatten();
    let is_gpu = |name: &str| name.split_once('/').is_some_and(|(_, device)| device == "gpu" || device.starts_with("mig-"));
    limits.filter(|(name, _)| is_gpu(name)).filter_map(|(_, quantity)| quantity.0.parse::<u32>().ok()).fold(0, u32::saturating_add)
}

/// The addresses of a pod; the kubelet reports them once its sandbox runs.
fn addresses(pod: &Pod) -> Vec<IpAddr> {
    let status = pod.status.as_ref();
    let several = status.and_then(|status| status.pod_ips.as_ref()).into_iter().flatten().map(|each| each.ip.as_str());
    let first = status.and_then(|status| status.pod_ip.as_deref());
    let all: BTreeSet<IpAddr> = several.chain(first).filter_map(|ip| ip.parse().ok()).collect();
    all.into_iter().collect()
}

/// Annotation that names the container of the engine or trainer; injection uses it too.
pub const CONTAINER_ANNOTATION: &str = "weightsync.dev/container";

/// Name of the engine's or trainer's container: from the pod's annotation, else the first.
pub fn container_name(pod: &Pod) -> Option<String> {
    let first = pod.spec.as_ref().and_then(|spec| spec.containers.first()).map(|container| &container.name);
    annotated_container(pod).or(first).cloned()
}

fn annotated_container(pod: &Pod) -> Option<&String> {
    pod.metadata.annotations.as_ref()?.get(CONTAINER_ANNOTATION)
}

/// The container that the pod's annotation names, if the pod does not have it.
fn missing_container(pod: &Pod) -> Option<String> {
    let mut containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    annotated_container(pod).filter(|named| containers.all(|container| container.name != **named)).cloned()
}

/// The kubelet's (1.36) reason for a container that was created and could not be started.
pub const NOT_STARTED: &str = "RunContainerError";
/// Its reasons for a container whose image it does not get.
const NO_IMAGE: [&str; 4] = ["ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"];

/// Why a container waits without end: it needs a change of its pod, its image or its configuration.
pub fn cannot_start(status: &ContainerStatus) -> Option<String> {
    let waiting = status.state.as_ref()?.waiting.as_ref()?;
    let reason = waiting.reason.as_deref()?;
    let no_image = NO_IMAGE.contains(&reason);
    if !no_image && !["CreateContainerConfigError", NOT_STARTED].contains(&reason) {
        return None;
    }
    let message = waiting.message.as_deref().unwrap_or_default();
    let mut cause = format!("container {} cannot start: {reason} {message}", status.name).trim_end().to_owned();
    if no_image {
        cause.push_str("; check the image's name, and the pull Secret that the pod needs (imagePullSecrets)");
    }
    Some(cause)
}

/// Why a pod makes no progress: a container that cannot start, or no node for it.
fn stuck(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    let containers = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    let unscheduled = || {
        let conditions = status.conditions.iter().flatten();
        let condition = conditions.into_iter().find(|condition| condition.type_ == "PodScheduled" && condition.status == "False")?;
        Some(format!("no node takes it: {}", condition.message.as_deref().or(condition.reason.as_deref()).unwrap_or("no cause is given")))
    };
    containers.into_iter().find_map(cannot_start).or_else(unscheduled)
}

/// Why the kubelet reports a pod as not ready; `None` when it is ready. If only a WeightSync update made it unready, the caller must not
/// leave the pod out.
pub fn not_ready(pod: &Pod) -> Option<String> {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    let ready = conditions.into_iter().flatten().find(|condition| condition.type_ == "Ready");
    match ready {
        Some(condition) if condition.status == "True" => None,
        Some(condition) => {
            let words = [condition.reason.as_deref(), condition.message.as_deref()];
            let why = words.into_iter().flatten().filter(|word| !word.is_empty()).collect::<Vec<_>>().join(": ");
            Some(if why.is_empty() { "not ready".to_owned() } else { format!("not ready ({why})") })
        }
        None => Some("the kubelet has not reported its readiness yet".to_owned()),
    }
}

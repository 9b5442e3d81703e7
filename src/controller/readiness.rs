//! Which pods may serve, for pods that declare the readiness gate [`GATE`] (ephemeral agents cannot have a probe).
//!
//! Pure: decides the condition's status. Never touches a pod without the gate, and makes no decision while facts are missing.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use super::decide::target_container;
use crate::api::WeightSync;
use weightsync_core::membership::{GroupStage, MemberView, MembershipView};
use weightsync_core::plan::{ROLE_LABEL, ROLE_TRAINER};
use weightsync_core::protocol::Reason;

/// The readiness gate, and the type of the condition that opens it.
pub(super) const GATE: &str = "weightsync.dev/ready";

/// The desired condition of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) ready: bool,
    pub(super) reason: Reason,
    pub(super) message: String,
}

impl Verdict {
    pub(super) fn serve(reason: Reason, message: &str) -> Self {
        Self { ready: true, reason, message: message.to_owned() }
    }
}

/// Whether the pod declares the gate.
pub(super) fn is_gated(pod: &Pod) -> bool {
    let gates = pod.spec.as_ref().and_then(|spec| spec.readiness_gates.as_ref());
    gates.into_iter().flatten().any(|gate| gate.condition_type == GATE)
}

/// The pod's present condition.
pub(super) fn present(pod: &Pod) -> Option<bool> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == GATE).map(|condition| condition.status == "True")
}

/// The desired conditions of the object's gated pods; pods without known facts are left out.
pub(super) fn verdicts(object: &WeightSync, view: &MembershipView, pods: &[&Pod]) -> BTreeMap<String, Verdict> {
    let gated = pods.iter().filter(|pod| is_gated(pod) && target_container(object, pod).is_some());
    gated.filter_map(|pod| Some((pod.uid()?, verdict(object, view, pod, &pod.uid()?)?))).collect()
}

fn verdict(object: &WeightSync, view: &MembershipView, pod: &Pod, uid: &str) -> Option<Verdict> {
    if object.spec.suspend {
        return Some(Verdict::serve(Reason::Suspended, "the WeightSync is suspended: the pod serves its current weights"));
    }
    if is_trainers(pod) {
        return Some(Verdict::serve(Reason::AsWanted, "a trainer's pod is always ready"));
    }
    if view.stage == GroupStage::Adopting {
        return None;
    }
    let members: Vec<&MemberView> = view.members.iter().filter(|member| member.pods.iter().any(|pod| pod.uid == uid)).collect();
    if members.is_empty() {
        // A reconcile may come before the group has a new pod: then decide only what holds for every pod.
        return Some(match view.wanted.as_ref().or(view.version.as_ref()) {
            Some(current) => Verdict {
                ready: false,
                reason: Reason::MemberLeft,
                message: format!("the pod is no member yet, and is not known to serve version {}", current.version),
            },
            None => before_first_version(object),
        });
    }
    // A pod with several engines is as ready as the least ready of them.
    let judged = members.iter().map(|member| replica(object, view, member));
    judged.min_by_key(|verdict| verdict.ready)
}

fn is_trainers(pod: &Pod) -> bool {
    pod.labels().get(ROLE_LABEL).is_some_and(|role| role == ROLE_TRAINER)
}

fn before_first_version(object: &WeightSync) -> Verdict {
    if object.spec.serve_before_first_version() {
        return Verdict::serve(Reason::NoVersion, "no version was published yet");
    }
    let message = "no version was published yet, and beforeFirstVersion is Hold".into();
    Verdict { ready: false, reason: Reason::NoVersion, message }
}

fn replica(object: &WeightSync, view: &MembershipView, member: &MemberView) -> Verdict {
    let not = |message: String| Verdict { ready: false, reason: member.reason, message };
    // Also during the formation of a group, and outside a group.
    if member.dirty {
        return not(format!("an install did not end well: {}", member.message));
    }
    let Some(current) = &view.version else { return before_first_version(object) };
    match &member.installed {
        // The engine confirmed it since its present start.
        Some(held) => match view.may_serve(held) {
            Ok(()) => Verdict::serve(Reason::MemberReady, &format!("serves version {}", held.version)),
            Err(why) => not(format!("{why}: {}", member.message)),
        },
        None => not(format!("serves no verified version, the current one is {}: {}", current.version, member.message)),
    }
}

//! Which pods are deleted because their engine is wedged (`update.onWedged: RestartPod`).
//!
//! Pure. Only pods with an owner that recreates them are deleted, by UID, and only if they do not terminate already. A member is wedged by
//! the report of its own agent, which requested a token and waited. Failed health probes alone delete nothing.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use crate::api::{OnWedged, WeightSync};
use weightsync_core::membership::MembershipView;
use weightsync_core::protocol::{Reason, Role};

#[derive(Debug, Default, PartialEq)]
pub(super) struct Wedged<'a> {
    pub(super) delete: Vec<(&'a Pod, String)>,
    pub(super) problems: Vec<(Reason, String)>,
}

pub(super) fn wedged<'a>(object: &WeightSync, view: &MembershipView, pods: &[&'a Pod]) -> Wedged<'a> {
    let mut found = Wedged::default();
    if object.spec.update.on_wedged != OnWedged::RestartPod || object.spec.suspend {
        return found;
    }
    for member in view.members.iter().filter(|member| member.wedged && member.role == Role::Rollout) {
        for of_member in &member.pods {
            let pod = pods.iter().find(|pod| pod.uid().as_deref() == Some(of_member.uid.as_str()));
            let Some(pod) = pod.filter(|pod| pod.metadata.deletion_timestamp.is_none()) else { continue };
            if pod.owner_references().iter().any(|owner| owner.controller == Some(true)) {
                found.delete.push((*pod, member.message.clone()));
            } else {
                let message =
                    format!("pod {}: it has no owner that would recreate it, so it is not deleted: {}", pod.name_any(), member.message);
                found.problems.push((Reason::EngineWedged, message));
            }
        }
    }
    found
}

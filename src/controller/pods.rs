//! Writes to pods. Every patch carries the pod's UID, so that a new pod of the same name is never patched by mistake.

use k8s_openapi::api::core::v1::{EphemeralContainer, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client, ResourceExt};
use serde_json::json;

use super::calls::{ApiError, Calls};
use super::readiness::{GATE, Verdict};
use weightsync_core::protocol::cut;

/// Field manager of WeightSync's condition on pods; an apply under this name does not touch the kubelet's conditions.
const MANAGER: &str = "weightsync-readiness";

pub(super) struct Pods {
    api: Api<Pod>,
    calls: Calls,
}

impl Pods {
    pub(super) fn new(client: Client, calls: Calls, namespace: &str) -> Self {
        Self { api: Api::namespaced(client, namespace), calls }
    }

    /// Sets the readiness condition. A pod that was deleted meanwhile is no error.
    pub(super) async fn set_readiness(&self, pod: &Pod, verdict: &Verdict) -> Result<(), ApiError> {
        let (name, status) = (pod.name_any(), if verdict.ready { "True" } else { "False" });
        let patch = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "uid": pod.uid()},
            "status": {"conditions": [{
                "type": GATE,
                "status": status,
                "reason": verdict.reason.as_str(),
                "message": cut(&verdict.message, 1024),
                "lastTransitionTime": Timestamp::now().to_string(),
            }]},
        });
        let params = PatchParams::apply(MANAGER).force();
        let what = format!("set {GATE}={status} on pod {name}");
        forgive_gone(self.calls.run(what, self.api.patch_status(&name, &params, &Patch::Apply(patch))).await.map(drop))
    }

    /// Deletes the pod with this UID. A pod that was deleted meanwhile is no error.
    pub(super) async fn delete(&self, pod: &Pod) -> Result<(), ApiError> {
        let name = pod.name_any();
        let params =
            DeleteParams { preconditions: Some(Preconditions { uid: pod.uid(), resource_version: None }), ..DeleteParams::default() };
        let deleted = self.calls.run(format!("delete pod {name}"), self.api.delete(&name, &params)).await;
        forgive_gone(deleted.map(drop))
    }

    /// Adds an ephemeral container. A pod that was deleted meanwhile is no error.
    pub(super) async fn add_ephemeral(&self, pod: &Pod, container: &EphemeralContainer) -> Result<(), ApiError> {
        let name = pod.name_any();
        // Strategic merge: an apply would have to repeat all existing entries.
        let patch = json!({"metadata": {"uid": pod.uid()}, "spec": {"ephemeralContainers": [container]}});
        let what = format!("add {} to pod {name}", container.name);
        let (params, patch) = (PatchParams::default(), Patch::Strategic(patch));
        forgive_gone(self.calls.run(what, self.api.patch_ephemeral_containers(&name, &params, &patch)).await.map(drop))
    }
}

fn forgive_gone(outcome: Result<(), ApiError>) -> Result<(), ApiError> {
    match outcome {
        Err(error) if error.is_gone() => {
            tracing::debug!(%error, "the pod was deleted meanwhile");
            Ok(())
        }
        outcome => outcome,
    }
}

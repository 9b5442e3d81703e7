//! Objects, pods and views to judge.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::api::WeightSync;
use weightsync_core::membership::{Membership, MembershipConfig, MembershipView, Restored};

/// Two pools would add nothing: one trainer, one pool of vLLM.
pub(crate) fn object(name: &str, created: u32) -> WeightSync {
    changed(name, created, |_| {})
}

pub(crate) fn changed(name: &str, created: u32, change: impl Fn(&mut Value)) -> WeightSync {
    let mut value = json!({
        "apiVersion": "weightsync.dev/v1alpha1",
        "kind": "WeightSync",
        "metadata": {
            "name": name, "namespace": "default", "uid": format!("uid-of-{name}"), "generation": 1,
            "creationTimestamp": format!("2026-01-01T00:00:{created:02}Z"),
        },
        "spec": {
            "trainer": {"selector": {"matchLabels": {"app": "trainer"}}},
            "rollouts": [{
                "name": "actors",
                "selector": {"matchLabels": {"app": "actor"}},
                "container": "engine",
                "engine": {"kind": "VLLM"},
            }],
        },
    });
    change(&mut value);
    serde_json::from_value(value).unwrap()
}

pub(crate) fn pod(name: &str, change: impl Fn(&mut Value)) -> Pod {
    let trainer = name.starts_with("trainer");
    let (app, role, container) = if trainer { ("trainer", "trainer", "train") } else { ("actor", "rollout", "engine") };
    let mut value = json!({
        "metadata": {
            "name": name, "namespace": "default", "uid": format!("uid-{name}"),
            "labels": {"app": app, "weightsync.dev/role": role},
        },
        "spec": {"containers": [{"name": container, "image": "any"}]},
        "status": {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "containerStatuses": [{
                "name": container, "image": "any", "imageID": "", "ready": true, "restartCount": 0,
                "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
            }],
        },
    });
    change(&mut value);
    serde_json::from_value(value).unwrap()
}

pub(crate) fn plain(name: &str) -> Pod {
    pod(name, |_| {})
}

/// A view of an object about which nothing is known.
pub(crate) fn idle(object: &WeightSync) -> MembershipView {
    let identity = object.plan_ref();
    Membership::new(MembershipConfig::new(identity.uid, identity.created, object.spec.update_policy(1)), Restored::default()).view()
}

//! A namespace that enforces Pod Security's `restricted`, with a quota and a range of limits: the API server admits injected pods there.
//!
//! The pods have their security context on the container, as many templates have it: nothing of the pod's own context helps the agent.

use k8s_openapi::api::core::v1::{LimitRange, Namespace, ResourceQuota};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::cluster::{Cluster, MINUTE, START, eventually};
use super::fixtures::{simulated_vllm, torch_trainer, wrapped};
use super::injection::{ask, by_hand};

/// The engine's own part of `restricted`, on its container alone; and no folder of the node, which `restricted` forbids.
fn own_context(mut pod: Value) -> Value {
    let container = &mut pod["spec"]["containers"][0];
    container["securityContext"] = json!({
        "runAsNonRoot": true, "runAsUser": 1000, "allowPrivilegeEscalation": false,
        "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"}
    });
    container["volumeMounts"] = json!([]);
    pod["spec"]["volumes"] = json!([]);
    pod
}

/// The namespace as an administrator of a shared cluster makes it.
async fn restricted(cluster: &Cluster) {
    let labels = json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}});
    let namespaces: Api<Namespace> = Api::all(cluster.client.clone());
    namespaces.patch(&cluster.namespace, &PatchParams::default(), &Patch::Merge(&labels)).await.unwrap();
    let quota = json!({"metadata": {"name": "q"}, "spec": {"hard": {
        "requests.cpu": "8", "requests.memory": "16Gi", "limits.cpu": "16", "limits.memory": "32Gi", "pods": "20"}}});
    let quota: ResourceQuota = serde_json::from_value(quota).unwrap();
    cluster.api::<ResourceQuota>().create(&PostParams::default(), &quota).await.unwrap();
    let range = json!({"metadata": {"name": "r"}, "spec": {"limits": [{"type": "Container",
        "default": {"cpu": "1", "memory": "512Mi"}, "defaultRequest": {"cpu": "100m", "memory": "64Mi"}}]}});
    let range: LimitRange = serde_json::from_value(range).unwrap();
    cluster.api::<LimitRange>().create(&PostParams::default(), &range).await.unwrap();
    // Until its status has numbers, every pod is refused.
    eventually("the quota counts", MINUTE, || async {
        let quota = cluster.api::<ResourceQuota>().get("q").await.map_err(|error| error.to_string())?;
        if quota.status.is_some_and(|status| status.used.is_some()) { Ok(()) } else { Err("it does not count yet".to_owned()) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn injected_pods_are_admitted_where_restricted_is_enforced() {
    Cluster::run("restricted", |cluster| async move {
        restricted(&cluster).await;
        let plain = own_context(simulated_vllm("plain"));
        for pod in [plain.clone(), own_context(torch_trainer("trainer")), wrapped(plain.clone())] {
            let name = format!("{} {}", pod["metadata"]["name"], pod["metadata"]["annotations"]);
            let by_policy = ask(&cluster, &pod).await;
            assert!(by_policy.is_ok(), "{name} by the policy: {by_policy:?}");
            let containers = by_policy.unwrap().spec.unwrap().init_containers.unwrap_or_default();
            assert_eq!(containers.len(), 1, "{name}: an agent is added");
            // Where a quota names limits, the plugin's options give them without a range of the namespace.
            let hand = by_hand(&pod, &["--cpu", "100m", "--memory", "64Mi", "--cpu-limit", "1", "--memory-limit", "256Mi"]).await;
            let by_hand = ask(&cluster, &hand).await;
            assert!(by_hand.is_ok(), "{name} by hand: {by_hand:?}");
        }

        // The kubelet starts the sidecar as the image's user.
        cluster.create_pod(plain).await;
        eventually("the sidecar runs", START, || async {
            let pod = cluster.api::<k8s_openapi::api::core::v1::Pod>().get("plain").await.map_err(|error| error.to_string())?;
            let statuses = pod.status.and_then(|status| status.init_container_statuses).unwrap_or_default();
            let runs = statuses.iter().any(|one| one.state.as_ref().is_some_and(|state| state.running.is_some()));
            if runs { Ok(()) } else { Err(format!("{statuses:?}")) }
        })
        .await;

        // A pod that asks for root is refused there, with or without an agent.
        let mut root = own_context(simulated_vllm("root"));
        root["spec"]["securityContext"] = json!({"runAsUser": 0});
        let refused = ask(&cluster, &root).await.expect_err("restricted forbids root").to_string();
        assert!(refused.contains("runAsUser=0"), "{refused}");
    })
    .await;
}

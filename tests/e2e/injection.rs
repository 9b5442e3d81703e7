//! The sidecar: the same by the chart's admission policy and by hand.

use std::process::Stdio;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use super::cluster::Cluster;
use super::fixtures::{simulated_vllm, torch_trainer};

/// What the API server would make of a pod, without making it.
async fn would_be(cluster: &Cluster, pod: &Value) -> Value {
    let pod: Pod = serde_json::from_value(pod.clone()).expect("a pod");
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let made = cluster.api::<Pod>().create(&dry, &pod).await.expect("the pod is accepted");
    serde_json::to_value(made.spec).unwrap()
}

/// The pod as `kubectl weightsync inject` writes it.
async fn by_hand(pod: &Value) -> Value {
    let mut child = Command::new(env!("CARGO_BIN_EXE_kubectl-weightsync"))
        .args(["inject", "--image-pull-policy", "Never"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("the plugin starts");
    child.stdin.take().unwrap().write_all(pod.to_string().as_bytes()).await.unwrap();
    let output = tokio::time::timeout(Duration::from_secs(30), child.wait_with_output()).await.expect("in time").unwrap();
    assert!(output.status.success());
    serde_saphyr::from_str(&String::from_utf8(output.stdout).unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_was_injected_by_hand_is_the_pod_that_the_policy_makes() {
    Cluster::run("injection", |cluster| async move {
        let mut with_key = simulated_vllm("with-key");
        with_key["metadata"]["annotations"] = json!({"weightsync.dev/api-key-secret": "engine/key", "weightsync.dev/trainer-uids": "1000"});
        let mut own_memory = simulated_vllm("without-memory");
        own_memory["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "host", "mountPath": "/host", "readOnly": true}]);
        let mut on_host = torch_trainer("on-host");
        on_host["spec"]["hostNetwork"] = json!(true);
        for pod in [torch_trainer("trainer"), with_key, own_memory, on_host] {
            let (policy, hand) = (would_be(&cluster, &pod).await, would_be(&cluster, &by_hand(&pod).await).await);
            assert_eq!(policy["initContainers"][0]["name"], "weightsync-agent", "the policy adds the sidecar");
            assert_eq!(policy, hand, "{}", pod["metadata"]["name"]);
        }
    })
    .await;
}

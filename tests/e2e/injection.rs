//! The sidecar and the wrapped container: the same by the chart's admission policies and by hand; and what they refuse.

use std::process::Stdio;

use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use super::cluster::{Cluster, MINUTE};
use super::fixtures::{SIDECAR_CPU, simulated_vllm, torch_trainer, wrapped};

/// What the API server says to a pod, without making it.
pub async fn ask(cluster: &Cluster, pod: &Value) -> Result<Pod, kube::Error> {
    let pod: Pod = serde_json::from_value(pod.clone()).expect("a pod");
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    cluster.api::<Pod>().create(&dry, &pod).await
}

/// What the API server would make of a pod.
pub async fn would_be(cluster: &Cluster, pod: &Value) -> Value {
    let made = ask(cluster, pod).await.expect("the pod is accepted");
    serde_json::to_value(made.spec).unwrap()
}

/// The pod as `kubectl weightsync inject` writes it, with arguments.
pub async fn by_hand(pod: &Value, arguments: &[&str]) -> Value {
    let mut child = Command::new(env!("CARGO_BIN_EXE_kubectl-weightsync"))
        .args(["inject", "--image-pull-policy", "Never"])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("the plugin starts");
    child.stdin.take().unwrap().write_all(pod.to_string().as_bytes()).await.unwrap();
    let output = tokio::time::timeout(MINUTE, child.wait_with_output()).await.expect("in time").unwrap();
    assert!(output.status.success());
    serde_saphyr::from_str(&String::from_utf8(output.stdout).unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn pod_injected_by_hand_equals_the_policys_pod() {
    Cluster::run("injection", |cluster| async move {
        let mut with_key = simulated_vllm("with-key");
        with_key["metadata"]["annotations"] = json!({"weightsync.dev/api-key-secret": "engine/key", "weightsync.dev/trainer-uids": "1000",
            "weightsync.dev/serve-unclaimed-after-seconds": "60"});
        let mut own_memory = simulated_vllm("without-memory");
        own_memory["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "host", "mountPath": "/host", "readOnly": true}]);
        let mut on_host = torch_trainer("on-host");
        on_host["spec"]["hostNetwork"] = json!(true);
        for pod in [torch_trainer("trainer"), with_key, own_memory, on_host] {
            let (policy, hand) = (would_be(&cluster, &pod).await, would_be(&cluster, &by_hand(&pod, &["--cpu", SIDECAR_CPU]).await).await);
            assert_eq!(policy["initContainers"][0]["name"], "weightsync-agent", "the policy adds the sidecar");
            assert_eq!(policy, hand, "{}", pod["metadata"]["name"]);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pod_wrapped_by_hand_equals_the_policys_pod() {
    Cluster::run("wrapping", |cluster| async move {
        let mut full = wrapped(simulated_vllm("full"));
        full["metadata"]["annotations"]["weightsync.dev/api-key-secret"] = json!("engine/key");
        full["metadata"]["annotations"]["weightsync.dev/trainer-uids"] = json!("1000");
        full["metadata"]["annotations"]["weightsync.dev/serve-unclaimed-after-seconds"] = json!("60");
        full["metadata"]["annotations"]["weightsync.dev/container"] = json!("engine");
        let engine = full["spec"]["containers"][0].clone();
        full["spec"]["containers"] = json!([{"name": "helper", "image": engine["image"], "command": ["/weightsync", "--version"]}, engine]);
        full["spec"]["containers"][1]["env"] = json!([{"name": "POD_NAME", "value": "mine"}]);
        full["spec"]["containers"][1]["args"] = json!(["--max-model-len", "64"]);
        let mut own_memory = wrapped(simulated_vllm("without-memory"));
        own_memory["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "host", "mountPath": "/host", "readOnly": true}]);
        let mut bare = wrapped(simulated_vllm("bare"));
        bare["spec"].as_object_mut().unwrap().remove("volumes");
        bare["spec"]["containers"][0] =
            json!({"name": "engine", "image": bare["spec"]["containers"][0]["image"], "command": ["/weightsync"]});
        let mut on_host = wrapped(torch_trainer("on-host"));
        on_host["spec"]["hostNetwork"] = json!(true);
        for pod in [wrapped(torch_trainer("trainer")), full, own_memory, bare, on_host] {
            let (policy, hand) = (would_be(&cluster, &pod).await, would_be(&cluster, &by_hand(&pod, &["--cpu", SIDECAR_CPU]).await).await);
            let name = &pod["metadata"]["name"];
            assert_eq!(policy["initContainers"][0]["name"], "weightsync-program", "{name}: the policy wraps it");
            assert_eq!(policy["initContainers"].as_array().map(Vec::len), Some(1), "{name}: and adds no sidecar");
            assert_eq!(policy, hand, "{name}");
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_cannot_be_wrapped_is_refused_with_what_to_write() {
    Cluster::run("unwrappable", |cluster| async move {
        let mut in_image = wrapped(simulated_vllm("in-image"));
        in_image["spec"]["containers"][0].as_object_mut().unwrap().remove("command");
        let mut elsewhere = wrapped(simulated_vllm("elsewhere"));
        elsewhere["metadata"]["annotations"]["weightsync.dev/container"] = json!("engin");
        let mut unknown = simulated_vllm("unknown");
        unknown["metadata"]["annotations"] = json!({"weightsync.dev/inject": "rap"});
        let cases: [(Value, &[&str]); 3] = [
            (in_image, &["container engine cannot be wrapped", "command: [vllm, serve]"]),
            (elsewhere, &["weightsync.dev/container names engin"]),
            (unknown, &["must be sidecar, wrap or false"]),
        ];
        for (pod, words) in cases {
            let refused = ask(&cluster, &pod).await.err().unwrap_or_else(|| panic!("{} was accepted", pod["metadata"]["name"])).to_string();
            for word in words {
                assert!(refused.contains(word), "{word}: {refused}");
            }
        }
    })
    .await;
}

//! Signals to containers' processes, sent on the node: what a kernel or a neighbour does to a pod, no API can.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::process::Command;

use super::cluster::Cluster;

/// Runs a command on kind's node.
async fn on_node(arguments: &[&str]) -> String {
    let node = format!("{}-control-plane", std::env::var("WEIGHTSYNC_CLUSTER").unwrap_or_else(|_| "weightsync".into()));
    let run = Command::new("docker").arg("exec").arg(&node).args(arguments).kill_on_drop(true).output();
    let output = tokio::time::timeout(Duration::from_secs(30), run).await.expect("the node answers").expect("docker runs");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// The process id, on the node, of a container's first process.
pub async fn process(cluster: &Cluster, pod: &str, container: &str) -> String {
    let object = cluster.api::<Pod>().get(pod).await.expect("the pod exists");
    let status = object.status.expect("a status");
    let all = status.container_statuses.into_iter().flatten().chain(status.init_container_statuses.into_iter().flatten());
    let id = all.filter(|status| status.name == container).find_map(|status| status.container_id).expect("the container runs");
    let id = id.trim_start_matches("containerd://").to_owned();
    on_node(&["crictl", "inspect", "--output", "go-template", "--template", "{{.info.pid}}", &id]).await
}

/// Sends a signal to a process of the node.
pub async fn send(process: &str, signal: &str) {
    on_node(&["kill", &format!("-{signal}"), process]).await;
}

/// Sends a signal to the first process of a container.
pub async fn signal(cluster: &Cluster, pod: &str, container: &str, signal: &str) {
    let process = process(cluster, pod, container).await;
    send(&process, signal).await;
}

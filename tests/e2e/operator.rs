//! The operator on the cluster: its pods, how many of them there are, and helm, which installs and changes it.

use std::process::Stdio;
use std::time::Duration;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::json;

use super::cluster::{Cluster, START, eventually};

/// The chart that tests install: that of this repository, or the one that WEIGHTSYNC_CHART names.
pub fn chart() -> String {
    std::env::var("WEIGHTSYNC_CHART").unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/charts/weightsync").into())
}

/// Where the operator of all tests runs.
pub const NAMESPACE: &str = "weightsync-system";
/// Helm's own waits are shorter; this one ends a helm that hangs.
const HELM: Duration = Duration::from_secs(180);

/// The operator's namespace, to ask for what is in it.
pub fn operator(cluster: &Cluster) -> Cluster {
    Cluster { client: cluster.client.clone(), namespace: NAMESPACE.into() }
}

/// The pods of the controller; none while the API server does not answer.
pub async fn controllers(cluster: &Cluster) -> Vec<Pod> {
    let labelled = ListParams::default().labels("app.kubernetes.io/component=controller");
    operator(cluster).api::<Pod>().list(&labelled).await.map(|list| list.items).unwrap_or_default()
}

/// Waits until there are as many controllers as asked for, all ready.
pub async fn scale_controller(cluster: &Cluster, replicas: i32) {
    let deployments = operator(cluster).api::<Deployment>();
    let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
    deployments.patch("weightsync", &PatchParams::default(), &patch).await.unwrap();
    eventually(&format!("{replicas} controllers"), START, || async {
        let found = deployments.get("weightsync").await.map_err(|error| error.to_string())?.status.unwrap_or_default();
        let pods = controllers(cluster).await.len();
        let is = (found.ready_replicas.unwrap_or(0), i32::try_from(pods).unwrap_or(-1));
        if is == (replicas, replicas) { Ok(()) } else { Err(format!("{is:?}")) }
    })
    .await;
}

/// Runs helm to its end, which must be good.
pub async fn helm(arguments: &[&str]) {
    set_by_helm(arguments).await;
}

/// What helm prints, which must end well.
pub async fn set_by_helm(arguments: &[&str]) -> String {
    let mut command = tokio::process::Command::new("helm");
    command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(HELM, command.output()).await.expect("helm ends").unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Upgrades the operator of all tests to the chart, with arguments next to the values that it has.
pub async fn upgrade(arguments: &[&str]) {
    let chart = chart();
    let common = ["upgrade", "weightsync", &chart, "--namespace", NAMESPACE, "--reuse-values", "--wait", "--timeout", "120s"];
    helm(&[&common, arguments].concat()).await;
}

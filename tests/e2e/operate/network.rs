//! The chart's network policies, enforced: members and the controller reach each other, and no one else reaches them.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::LogParams;
use serde_json::{Value, json};

use crate::asks::deliver;
use crate::cluster::{Cluster, MINUTE, START, eventually};
use crate::fixtures::{ENGINE_PORT, STATUS_PORT, simulated_vllm, trainer, weightsync};
use crate::node::{on_node, process};
use crate::operator::{controllers, operator};
use crate::policies::lift;

/// Where a pod's agent listens for members: control and data port, as it says itself.
async fn listens(cluster: &Cluster, pod: &str) -> (u16, u16) {
    let params = LogParams { container: Some("weightsync-agent".into()), ..LogParams::default() };
    eventually(&format!("the ports of {pod}"), START, || async {
        let log = cluster.api::<Pod>().logs(pod, &params).await.map_err(|error| error.to_string())?;
        let endpoint =
            log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()).rfind(|line| !find(line, "control").is_null());
        let endpoint = endpoint.ok_or("it does not listen yet")?;
        let port = |key: &str| find(&endpoint, key).as_str().and_then(|address| address.rsplit(':').next()?.parse().ok());
        port("control").zip(port("data")).ok_or(endpoint.to_string())
    })
    .await
}

/// A field of a log line, wherever the line has its fields.
fn find<'a>(line: &'a Value, key: &str) -> &'a Value {
    if line[key].is_null() { &line["fields"][key] } else { &line[key] }
}

/// Whether a connection can be opened from within a pod's network.
async fn reaches(process: &str, address: &str, port: u16) -> bool {
    let open = format!(
        "nsenter --target {process} --net timeout 2 bash -c ': >/dev/tcp/{address}/{port}' 2>/dev/null && echo open || echo closed"
    );
    on_node(&["sh", "-c", &open]).await == "open"
}

async fn address(cluster: &Cluster, pod: &str) -> String {
    let given = |pod: &Pod| pod.status.as_ref().and_then(|status| status.pod_ip.clone()).ok_or("no address");
    cluster.await_pod(pod, "it has an address", START, |pod| given(pod).map_err(str::to_owned)).await
}

/// Answers the stranger's process and what it must not reach.
async fn strangers_are_kept_out(cluster: &Cluster) -> (String, Vec<(String, u16)>) {
    let controller = controllers(cluster).await[0].name_any();
    let controller = address(&operator(cluster), &controller).await;

    cluster.create_pod(trainer("trainer-0")).await;
    for pod in ["sim-0", "sim-1"] {
        cluster.create_pod(simulated_vllm(pod)).await;
    }
    let mut stranger = simulated_vllm("stranger");
    stranger["metadata"]["labels"] = json!({"app": "stranger"});
    cluster.create_pod(stranger).await;
    cluster.apply(&weightsync("run")).await.unwrap();
    cluster.await_ready("trainer-0", START).await;
    cluster.await_group("run", 2, START).await;
    deliver(cluster, 1, &["sim-0", "sim-1"]).await;

    let member = address(cluster, "sim-0").await;
    let (control, data) = listens(cluster, "sim-0").await;
    let doors =
        [(&member, control), (&member, data), (&member, STATUS_PORT), (&member, ENGINE_PORT), (&controller, 8443), (&controller, 8080)];
    cluster.await_ready("stranger", START).await;
    let stranger = process(cluster, "stranger", "engine").await;
    let neighbour = process(cluster, "sim-1", "engine").await;
    for (address, port) in doors {
        assert!(!reaches(&stranger, address, port).await, "a stranger reaches {address}:{port}");
        // Members reach members on every port, and of the controller the one on which they enrol.
        let may = port != 8080;
        assert_eq!(reaches(&neighbour, address, port).await, may, "a member and {address}:{port}");
    }
    (stranger, doors.map(|(address, port)| (address.clone(), port)).to_vec())
}

#[tokio::test(flavor = "multi_thread")]
async fn group_forms_under_network_policies_and_strangers_fail() {
    Cluster::run("network", |cluster| async move {
        let (stranger, doors) = strangers_are_kept_out(&cluster).await;
        lift(&cluster.namespace).await;
        for (address, port) in doors {
            eventually(&format!("nothing but the policies kept strangers off {address}:{port}"), MINUTE, || async {
                if reaches(&stranger, &address, port).await { Ok(()) } else { Err("closed") }
            })
            .await;
        }
    })
    .await;
}

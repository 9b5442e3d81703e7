//! What a loss costs on a cluster: from the signal to a replica's agent until the next version is verified and served by the others.
//!
//! `make bench-cluster` makes the cluster of the end-to-end tests ready and runs this. A torch trainer publishes to three simulated
//! engines; what their pods answer is compared after each run. The time of the request through the API server's port-forward, and of the
//! signal through the container runtime, is part of each figure.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

#[path = "../../tests/e2e/asks.rs"]
#[allow(dead_code)]
mod asks;
#[path = "../../tests/e2e/cluster.rs"]
#[allow(dead_code)]
mod cluster;
#[path = "../../tests/e2e/fixtures.rs"]
#[allow(dead_code)]
mod fixtures;
#[path = "../../tests/e2e/http.rs"]
mod http;
#[path = "../../tests/e2e/node.rs"]
#[allow(dead_code)]
mod node;
#[path = "../../tests/e2e/operator.rs"]
#[allow(dead_code)]
mod operator;
#[path = "../../tests/e2e/policies.rs"]
#[allow(dead_code)]
mod policies;
#[path = "../transport/report.rs"]
#[allow(dead_code)]
mod report;

use std::time::{Duration, Instant};

use clap::Parser;
use k8s_openapi::api::core::v1::Pod;

use cluster::Cluster;

const START: Duration = Duration::from_secs(180);
const ENGINES: [&str; 3] = ["sim-0", "sim-1", "sim-2"];

#[derive(Parser)]
struct Arguments {
    /// Runs of each kind.
    #[arg(long, default_value_t = 20)]
    runs: u64,
    /// One JSON object instead of lines for people.
    #[arg(long)]
    json: bool,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[tokio::main]
async fn main() {
    let arguments = Arguments::parse();
    Cluster::run("bench", move |cluster| async move { measure(&cluster, &arguments).await }).await;
}

async fn measure(cluster: &Cluster, arguments: &Arguments) {
    cluster.create_pod(fixtures::torch_trainer("trainer-0")).await;
    for name in ENGINES {
        cluster.create_pod(fixtures::simulated_vllm(name)).await;
    }
    cluster.apply(&fixtures::weightsync("run")).await.unwrap();
    cluster.await_ready("trainer-0", START).await;
    whole(cluster, None).await;
    asks::publish_to(cluster, "trainer-0", 1, 3).await;
    let mut version = 1;
    let mut report = report::Report::new(arguments.json);
    for (signal, wanted) in [("KILL", "below 1000 ms"), ("STOP", "below 5000 ms")] {
        let mut recovered = Vec::new();
        for run in 0..arguments.runs {
            let lost = ENGINES[usize::try_from(run).unwrap() % ENGINES.len()];
            let process = node::process(cluster, lost, "weightsync-agent").await;
            asks::train(cluster, "trainer-0").await;
            version += 1;
            let begun = Instant::now();
            node::send(&process, signal).await;
            served_by_the_others(cluster, lost, version).await;
            recovered.push(begun.elapsed().as_secs_f64() * 1000.0);
            agree(cluster, lost).await;
            // A new pod, because the kubelet makes a container that ends often wait for minutes.
            cluster.force_delete(lost).await;
            gone(cluster, lost).await;
            cluster.create_pod(fixtures::simulated_vllm(lost)).await;
            // The status may still be that of before; a pod that is Ready serves the version.
            cluster.await_ready(lost, START).await;
            whole(cluster, Some(version)).await;
        }
        report.series(
            &format!("SIG{signal} of one of 3 replicas on a cluster: until the others served the next version"),
            "ms",
            &recovered,
            wanted,
        );
    }
    report.finish();
}

/// Publishes until the other two replicas have the version: a trainer that is asked to try again does so at once.
async fn served_by_the_others(cluster: &Cluster, lost: &str, version: u64) {
    let others: Vec<_> = ENGINES.iter().filter(|name| **name != lost).map(|name| serde_json::json!(format!("actors/{name}"))).collect();
    for _ in 0..10 {
        let (status, answer) = asks::publish(cluster, "trainer-0", version, 0.0).await;
        if status == 200 && answer["installed"].as_array().is_some_and(|installed| others.iter().all(|other| installed.contains(other))) {
            return;
        }
        assert!(status == 200 || answer["retryable"] == true, "{answer}");
    }
    panic!("version {version} was not served after 10 tries");
}

/// The engines that were not touched serve the same bytes.
async fn agree(cluster: &Cluster, lost: &str) {
    let mut digests = Vec::new();
    for name in ENGINES.into_iter().filter(|name| *name != lost) {
        digests.push(asks::served(cluster, name).await);
    }
    assert_eq!(digests[0], digests[1]);
}

/// Waits until a pod is gone.
async fn gone(cluster: &Cluster, name: &str) {
    cluster::eventually(&format!("pod {name} is gone"), START, || async {
        match cluster.api::<Pod>().get_opt(name).await.map_err(|error| error.to_string())? {
            None => Ok(()),
            Some(pod) => Err(cluster::describe(&pod)),
        }
    })
    .await;
}

/// Waits until all three are in the group again, and serve `version`.
async fn whole(cluster: &Cluster, version: Option<u64>) {
    cluster
        .await_status("run", "three replicas in the group", START, |status| {
            let version_is = version.is_none_or(|version| status["version"] == version);
            if status["replicas"]["ready"] == 3 && status["worldSize"] == 4 && version_is { Ok(()) } else { Err("not whole".to_owned()) }
        })
        .await;
}

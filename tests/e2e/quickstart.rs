//! The quick start as the documentation has it, on a cluster: the same file that `weightsync local` reads.

use serde_json::{Value, json};

use super::asks::{publish_to, served, train};
use super::cluster::{Cluster, START};
use super::fixtures::{simulated_vllm, torch_trainer};

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/examples/quickstart/weightsync.yaml");

/// The pod with the label that the example selects. Its own pods name images that no test cluster can pull.
fn labelled(mut pod: Value, app: &str) -> Value {
    pod["metadata"]["labels"]["app"] = json!(app);
    pod
}

#[tokio::test(flavor = "multi_thread")]
async fn quickstart_runs_unchanged_on_a_cluster() {
    Cluster::run("quickstart", |cluster| async move {
        let object: Value = serde_saphyr::from_str(&std::fs::read_to_string(EXAMPLE).unwrap()).unwrap();
        cluster.apply(&object).await.unwrap();
        cluster.create_pod(labelled(torch_trainer("trainer-0"), "trainer")).await;
        for name in ["actor-0", "actor-1"] {
            cluster.create_pod(labelled(simulated_vllm(name), "actor")).await;
        }
        for name in ["trainer-0", "actor-0", "actor-1"] {
            cluster.await_ready(name, START).await;
        }
        cluster.await_group("grpo", 2, START).await;
        let before = served(&cluster, "actor-0").await;
        train(&cluster, "trainer-0").await;
        publish_to(&cluster, "trainer-0", 1, 2).await;
        let status = cluster.await_version("grpo", 1, 2, START).await;
        let now = served(&cluster, "actor-0").await;
        assert_ne!(now, before);
        assert_eq!(served(&cluster, "actor-1").await, now);
        let kinds: Vec<&str> = status["conditions"].as_array().unwrap().iter().filter_map(|one| one["type"].as_str()).collect();
        assert_eq!(kinds, ["Ready", "Progressing", "Accepted", "Degraded"]);
    })
    .await;
}

//! A legitimate rollout pod that lies in every message that it may send. The others go on: each version is served by the honest engines as
//! the trainer made it, and no order of the liar is carried out.

use k8s_openapi::api::core::v1::Pod;
use kube::api::LogParams;
use serde_json::Value;

use super::asks::{publish, save, served, train};
use super::cluster::{Cluster, START, eventually, is_ready};
use super::fixtures::{SCRATCH, liar, simulated_vllm, trainer, weightsync};
use super::injection::would_be;

const HONEST: [&str; 2] = ["sim-0", "sim-1"];

/// Each lie that was informed far, and what was answered.
async fn lies(cluster: &Cluster) -> Vec<(String, Value)> {
    let log = cluster.api::<Pod>().logs("liar", &LogParams::default()).await.unwrap_or_default();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.map(|line| (line["lie"].as_str().unwrap_or_default().to_owned(), line["answer"].clone())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn rollout_that_lies_in_every_message_changes_no_other() {
    Cluster::run("liar", |cluster| async move {
        cluster.create_pod(trainer("trainer-0")).await;
        for name in HONEST {
            cluster.create_pod(simulated_vllm(name)).await;
        }
        cluster.apply(&weightsync("run")).await.unwrap();
        cluster.await_ready("trainer-0", START).await;
        cluster.await_group("run", 2, START).await;
        let sidecar = would_be(&cluster, &simulated_vllm("any")).await["initContainers"][0].clone();
        cluster.create_pod(liar("liar", &sidecar)).await;
        eventually("the liar is in the group and lies", START, || async {
            if lies(&cluster).await.is_empty() { Err("not yet") } else { Ok(()) }
        })
        .await;

        let begun = std::time::Instant::now();
        let (mut version, mut before) = (0, served(&cluster, HONEST[0]).await);
        let reported = loop {
            version += 1;
            train(&cluster, "trainer-0").await;
            let (status, answer) = publish(&cluster, "trainer-0", version, 0.0).await;
            assert_eq!(status, 200, "version {version}: {answer}");
            let now = served(&cluster, HONEST[0]).await;
            assert_ne!(now, before, "version {version}");
            assert_eq!(now, served(&cluster, HONEST[1]).await, "both serve version {version}: {answer}");
            before = now;
            for name in HONEST {
                let pod = cluster.api::<Pod>().get(name).await.unwrap();
                assert!(is_ready(&pod), "{name} serves on");
            }
            let reported = lies(&cluster).await;
            if reported.iter().any(|(lie, _)| lie == "all") {
                break reported;
            }
            assert!(begun.elapsed() < 2 * START, "it does not come to the last of its lies: {reported:?}");
        };
        let orders = reported.iter().filter(|(_, answer)| answer != "sent");
        let taken: Vec<_> = orders.clone().filter(|(_, answer)| answer == "taken").collect();
        assert!(taken.is_empty(), "{taken:?}");
        assert!(orders.count() >= 2 + 6 * 3, "{reported:?}");

        let status = cluster.await_status("run", "the last version stands", START, |status| {
            if status["version"] == version { Ok(status.clone()) } else { Err(format!("not version {version}")) }
        });
        let status = status.await;
        assert!(status["epoch"].as_u64().is_some_and(|epoch| epoch < 1000), "{status}");
        // A fresh engine on what the trainer saved serves the same bytes.
        let path = format!("{SCRATCH}/{}", cluster.namespace);
        save(&cluster, "trainer-0", &path).await;
        let mut fresh = simulated_vllm("fresh");
        let command = fresh["spec"]["containers"][0]["command"].as_array_mut().unwrap();
        *command.last_mut().unwrap() = path.into();
        fresh["metadata"]["labels"] = serde_json::json!({"app": "fresh"});
        // The trainer's user wrote the files.
        fresh["spec"]["securityContext"] = serde_json::json!({"runAsUser": 0});
        cluster.create_pod(fresh).await;
        cluster.await_ready("fresh", START).await;
        assert_eq!(served(&cluster, "fresh").await, before, "version {version} is what the trainer made");
    })
    .await;
}

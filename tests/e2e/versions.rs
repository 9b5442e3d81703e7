//! The main road: a torch trainer that trains, real vLLM servers that serve, versions that arrive proven, a rollout that is lost.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use super::asks::{between_20_and_80_percent, completion, publish, publish_to, save, train, trainer_pid};
use super::cluster::{Cluster, is_ready};
use super::fixtures::{BASE_MODEL, SCRATCH, torch_trainer, vllm, weightsync};

const START: Duration = Duration::from_secs(240);
const MINUTE: Duration = Duration::from_secs(60);

/// A trainer and two real servers, grouped.
async fn group(cluster: &Cluster) {
    cluster.create_pod(torch_trainer("trainer-0")).await;
    for name in ["vllm-0", "vllm-1"] {
        cluster.create_pod(vllm(name, Some("rollout"), BASE_MODEL)).await;
    }
    cluster.apply(&weightsync("run")).await.unwrap();
    for name in ["trainer-0", "vllm-0", "vllm-1"] {
        cluster.await_ready(name, START).await;
    }
    cluster.await_group("run", 2, MINUTE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_of_a_real_trainer_are_served_as_by_fresh_servers_and_a_lost_rollout_is_left_out_and_replaced() {
    Cluster::run("versions", |cluster| async move {
        group(&cluster).await;
        let pid = trainer_pid(&cluster, "trainer-0").await;
        let mut before = completion(&cluster, "vllm-0").await;
        for version in 1..=3 {
            train(&cluster, "trainer-0").await;
            publish_to(&cluster, "trainer-0", version, 2).await;
            let status = cluster.await_version("run", version, 2, MINUTE).await;
            assert_eq!(status["replicas"]["display"], "2/2");
            assert_eq!(status["transport"]["name"], "tcp");
            let now = completion(&cluster, "vllm-0").await;
            assert_eq!(now, completion(&cluster, "vllm-1").await, "both servers serve version {version}");
            assert_ne!(now, before, "version {version} differs from the one before");
            equals_a_fresh_server(&cluster, version, &now).await;
            before = now;
        }
        kubectl_shows(&cluster).await;
        lose_a_rollout_in_the_middle(&cluster).await;
        assert_eq!(trainer_pid(&cluster, "trainer-0").await, pid, "the trainer noticed nothing");
    })
    .await;
}

/// A server started on the checkpoint that the trainer saved answers the same, to the last digit.
async fn equals_a_fresh_server(cluster: &Cluster, version: u64, served: &str) {
    let (path, name) = (format!("{SCRATCH}/{}-{version}", cluster.namespace), format!("fresh-{version}"));
    save(cluster, "trainer-0", &path).await;
    cluster.create_pod(vllm(&name, None, &path)).await;
    cluster.await_ready(&name, START).await;
    assert_eq!(completion(cluster, &name).await, served, "version {version} is served as by a fresh server");
    cluster.force_delete(&name).await;
}

/// What a person sees, and waits for.
async fn kubectl_shows(cluster: &Cluster) {
    let kubectl = |arguments: &[&str]| {
        let mut command = tokio::process::Command::new("kubectl");
        command.arg("-n").arg(&cluster.namespace).args(arguments).kill_on_drop(true);
        async move { tokio::time::timeout(MINUTE, command.output()).await.unwrap().unwrap() }
    };
    let shown = kubectl(&["get", "ws", "run"]).await;
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    let row: Vec<_> = text.lines().nth(1).unwrap_or_default().split_whitespace().collect();
    assert_eq!(row.first(), Some(&"run"), "{text}");
    assert_eq!((row.get(1), row.get(3), row.get(4), row.get(5)), (Some(&"2/2"), Some(&"3"), Some(&"3"), Some(&"tcp")), "{text}");
    let waited = kubectl(&["wait", "--for=condition=Ready", "ws/run", "--timeout=30s"]).await;
    assert!(waited.status.success(), "{}", String::from_utf8_lossy(&waited.stderr));
}

async fn lose_a_rollout_in_the_middle(cluster: &Cluster) {
    train(cluster, "trainer-0").await;
    let trainer = async { publish(cluster, "trainer-0", 4, 0.15).await };
    let loss = async {
        let percent = between_20_and_80_percent(cluster, "vllm-1").await;
        cluster.force_delete("vllm-1").await;
        percent
    };
    let ((status, answer), percent) = tokio::join!(trainer, loss);
    assert!((20.0..=80.0).contains(&percent));
    assert_eq!(status, 200, "the survivor gets the version: {answer}");
    assert_eq!(answer["installed"], serde_json::json!(["actors/vllm-0"]));
    cluster.await_version("run", 4, 1, MINUTE).await;
    // Whether the agent's silence or the pod's end is seen first, the pod and the cause are named.
    cluster.await_event(&["AgentLost", "MemberLeft"], MINUTE, |note| note.contains("vllm-1")).await;

    cluster.create_pod(vllm("vllm-1", Some("rollout"), BASE_MODEL)).await;
    // Never ready before it holds the current version.
    cluster
        .await_pod(
            "vllm-1",
            "the replacement is Ready",
            START,
            |pod: &Pod| if is_ready(pod) { Ok(()) } else { Err("not Ready".to_owned()) },
        )
        .await;
    assert_eq!(completion(cluster, "vllm-1").await, completion(cluster, "vllm-0").await, "the replacement serves what the survivor serves");
    cluster.await_version("run", 4, 2, MINUTE).await;
}

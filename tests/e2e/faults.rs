//! What dies, is found by its own path, in bounded time, is named, and heals without a hand. Simulated engines.

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::asks::{deliver, faults, publish_to};
use super::cluster::{Cluster, MINUTE, START, describe};
use super::fixtures::{IMAGE, simulated_vllm, torch_trainer, trainer, weightsync, without_sidecar};
use super::node::signal;

/// A trainer and `rollouts` simulated engines that serve version 1.
pub async fn group(cluster: &Cluster, rollouts: usize) {
    let names = without_version(cluster, rollouts, &weightsync("run")).await;
    deliver(cluster, 1, &names.iter().map(String::as_str).collect::<Vec<_>>()).await;
}

/// The same, by an object `run` with rules of its own; version 1 is what all started with.
pub async fn group_by(cluster: &Cluster, rollouts: usize, object: &serde_json::Value) {
    without_version(cluster, rollouts, object).await;
    publish_to(cluster, "trainer-0", 1, rollouts).await;
    cluster.await_version("run", 1, rollouts as u64, MINUTE).await;
}

/// A trainer and simulated engines that are a group; answers the engines' names.
async fn without_version(cluster: &Cluster, rollouts: usize, object: &serde_json::Value) -> Vec<String> {
    let names: Vec<String> = (0..rollouts).map(|number| format!("sim-{number}")).collect();
    cluster.create_pod(trainer("trainer-0")).await;
    for name in &names {
        cluster.create_pod(simulated_vllm(name)).await;
    }
    cluster.apply(object).await.unwrap();
    cluster.await_ready("trainer-0", START).await;
    cluster.await_group("run", rollouts as u64, START).await;
    names
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_with_503_or_silence_leaves_and_rejoins() {
    Cluster::run("sick-engine", |cluster| async move {
        group(&cluster, 2).await;
        let mut epoch = cluster.status("run").await["epoch"].as_u64().unwrap();
        let answer = json!({"kind": "answer", "status": 503, "body": {"detail": "Service Unavailable"}});
        for (fault, answers) in [(answer, true), (json!({"kind": "hang"}), false)] {
            faults(&cluster, "sim-1", &json!({"rules": [{"path": "*", "fault": fault}]})).await;
            // The second cause is visible next to the first.
            cluster.await_event(&["EngineUnhealthy"], MINUTE, |note| note.contains("sim-1") && note.contains("503") == answers).await;
            epoch = cluster
                .await_status("run", "the sick replica left", MINUTE, |status| {
                    let now = status["epoch"].as_u64().unwrap_or(0);
                    if now > epoch && status["worldSize"] == 2 { Ok(now) } else { Err(format!("epoch {now}")) }
                })
                .await;
            faults(&cluster, "sim-1", &json!({})).await;
            epoch = cluster
                .await_status("run", "it is back", START, |status| {
                    let now = status["epoch"].as_u64().unwrap_or(0);
                    if now > epoch && status["worldSize"] == 3 && status["replicas"]["ready"] == 2 {
                        Ok(now)
                    } else {
                        Err(format!("epoch {now}"))
                    }
                })
                .await;
        }
        deliver(&cluster, 2, &["sim-0", "sim-1"]).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_or_stopped_agent_is_found_named_and_healed() {
    Cluster::run("agent-faults", |cluster| async move {
        group(&cluster, 2).await;
        signal(&cluster, "sim-1", "weightsync-agent", "KILL").await;
        cluster.await_event(&["AgentLost"], MINUTE, |note| note.contains("sim-1")).await;
        cluster.await_version("run", 1, 2, START).await;
        signal(&cluster, "sim-1", "weightsync-agent", "STOP").await;
        cluster.await_event(&["AgentLost"], MINUTE, |note| note.contains("sim-1")).await;
        signal(&cluster, "sim-1", "weightsync-agent", "CONT").await;
        cluster.await_version("run", 1, 2, START).await;
        deliver(&cluster, 2, &["sim-0", "sim-1"]).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn suspended_or_deleted_object_leaves_pods_serving() {
    Cluster::run("lifecycle", |cluster| async move {
        group(&cluster, 2).await;
        cluster.patch_weightsync("run", &json!({"spec": {"suspend": true}})).await.unwrap();
        cluster
            .await_status("run", "everybody is released", MINUTE, |status| {
                let ready =
                    status["conditions"].as_array().into_iter().flatten().find(|c| c["type"] == "Ready").cloned().unwrap_or_default();
                if ready["reason"] == "Suspended" { Ok(()) } else { Err(ready.to_string()) }
            })
            .await;
        for pod in ["sim-0", "sim-1"] {
            cluster.await_ready(pod, MINUTE).await;
        }
        cluster.patch_weightsync("run", &json!({"spec": {"suspend": false}})).await.unwrap();
        cluster.await_version("run", 1, 2, START).await;
        cluster.delete_weightsync("run").await;
        for pod in ["sim-0", "sim-1"] {
            cluster.await_ready(pod, MINUTE).await;
        }
        cluster.apply(&weightsync("run")).await.unwrap();
        cluster.await_group("run", 2, START).await;
        deliver(&cluster, 2, &["sim-0", "sim-1"]).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn running_pods_without_a_sidecar_are_adopted_and_get_a_version() {
    Cluster::run("adopt", |cluster| async move {
        cluster.create_pod(without_sidecar(torch_trainer("trainer-0"), 0)).await;
        cluster.create_pod(without_sidecar(simulated_vllm("sim-root"), 0)).await;
        let mut gated = without_sidecar(simulated_vllm("sim-user"), 1000);
        gated["spec"]["readinessGates"] = json!([{"conditionType": "weightsync.dev/ready"}]);
        cluster.create_pod(gated).await;
        for pod in ["trainer-0", "sim-root"] {
            cluster.await_ready(pod, START).await;
        }
        cluster
            .await_pod("sim-user", "its containers run", START, |pod| {
                let text = describe(pod);
                if text.contains("ContainersReady=True") { Ok(()) } else { Err(text) }
            })
            .await;
        cluster.await_not_ready("sim-user", MINUTE).await;
        let mut object = weightsync("run");
        object["spec"]["agent"] = json!({"launch": "Ephemeral"});
        cluster.apply(&object).await.unwrap();
        cluster.await_group("run", 2, START).await;
        deliver(&cluster, 1, &["sim-root", "sim-user"]).await;
        // The pod's gate is opened by the controller.
        cluster.await_ready("sim-user", MINUTE).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_the_runtime_cannot_start_is_replaced() {
    Cluster::run("not-started", |cluster| async move {
        for pod in [trainer("trainer-0"), simulated_vllm("sim-0")] {
            cluster.create_pod(without_sidecar(pod, 0)).await;
        }
        for pod in ["trainer-0", "sim-0"] {
            cluster.await_ready(pod, START).await;
        }
        // What a container of ours is like whose start runc refuses: the kubelet never tries an ephemeral one again.
        let broken = json!({"name": "weightsync-agent-1", "image": IMAGE, "imagePullPolicy": "Never", "command": ["/nothing"]});
        let patch = Patch::Strategic(json!({"spec": {"ephemeralContainers": [broken]}}));
        cluster.api::<Pod>().patch_ephemeral_containers("sim-0", &PatchParams::default(), &patch).await.unwrap();
        cluster
            .await_pod("sim-0", "its agent could not be started", MINUTE, |pod| {
                let text = describe(pod);
                if text.contains("RunContainerError") { Ok(()) } else { Err(text) }
            })
            .await;
        let mut object = weightsync("run");
        object["spec"]["agent"] = json!({"launch": "Ephemeral"});
        cluster.apply(&object).await.unwrap();
        cluster.await_group("run", 1, START).await;
        deliver(&cluster, 1, &["sim-0"]).await;
    })
    .await;
}

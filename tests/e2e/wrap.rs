//! Pods whose command runs below the agent (`agent.launch: Wrap`): they take part without a sidecar, a restarted engine is informed of at once
//! and not ready before it was fed, and the pod's end is the engine's own.

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::asks::{deliver, faults, served};
use super::cluster::{Cluster, MINUTE, START, describe};
use super::fixtures::{simulated_vllm, torch_trainer, trainer, weightsync, wrapped};

#[tokio::test(flavor = "multi_thread")]
async fn wrapped_pods_take_part_and_restarted_engine_is_fed() {
    Cluster::run("wrap", |cluster| async move {
        cluster.create_pod(wrapped(torch_trainer("trainer-0"))).await;
        for name in ["sim-0", "sim-1"] {
            let made = cluster.create_pod(wrapped(simulated_vllm(name))).await.spec.unwrap();
            let init: Vec<_> = made.init_containers.iter().flatten().map(|container| container.name.as_str()).collect();
            assert_eq!(init, ["weightsync-program"], "no sidecar next to it");
        }
        let mut object = weightsync("run");
        object["spec"]["agent"] = json!({"launch": "Wrap"});
        cluster.apply(&object).await.unwrap();
        cluster.await_ready("trainer-0", START).await;
        cluster.await_group("run", 2, START).await;
        deliver(&cluster, 1, &["sim-0", "sim-1"]).await;
        for name in ["sim-0", "sim-1"] {
            cluster.await_ready(name, MINUTE).await;
        }
        let expected = served(&cluster, "sim-0").await;

        // The engine's process ends by itself, with exit code 1: so does its container, after its parent reported it.
        let crash = json!({"rules": [{"path": "/health", "times": 1, "fault": {"kind": "crash"}}]});
        faults(&cluster, "sim-1", &crash).await;
        cluster.await_event(&["EngineUnhealthy"], MINUTE, |note| note.contains("sim-1") && note.contains("exit status: 1")).await;
        let restarted = |pod: &Pod| {
            let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
            let ended = statuses.filter_map(|status| status.last_state.as_ref()?.terminated.as_ref()).map(|state| state.exit_code);
            if ended.clone().any(|code| code == 1) { Ok(()) } else { Err(describe(pod)) }
        };
        // Both groups are visible, though their Events differ in the note alone.
        cluster.await_event(&["GroupFormed"], MINUTE, |note| note.contains("3 members")).await;
        cluster.await_event(&["GroupFormed"], MINUTE, |note| note.contains("2 members") && note.contains("sim-1")).await;
        cluster.await_pod("sim-1", "its container ended with the engine's exit code", MINUTE, restarted).await;
        // The new engine started with the base checkpoint: it is ready when it holds version 1, and not before.
        cluster.await_version("run", 1, 2, START).await;
        cluster.await_ready("sim-1", MINUTE).await;
        assert_eq!(served(&cluster, "sim-1").await, expected);
        deliver(&cluster, 2, &["sim-0", "sim-1"]).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unwrapped_pod_is_named_with_a_remedy_and_takes_part() {
    Cluster::run("not-wrapped", |cluster| async move {
        cluster.create_pod(wrapped(trainer("trainer-0"))).await;
        cluster.create_pod(simulated_vllm("sim-0")).await;
        let mut object = weightsync("run");
        object["spec"]["agent"] = json!({"launch": "Wrap"});
        cluster.apply(&object).await.unwrap();
        cluster.await_ready("trainer-0", START).await;
        cluster
            .await_status("run", "the pod that has a sidecar is named", MINUTE, |status| {
                let all = status["conditions"].as_array().cloned().unwrap_or_default();
                let agents = all.iter().find(|condition| condition["type"] == "Degraded").cloned().unwrap_or_default();
                let named = agents["message"].as_str().is_some_and(|text| text.contains("sim-0") && text.contains("inject: wrap"));
                if agents["reason"] == "AgentMissing" && named { Ok(()) } else { Err(agents.to_string()) }
            })
            .await;
        cluster.await_group("run", 1, START).await;
        deliver(&cluster, 1, &["sim-0"]).await;
    })
    .await;
}

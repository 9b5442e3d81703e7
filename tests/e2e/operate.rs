//! The operator's tools on a cluster: the plugin's verbs through the real API server, agents' metrics, and what they log.

mod network;
mod preflight;

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::process::Command;

use super::asks::publish_to;
use super::cluster::Cluster;
use super::fixtures::{STATUS_PORT, simulated_vllm, torch_trainer, weightsync, wrapped};
use super::http::{get, request};

const START: Duration = Duration::from_secs(120);
const MINUTE: Duration = Duration::from_secs(60);
/// A trainer and a rollout with sidecars, and a wrapped rollout.
const PODS: [&str; 3] = ["trainer-0", "sim-0", "sim-1"];

/// Standard output of a verb that ends with this code.
async fn verb(cluster: &Cluster, words: &[&str], code: i32) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-weightsync"));
    command.args(words).args(["--namespace", &cluster.namespace]).stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(MINUTE, command.output()).await.expect("it ends").unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(output.status.code(), Some(code), "{words:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_plugins_verbs_work_on_a_cluster() {
    Cluster::run("operate", |cluster| async move {
        cluster.create_pod(torch_trainer("trainer-0")).await;
        cluster.create_pod(simulated_vllm("sim-0")).await;
        cluster.create_pod(wrapped(simulated_vllm("sim-1"))).await;
        cluster.apply(&weightsync("run")).await.unwrap();
        cluster.await_ready("trainer-0", START).await;
        cluster.await_group("run", 2, START).await;
        publish_to(&cluster, "trainer-0", 1, 2).await;
        cluster.await_version("run", 1, 2, MINUTE).await;

        let status: Value = serde_json::from_str(&verb(&cluster, &["status", "run", "-o", "json"], 0).await).unwrap();
        assert_eq!(status["status"]["version"], 1);
        cluster.await_event(&["GroupFormed"], MINUTE, |_| true).await;
        // A forwarded port is a loopback peer; a PUT without a body brings the filter of the start back.
        for pod in PODS {
            let (status, answer) = request(&cluster, pod, STATUS_PORT, "PUT", "/loglevel", None, MINUTE).await.unwrap();
            assert_eq!((status, &answer["filter"]), (200, &json!("info")), "{pod}: {answer}");
        }

        let metrics = get(&cluster, "sim-0", STATUS_PORT, "/metrics").await.1;
        assert!(metrics.as_str().unwrap().contains("weightsync_agent_engine_pause_duration_seconds_count{engine=\"vllm\"} 1"), "{metrics}");

        let folder = tempfile::tempdir().unwrap();
        let file: PathBuf = folder.path().join("report.tar");
        let written: Value =
            serde_json::from_str(&verb(&cluster, &["report", "run", "--file", file.to_str().unwrap(), "-o", "json"], 0).await).unwrap();
        let tar = |words: &[&str]| {
            let output = std::process::Command::new("tar").arg("-f").arg(&file).args(words).output().unwrap();
            assert!(output.status.success(), "{words:?}: {output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        let names = tar(&["-t"]);
        for wanted in ["objects/run.json", "metrics/sim-0.txt", "operator/metrics.txt", "operator/state.json"] {
            assert!(names.lines().any(|name| name == wanted), "{wanted} is not among {names}; {written}");
        }
        for log in ["logs/trainer-0-weightsync-agent.log", "logs/sim-0-weightsync-agent.log", "logs/sim-1-engine.log"] {
            let lines = tar(&["-xO", log]);
            assert!(lines.lines().count() > 0 && lines.lines().all(|line| line.contains("\"target\":\"weightsync")), "{log}: {lines}");
        }

        preflight::edges_of_a_running_group_are_measured(&cluster).await;

        verb(&cluster, &["release", "run", "--timeout", "60"], 0).await;
        cluster.patch_weightsync("run", &json!({"spec": {"suspend": false}})).await.unwrap();
        cluster.await_group("run", 2, MINUTE).await;
        cluster.await_version("run", 1, 2, MINUTE).await;
    })
    .await;
}

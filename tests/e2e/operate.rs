//! The operator's tools on a cluster: the plugin's verbs through the real API server, agents' metrics, and what they log.

mod network;
mod preflight;

use std::path::PathBuf;
use std::process::Stdio;

use serde_json::{Value, json};
use tokio::process::Command;

use super::asks::deliver;
use super::cluster::{Cluster, MINUTE, START};
use super::fixtures::{STATUS_PORT, simulated_vllm, trainer, weightsync, wrapped};
use super::http::{get, request};

/// A trainer and a rollout with sidecars, and a wrapped rollout.
const PODS: [&str; 3] = ["trainer-0", "sim-0", "sim-1"];

/// Standard output of a verb that ends with this code.
async fn verb(cluster: &Cluster, words: &[&str], code: i32) -> String {
    let (output, text, error) = run(cluster, words).await;
    assert_eq!(output, Some(code), "{words:?}: {text}{error}");
    text
}

/// How a verb ends: its code, standard output and standard error.
async fn run(cluster: &Cluster, words: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-weightsync"));
    command.args(words).args(["--namespace", &cluster.namespace]).stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(START, command.output()).await.expect("it ends").unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_plugins_verbs_work_on_a_cluster() {
    Cluster::run("operate", |cluster| async move {
        cluster.create_pod(trainer("trainer-0")).await;
        cluster.create_pod(simulated_vllm("sim-0")).await;
        cluster.create_pod(wrapped(simulated_vllm("sim-1"))).await;
        cluster.apply(&weightsync("run")).await.unwrap();
        cluster.await_ready("trainer-0", START).await;
        cluster.await_group("run", 2, START).await;
        deliver(&cluster, 1, &["sim-0", "sim-1"]).await;

        let status: Value = serde_json::from_str(&verb(&cluster, &["status", "run", "-o", "json"], 0).await).unwrap();
        assert_eq!(status["status"]["version"], 1);
        // The trainer is the first rank, and each engine has one of the others.
        let members = status["status"]["members"].as_array().unwrap().iter();
        let mut ranks: Vec<_> =
            members.map(|member| (member["rankOffset"].as_i64(), member["size"].as_i64(), member["name"].as_str().unwrap())).collect();
        ranks.sort_unstable();
        assert_eq!(ranks.iter().map(|rank| (rank.0, rank.1)).collect::<Vec<_>>(), [0, 1, 2].map(|at| (Some(at), Some(1))), "{ranks:?}");
        assert_eq!(ranks[0].2, "trainer/trainer-0", "{ranks:?}");
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

        verb(&cluster, &["release", "run", "--timeout", "300"], 0).await;
        cluster.patch_weightsync("run", &json!({"spec": {"suspend": false}})).await.unwrap();
        cluster.await_group("run", 2, MINUTE).await;
        cluster.await_version("run", 1, 2, MINUTE).await;
    })
    .await;
}

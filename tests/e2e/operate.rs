//! The operator's tools on a cluster: the plugin's verbs through the real API server, its metrics, and the chart's own check.

mod network;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::process::Command;

use super::asks::publish_to;
use super::cluster::{Cluster, eventually};
use super::fixtures::{STATUS_PORT, simulated_vllm, torch_trainer, weightsync, wrapped};
use super::http::get;
use super::operator::{NAMESPACE, helm};

const START: Duration = Duration::from_secs(120);
const MINUTE: Duration = Duration::from_secs(60);

/// Standard output of a verb that ends with this code.
async fn verb(cluster: &Cluster, words: &[&str], code: i32) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-weightsync"));
    command.args(words).args(["--namespace", &cluster.namespace]).stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(MINUTE, command.output()).await.expect("it ends").unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(output.status.code(), Some(code), "{words:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// What each pod said that it logs now.
async fn filters(cluster: &Cluster, words: &[&str]) -> BTreeMap<String, String> {
    let said: Value = serde_json::from_str(&verb(cluster, &[words, &["-o", "json"]].concat(), 0).await).unwrap();
    let text = |row: &Value, key: &str| row[key].as_str().unwrap_or_else(|| panic!("no {key} in {said}")).to_owned();
    said.as_array().unwrap().iter().map(|row| (text(row, "pod"), text(row, "filter"))).collect()
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
        eventually("the Event of the group", MINUTE, || async {
            let events = verb(&cluster, &["events", "run"], 0).await;
            if events.contains("GroupFormed") { Ok(()) } else { Err(events) }
        })
        .await;
        let logs = verb(&cluster, &["logs", "run"], 0).await;
        for pod in ["trainer-0", "sim-0", "sim-1"] {
            assert!(logs.lines().any(|line| line.starts_with(pod)), "no line of {pod}: {logs}");
        }
        let doctor = verb(&cluster, &["doctor", "sim-0", "sim-1", "-o", "json"], 0).await;
        assert_eq!(
            doctor.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).filter(|said| said["report"].is_object()).count(),
            2
        );
        assert_eq!(
            filters(&cluster, &["log-level", "weightsync=debug,info", "--of", "run"]).await,
            ["trainer-0", "sim-0", "sim-1"].map(|pod| (pod.to_owned(), "weightsync=debug,info".to_owned())).into()
        );
        assert_eq!(
            filters(&cluster, &["log-level", "--reset", "--of", "run"]).await,
            ["trainer-0", "sim-0", "sim-1"].map(|pod| (pod.to_owned(), "info".to_owned())).into()
        );
        assert!(verb(&cluster, &["log-level"], 0).await.contains("weightsync"));

        let metrics = get(&cluster, "sim-0", STATUS_PORT, "/metrics").await.1;
        assert!(metrics.as_str().unwrap().contains("weightsync_agent_engine_pause_duration_seconds_count{engine=\"vllm\"} 1"), "{metrics}");

        let folder = tempfile::tempdir().unwrap();
        let file: PathBuf = folder.path().join("report.zip");
        let written: Value =
            serde_json::from_str(&verb(&cluster, &["report", "run", "--file", file.to_str().unwrap(), "-o", "json"], 0).await).unwrap();
        let names: Vec<String> = zip::ZipArchive::new(std::fs::File::open(&file).unwrap())
            .unwrap()
            .file_names()
            .map(|name| name.unwrap().into_owned())
            .collect();
        for wanted in ["objects/run.json", "metrics/sim-0.txt", "logs/sim-1-engine.log", "operator/metrics.txt", "operator/state.json"] {
            assert!(names.iter().any(|name| name == wanted), "{wanted} is not among {names:?}; {written}");
        }

        verb(&cluster, &["pause", "run", "--timeout", "60"], 0).await;
        verb(&cluster, &["resume", "run", "--timeout", "60"], 0).await;
        cluster.await_version("run", 1, 2, MINUTE).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_charts_own_check_passes() {
    helm(&["test", "weightsync", "--namespace", NAMESPACE, "--timeout", "60s"]).await;
}

//! The kubectl plugin as a person runs it: the real program, a kubeconfig, and an API server that answers as a cluster would.

mod api;

use std::collections::BTreeMap;
use std::process::{Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use self::api::Api;

const OBJECTS: &str = "/apis/weightsync.dev/v1alpha1/namespaces/rl/weightsyncs";
const RUN: &str = "/apis/weightsync.dev/v1alpha1/namespaces/rl/weightsyncs/run";

fn object() -> Value {
    json!({
        "apiVersion": "weightsync.dev/v1alpha1", "kind": "WeightSync",
        "metadata": {"name": "run", "namespace": "rl", "uid": "u", "generation": 1},
        "spec": {
            "trainer": {"selector": {"matchLabels": {"app": "trainer"}}},
            "rollouts": [{"name": "actors", "selector": {"matchLabels": {"app": "actor"}}, "engine": {"kind": "VLLM", "ports": [8000]}}],
        },
        "status": {"members": [
            {"name": "trainer/t-0", "pods": ["t-0"], "rankOffset": 0, "size": 1, "state": "Ready", "reason": "MemberReady"},
            {"name": "actors/a-0", "pods": ["a-0"], "rankOffset": 1, "size": 1, "state": "Ready", "reason": "MemberReady"},
        ]},
    })
}

fn pod(name: &str, init: &Value, annotations: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "namespace": "rl", "annotations": annotations,
            "labels": {"weightsync.dev/role": "rollout", "example.com/team": "planted-in-label"},
        },
        "spec": {
            "initContainers": init,
            "containers": [{
                "name": "engine", "image": "vllm:1", "command": ["sh", "-c", "vllm serve --api-key planted-engine-key"],
                "args": ["--hf-token=planted-in-arguments"], "env": [{"name": "DATABASE", "value": "https://user:planted-in-env@host"}],
            }],
            "volumes": [{"name": "v", "csi": {"driver": "d", "volumeAttributes": {"key": "planted-in-volume"}}}],
        },
        "status": {"containerStatuses": [{
            "name": "engine", "image": "vllm:1", "imageID": "", "ready": false, "restartCount": 1,
            "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": "planted-in-last-words"}},
        }]},
    })
}

/// One object, a trainer with a sidecar, a wrapped rollout.
async fn cluster() -> Api {
    let api = Api::start().await;
    api.put(RUN, object());
    api.list(OBJECTS, &[object()]);
    let planted = json!({"example.com/note": "planted-in-annotation"});
    let trainer = pod("t-0", &json!([{"name": "weightsync-agent", "image": "ours:1"}]), &planted);
    let mut rollout = pod("a-0", &json!([{"name": "weightsync-program", "image": "ours:1"}]), &json!({"weightsync.dev/inject": "wrap"}));
    let command = ["/opt/weightsync/weightsync", "run", "--", "vllm", "serve", "--api-key", "planted-engine-key"];
    rollout["spec"]["containers"][0]["command"] = json!(command);
    api.put("/api/v1/namespaces/rl/pods/t-0", trainer.clone());
    api.put("/api/v1/namespaces/rl/pods/a-0", rollout.clone());
    api.list("/api/v1/namespaces/rl/pods", &[trainer, rollout]);
    let event = |reason: &str, kind: &str, at: &str, note: &str| {
        json!({
            "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": reason, "namespace": "rl"}, "eventTime": at,
            "type": kind, "reason": reason, "note": note, "action": "Coordinate", "regarding": {"kind": "WeightSync", "name": "run"},
            "reportingController": if reason == "Scheduled" { "scheduler" } else { "weightsync-controller" },
        })
    };
    api.list(
        "/apis/events.k8s.io/v1/namespaces/rl/events",
        &[
            event("AgentLost", "Warning", "2026-01-01T00:00:02.000000Z", "actors/a-0: the connection closed"),
            event("GroupFormed", "Normal", "2026-01-01T00:00:01.000000Z", "epoch 1"),
            event("Scheduled", "Normal", "2026-01-01T00:00:00.000000Z", "planted-in-event"),
        ],
    );
    let line = |second: u32, message: &str| {
        json!({
            "timestamp": format!("2026-01-01T00:00:{second:02}.000000Z"), "level": "INFO", "target": "weightsync_agent::core",
            "message": message, "prompt": "planted-in-field",
        })
    };
    api.log("t-0/weightsync-agent", &format!("{}\n{}\n", line(1, "first"), line(3, "third")));
    api.log("a-0/engine", &format!("INFO: asked with AWS_SECRET_ACCESS_KEY=planted-in-log\n{}\n", line(2, "second")));
    api
}

async fn run(api: &Api, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-weightsync"));
    command.args(words).env("KUBECONFIG", api.kubeconfig()).stdin(Stdio::null()).kill_on_drop(true);
    tokio::time::timeout(Duration::from_secs(30), command.output()).await.expect("it ends").unwrap()
}

/// Standard output of a verb that succeeds.
async fn said(api: &Api, words: &[&str]) -> String {
    let output = run(api, words).await;
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn rollback_names_a_kept_version_and_clear_removes_it() {
    let api = cluster().await;
    let mut kept = object();
    kept["status"]["version"] = json!(7);
    kept["status"]["members"][1]["retained"] = json!([7, 5]);
    api.put(RUN, kept);
    let missing = run(&api, &["rollback", "run", "--to", "6"]).await;
    let error = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(!missing.status.success() && error.contains("no member keeps version 6") && error.contains("5, 7"), "{error}");
    assert_eq!(api.get(RUN)["spec"]["targetVersion"], json!(null), "nothing was changed");
    let answer: Value = serde_json::from_str(&said(&api, &["rollback", "run", "--timeout", "0", "-o", "json"]).await).unwrap();
    assert_eq!(answer, json!({"name": "run", "targetVersion": 5, "from": 7, "done": false}));
    assert_eq!(api.get(RUN)["spec"]["targetVersion"], json!(5));
    assert!(said(&api, &["rollback", "run", "--clear"]).await.contains("not held any more"));
    assert_eq!(api.get(RUN)["spec"]["targetVersion"], json!(null));
    let both = run(&api, &["rollback", "run", "--clear", "--to", "5"]).await;
    assert!(!both.status.success());
}

fn operator(api: &Api) {
    let labels = json!({"app.kubernetes.io/name": "weightsync", "app.kubernetes.io/component": "controller"});
    let container = json!({"name": "controller", "image": "ours:1", "env": [{"name": "PLANTED", "value": "planted-in-operator"}]});
    let deployment = json!({
        "metadata": {"name": "weightsync", "namespace": "sys", "labels": labels},
        "spec": {"selector": {}, "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}}},
    });
    api.list("/apis/apps/v1/deployments", std::slice::from_ref(&deployment));
    api.list("/apis/apps/v1/namespaces/sys/deployments", &[deployment]);
    api.list("/api/v1/namespaces/sys/pods", &[json!({"metadata": {"name": "c-0", "namespace": "sys", "labels": labels}})]);
    let lease = json!({"metadata": {"name": "weightsync", "namespace": "sys"}, "spec": {"holderIdentity": "c-0"}});
    api.put("/apis/coordination.k8s.io/v1/namespaces/sys/leases/weightsync", lease);
    let ours = r#"{"timestamp":"2026-01-01T00:00:01.000000Z","level":"INFO","target":"weightsync::controller","message":"leading"}"#;
    api.log("c-0/controller", &format!("{ours}\nhyper: Authorization: Bearer planted-bearer-token\n"));
}

/// Names and texts of a tar file, as the system's own program reads them.
fn unpack(path: &std::path::Path) -> BTreeMap<String, String> {
    let tar = |words: &[&str]| {
        let output = std::process::Command::new("tar").arg("-f").arg(path).args(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    tar(&["-t"]).lines().map(|name| (name.to_owned(), tar(&["-xO", name]))).collect()
}

async fn report(api: &Api) -> BTreeMap<String, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.tar");
    let written: Value =
        serde_json::from_str(&said(api, &["report", "run", "--file", path.to_str().unwrap(), "-o", "json"]).await).unwrap();
    let files = unpack(&path);
    assert_eq!(written["files"], files.len());
    files
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_of_a_cluster_holds_every_named_part() {
    let api = cluster().await;
    operator(&api);
    let files = report(&api).await;
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    let wanted = ["report.json", "objects/run.json", "events/run.json", "pods/a-0.json", "pods/t-0.json", "operator/deployment.json"];
    let logs = ["logs/t-0-weightsync-agent.log", "logs/a-0-engine.log", "logs/c-0-controller.log", "operator/pods/c-0.json"];
    for wanted in wanted.into_iter().chain(logs) {
        assert!(names.contains(&wanted), "{wanted} is not among {names:?}");
    }
    assert!(files["pods/a-0.json"].contains("vllm:1") && files["objects/run.json"].contains("rankOffset"));
    assert!(files["events/run.json"].contains("the connection closed"));
    assert!(files["logs/a-0-engine.log"].contains("second") && files["logs/c-0-controller.log"].contains("leading"));
    let about: Value = serde_json::from_str(&files["report.json"]).unwrap();
    assert!(about["missing"].to_string().contains("/metrics"), "what could not be had is named: {about:#}");
    assert!(about["notCollected"].to_string().contains("environment variables"), "{about:#}");
    assert_eq!(about["linesLeftOut"]["logs/a-0-engine.log"], 1);
    assert!(!api.asked().iter().any(|asked| asked.contains("/secrets")), "{:?}", api.asked());
    assert!(api.asked().iter().any(|asked| asked.contains("regarding.name%3Drun")), "{:?}", api.asked());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_of_planted_secrets_holds_none() {
    let api = cluster().await;
    operator(&api);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    api.forward("a-0:8472", listener.local_addr().unwrap().port());
    let metrics = "weightsync_agent_epoch 3\nvllm_requests{key=\"planted-in-metrics\"} 1\n";
    let page = axum::Router::new().route("/metrics", axum::routing::get(move || async move { metrics }));
    tokio::spawn(async move { axum::serve(listener, page).await.unwrap() });
    let files = report(&api).await;
    for (name, text) in &files {
        assert!(!text.contains("planted-"), "{name}: {text}");
    }
    assert_eq!(files["metrics/a-0.txt"], "weightsync_agent_epoch 3\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_over_a_file_that_is_there_is_refused() {
    let api = cluster().await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.tar");
    std::fs::write(&path, "mine").unwrap();
    let refused = run(&api, &["report", "run", "--file", path.to_str().unwrap()]).await;
    assert!(!refused.status.success(), "{refused:?}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_web_page_is_brought_from_the_pod_that_leads() {
    let api = cluster().await;
    operator(&api);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    api.forward("c-0:8080", listener.local_addr().unwrap().port());
    let page = axum::Router::new().route("/ui/", axum::routing::get(|| async { "the page" }));
    tokio::spawn(async move { axum::serve(listener, page).await.unwrap() });
    let mut plugin = Command::new(env!("CARGO_BIN_EXE_kubectl-weightsync"))
        .args(["ui", "-o", "json"])
        .env("KUBECONFIG", api.kubeconfig())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(plugin.stdout.take().unwrap()).lines();
    let line = tokio::time::timeout(Duration::from_secs(20), lines.next_line()).await.expect("it tells where").unwrap().unwrap();
    let reported: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(reported["pod"], "c-0");
    let client = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(10)).build().unwrap();
    for _ in 0..2 {
        assert_eq!(client.get(reported["url"].as_str().unwrap()).send().await.unwrap().text().await.unwrap(), "the page");
    }
}

#[test]
fn completion_is_written_for_shells_and_for_kubectl_itself() {
    let run = |words: &[&str]| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_kubectl-weightsync")).args(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        assert!(run(&["completion", shell]).contains("rollback"), "{shell}");
    }
    assert!(run(&["completion", "kubectl"]).starts_with("#!/bin/sh"));
    assert_eq!(run(&["__complete", "--", "rol"]), "rollback\n:4\n");
    for gone in ["doctor", "events", "log", "pause", "resume"] {
        assert_eq!(run(&["__complete", "--", gone]), ":4\n");
    }
}

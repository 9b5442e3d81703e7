//! The kubectl plugin as a person runs it: the real program, a kubeconfig, and an API server that answers as a cluster would.

mod api;

use std::process::{Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use self::api::Api;
use crate::world::{Actor, World};

const OBJECTS: &str = "/apis/weightsync.dev/v1alpha1/namespaces/rl/weightsyncs";
const RUN: &str = "/apis/weightsync.dev/v1alpha1/namespaces/rl/weightsyncs/run";

fn object() -> Value {
    json!({
        "apiVersion": "weightsync.dev/v1alpha1", "kind": "WeightSync",
        "metadata": {"name": "run", "namespace": "rl", "uid": "u", "generation": 1},
        "spec": {
            "trainer": {"selector": {"matchLabels": {"app": "trainer"}}},
            "rollouts": [{"name": "actors", "selector": {"matchLabels": {"app": "actor"}}, "engine": {"vllm": {"ports": [8000]}}}],
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
        "metadata": {"name": name, "namespace": "rl", "labels": {"weightsync.dev/role": "rollout"}, "annotations": annotations},
        "spec": {
            "initContainers": init,
            "containers": [{
                "name": "engine", "image": "vllm:1", "command": ["vllm", "serve", "--api-key", "planted-engine-key"],
                "env": [{"name": "HF_TOKEN", "value": "planted-hugging-face"}],
            }],
        },
    })
}

/// One object, a trainer with a sidecar, a wrapped rollout.
async fn cluster() -> Api {
    let api = Api::start().await;
    api.put(RUN, object());
    api.list(OBJECTS, &[object()]);
    let trainer = pod("t-0", &json!([{"name": "weightsync-agent", "image": "ours:1"}]), &json!({}));
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
        })
    };
    api.list(
        "/apis/events.k8s.io/v1/namespaces/rl/events",
        &[
            event("AgentLost", "Warning", "2026-01-01T00:00:02.000000Z", "actors/a-0: the connection closed"),
            event("GroupFormed", "Normal", "2026-01-01T00:00:01.000000Z", "epoch 1"),
        ],
    );
    let line = |second: u32, message: &str| json!({"timestamp": format!("2026-01-01T00:00:{second:02}.000000Z"), "level": "INFO", "message": message, "target": "weightsync"});
    api.log("t-0/weightsync-agent", &format!("{}\n{}\n", line(1, "first"), line(3, "asked with planted-engine-key")));
    api.log("a-0/engine", &format!("INFO: Uvicorn running with planted-hugging-face\n{}\n", line(2, "second")));
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
async fn events_are_shown_the_oldest_first_as_text_and_as_json() {
    let api = cluster().await;
    let text = said(&api, &["events", "run"]).await;
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].contains("GroupFormed") && lines[1].contains("AgentLost"), "{text}");
    assert!(lines[1].starts_with("2026-01-01 00:00:02") && lines[1].contains("the connection closed"), "{text}");
    let warnings = said(&api, &["events", "--warnings", "-o", "json"]).await;
    let warnings: Vec<Value> = warnings.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((warnings.len(), &warnings[0]["reason"]), (1, &json!("AgentLost")));
    assert!(api.asked().iter().any(|asked| asked.contains("regarding.name%3Drun")), "{:?}", api.asked());
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_of_all_agents_come_in_the_order_of_time_without_the_engines_lines() {
    let api = cluster().await;
    let text = said(&api, &["logs", "run"]).await;
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines,
        ["t-0 00:00:01.000 INFO  first", "a-0 00:00:02.000 INFO  second", "t-0 00:00:03.000 INFO  asked with planted-engine-key"]
    );
    let json: Vec<Value> =
        said(&api, &["logs", "--output", "json"]).await.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&json[1]["pod"], &json[1]["message"]), (&json!("a-0"), &json!("second")));
    assert_eq!(said(&api, &["logs", "--pod", "a-0"]).await.lines().count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn pause_and_resume_change_the_spec_and_nothing_else() {
    let api = cluster().await;
    assert!(said(&api, &["pause", "run"]).await.contains("serve what they have"));
    assert_eq!(api.get(RUN)["spec"]["suspend"], json!(true));
    let answer: Value = serde_json::from_str(&said(&api, &["resume", "run", "-o", "json"]).await).unwrap();
    assert_eq!(answer, json!({"name": "run", "suspend": false, "changed": true}));
    assert_eq!(api.get(RUN)["spec"]["suspend"], json!(false));
    assert_eq!(api.get(RUN)["spec"]["trainer"], object()["spec"]["trainer"]);
    let missing = run(&api, &["pause", "nothing"]).await;
    assert!(!missing.status.success() && String::from_utf8_lossy(&missing.stderr).contains("there is no WeightSync nothing"));
}

#[tokio::test(flavor = "multi_thread")]
async fn rollback_names_a_version_that_is_kept_and_clear_takes_it_away() {
    let api = cluster().await;
    let mut kept = object();
    kept["status"]["version"] = json!(7);
    kept["status"]["members"][1]["retained"] = json!([7, 5]);
    api.put(RUN, kept);
    let missing = run(&api, &["rollback", "run", "--to", "6"]).await;
    let error = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(!missing.status.success() && error.contains("nobody keeps version 6") && error.contains("5, 7"), "{error}");
    assert_eq!(api.get(RUN)["spec"]["targetVersion"], json!(null), "nothing was changed");
    let answer: Value = serde_json::from_str(&said(&api, &["rollback", "run", "--timeout", "0", "-o", "json"]).await).unwrap();
    assert_eq!(answer, json!({"name": "run", "targetVersion": 5, "from": 7, "done": false}));
    assert_eq!(api.get(RUN)["spec"]["targetVersion"], json!(5));
    assert!(said(&api, &["rollback", "run", "--clear"]).await.contains("held no longer"));
    assert_eq!(api.get(RUN)["spec"]["targetVersion"], json!(null));
    let both = run(&api, &["rollback", "run", "--clear", "--to", "5"]).await;
    assert!(!both.status.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_is_run_where_each_agent_is() {
    let api = cluster().await;
    api.says("t-0", Some("{\"gpus\": []}\n"));
    api.says("a-0", None);
    let output = run(&api, &["doctor", "--of", "run", "-o", "json"]).await;
    assert_eq!(output.status.code(), Some(1), "one of them failed");
    let text = String::from_utf8(output.stdout).unwrap();
    let reports: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(reports[0], json!({"pod": "t-0", "report": {"gpus": []}}));
    let error = reports[1]["error"].as_str().unwrap();
    assert!(error.contains("exit code 127") && error.contains("no such program"), "{error}");
    let asked = api.asked().join("\n");
    assert!(
        asked.contains("pods/t-0/exec") && asked.contains("container=weightsync-agent") && asked.contains("command=%2Fweightsync&"),
        "{asked}"
    );
    assert!(asked.contains("container=engine") && asked.contains("command=%2Fopt%2Fweightsync%2Fweightsync"), "{asked}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_level_of_a_running_agent_is_shown_and_changed_through_a_forwarded_port() {
    let api = cluster().await;
    let world = World::start(json!({}), [Actor::new()]).await;
    world.until_ready(1).await;
    api.forward("a-0:8472", world.status_port("actor-0"));
    assert_eq!(said(&api, &["log-level", "weightsync=debug,info", "--pod", "a-0"]).await.trim(), "a-0  weightsync=debug,info");
    let shown: Value = serde_json::from_str(&said(&api, &["log-level", "--pod", "a-0", "-o", "json"]).await).unwrap();
    assert_eq!(shown, json!([{"pod": "a-0", "filter": "weightsync=debug,info"}]));
    let refused = run(&api, &["log-level", "trace", "--pod", "a-0"]).await;
    assert!(!refused.status.success() && String::from_utf8_lossy(&refused.stdout).contains("weightsync only"), "{refused:?}");
    // The other one has no port that leads anywhere; it is named, and the first one is asked all the same.
    let both = run(&api, &["log-level", "--reset", "--of", "run"]).await;
    let text = String::from_utf8(both.stdout).unwrap();
    assert!(!both.status.success() && text.contains("t-0  error") && text.lines().any(|line| line.starts_with("a-0  ")), "{text}");
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
    api.log("c-0/controller", "leading with Bearer planted-bearer-token\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_holds_what_helps_and_no_planted_secret() {
    let api = cluster().await;
    operator(&api);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.zip");
    let file = path.to_str().unwrap();
    let written: Value = serde_json::from_str(&said(&api, &["report", "run", "--file", file, "-o", "json"]).await).unwrap();
    assert!(written["redacted"].as_u64().unwrap() >= 5, "{written}");

    let mut archive = zip::ZipArchive::new(std::fs::File::open(&path).unwrap()).unwrap();
    let mut files = std::collections::BTreeMap::new();
    for at in 0..archive.len() {
        let mut file = archive.by_index(at).unwrap();
        let mut text = String::new();
        std::io::Read::read_to_string(&mut file, &mut text).unwrap();
        files.insert(file.name().unwrap().into_owned(), text);
    }
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    let wanted = ["report.json", "objects/run.json", "events/run.json", "pods/a-0.json", "pods/t-0.json", "operator/deployment.json"];
    for wanted in wanted.into_iter().chain(["logs/t-0-weightsync-agent.log", "logs/a-0-engine.log", "logs/c-0-controller.log"]) {
        assert!(names.contains(&wanted), "{wanted} is not among {names:?}");
    }
    for (name, text) in &files {
        assert!(!text.contains("planted-"), "{name}: {text}");
    }
    assert!(files["logs/a-0-engine.log"].contains("Uvicorn running with [REDACTED]"), "{}", files["logs/a-0-engine.log"]);
    assert!(files["pods/a-0.json"].contains("vllm:1") && files["objects/run.json"].contains("rankOffset"));
    assert!(files["report.json"].contains("/metrics"), "what could not be had is named: {}", files["report.json"]);
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions()) & 0o777, 0o600);
    assert!(!api.asked().iter().any(|asked| asked.contains("/secrets")), "{:?}", api.asked());
    let again = run(&api, &["report", "run", "--file", file]).await;
    assert!(!again.status.success(), "a file that is there is not overwritten");
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
    let told: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(told["pod"], "c-0");
    let client = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(10)).build().unwrap();
    for _ in 0..2 {
        assert_eq!(client.get(told["url"].as_str().unwrap()).send().await.unwrap().text().await.unwrap(), "the page");
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
        assert!(run(&["completion", shell]).contains("log-level"), "{shell}");
    }
    assert!(run(&["completion", "kubectl"]).starts_with("#!/bin/sh"));
    assert_eq!(run(&["__complete", "--", "pau"]), "pause\n:4\n");
}

//! `weightsync run -- COMMAND` and `weightsync install`: what a container that was wrapped is made of.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use weightsync_core::plan::Candidate;
use weightsync_core::protocol::{Assignment, EngineAssignment, MemberName, PodRef, Reason, Role, TransportPolicy};
use weightsync_core::weights::IgnoredTensors;

use crate::agent_process::Operator;
use crate::model::Model;
use crate::world::{PROGRAM, SOON};

/// `weightsync run -- COMMAND` with the environment of a pod, before its start.
fn run(folder: &Path, operator: Option<&Operator>, command: &[&str]) -> Command {
    std::fs::write(folder.join("token"), "w").unwrap();
    let ca = operator.map_or("-----BEGIN CERTIFICATE-----", |operator| operator.ca.certificate_pem());
    // Port 1 is no one's: the agent asks for ever, and the command must not care.
    let controller = operator.map_or_else(|| "127.0.0.1:1".to_owned(), |operator| operator.address.to_string());
    let mut run = Command::new(PROGRAM);
    run.args(["run", "--status-address", "127.0.0.1:0", "--role", "rollout", "--"]).args(command);
    run.env("POD_NAME", "w").env("POD_NAMESPACE", "ns").env("POD_UID", "uid-w").env("POD_IP", "127.0.0.1");
    run.env("WEIGHTSYNC_CONTROLLER_URL", controller).env("WEIGHTSYNC_CONTROLLER_CA", ca);
    run.env("WEIGHTSYNC_TOKEN_FILE", folder.join("token")).env("WEIGHTSYNC_VERSION_DIR", folder.join("versions"));
    run.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    run
}

async fn ended(child: Child) -> Output {
    tokio::time::timeout(SOON, child.wait_with_output()).await.expect("it ends with its command").unwrap()
}

fn signal(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(child.id().unwrap()).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn end_of_a_wrapped_engine_is_reported_at_once() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let operator = Operator::start().await;
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let assignment = Assignment {
        role: Role::Rollout,
        engines: vec![EngineAssignment { kind: "vllm".into(), port }],
        registered: false,
        serve_before_first_version: true,
        current: None,
        returned: None,
        newest: None,
        suspended: false,
        hindrance: None,
        ignored: IgnoredTensors::default(),
        transport: TransportPolicy::default(),
    };
    let pods = vec![PodRef { name: "w".into(), uid: "uid-w".into(), node: None, ips: Vec::new() }];
    let candidate = Candidate { name: MemberName("actors/w".into()), role: Role::Rollout, size: 1, pods, port: Some(port) };
    let mut handle = operator.claim_with("object", &["w"], &assignment, Some((vec![candidate], Vec::new())));
    let model = Model::small(1).save(&folder.path().join("model"));
    let (port, model) = (port.to_string(), model.display().to_string());
    let dev = weightsync_testkit::dev_program().display().to_string();
    let engine = [&dev, "simulate-engine", "--engine", "vllm", "--port", &port, "--model", &model];
    let child = run(folder.path(), Some(&operator), &engine).spawn().unwrap();
    let well =
        handle.view.wait_for(|view| view.members.iter().any(|member| member.reason == Reason::NoSource || member.engine_url.is_some()));
    tokio::time::timeout(SOON, well).await.expect("the engine is found well").unwrap();

    let crash = json!({"rules": [{"path": "/health", "times": 1, "fault": {"kind": "crash"}}]});
    let reported = reqwest::Client::new().post(format!("http://127.0.0.1:{port}/simulator/faults")).json(&crash).send().await.unwrap();
    assert!(reported.status().is_success());
    let output = ended(child).await;
    assert_eq!(output.status.code(), Some(1), "the engine's exit status: {}", String::from_utf8_lossy(&output.stderr));
    operator.reported(Reason::EngineUnhealthy, "its process ended (exit status: 1)").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn signals_and_exit_status_pass_through() {
    let folder = tempfile::tempdir().unwrap();
    let script = "trap 'exit 7' TERM; echo up; while :; do sleep 0.05; done";
    let mut child = run(folder.path(), None, &["sh", "-c", script]).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let first = tokio::time::timeout(SOON, lines.next_line()).await.expect("the command starts").unwrap();
    assert_eq!(first.as_deref(), Some("up"));
    signal(&child, Signal::TERM);
    assert_eq!(ended(child).await.status.code(), Some(7));

    let killed = run(folder.path(), None, &["sh", "-c", "kill -KILL $$"]).spawn().unwrap();
    assert_eq!(ended(killed).await.status.code(), Some(137), "as shells say it");
    let missing = run(folder.path(), None, &["/no/such/engine"]).spawn().unwrap();
    let output = ended(missing).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/no/such/engine cannot be started"));
}

#[tokio::test(flavor = "multi_thread")]
async fn command_sees_neither_agents_token_nor_key() {
    let folder = tempfile::tempdir().unwrap();
    let script = "echo \"[$WEIGHTSYNC_TOKEN$WEIGHTSYNC_ENGINE_API_KEY]$POD_NAME\"";
    let mut run = run(folder.path(), None, &["sh", "-c", script]);
    let child = run.env("WEIGHTSYNC_TOKEN", "secret").env("WEIGHTSYNC_ENGINE_API_KEY", "secret").spawn().unwrap();
    let output = ended(child).await;
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "[]w");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_program_installs_itself_whole_and_over_an_older_one() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("weightsync"), "older").unwrap();
    let installed = Command::new(PROGRAM).arg("install").arg(folder.path()).output().await.unwrap();
    assert!(installed.status.success(), "{}", String::from_utf8_lossy(&installed.stderr));
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["weightsync"]);
    let version = Command::new(folder.path().join("weightsync")).arg("--version").output();
    let version = tokio::time::timeout(Duration::from_secs(20), version).await.expect("the copy answers").unwrap();
    assert!(version.status.success());
    let nowhere = Command::new(PROGRAM).args(["install", "/no/such/folder"]).output().await.unwrap();
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&nowhere.stderr).contains("cannot be copied to /no/such/folder"));
}

//! What becomes of an engine when its object is deleted or its registration ends: a real simulated server and a real agent.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::process::{Child, Command};
use weightsync_agent::process::EngineFactory;
use weightsync_agent::registry::Registered;
use weightsync_core::protocol::*;
use weightsync_engine::EngineConfig;

use super::registered::{Planner, Process, assignment};
use super::{Agent, Operator, SOON};
use crate::model::Model;

/// A simulated vLLM on a port of its own.
struct Server {
    port: u16,
    model: PathBuf,
    child: Child,
}

impl Server {
    fn start(folder: &Path) -> Self {
        let model = folder.join("start");
        if !model.exists() {
            Model::small(1).save(&model);
        }
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let child = Self::spawn(&model, port);
        Self { port, model, child }
    }

    fn spawn(model: &Path, port: u16) -> Child {
        let mut command = Command::new(weightsync_testkit::dev_program());
        command.args(["simulate-engine", "--engine", "vllm", "--port", &port.to_string(), "--model"]).arg(model);
        command.stdout(std::process::Stdio::null()).kill_on_drop(true).spawn().unwrap()
    }

    async fn kill(&mut self) {
        self.child.kill().await.unwrap();
    }

    fn start_again(&mut self) {
        self.child = Self::spawn(&self.model, self.port);
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(i32::try_from(self.child.id().unwrap()).unwrap()).unwrap(), signal).unwrap();
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    /// Asks until the server is there.
    async fn post(&self, path: &str, body: &Value) {
        let client = reqwest::Client::new();
        let asked = async {
            while !client.post(self.url(path)).json(body).send().await.is_ok_and(|answer| answer.status().is_success()) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(SOON, asked).await.expect("a simulated server answers");
    }

    async fn says(&self, path: &str, field: &str) -> Value {
        let Ok(answer) = reqwest::get(self.url(path)).await else { return Value::Null };
        answer.json::<Value>().await.map(|answer| answer[field].clone()).unwrap_or_default()
    }

    /// Waits until the server itself says that it runs with its start-up weights.
    async fn until_it_runs(&self) {
        let mut last = Value::Null;
        let asked = tokio::time::timeout(SOON, async {
            loop {
                last = json!([self.says("/is_paused", "is_paused").await, self.says("/weight_info", "weight_version").await]);
                if last == json!([false, "default"]) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        assert!(asked.await.is_ok(), "the server still says {last}");
    }

    /// What an agent leaves that was killed in the middle of an update.
    async fn leave_half_an_update(&self) {
        self.post("/pause?mode=keep", &json!({})).await;
        self.post("/update_weight_version", &json!({"new_version": format!("installing:2+{}", "0".repeat(64))})).await;
    }
}

fn engine_at(port: u16) -> EngineAssignment {
    EngineAssignment { kind: "vllm".into(), port }
}

/// The adapters of real servers.
fn vllm(folder: &Path) -> EngineFactory {
    let versions = folder.join("versions");
    Arc::new(move |engine: &EngineAssignment, registered: Option<&Registered>| {
        let address = registered.and_then(|registered| registered.address);
        let host = address.map_or_else(|| "127.0.0.1".to_owned(), |address| address.to_string());
        weightsync_engine::connect(EngineConfig {
            kind: "vllm".into(),
            url: format!("http://{host}:{}", engine.port),
            api_key: None,
            served_model: None,
            record: Some(versions.join(format!("engine-{}.json", engine.port))),
            owner: "test".into(),
            processes: "/proc".into(),
            unproven_routes: false,
        })
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn pod_without_its_object_is_as_ready_as_its_engine() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start(folder.path());
    let operator = Operator::start().await;
    let listed =
        Assignment { registered: false, serve_before_first_version: false, engines: vec![engine_at(server.port)], ..assignment(&[]) };
    let held = operator.claim_with("object", &["w"], &listed, None);
    let agent = Agent::start_over(&operator, "w", folder.path(), vllm(folder.path()));
    agent.until_ready_says(503, "no version yet").await;
    drop(held);
    operator.directory.remove("object");
    agent.until_ready_says(200, "ok").await;

    server.signal(Signal::STOP);
    // Three probes of 3 s each, and a look whether it computes: this takes 12 s at least.
    agent.until_ready_within(3 * SOON, 503, "health probes").await;
    server.signal(Signal::CONT);
    agent.until_ready_says(200, "ok").await;
    server.kill().await;
    agent.until_ready_says(503, "").await;
    server.start_again();
    agent.until_ready_says(200, "ok").await;
    agent.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pod_without_its_object_forgets_engines_that_end() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let (one, mut two) = (Server::start(folder.path()), Server::start(folder.path()));
    let operator = Operator::start().await;
    let planner = Planner::start_for(&operator, "x", false);
    let agent = Agent::start_over(&operator, "x", folder.path(), vllm(folder.path()));
    let (_first, second) = (Process::start("weightsync/uid-x", one.port, ""), Process::start("weightsync/uid-x", two.port, ""));
    let mut ports = [one.port, two.port];
    ports.sort_unstable();
    agent.until_engines(&ports).await;
    drop(planner);
    operator.directory.remove("object");
    agent.until_ready_says(200, "ok").await;
    two.kill().await;
    agent.until_ready_says(503, "").await;
    drop(second);
    agent.until_ready_says(200, "ok").await;
    agent.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_whose_registration_ends_half_way_runs_again() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path());
    server.leave_half_an_update().await;
    let operator = Operator::start().await;
    let _planner = Planner::start(&operator, "y");
    let agent = Agent::start_over(&operator, "y", folder.path(), vllm(folder.path()));
    let process = Process::start("weightsync/uid-y", server.port, "");
    agent.until_ready_says(503, "must not serve before it is fed").await;
    assert_eq!(server.says("/is_paused", "is_paused").await, json!(true));
    // The process that registered it ends; the server does not.
    drop(process);
    // Its start-up weights are no version: the pod must not serve them in between.
    let left = async {
        loop {
            let (status, text) = agent.page("/readyz").await;
            assert_eq!(status, 503, "the engine left, and the pod is ready: {text}");
            if text.contains("no engine has registered yet") {
                break;
            }
        }
    };
    tokio::time::timeout(SOON, left).await.unwrap();
    server.until_it_runs().await;
    agent.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_that_cannot_start_again_ends_no_other() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let operator = Operator::start().await;
    let mut planner = Planner::start(&operator, "z");
    let agent = Agent::start(&operator, "z", folder.path());
    let mut one = Process::start("weightsync/uid-z", 8001, "");
    agent.until_engines(&[8001]).await;
    let before = agent.directory_of(8001);
    // What a switch that takes long still holds.
    let held = agent.hold_directory_of(8002);
    let mut two = Process::start("weightsync/uid-z", 8002, "");
    planner.until("z", &[8001, 8002]).await;
    agent.until_ready_says(503, "the engine on port 8002 takes no part yet").await;
    assert_eq!(agent.directory_of(8001), before, "the endpoint of the other engine was made again");
    drop(held);
    agent.until_engines(&[8001, 8002]).await;
    agent.until_ready_says(200, "ok").await;
    assert_eq!(agent.directory_of(8001), before);
    for process in [&mut one, &mut two] {
        process.child.kill().await.unwrap();
    }
    agent.end().await;
}

/// A new controller knows no engine of a pod before its agent reports.
#[tokio::test(flavor = "multi_thread")]
async fn engines_outlast_a_controller_that_knows_none() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let operator = Operator::start().await;
    let planner = Planner::start(&operator, "u");
    let agent = Agent::start(&operator, "u", folder.path());
    let _process = Process::start("weightsync/uid-u", 8001, "");
    agent.until_engines(&[8001]).await;
    let before = agent.directory_of(8001);
    drop(planner);
    operator.directory.unsettle();
    let mut next = Planner::start(&operator, "u");
    operator.directory.settle();
    // Reported at once, and not with the next report in its turn: that would come after a new group.
    let begun = std::time::Instant::now();
    next.until("u", &[8001]).await;
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    assert_eq!(agent.directory_of(8001), before, "the endpoint was made again");
    agent.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_that_registers_another_address_is_asked_there() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let operator = Operator::start().await;
    let _planner = Planner::start(&operator, "v");
    let (seen, mut asked) = tokio::sync::mpsc::unbounded_channel();
    let engines: EngineFactory = Arc::new(move |_, registered| {
        seen.send(registered.cloned().unwrap_or_default()).unwrap();
        Ok(Arc::new(super::Idle))
    });
    let agent = Agent::start_over(&operator, "v", folder.path(), engines);
    let _first = Process::start("weightsync/uid-v", 8001, "");
    assert_eq!(tokio::time::timeout(SOON, asked.recv()).await.unwrap(), Some(Registered::default()));
    let _second = Process::start("weightsync/uid-v", 8001, "127.0.0.1");
    let there = Registered { address: Some("127.0.0.1".parse().unwrap()), api_key: None };
    assert_eq!(tokio::time::timeout(SOON, asked.recv()).await.unwrap(), Some(there));
    agent.end().await;
}

/// Any container of a pod may register a port: the pod's key for its engine is sent to none of them.
#[tokio::test(flavor = "multi_thread")]
async fn registered_engine_is_sent_its_own_key_and_no_other() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let operator = Operator::start().await;
    let _planner = Planner::start(&operator, "k");
    let (seen, mut asked) = tokio::sync::mpsc::unbounded_channel();
    let engines: EngineFactory = Arc::new(move |_, registered| {
        seen.send(registered.unwrap().api_key.as_ref().map(|key| key.text().to_owned())).unwrap();
        Ok(Arc::new(super::Idle))
    });
    let agent = Agent::start_over(&operator, "k", folder.path(), engines);
    let registers = "
import sys, weightsync
held = [weightsync.register_engine(8001), weightsync.register_engine(8002, api_key='the-key')]
sys.stdin.read()
";
    let mut command = Command::new("python3");
    command.args(["-c", registers]).env("WEIGHTSYNC_SOCKET", "weightsync/uid-k").stdin(std::process::Stdio::piped()).kill_on_drop(true);
    let _process = command.env("PYTHONPATH", Path::new(env!("CARGO_MANIFEST_DIR")).join("python")).spawn().unwrap();
    let mut keys = Vec::new();
    for _ in 0..2 {
        keys.push(tokio::time::timeout(SOON, asked.recv()).await.unwrap().unwrap());
    }
    keys.sort();
    assert_eq!(keys, [None, Some("the-key".to_owned())]);
    agent.end().await;
}

//! Engines that register with the agent of their pod: real processes with the Python client, a real agent and a real enrolment server.

use std::collections::HashMap;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio_util::task::AbortOnDropHandle;
use weightsync_coordinator::{Addresses, CoordinatorHandle, Registered};
use weightsync_core::protocol::*;
use weightsync_core::weights::IgnoredTensors;

use super::{Agent, Operator, SOON};

const OBJECT: &str = "object";

/// Registers the engine on the port that it was given; prints each answer, and ends with its input.
const ENGINE: &str = r#"
import json, sys
import weightsync
port, address = int(sys.argv[1]), sys.argv[2] or None
try:
    held = weightsync.register_engine(port, address, timeout=20)
    print(json.dumps({"registered": held.port}), flush=True)
except weightsync.WeightSyncError as error:
    print(json.dumps({"refused": type(error).__name__, "message": error.message}), flush=True)
sys.stdin.read()
"#;

/// The process of an engine.
pub(super) struct Process {
    pub(super) child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    pub(super) fn start(socket: &str, port: u16, address: &str) -> Self {
        let mut command = Command::new("python3");
        command.args(["-c", ENGINE, &port.to_string(), address]).env("WEIGHTSYNC_SOCKET", socket);
        command.env("PYTHONPATH", Path::new(env!("CARGO_MANIFEST_DIR")).join("python"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    async fn answer(&mut self) -> Value {
        let line = tokio::time::timeout(SOON, self.lines.next_line()).await.expect("an engine hears of its registration");
        serde_json::from_str(&line.unwrap().expect("an engine prints what it heard")).unwrap()
    }
}

pub(super) fn assignment(ports: &[u16]) -> Assignment {
    Assignment {
        role: Role::Rollout,
        engines: ports.iter().map(|port| EngineAssignment { kind: "idle".into(), port: *port }).collect(),
        registered: true,
        serve_before_first_version: true,
        current: None,
        returned: None,
        newest: None,
        suspended: false,
        hindrance: None,
        ignored: IgnoredTensors::default(),
        transport: TransportPolicy::default(),
    }
}

/// An object whose pod has the engines that register, and the planner that follows them.
pub(super) struct Planner {
    registered: tokio::sync::watch::Receiver<Registered>,
    _coordinator: CoordinatorHandle,
    _task: AbortOnDropHandle<()>,
}

impl Planner {
    pub(super) fn start(operator: &Operator, pod: &str) -> Self {
        Self::start_for(operator, pod, true)
    }

    /// The same; with `serves` its engines may serve before the first version.
    pub(super) fn start_for(operator: &Operator, pod: &str, serves: bool) -> Self {
        let assignment = move |ports: &[u16]| Assignment { serve_before_first_version: serves, ..assignment(ports) };
        let coordinator = operator.claim_with(OBJECT, &[pod], &assignment(&[]), None);
        let registered = operator.directory.registered(OBJECT).unwrap();
        let (mut changes, directory, uid) = (registered.clone(), operator.directory.clone(), format!("uid-{pod}"));
        let task = tokio::spawn(async move {
            while changes.changed().await.is_ok() {
                let ports = changes.borrow_and_update().get(&uid).cloned().unwrap_or_default();
                directory.claim(OBJECT, HashMap::from([(uid.clone(), assignment(&ports))]), Addresses::Callers);
            }
        });
        Self { registered, _coordinator: coordinator, _task: AbortOnDropHandle::new(task) }
    }

    /// Waits until exactly these engines are registered with the pod's agent.
    pub(super) async fn until(&mut self, pod: &str, ports: &[u16]) {
        let uid = format!("uid-{pod}");
        let waited = tokio::time::timeout(SOON, self.registered.wait_for(|all| all.get(&uid).is_some_and(|found| found == ports)));
        let waited = waited.await.is_ok_and(|found| found.is_ok());
        assert!(waited, "{ports:?} were never registered: {:?}", self.registered.borrow());
    }
}

impl Agent {
    /// Waits until its metrics show the engines of exactly these ports as healthy.
    pub(super) async fn until_engines(&self, ports: &[u16]) {
        let wanted: Vec<String> = ports.iter().map(|port| format!("weightsync_agent_engine_healthy{{port=\"{port}\"}} 1")).collect();
        let mut last = Vec::new();
        let found = tokio::time::timeout(SOON, async {
            loop {
                let (_, text) = self.page("/metrics").await;
                let shown = text.lines().filter(|line| line.starts_with("weightsync_agent_engine_healthy{"));
                last = shown.map(str::to_owned).collect();
                last.sort();
                if last == wanted {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        assert!(found.await.is_ok(), "never {wanted:?}, last {last:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn registered_engines_come_and_go_with_their_processes() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let operator = Operator::start().await;
    let mut planner = Planner::start(&operator, "r");
    let agent = Agent::start(&operator, "r", folder.path());
    agent.until_ready_says(503, "no engine has registered yet").await;

    let mut one = Process::start("weightsync/uid-r", 8001, "");
    assert_eq!(one.answer().await, json!({"registered": 8001}));
    planner.until("r", &[8001]).await;
    agent.until_ready_says(200, "ok").await;
    let mut two = Process::start("weightsync/uid-r", 8002, "127.0.0.1");
    assert_eq!(two.answer().await, json!({"registered": 8002}));
    agent.until_engines(&[8001, 8002]).await;

    // A process that is killed says nothing to anyone.
    one.child.kill().await.unwrap();
    planner.until("r", &[8002]).await;
    agent.until_engines(&[8002]).await;

    // The port is taken by another process; the other engine never noticed.
    let mut again = Process::start("weightsync/uid-r", 8001, "");
    assert_eq!(again.answer().await, json!({"registered": 8001}));
    agent.until_engines(&[8001, 8002]).await;
    agent.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_return_to_an_agent_that_started_again() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let operator = Operator::start().await;
    let mut planner = Planner::start(&operator, "s");
    let agent = Agent::start(&operator, "s", folder.path());
    let mut engine = Process::start("weightsync/uid-s", 8001, "");
    assert_eq!(engine.answer().await, json!({"registered": 8001}));
    planner.until("s", &[8001]).await;
    agent.end().await;

    // The controller never learns of a pod without engines: those of the pod return before the agent reports.
    let mut seen = planner.registered.clone();
    seen.mark_unchanged();
    let agent = Agent::start(&operator, "s", folder.path());
    agent.until_engines(&[8001]).await;
    drop(engine);
    planner.until("s", &[]).await;
    agent.until_ready_says(503, "no engine has registered yet").await;
    assert!(seen.has_changed().unwrap() && seen.borrow()["uid-s"].is_empty());
    agent.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_of_another_pod_or_a_trainer_is_refused() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let operator = Operator::start().await;
    let mut planner = Planner::start(&operator, "t");
    let agent = Agent::start(&operator, "t", folder.path());
    let mut foreign = Process::start("weightsync/uid-t", 8001, "192.0.2.1");
    let refused = foreign.answer().await;
    assert_eq!(refused["refused"], "Refused");
    assert!(refused["message"].as_str().unwrap().contains("192.0.2.1 is no address of this pod"), "{refused}");

    // A trainer that connects here learns that it is wrong, at once.
    let publish = r"
import weightsync
source = weightsync.stream(lambda: [('w', b'1234')], [('w', 'F32', (1,))])
try:
    weightsync.Publisher.from_env(socket='weightsync/uid-t').publish(source, 1)
except weightsync.NotAllowed as error:
    print(error.message)
";
    let mut command = Command::new("python3");
    command.args(["-c", publish]).env("PYTHONPATH", Path::new(env!("CARGO_MANIFEST_DIR")).join("python")).kill_on_drop(true);
    let output = tokio::time::timeout(SOON, command.output()).await.expect("a trainer is refused at once").unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("this is the agent of a rollout's pod"), "{text}");
    planner.until("t", &[]).await;
    agent.end().await;
}

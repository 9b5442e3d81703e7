//! A group of real processes for one test: `weightsync local` with its agents, simulated engines, and publishes from other processes.
//!
//! Every wait ends; when a test fails, the group's output and the ends of all logs are printed. Nothing outlives a world.

mod actor;
mod ending;
pub mod files;
mod processes;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::watch;

pub use self::actor::Actor;
use self::actor::engine;
use self::processes::agent_of;
use crate::gpu::fixture::{Machine, uuid};
use crate::model::Model;

/// The program under test.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_weightsync");
/// Longest wait for anything that is to happen; far above what a busy machine takes, or one that is emulated on a busy machine.
pub const SOON: Duration = Duration::from_secs(180);

static WORLDS: AtomicU32 = AtomicU32::new(0);

/// A running group.
pub struct World {
    folder: tempfile::TempDir,
    local: Child,
    /// Of it, and of engines that are started next to it.
    environment: Vec<(&'static str, String)>,
    pub socket: String,
    events: watch::Receiver<Vec<Value>>,
    actors: Vec<Actor>,
    /// Loopback address of everything in it.
    address: IpAddr,
    ports: Vec<u16>,
    late: Vec<Child>,
    pub http: reqwest::Client,
}

/// What a group is started with.
struct Setup<'a> {
    program: &'a Path,
    delivery: &'static str,
    machine: Option<&'a Machine>,
    transport: Value,
    /// What engines start with.
    model: Model,
    update: Value,
    /// Loopback address of everything in the group.
    address: IpAddr,
    /// Whether the program reads the file of earlier builds.
    earlier: bool,
}

impl<'a> Setup<'a> {
    fn usual() -> Self {
        Self {
            program: Path::new(PROGRAM),
            delivery: "Agent",
            machine: None,
            transport: transport_of_stories(),
            model: Model::small(0),
            update: json!({}),
            address: Ipv4Addr::LOCALHOST.into(),
            earlier: false,
        }
    }

    fn on(machine: &'a Machine) -> Self {
        Self { machine: Some(machine), model: Model::large(0), ..Self::usual() }
    }
}

/// How a publish ended.
#[derive(Debug)]
pub struct Published {
    pub code: i32,
    /// A `PublishResult`, or `{"error": PublishError}`.
    pub outcome: Value,
}

impl Published {
    /// The result of a publish that went well.
    pub fn done(self) -> Value {
        assert_eq!(self.code, 0, "{}", self.outcome);
        self.outcome
    }

    /// The error of one that did not.
    pub fn failed(self) -> Value {
        assert_ne!(self.code, 0, "{}", self.outcome);
        self.outcome["error"].clone()
    }
}

/// Names of those that a result says serve the version, without their pools.
pub fn installed(result: &Value) -> Vec<&str> {
    result["installed"].as_array().unwrap().iter().map(|name| short(name.as_str().unwrap())).collect()
}

/// The name of a member without its pool.
pub fn short(member: &str) -> &str {
    member.split_once('/').map_or(member, |(_, name)| name)
}

/// Whether a value names this member, with its pool or without.
pub fn is_member(value: &Value, member: &str) -> bool {
    value.as_str().is_some_and(|name| name == member || short(name) == member)
}

/// Why a member does not serve the version, by a result.
pub fn behind<'a>(result: &'a Value, member: &str) -> &'a str {
    let rows = result["behind"].as_array().unwrap();
    let row = rows.iter().find(|row| is_member(&row[0], member)).unwrap_or_else(|| panic!("{member} is not behind: {result}"));
    row[1].as_str().unwrap()
}

/// One rule that spoils calls.
pub fn spoiled(path: &str, fault: &Value) -> Value {
    json!({"rules": [{"path": path, "fault": fault}]})
}

/// 503 to a call.
pub fn unavailable() -> Value {
    json!({"kind": "answer", "status": 503, "body": {"detail": "Service Unavailable"}})
}

impl World {
    /// Starts a group; `update` has fields of the spec's parts `update`, `membership` and `health`, and may have its `canary`. Engines start with version 0 of [`crate::model::Model::small`].
    pub async fn start(update: Value, actors: impl IntoIterator<Item = Actor>) -> Self {
        Self::start_with(&Model::small(0), update, actors).await
    }

    /// Starts a group whose parts listen at that loopback address, and connect to each other there.
    pub async fn start_at(address: IpAddr, actors: impl IntoIterator<Item = Actor>) -> Self {
        Self::start_as(Setup { address, ..Setup::usual() }, actors).await
    }

    /// Starts a group whose engines start with that model.
    pub async fn start_with(model: &Model, update: Value, actors: impl IntoIterator<Item = Actor>) -> Self {
        Self::start_from(Path::new(PROGRAM), model, update, actors).await
    }

    /// Starts a group of the build in that file: its coordinator, and agents for as long as that is the build there.
    pub async fn start_from(program: &Path, model: &Model, update: Value, actors: impl IntoIterator<Item = Actor>) -> Self {
        Self::start_as(Setup { program, model: model.clone(), update, ..Setup::usual() }, actors).await
    }

    /// As [`start_from`](Self::start_from), with a build that reads the file of earlier builds.
    pub async fn start_earlier(program: &Path, actors: impl IntoIterator<Item = Actor>) -> Self {
        Self::start_as(Setup { program, earlier: true, ..Setup::usual() }, actors).await
    }

    /// Starts a group whose trainer has the first GPU of a machine, and whose rollouts have the next ones; `transport` is the part of the
    /// same name of the spec.
    pub async fn start_on(machine: &Machine, transport: Value, update: Value, actors: impl IntoIterator<Item = Actor>) -> Self {
        Self::start_as(Setup { transport, update, ..Setup::on(machine) }, actors).await
    }

    /// As [`start_on`](Self::start_on), with the program in that file.
    pub async fn start_on_by(program: &Path, machine: &Machine, transport: Value, actors: impl IntoIterator<Item = Actor>) -> Self {
        Self::start_as(Setup { program, transport, ..Setup::on(machine) }, actors).await
    }

    /// As [`start_on`](Self::start_on), with engines that join a group by themselves, whose ranks are on the GPUs of their rollouts.
    pub async fn start_joining(machine: &Machine, update: Value, actors: impl IntoIterator<Item = Actor>) -> Self {
        let transport = json!({"type": "NCCL", "bucketMiB": 1});
        Self::start_as(Setup { delivery: "Engine", transport, update, ..Setup::on(machine) }, actors).await
    }

    /// Starts a group over that transport, with the defaults of everything else.
    pub async fn start_over(transport: Value, actors: impl IntoIterator<Item = Actor>) -> Self {
        Self::start_as(Setup { transport, ..Setup::usual() }, actors).await
    }

    /// Starts a group whose weights travel in the trainer's own data plane.
    pub async fn start_external(update: Value, actors: impl IntoIterator<Item = Actor>) -> Self {
        Self::start_as(Setup { delivery: "External", transport: json!({}), update, ..Setup::usual() }, actors).await
    }

    async fn start_as(setup: Setup<'_>, actors: impl IntoIterator<Item = Actor>) -> Self {
        let Setup { program, delivery, machine, transport, model, update, address, earlier } = setup;
        let folder = tempfile::tempdir().unwrap();
        model.save(&folder.path().join("start"));
        let name = format!("t{}-{}", std::process::id(), WORLDS.fetch_add(1, Ordering::Relaxed));
        let actors: Vec<Actor> = actors.into_iter().collect();
        let ports: Vec<u16> = actors.iter().map(|_| weightsync_coordinator::local::free_port().unwrap()).collect();
        let rollouts: Vec<Value> = actors.iter().zip(&ports).enumerate().map(|(number, (actor, port))| {
            let own = u32::try_from(number).unwrap() + 1;
            let gpus = machine.map(|_| uuid(actor.gpu.unwrap_or(own))).into_iter().collect::<Vec<_>>();
            let mut command = if actor.absent { Vec::new() } else { engine(actor, SocketAddr::new(address, *port), folder.path()) };
            if !command.is_empty() && !command.iter().any(|word| word == "--gpu") {
                // The engine is on its agent's GPU, and reads what is handed over there.
                command.extend(gpus.iter().flat_map(|gpu| ["--gpu".to_owned(), gpu.clone()]));
            }
            json!({"name": format!("actor-{number}"), "pool": files::pools(&actors)[number], "port": port, "command": command, "gpus": gpus})
        }).collect();
        let processes = json!({
            "apiVersion": "weightsync.dev/v1alpha1", "kind": "LocalProcesses",
            "versions": folder.path().join("versions"),
            "trainer": {"gpu": machine.map(|_| uuid(0))},
            "rollouts": rollouts,
        });
        let object = files::object(&name, &actors, transport, delivery, update);
        std::fs::write(folder.path().join(files::OBJECT), object.to_string()).unwrap();
        std::fs::write(folder.path().join(files::PROCESSES), processes.to_string()).unwrap();
        if earlier {
            files::write_earlier(folder.path());
        }
        let environment = machine.map(Machine::environment).unwrap_or_default();
        let (local, events) = start_local(program, address, folder.path(), &environment);
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(5)).build().unwrap();
        let socket = format!("@weightsync/{name}-trainer");
        let mut world = Self { folder, local, environment, socket, events, actors, address, ports, late: Vec::new(), http };
        world.event("the group to start", |event| event["event"] == "started").await;
        world
    }

    /// Process id of the program that started the group, its coordinator.
    pub fn coordinator(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.local.id().unwrap()).unwrap()).unwrap()
    }

    /// Address of the web page.
    pub fn web_page(&self) -> String {
        let events = self.events.borrow();
        let started = events.iter().rev().find(|event| event["event"] == "started").unwrap();
        started["ui"].as_str().unwrap().to_owned()
    }

    /// Kills the program that started the group, and nothing else.
    pub fn kill(&self) {
        kill_process(self.coordinator(), Signal::KILL).unwrap();
    }

    /// Starts the group again from its file, after it was killed.
    pub async fn restart(&mut self) {
        self.local.wait().await.unwrap();
        (self.local, self.events) = start_local(Path::new(PROGRAM), self.address, self.folder.path(), &self.environment);
        self.event("the group to start", |event| event["event"] == "started").await;
    }

    /// Folder for files of the test.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Writes a target version into the group's file, or takes it away, and has it read again.
    pub async fn target(&mut self, target: Option<u64>) {
        let path = self.folder.path().join(files::OBJECT);
        let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        file["spec"].as_object_mut().unwrap().remove("targetVersion");
        file["spec"].as_object_mut().unwrap().extend(target.map(|target| ("targetVersion".to_owned(), json!(target))));
        std::fs::write(&path, file.to_string()).unwrap();
        let reloads = |events: &Vec<Value>| events.iter().filter(|event| event["event"] == "reloaded").count();
        let before = reloads(&self.events.borrow());
        let local = Pid::from_raw(i32::try_from(self.local.id().unwrap()).unwrap()).unwrap();
        kill_process(local, Signal::HUP).unwrap();
        let waited = tokio::time::timeout(SOON, self.events.wait_for(|events| reloads(events) > before)).await;
        assert!(waited.is_ok(), "the file is read again");
    }

    /// Where an engine listens.
    fn at(&self, number: usize) -> SocketAddr {
        SocketAddr::new(self.address, self.ports[number])
    }

    /// Port of an engine.
    pub fn port(&self, number: usize) -> u16 {
        self.ports[number]
    }

    /// Starts an engine that was absent.
    pub fn start_engine(&mut self, number: usize) {
        let command = engine(&self.actors[number], self.at(number), self.folder.path());
        let environment = self.environment.clone();
        let child = Command::new(&command[0]).args(&command[1..]).envs(environment).stdout(Stdio::null()).kill_on_drop(true).spawn();
        self.late.push(child.unwrap());
    }

    /// Waits for an event of the group.
    pub async fn event(&mut self, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let found = |events: &Vec<Value>| events.iter().find(|event| is(event)).cloned();
        let waited = tokio::time::timeout(SOON, self.events.wait_for(|events| found(events).is_some())).await;
        match waited {
            Ok(Ok(events)) => found(&events).unwrap(),
            _ => panic!("waited for {what}"),
        }
    }

    /// Waits until the group reports that reason for that member.
    pub async fn reported(&mut self, reason: &str, member: &str) -> String {
        self.reported_saying(reason, member, "").await
    }

    /// The same, with a message that has this part: an engine that was asked before it listened was reported as unhealthy before.
    pub async fn reported_saying(&mut self, reason: &str, member: &str, part: &str) -> String {
        let is = |event: &Value| {
            let says = event["message"].as_str().is_some_and(|message| message.contains(part));
            event["reason"] == reason && is_member(&event["member"], member) && says
        };
        let event = self.event(&format!("{reason} of {member}: {part}"), is).await;
        event["message"].as_str().unwrap().to_owned()
    }

    /// How many events of the group have that reason and that member.
    pub fn events_of(&self, reason: &str, member: &str) -> usize {
        self.events.borrow().iter().filter(|event| event["reason"] == reason && is_member(&event["member"], member)).count()
    }

    /// Runs `weightsync publish` on a checkpoint, to its end.
    pub async fn publish(&self, checkpoint: &Path, version: u64, more: &[&str]) -> Published {
        let mut command = Command::new(PROGRAM);
        command.arg("publish").arg(checkpoint).args(["--version", &version.to_string(), "--socket", &self.socket, "--output", "json"]);
        command.args(more).stdin(Stdio::null()).kill_on_drop(true);
        let output = tokio::time::timeout(SOON, command.output()).await.expect("a publish ends").unwrap();
        let outcome = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
        Published { code: output.status.code().unwrap_or_else(|| output.status.signal().unwrap()), outcome }
    }

    /// Runs `weightsync publish` on a checkpoint, and kills it once its progress says so. False when it was done before its progress did: progress
    /// that is overtaken by later progress is not printed.
    pub async fn publish_and_kill(&self, checkpoint: &Path, version: u64, says: &str) -> bool {
        let mut command = Command::new(PROGRAM);
        command.arg("publish").arg(checkpoint).args(["--version", &version.to_string(), "--socket", &self.socket]);
        let mut trainer = command.stdin(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
        let mut lines = BufReader::new(trainer.stderr.take().unwrap()).lines();
        let said = async {
            while let Some(line) = lines.next_line().await.unwrap() {
                if line.contains(says) {
                    return true;
                }
            }
            false
        };
        let said = tokio::time::timeout(SOON, said).await.unwrap_or_else(|_| panic!("waited for {says}"));
        if said {
            trainer.kill().await.unwrap();
        } else {
            assert!(trainer.wait().await.unwrap().success(), "a publish that was not killed failed");
        }
        said
    }

    /// What an engine's simulator says at a path of its own, `digest`, `calls` or `faults`.
    pub async fn simulator(&self, number: usize, path: &str) -> Value {
        self.get(number, &format!("/simulator/{path}")).await
    }

    /// What an engine answers; null when it does not.
    pub async fn get(&self, number: usize, path: &str) -> Value {
        let answer = self.http.get(format!("http://{}{path}", self.at(number))).send().await;
        match answer {
            Ok(answer) => answer.json().await.unwrap_or_default(),
            Err(_) => Value::Null,
        }
    }

    /// Replaces what goes wrong in an engine.
    pub async fn spoil(&self, number: usize, faults: &Value) {
        let url = format!("http://{}/simulator/faults", self.at(number));
        let answer = self.http.post(url).json(faults).send().await.unwrap();
        assert_eq!(answer.status(), 200, "{faults}");
    }

    /// Posts to an engine.
    pub async fn post(&self, number: usize, path: &str, body: &Value) {
        let url = format!("http://{}{path}", self.at(number));
        let answer = self.http.post(url).json(body).send().await.unwrap();
        assert_eq!(answer.status(), 200, "{path}");
    }

    /// Whether an engine serves exactly that model.
    pub async fn serves(&self, number: usize, model: &Model) -> bool {
        self.simulator(number, "digest").await["tensors"] == model.digests()
    }

    /// Waits until an engine serves exactly that model.
    pub async fn until_serves(&self, number: usize, model: &Model) {
        until(&format!("actor-{number} to serve the version"), || self.serves(number, model)).await;
    }

    /// How often an engine was asked to load weights.
    pub async fn loads(&self, number: usize) -> usize {
        let calls = self.simulator(number, "calls").await;
        // Every load comes after a pause.
        calls.as_array().unwrap().iter().filter(|call| call.as_str().unwrap().starts_with("POST /pause")).count()
    }

    /// Address of an agent's status pages, from its log.
    fn pages(&self, pod: &str) -> Option<String> {
        let log = std::fs::read_to_string(self.folder.path().join(format!("state/{pod}-agent.log"))).ok()?;
        let line = log.lines().rfind(|line| line.contains("status pages"))?;
        // The address is the end of the line, after a colour.
        let address = line.trim_end().rsplit(|c: char| !c.is_ascii_hexdigit() && !".:[]".contains(c)).next()?;
        Some(format!("http://{address}"))
    }

    /// Status and text of a page of an agent; 0 when it does not answer.
    pub async fn page(&self, pod: &str, path: &str) -> (u16, String) {
        let Some(pages) = self.pages(pod) else { return (0, String::new()) };
        match self.http.get(format!("{pages}{path}")).send().await {
            Ok(answer) => (answer.status().as_u16(), answer.text().await.unwrap_or_default()),
            Err(_) => (0, String::new()),
        }
    }

    /// Port of an agent's status pages.
    pub fn status_port(&self, pod: &str) -> u16 {
        self.pages(pod).and_then(|url| url.rsplit(':').next()?.parse().ok()).unwrap()
    }

    /// The roster from an agent; null if it does not respond.
    pub async fn roster(&self, pod: &str) -> Value {
        serde_json::from_str(&self.page(pod, "/v1/roster").await.1).unwrap_or_default()
    }

    /// Names of replicas in a state, by the trainer's agent.
    pub async fn replicas(&self, state: &str) -> Vec<String> {
        let roster = self.roster("trainer").await;
        let replicas = roster["replicas"].as_array().cloned().unwrap_or_default();
        replicas
            .iter()
            .filter(|replica| replica["state"] == state)
            .map(|replica| short(replica["name"].as_str().unwrap()).to_owned())
            .collect()
    }

    /// Waits until that many replicas are ready.
    pub async fn until_ready(&self, count: usize) {
        until(&format!("{count} replicas to be ready"), || async { self.replicas("ready").await.len() == count }).await;
    }

    /// Process id of a pod's agent, once it runs.
    pub async fn agent(&self, pod: &str) -> Pid {
        let local = self.local.id().unwrap();
        let deadline = tokio::time::Instant::now() + SOON;
        loop {
            if let Some(pid) = agent_of(local, pod) {
                return pid;
            }
            assert!(tokio::time::Instant::now() < deadline, "no agent of {pod}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Sends a signal to a pod's agent.
    pub async fn signal(&self, pod: &str, signal: Signal) {
        kill_process(self.agent(pod).await, signal).unwrap();
    }
}

/// Starts `weightsync local` on the file in the folder; answers what it prints, too.
fn start_local(
    program: &Path,
    address: IpAddr,
    folder: &Path,
    environment: &[(&'static str, String)],
) -> (Child, watch::Receiver<Vec<Value>>) {
    let mut local = Command::new(program)
        .args(["local", "--output", "json"])
        .args(files::arguments(folder))
        // An earlier build has no page.
        .args((program == Path::new(PROGRAM)).then_some("--ui"))
        // Nor does one know this option.
        .args(address.is_ipv6().then_some(["--address".to_owned(), address.to_string()]).into_iter().flatten())
        .envs(environment.iter().cloned())
        .stdout(Stdio::piped())
        .stderr(std::fs::File::options().create(true).append(true).open(folder.join("local.log")).unwrap())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(local.stdout.take().unwrap()).lines();
    let (tell, events) = watch::channel(Vec::new());
    tokio::spawn(async move {
        while let Ok(Some(line)) = lines.next_line().await {
            tell.send_modify(|events: &mut Vec<Value>| events.push(serde_json::from_str(&line).unwrap()));
        }
    });
    (local, events)
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.evidence();
        }
        self.stop();
    }
}

/// Waits for a condition.
pub async fn until<F: Future<Output = bool>>(what: &str, mut condition: impl FnMut() -> F) {
    let pause = Duration::from_millis(20);
    let waiting = async {
        while !condition().await {
            tokio::time::sleep(pause).await;
        }
    };
    tokio::time::timeout(SOON, waiting).await.unwrap_or_else(|_| panic!("waited for {what}"));
}

/// How bytes travel in stories that name no transport: TCP, or reads through NIXL where WEIGHTSYNC_STORIES_OVER is `gdr` (over TCP) or `verbs`
/// (over the RDMA device of this host).
fn transport_of_stories() -> Value {
    match std::env::var("WEIGHTSYNC_STORIES_OVER").as_deref() {
        Ok("gdr") => json!({"type": "GDR", "bucketMiB": 1, "allowTcp": true}),
        Ok("verbs") => json!({"type": "GDR", "bucketMiB": 1}),
        _ => json!({"type": "TCP"}),
    }
}

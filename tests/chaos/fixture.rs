//! A world: the group that `weightsync local` runs, each pod with a link, a small disk and a clock of its own, and a trainer's process.
//!
//! Starts and ends things, and reports their state; `fault` injects the faults, `checks` decides what must not happen.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::{Pid, Signal};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::process::{Child, Command};
use tokio::sync::{broadcast, watch};
use tokio::time::{Instant, timeout};
use weightsync_coordinator::CoordinatorEvent;
use weightsync_coordinator::local::{EngineProgram, Group, GroupSpec, PodSpec, default_policy};
use weightsync_core::membership::{GroupStage, JoinPolicy, MemberStanding, MemberView, MembershipView};
use weightsync_core::protocol::{
    EngineAssignment, HealthPolicy, MOST_ENGINES, Preflight, Reason, TransportPolicy, TransportWish, UpdatePolicy,
};
use weightsync_core::weights::IgnoredTensors;
use weightsync_testkit::liar::{INSTANCE, Lie};
use weightsync_testkit::simulator::{Simulator, SimulatorOptions};

use crate::checks::{COMPLETIONS, Watcher, is_ready};
use crate::model::Model;
use crate::net::{ENGINE, HERE, Link, STATUS, must};
use crate::plan::{ROLLOUTS, TENSORS};
use crate::trainer::{Outcome, Trainer};
use crate::truth::{Holds, Truth};
use crate::{clock, processes};

/// The program under test.
const PROGRAM: &str = env!("CARGO_BIN_EXE_weightsync");
/// What engines are, in the order of the rollouts.
const KINDS: [&str; ROLLOUTS] = ["vllm", "sglang", "vllm"];
/// The longest update, by the rules of the group.
pub const UPDATE: Duration = Duration::from_secs(15);
/// Time between two probes of an engine, in ms.
pub const HEALTH_PERIOD: u64 = 200;
/// A process that was killed runs again within this.
const AGAIN: Duration = Duration::from_secs(40);
/// A liar in the place of an agent is a member within this: its member may have failed a few times before.
const TAKEN_IN: Duration = Duration::from_secs(45);
/// Every engine takes this long to load, so that an install has a middle.
const LOAD_MS: u64 = 250;

/// A fact from Events or status.
#[derive(Debug, Clone)]
pub struct Said {
    pub at: Instant,
    pub member: Option<String>,
    pub reason: Reason,
    pub message: String,
    /// A warning, or a row of status of a member that is not as it should be.
    pub warning: bool,
}

/// All of it, in order.
pub type Reported = Arc<Mutex<Vec<Said>>>;

pub struct Fixture {
    pub group: Group,
    pub links: Vec<Link>,
    pub trainer: Trainer,
    pub reported: Reported,
    pub watcher: Watcher,
    pub http: reqwest::Client,
    name: String,
    folder: TempDir,
    last: u64,
    /// The processes that registered the engines of rollouts, where engines register.
    registrars: Mutex<BTreeMap<usize, Child>>,
}

/// Name of a pod: 0 is the source.
pub fn pod(number: usize) -> String {
    if number == 0 { "trainer".to_owned() } else { format!("actor-{}", number - 1) }
}

/// Its name in the roster.
pub fn member(number: usize) -> String {
    if number == 0 { "trainer/trainer".to_owned() } else { format!("rollouts/{}", pod(number)) }
}

/// 2 MiB in as many tensors and buckets.
fn model(version: u64) -> Model {
    Model::of(version, (0..TENSORS).map(|layer| (format!("model.layers.{layer}.mlp.weight"), 64 << 10)))
}

/// What engines load with, faults aside.
pub fn usual() -> Value {
    json!({"loadMs": LOAD_MS})
}

impl Fixture {
    /// Starts world `number` and publishes its first version. Its engines are known beforehand, or register.
    pub async fn start(number: usize, shim: &Path, registered: bool) -> Result<Self, String> {
        let folder = tempfile::tempdir().unwrap();
        let name = format!("chaos-{number}");
        let links: Vec<Link> = (0..=ROLLOUTS).map(|pod| Link::new(number, pod)).collect();
        let (state, versions) = (folder.path().join("state"), folder.path().join("versions"));
        small_disk(&state, 8);
        for number in 0..=ROLLOUTS {
            small_disk(&versions.join(pod(number)), 16);
            clock::set(&folder.path().join(format!("{}.clock", pod(number))), 0);
        }
        let start = model(0).save(&folder.path().join("start"));
        let policy = UpdatePolicy {
            silence_ms: 3000,
            update_timeout_ms: u64::try_from(UPDATE.as_millis()).unwrap(),
            retain_bytes: 64 << 20,
            bucket_bytes: 256 << 10,
            // Links that are slow for a moment are faults here, and not how the network is.
            transport: TransportPolicy { wish: TransportWish::Tcp, preflight: Preflight::Off, ..TransportPolicy::default() },
            health: HealthPolicy { period_ms: HEALTH_PERIOD, timeout_ms: 1000, failure_threshold: 3, success_threshold: 1 },
            ..default_policy()
        };
        let spec = GroupSpec {
            name: name.clone(),
            address: HERE.into(),
            directory: state,
            versions,
            pods: (0..=ROLLOUTS).map(|number| pod_spec(number, &name, &links[number], &start, registered)).collect(),
            policy,
            join: JoinPolicy::Immediate,
            debounce: Duration::from_millis(100),
            target: None,
            program: agent_program(folder.path(), shim, &links),
            guard: PathBuf::from(PROGRAM),
        };
        let group = Group::start(spec).await.map_err(|error| error.to_string())?;
        let reported = Reported::default();
        tokio::spawn(keep_events(group.events(), Arc::clone(&reported)));
        tokio::spawn(keep_rows(group.view(), Arc::clone(&reported)));
        let trainer = Trainer::start(&links[0], &format!("@weightsync/{name}-trainer"), &folder.path().join("trainer.log")).await;
        let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(2)).build().unwrap();
        let watcher = Watcher::new();
        let registrars = Mutex::default();
        let mut fixture = Self { group, links, trainer, reported, watcher, http, name, folder, last: 0, registrars };
        for number in (1..=ROLLOUTS).filter(|_| registered) {
            fixture.register(number);
        }
        fixture.add(0).await;
        fixture.watcher.start(&fixture.group, &fixture.links, &fixture.http);
        fixture.until("the group to form", Duration::from_secs(60), |view| view.ready as usize == ROLLOUTS).await?;
        let version = fixture.next_version().await;
        fixture.publish(version, None).await;
        match fixture.trainer.outcome(version).await? {
            Outcome::Published { .. } => {}
            other @ Outcome::Failed { .. } => return Err(format!("the first version was not published: {other:?}")),
        }
        fixture.whole(Duration::from_secs(45)).await?;
        Ok(fixture)
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Disk of the coordinator's epoch and of all logs.
    pub fn state(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    /// Where versions are put for an engine.
    pub fn memory(&self, number: usize) -> PathBuf {
        self.folder.path().join("versions").join(pod(number))
    }

    /// What the coordinator knows now.
    pub fn view(&self) -> MembershipView {
        self.group.view().borrow().clone()
    }

    /// Version that counts now.
    pub fn version(&self) -> u64 {
        self.view().version.map_or(0, |held| held.version)
    }

    /// Makes the next version's checkpoint.
    pub async fn next_version(&mut self) -> u64 {
        self.last += 1;
        self.add(self.last).await;
        self.last
    }

    /// Makes a checkpoint, and learns from an engine that never had another one what it answers.
    async fn add(&mut self, version: u64) {
        let folder = self.folder.path().join(if version == 0 { "start".to_owned() } else { format!("v{version}") });
        let model = model(version);
        model.save(&folder);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let reference = Simulator::start(SimulatorOptions::new("vllm", folder), listener).await.unwrap();
        let answers = async {
            loop {
                if let Some(answer) = crate::checks::answer(&self.http, &reference.url()).await {
                    return answer;
                }
            }
        };
        self.watcher.knows(timeout(AGAIN, answers).await.expect("a reference engine answers"), version, model.digests());
        reference.stop().await;
    }

    /// Makes the trainer publish.
    pub async fn publish(&mut self, version: u64, gate: Option<usize>) {
        let path = self.folder.path().join(format!("v{version}"));
        self.trainer.publish(version, &path, gate).await;
    }

    /// Waits until the coordinator's view is so.
    pub async fn until(&self, what: &str, deadline: Duration, so: impl Fn(&MembershipView) -> bool) -> Result<MembershipView, String> {
        let mut view = self.group.view();
        match timeout(deadline, view.wait_for(|view| so(view))).await {
            Ok(Ok(view)) => return Ok(view.clone()),
            Ok(Err(_)) => return Err(format!("waited for {what}: the coordinator ended")),
            Err(_) => {}
        }
        let view = self.view();
        let rows = view.members.iter().map(|row| format!("{} {:?} {}: {}", row.name, row.standing, row.reason, row.message));
        let rows: Vec<String> = rows.collect();
        Err(format!("waited {deadline:?} for {what}: stage {:?}, version {:?}, {}", view.stage, view.version, rows.join("; ")))
    }

    /// Waits until everybody is in the group and serves the current version. The engines themselves are asked, and must compute a token; the pods
    /// must be ready, and the roster of the trainer's agent must say the same.
    pub async fn whole(&self, deadline: Duration) -> Result<(), String> {
        self.whole_but(None, deadline).await
    }

    /// The same of all rollouts but that one.
    pub async fn whole_but(&self, liar: Option<usize>, deadline: Duration) -> Result<(), String> {
        let until = Instant::now() + deadline;
        // A liar may have more engines than one.
        let others = |row: &MemberView| liar.is_none_or(|number| row.name.voter() != member(number));
        let well = |view: &MembershipView| {
            view.stage == GroupStage::Committed
                && (1..=ROLLOUTS)
                    .filter(|number| Some(*number) != liar)
                    .all(|number| view.members.iter().any(|row| row.name.0 == member(number)))
                && view.members.iter().filter(|row| others(row)).all(|row| row.standing == MemberStanding::Ready && !row.dirty)
        };
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let view = self.until("everybody to be ready", left, well).await?;
            let version = view.version.as_ref().map_or(0, |held| held.version);
            let mut wrong = Vec::new();
            let roster = self.roster().await;
            for number in (1..=ROLLOUTS).filter(|number| Some(*number) != liar) {
                let host = self.host(number);
                let (truth, answered) = self.watcher.truth(&self.http, number, &host).await;
                if truth.holds != Holds::Version(version) || !truth.runs || answered != Some(version) {
                    wrong.push(format!("{} is {truth:?} and answers with {answered:?}", pod(number)));
                }
                if !is_ready(&self.http, &host).await {
                    wrong.push(format!("{} is not ready", pod(number)));
                }
                let rows = roster["replicas"].as_array().into_iter().flatten();
                let row = rows.into_iter().find(|row| row["name"] == member(number)).cloned().unwrap_or_default();
                if row["state"] != "ready" || row["version"] != version {
                    wrong.push(format!("the roster of the trainer's agent says of {}: {row}", pod(number)));
                }
            }
            // A view is older than an answer: only what stays wrong is wrong.
            if wrong.is_empty() {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(format!("all are reported as ready at version {version}, but {}", wrong.join(", ")));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn host(&self, number: usize) -> String {
        format!("http://{}", self.links[number].address)
    }

    /// The roster as the trainer's agent shows it; null when it shows none.
    async fn roster(&self) -> Value {
        let page = async { self.http.get(format!("{}:{STATUS}/v1/roster", self.host(0))).send().await.ok()?.json().await.ok() };
        page.await.unwrap_or_default()
    }

    /// The version whose every tensor an engine holds, byte for byte, and computes with; none for any mixture, and when it does not answer.
    pub async fn serves(&self, number: usize) -> Option<u64> {
        match self.watcher.truth(&self.http, number, &self.host(number)).await {
            (Truth { holds: Holds::Version(version), .. }, answered) => answered.filter(|answered| *answered == version),
            _ => None,
        }
    }

    /// Replaces what goes wrong in an engine; nothing happens to one that is gone.
    pub async fn spoil(&self, number: usize, faults: &Value) {
        let mutes = |rule: &Value| rule["path"] == COMPLETIONS;
        self.watcher.mute(number, faults["rules"].as_array().into_iter().flatten().any(mutes));
        let url = format!("http://{}:{ENGINE}/simulator/faults", self.links[number].address);
        let _ = self.http.post(url).json(faults).send().await;
    }

    /// The process of a pod's agent, once it runs.
    pub async fn agent(&self, number: usize) -> Result<Pid, String> {
        processes::until_child(&self.agent_variable(number), AGAIN, None).await
    }

    /// The process that took the place of that one.
    pub async fn next_agent(&self, number: usize, before: Pid) -> Result<Pid, String> {
        processes::until_child(&self.agent_variable(number), AGAIN, Some(before)).await
    }

    /// The trainer's process knows the socket of its agent as well; the UID of a pod is its agent's alone.
    fn agent_variable(&self, number: usize) -> String {
        format!("POD_UID={}-{}-1", self.name, pod(number))
    }

    /// Has a liar take the place of a pod's agent, and waits until it is in the group as one that does not lie yet.
    pub async fn let_lie(&self, number: usize, lie: Lie) -> Result<Pid, String> {
        let which = Lie::ALL.iter().position(|one| *one == lie).unwrap_or_default();
        std::fs::write(self.folder.path().join(format!("{}.lie", pod(number))), which.to_string()).unwrap();
        self.watcher.lies(number, true);
        let honest = self.agent(number).await?;
        processes::signal(honest, Signal::KILL)?;
        let liar = self.next_agent(number, honest).await?;
        let name = member(number);
        let taken_in = |view: &MembershipView| {
            let row = view.members.iter().find(|row| row.name.0 == name);
            row.is_some_and(|row| row.standing == MemberStanding::Ready && is_liar(row)) && is_whole(view)
        };
        self.until("the liar to be taken in", TAKEN_IN, taken_in).await?;
        Ok(liar)
    }

    /// Has a process register the engine of a pod, for as long as it lives.
    pub fn register(&self, number: usize) {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let log =
            std::fs::OpenOptions::new().create(true).append(true).open(self.folder.path().join(format!("{}-registrar.log", pod(number))));
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.links[number].path().display())).arg("python3.11").arg(root.join("tests/chaos/registrar.py"));
        command.arg(ENGINE.to_string()).env("WEIGHTSYNC_SOCKET", format!("@weightsync/{}-{}", self.name, pod(number)));
        command.env("PYTHONPATH", root.join("python")).env("PYTHONDONTWRITEBYTECODE", "1");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(log.unwrap()).kill_on_drop(true);
        self.registrars.lock().unwrap().insert(number, command.spawn().unwrap());
    }

    /// Registers it once more, and waits until it is a member.
    pub async fn register_again(&self, number: usize) -> Result<(), String> {
        self.register(number);
        let name = member(number);
        self.until("the engine to be a member again", AGAIN, |view| view.members.iter().any(|row| row.name.0 == name)).await?;
        self.watcher.away(number, false);
        Ok(())
    }

    /// Ends that process. What its engine does from now on is no member's.
    pub fn end_registration(&self, number: usize) {
        self.watcher.away(number, true);
        if let Some(mut registrar) = self.registrars.lock().unwrap().remove(&number) {
            registrar.start_kill().unwrap();
        }
    }

    /// The liar of a pod begins to lie.
    pub fn lies(&self, number: usize) {
        std::fs::write(self.folder.path().join(format!("{}.lies", pod(number))), []).unwrap();
    }

    /// All lies of a pod's liar, one line for each.
    pub fn lies_sent(&self, number: usize) -> Vec<Value> {
        let log = std::fs::read_to_string(self.state().join(format!("{}-agent.log", pod(number)))).unwrap_or_default();
        let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter(|line| line["lie"].is_string()).collect()
    }

    /// The honest agent of a pod takes its place again.
    pub async fn end_of_lies(&self, number: usize, liar: Pid) -> Result<(), String> {
        for kind in ["lie", "lies"] {
            let _ = std::fs::remove_file(self.folder.path().join(format!("{}.{kind}", pod(number))));
        }
        // It may have ended by itself.
        let _ = processes::signal(liar, Signal::KILL);
        let name = member(number);
        let honest = |view: &MembershipView| {
            let row = view.members.iter().find(|row| row.name.0 == name);
            row.is_some_and(|row| row.incarnation.is_some() && !is_liar(row))
        };
        self.until("the honest agent to come back", AGAIN, honest).await?;
        self.watcher.lies(number, false);
        Ok(())
    }

    /// The process of a pod's engine, once it runs.
    pub async fn engine(&self, number: usize) -> Result<Pid, String> {
        processes::until_child(&format!("WEIGHTSYNC_CHAOS_ENGINE={}-{}", self.name, pod(number)), AGAIN, None).await
    }

    /// The ends of all logs.
    pub fn evidence(&self) -> String {
        let mut text = String::new();
        for said in self.reported.lock().unwrap().iter().rev().take(60).rev() {
            let ago = said.at.elapsed().as_millis();
            let _ = writeln!(text, "{ago} ms ago: {} {}: {}", said.reason, said.member.as_deref().unwrap_or_default(), said.message);
        }
        let logs = std::fs::read_dir(self.state()).into_iter().flatten().flatten().map(|entry| entry.path());
        let logs = logs.chain([self.folder.path().join("trainer.log")]);
        for log in logs.filter(|log| log.extension().is_some_and(|extension| extension == "log")) {
            let lines = std::fs::read_to_string(&log).unwrap_or_default();
            let lines: Vec<&str> = lines.lines().collect();
            let end = lines[lines.len().saturating_sub(40)..].join("\n");
            let _ = writeln!(text, "--- {}\n{end}", log.file_name().unwrap().display());
        }
        text
    }

    /// Ends everything in good order.
    pub async fn stop(self) {
        self.group.stop().await;
        for number in 0..=ROLLOUTS {
            let _ = std::process::Command::new("umount").arg("-l").arg(self.memory(number)).status();
        }
        let _ = std::process::Command::new("umount").arg("-l").arg(self.state()).status();
    }
}

async fn keep_events(mut events: broadcast::Receiver<CoordinatorEvent>, reported: Reported) {
    while let Ok(CoordinatorEvent { reason, message, member, warning }) = events.recv().await {
        let member = member.map(|member| member.0);
        reported.lock().unwrap().push(Said { at: Instant::now(), member, reason, message, warning });
    }
}

/// What status says of members that are not as they should be, each time that it says something else.
async fn keep_rows(mut view: watch::Receiver<MembershipView>, reported: Reported) {
    let mut before = BTreeSet::new();
    loop {
        let mut rows = BTreeSet::new();
        {
            let view = view.borrow_and_update();
            for row in &view.members {
                if !matches!(row.standing, MemberStanding::Ready | MemberStanding::Updating | MemberStanding::Forming) {
                    rows.insert((Some(row.name.0.clone()), row.reason, row.message.clone()));
                }
            }
            for row in &view.degraded {
                rows.insert((row.member.as_ref().map(|member| member.0.clone()), row.reason, row.message.clone()));
            }
        }
        for (member, reason, message) in rows.difference(&before) {
            let (member, message) = (member.clone(), message.clone());
            reported.lock().unwrap().push(Said { at: Instant::now(), member, reason: *reason, message, warning: true });
        }
        before = rows;
        if view.changed().await.is_err() {
            return;
        }
    }
}

/// Whether a liar speaks for that member.
fn is_liar(row: &MemberView) -> bool {
    row.incarnation.as_ref().is_some_and(|life| life.instance.starts_with(INSTANCE))
}

/// Everybody is in a committed group, and every rollout serves the current version.
fn is_whole(view: &MembershipView) -> bool {
    let ready = |row: &MemberView| row.standing == MemberStanding::Ready && !row.dirty;
    view.stage == GroupStage::Committed && view.ready as usize == ROLLOUTS && view.members.iter().all(ready)
}

fn small_disk(folder: &Path, mebibytes: u32) {
    std::fs::create_dir_all(folder).unwrap();
    must(&["mount", "-t", "tmpfs", "-o", &format!("size={mebibytes}m,mode=0755"), "tmpfs", folder.to_str().unwrap()]);
}

/// The program that is started as an agent: enters its pod's namespace, under its pod's clock. While a file says so, it is a liar.
fn agent_program(folder: &Path, shim: &Path, links: &[Link]) -> PathBuf {
    let cases = links
        .iter()
        .enumerate()
        .map(|(number, link)| format!("{}) address={} namespace={};;\n", pod(number), link.address, link.path().display()));
    let script = format!(
        "#!/bin/sh\ncase $POD_NAME in\n{}esac\n\
         export POD_IP=$address WEIGHTSYNC_STATUS_ADDRESS=$address:{} WEIGHTSYNC_LOG=info\n\
         export LD_PRELOAD={} WEIGHTSYNC_TEST_CLOCK={}/$POD_NAME.clock\n\
         program={PROGRAM}\n\
         if [ -e {}/$POD_NAME.lie ]; then\n\
         export TEST_LIE=$(cat {}/$POD_NAME.lie) TEST_LIE_FILE={}/$POD_NAME.lies\n\
         program={}\nfi\n\
         exec nsenter --net=$namespace $program \"$@\"\n",
        cases.collect::<String>(),
        STATUS,
        shim.display(),
        folder.display(),
        folder.display(),
        folder.display(),
        folder.display(),
        weightsync_testkit::liar_program().display(),
    );
    let path = folder.join("agent");
    std::fs::write(&path, script).unwrap();
    must(&["chmod", "755", path.to_str().unwrap()]);
    path
}

fn pod_spec(number: usize, group: &str, link: &Link, start: &Path, registered: bool) -> PodSpec {
    let engine = (number > 0).then(|| {
        let kind = KINDS[number - 1];
        let (net, port, model, faults) = (format!("--net={}", link.path().display()), ENGINE.to_string(), start.display(), usual());
        let dev = weightsync_testkit::dev_program().display().to_string();
        let words = [&dev, "simulate-engine", "--engine", kind, "--host", "0.0.0.0", "--port", &port, "--model", &model.to_string()];
        let command = ["nsenter", &net].into_iter().chain(words).chain(["--faults", &faults.to_string()]).map(str::to_owned).collect();
        EngineProgram {
            assignment: EngineAssignment { kind: kind.to_owned(), port: ENGINE },
            registered: registered.then_some(MOST_ENGINES),
            ignored: IgnoredTensors::default(),
            command,
            environment: BTreeMap::from([("WEIGHTSYNC_CHAOS_ENGINE".to_owned(), format!("{group}-{}", pod(number)))]),
        }
    });
    let pool = (number > 0).then(|| "rollouts".to_owned());
    PodSpec { name: pod(number), pool, size: 1, gpus: Vec::new(), engine }
}

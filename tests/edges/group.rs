//! A group as `weightsync local` would run it, with a link for each pod. Starts and ends things, and reports their state.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::process::Command;
use tokio::time::timeout;
use weightsync_coordinator::local::{EngineProgram, Group as Local, GroupSpec, PodSpec, default_policy};
use weightsync_core::membership::{JoinPolicy, MembershipView};
use weightsync_core::protocol::{EngineAssignment, Preflight, PreflightReport, TransportPolicy, TransportWish};
use weightsync_core::weights::IgnoredTensors;

use crate::model::Model;
use crate::net::{ENGINE, HERE, Link, STATUS, must};

const PROGRAM: &str = env!("CARGO_BIN_EXE_weightsync");
/// Longest wait for anything; far above what a busy machine takes.
const SOON: Duration = Duration::from_secs(180);

/// Rates of the links, each way.
#[derive(Clone, Copy)]
pub struct Links {
    /// In Mbit/s.
    pub mbit: u32,
    /// A pod with another rate.
    pub slow: Option<(usize, u32)>,
}

pub struct Wanted {
    /// Number of the world: no two have one.
    pub world: usize,
    pub rollouts: usize,
    pub links: Links,
    pub preflight: Preflight,
}

pub struct Group {
    local: Local,
    links: Vec<Link>,
    name: String,
    folder: TempDir,
    last: u64,
}

/// Name of a pod: 0 is the source.
fn pod(number: usize) -> String {
    if number == 0 { "trainer".to_owned() } else { format!("actor-{number}") }
}

/// Its name in the roster.
pub fn member(number: usize) -> String {
    if number == 0 { "trainer/trainer".to_owned() } else { format!("rollouts/{}", pod(number)) }
}

/// 24 MiB in 12 tensors.
fn model(version: u64) -> Model {
    Model::of(version, (0..12).map(|layer| (format!("model.layers.{layer}.mlp.weight"), 512 << 10)))
}

impl Group {
    /// Starts it and waits until all are in one group.
    pub async fn start(wanted: Wanted) -> Self {
        let Wanted { world, rollouts, links: rates, preflight } = wanted;
        let folder = tempfile::tempdir().unwrap();
        let name = format!("edges-{world}");
        let links: Vec<Link> = (0..=rollouts).map(|pod| Link::new(world, pod)).collect();
        for number in 0..=rollouts {
            let mbit = rates.slow.filter(|(slow, _)| *slow == number).map_or(rates.mbit, |(_, mbit)| mbit);
            limit(world, number, mbit);
        }
        let state = folder.path().join("state");
        std::fs::create_dir_all(&state).unwrap();
        let start = model(0).save(&folder.path().join("start"));
        let mut policy = default_policy();
        policy.bucket_bytes = 1 << 20;
        policy.transport = TransportPolicy { wish: TransportWish::Tcp, preflight, ..TransportPolicy::default() };
        let spec = GroupSpec {
            name: name.clone(),
            address: HERE.into(),
            directory: state,
            versions: folder.path().join("versions"),
            pods: (0..=rollouts).map(|number| pod_spec(number, &links[number], &start)).collect(),
            policy,
            join: JoinPolicy::Immediate,
            debounce: Duration::from_millis(100),
            target: None,
            program: agent_program(folder.path(), &links),
            guard: PathBuf::from(PROGRAM),
        };
        let local = Local::start(spec).await.unwrap();
        let group = Self { local, links, name, folder, last: 0 };
        group.until("the group to form", |view| view.ready as usize == rollouts).await;
        group
    }

    /// Waits until the coordinator's view is so.
    pub async fn until(&self, what: &str, so: impl Fn(&MembershipView) -> bool) -> MembershipView {
        let mut view = self.local.view();
        if let Ok(Ok(view)) = timeout(SOON, view.wait_for(|view| so(view))).await {
            return view.clone();
        }
        panic!("waited for {what}: {:#?}\n{}", *self.local.view().borrow(), self.logs());
    }

    /// Waits until all edges of the group were measured.
    pub async fn measured(&self) -> PreflightReport {
        let view = self.until("the edges to be measured", |view| view.preflight.as_ref().is_some_and(|report| report.done)).await;
        *view.preflight.unwrap()
    }

    /// Publishes so many versions, one after another, and returns how long each took.
    pub async fn updates(&mut self, count: u64) -> Vec<Duration> {
        let mut times = Vec::new();
        for _ in 0..count {
            self.last += 1;
            let checkpoint = self.folder.path().join(format!("v{}", self.last));
            model(self.last).save(&checkpoint);
            let mut command = Command::new("nsenter");
            command.arg(format!("--net={}", self.links[0].path().display())).arg(PROGRAM).arg("publish").arg(&checkpoint);
            command.args(["--version", &self.last.to_string(), "--socket", &format!("@weightsync/{}-trainer", self.name)]);
            let begun = Instant::now();
            let output = timeout(SOON, command.kill_on_drop(true).output()).await.expect("a publish ends").unwrap();
            times.push(begun.elapsed());
            assert!(output.status.success(), "{}\n{}", String::from_utf8_lossy(&output.stderr), self.logs());
        }
        times
    }

    pub async fn stop(self) {
        self.local.stop().await;
    }

    /// The ends of all logs.
    fn logs(&self) -> String {
        let logs = std::fs::read_dir(self.folder.path().join("state")).into_iter().flatten().flatten();
        let ends = logs.map(|log| {
            let text = std::fs::read_to_string(log.path()).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            format!("--- {}\n{}\n", log.path().display(), lines[lines.len().saturating_sub(30)..].join("\n"))
        });
        ends.collect()
    }
}

/// Limits the link of a pod, each way.
fn limit(world: usize, pod: usize, mbit: u32) {
    let rate = format!("{mbit}mbit");
    let shape = ["root", "tbf", "rate", &rate, "burst", "256kb", "latency", "50ms"];
    must(&[&["tc", "qdisc", "add", "dev", &format!("h{world}p{pod}")], &shape[..]].concat());
    must(&[&["tc", "-n", &format!("w{world}p{pod}"), "qdisc", "add", "dev", "eth0"], &shape[..]].concat());
}

/// The program that is started as an agent: enters its pod's namespace.
fn agent_program(folder: &Path, links: &[Link]) -> PathBuf {
    let cases = links.iter().enumerate();
    let cases = cases.map(|(number, link)| format!("{}) address={} namespace={};;\n", pod(number), link.address, link.path().display()));
    let script = format!(
        "#!/bin/sh\ncase $POD_NAME in\n{}esac\n\
         export POD_IP=$address WEIGHTSYNC_STATUS_ADDRESS=$address:{STATUS} WEIGHTSYNC_LOG=debug\n\
         exec nsenter --net=$namespace {PROGRAM} \"$@\"\n",
        cases.collect::<String>(),
    );
    let path = folder.join("agent");
    std::fs::write(&path, script).unwrap();
    must(&["chmod", "755", path.to_str().unwrap()]);
    path
}

fn pod_spec(number: usize, link: &Link, start: &Path) -> PodSpec {
    let engine = (number > 0).then(|| {
        let (net, port) = (format!("--net={}", link.path().display()), ENGINE.to_string());
        let (dev, model) = (weightsync_testkit::dev_program().display().to_string(), start.display().to_string());
        let words = ["nsenter", &net, &dev, "simulate-engine", "--engine", "vllm", "--host", "0.0.0.0", "--port", &port, "--model", &model];
        EngineProgram {
            assignment: EngineAssignment { kind: "vllm".to_owned(), port: ENGINE },
            registered: None,
            ignored: IgnoredTensors::default(),
            command: words.map(str::to_owned).to_vec(),
            environment: BTreeMap::new(),
        }
    });
    let pool = (number > 0).then(|| "rollouts".to_owned());
    PodSpec { name: pod(number), pool, size: 1, gpus: Vec::new(), engine }
}

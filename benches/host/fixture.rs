//! A group on this host to measure: a source, rollouts with simulated vLLMs, and a model of matrices that is as large as asked for.
//!
//! Engines may be left to the measurement, so that it can have one begin whenever it likes. Decides nothing of what is measured; every wait
//! has a deadline.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use tempfile::TempDir;
use tokio::sync::watch;
use weightsync_agent::client::trainer::TrainerClient;
use weightsync_coordinator::local::{EngineProgram, Group, GroupSpec, PodSpec, default_policy, free_port};
use weightsync_core::membership::{GroupStage, JoinPolicy, MembershipView};
use weightsync_core::protocol::{
    Activation, ClientRequest, EngineAssignment, PublishResult, QueuePolicy, TransportPolicy, TransportWish, UpdatePolicy,
};
use weightsync_core::weights::safetensors::SafetensorsPlan;
use weightsync_core::weights::{Bucket, Dtype, IgnoredTensors, Layout, TensorSpec};

use crate::PROGRAM;

/// Nothing that is waited for here takes longer, on a machine that is busy with other things as well.
const LONG: Duration = Duration::from_secs(120);
/// Between two looks at something that cannot be awaited.
const LOOK: Duration = Duration::from_millis(2);

/// How bytes travel between members.
#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
pub enum Over {
    /// A chain of connections.
    #[default]
    Tcp,
    /// Reads through NIXL over TCP; WEIGHTSYNC_NIXL names its library.
    Gdr,
}

impl Over {
    /// As commands and objects name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Gdr => "gdr",
        }
    }
}

/// What a group is made of.
pub struct Wanted<'a> {
    /// Part of its name: what is measured.
    pub what: &'a str,
    /// Size of the model in MB.
    pub megabytes: u64,
    /// Memory in MiB that the source may keep.
    pub retain: u32,
    /// Folder in memory where versions are put.
    pub versions: &'a Path,
    /// Rollouts whose engines are started with the group.
    pub rollouts: u32,
    /// Rollouts after them whose engines the measurement starts.
    pub later: u32,
    /// How long a joining replica waits for others.
    pub debounce: Duration,
    /// How bytes travel.
    pub over: Over,
}

/// A running group. Dropping it kills its processes.
pub struct Fixture {
    group: Group,
    name: String,
    layout: Layout,
    ports: Vec<u16>,
    folder: TempDir,
    versions: TempDir,
    http: reqwest::Client,
}

/// A process that is killed when it is dropped.
pub struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Fixture {
    /// Starts it and waits until the rollouts that are started with it are ready.
    pub async fn start(wanted: &Wanted<'_>) -> Result<Self> {
        // Clients over plain HTTP want one as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (folder, versions) = (tempfile::tempdir()?, tempfile::tempdir_in(wanted.versions)?);
        let layout = layout(wanted.megabytes)?;
        start_checkpoint(&layout, &folder.path().join("start"))?;
        // Names of sockets must differ between groups that follow each other at once.
        let name = format!("{}-{}-{}", wanted.what, std::process::id(), rand::random::<u16>());
        let ports = (0..wanted.rollouts + wanted.later).map(|_| free_port()).collect::<Result<Vec<_>, _>>()?;
        let group = Group::start(spec(wanted, &name, folder.path(), versions.path(), &ports)).await?;
        let http = reqwest::Client::builder().timeout(LONG).no_proxy().build()?;
        let fixture = Self { group, name, layout, ports, folder, versions, http };
        fixture.until("the group to form", |view| view.stage == GroupStage::Committed && view.ready == wanted.rollouts).await?;
        Ok(fixture)
    }

    /// Membership's view, to follow.
    pub fn view(&self) -> watch::Receiver<MembershipView> {
        self.group.view()
    }

    /// Kills a pod's agent and engine. Whether there is such a pod.
    pub async fn kill(&self, pod: &str) -> bool {
        self.group.kill(pod).await
    }

    /// Starts a killed pod again, with another UID. Whether there is such a pod.
    pub async fn replace(&self, pod: &str) -> bool {
        self.group.replace(pod).await
    }

    /// Where versions are.
    pub fn versions(&self) -> &Path {
        self.versions.path()
    }

    /// Waits until membership's view satisfies `reached`, and returns that view.
    pub async fn until(&self, what: &str, mut reached: impl FnMut(&MembershipView) -> bool) -> Result<MembershipView> {
        let mut view = self.group.view();
        let reached = tokio::time::timeout(LONG, view.wait_for(|view| reached(view))).await;
        Ok(reached.map_err(|_| anyhow!("waited for {what}"))??.clone())
    }

    /// Publishes a version, each bucket of which has a byte of its own. Returns how long the trainer waited for it.
    pub async fn publish(&self, version: u64) -> Result<(PublishResult, Duration)> {
        let socket = format!("@weightsync/{}-trainer", self.name).parse().map_err(|error| anyhow!("{error}"))?;
        let request = ClientRequest::Publish {
            version,
            tensors: self.layout.tensors().cloned().collect(),
            queue: QueuePolicy::Wait,
            activation: Activation::Auto,
            repeatable: true,
            gpu: None,
            timeout_ms: 600_000,
        };
        let published = tokio::task::spawn_blocking(move || -> Result<_> {
            let mut client = TrainerClient::connect(&socket, "weightsync bench")?;
            let mut fill = |_: &Layout, bucket: Bucket, into: &mut [u8]| {
                into.fill(u8::try_from(version).unwrap_or(1).wrapping_add(bucket.sequence.to_le_bytes()[0]));
                Ok(())
            };
            let start = Instant::now();
            let result = client.publish(&request, &mut fill, &mut |_| ())?;
            Ok((result, start.elapsed()))
        });
        published.await?
    }

    /// URL of a rollout's engine.
    pub fn engine(&self, rollout: u32) -> Result<String> {
        let port = self.ports.get(usize::try_from(rollout)?).context("no such rollout")?;
        Ok(format!("http://127.0.0.1:{port}"))
    }

    /// Starts the engine of a rollout that was left to the measurement.
    pub fn start_engine(&self, rollout: u32) -> Result<Killed> {
        let port = *self.ports.get(usize::try_from(rollout)?).context("no such rollout")?;
        let command = engine_command(port, self.folder.path());
        let (program, words) = command.split_first().context("no command")?;
        let mut command = Command::new(program);
        command.args(words).stdin(Stdio::null()).stdout(Stdio::null());
        Ok(Killed(command.spawn().with_context(|| format!("{command:?}"))?))
    }

    /// Waits until a page answers 200. Returns when it first did.
    pub async fn until_answers(&self, url: &str) -> Result<Instant> {
        let begun = Instant::now();
        loop {
            if self.http.get(url).send().await.is_ok_and(|answer| answer.status().is_success()) {
                return Ok(Instant::now());
            }
            if begun.elapsed() > LONG {
                bail!("{url} does not answer with success");
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// URL of the status pages of a pod's agent, from its log.
    pub fn pages(&self, pod: &str) -> Result<String> {
        let log = std::fs::read_to_string(self.folder.path().join(format!("{pod}-agent.log")))?;
        let line = log.lines().rfind(|line| line.contains("status pages")).context("an agent reported no status pages")?;
        let port: String = line.rsplit("127.0.0.1:").next().unwrap_or_default().chars().take_while(char::is_ascii_digit).collect();
        Ok(format!("http://127.0.0.1:{port}"))
    }

    /// What an agent counted of installs, once it has counted so many.
    pub async fn installs(&self, pod: &str, count: u64) -> Result<Installs> {
        let (url, begun) = (format!("{}/metrics", self.pages(pod)?), Instant::now());
        let wanted = format!("{PAUSES}_count{{engine=\"vllm\"}} {count}");
        loop {
            let text = self.http.get(&url).send().await?.error_for_status()?.text().await?;
            if text.lines().any(|line| line == wanted) {
                return Ok(Installs(text));
            }
            if begun.elapsed() > LONG {
                bail!("the agent of {pod} never counted {count} installs: {text}");
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// The client with which engines are asked.
    pub fn http(&self) -> reqwest::Client {
        self.http.clone()
    }

    /// Ends every process in good order.
    pub async fn stop(self) {
        self.group.stop().await;
    }
}

const PAUSES: &str = "weightsync_agent_engine_pause_duration_seconds";

/// The metrics of an agent: sums over all installs up to now, in seconds.
#[derive(Default)]
pub struct Installs(String);

impl Installs {
    /// How long its engine was paused.
    pub fn paused(&self) -> f64 {
        self.sum(&format!("{PAUSES}_sum{{engine=\"vllm\"}} "))
    }

    /// How long a step took.
    pub fn step(&self, step: &str) -> f64 {
        self.sum(&format!("weightsync_agent_step_duration_seconds_sum{{step=\"{step}\"}} "))
    }

    fn sum(&self, series: &str) -> f64 {
        let value = self.0.lines().find_map(|line| line.strip_prefix(series));
        value.and_then(|value| value.parse().ok()).unwrap_or(0.0)
    }
}

fn layout(megabytes: u64) -> Result<Layout> {
    // Matrices of 32 MB, as in a model of some billion parameters.
    let name = |number| format!("model.layers.{number}.mlp.weight");
    let tensors = (0..megabytes.div_ceil(32)).map(|number| TensorSpec::new(name(number), Dtype::BF16, vec![4000, 4000]));
    Ok(Layout::new("model", tensors.collect(), 0)?)
}

/// What engines start with: zeros that take no room on disk.
fn start_checkpoint(layout: &Layout, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    let plan = SafetensorsPlan::new(layout, None)?;
    for planned in &plan.files {
        std::fs::write(folder.join(&planned.name), &planned.header)?;
        std::fs::OpenOptions::new().write(true).open(folder.join(&planned.name))?.set_len(planned.bytes)?;
    }
    std::fs::write(folder.join("config.json"), "{}")?;
    Ok(())
}

fn engine_command(port: u16, folder: &Path) -> Vec<String> {
    let model = folder.join("start").to_string_lossy().into_owned();
    let dev = weightsync_testkit::dev_program().display().to_string();
    [&dev, "simulate-engine", "--engine", "vllm", "--port", &port.to_string(), "--model", &model].map(str::to_owned).to_vec()
}

fn spec(wanted: &Wanted<'_>, name: &str, folder: &Path, versions: &Path, ports: &[u16]) -> GroupSpec {
    let rollouts = ports.iter().zip(0..).map(|(port, number)| {
        let command = if number < wanted.rollouts { engine_command(*port, folder) } else { Vec::new() };
        let assignment = EngineAssignment { kind: "vllm".into(), port: *port };
        let engine =
            Some(EngineProgram { assignment, registered: None, ignored: IgnoredTensors::default(), command, environment: BTreeMap::new() });
        PodSpec { name: format!("actor-{number}"), pool: Some("actors".into()), size: 1, gpus: Vec::new(), engine }
    });
    let trainer = PodSpec { name: "trainer".into(), pool: None, size: 1, gpus: Vec::new(), engine: None };
    let wish = match wanted.over {
        Over::Tcp => TransportWish::Auto,
        Over::Gdr => TransportWish::Gdr,
    };
    let transport = TransportPolicy { wish, allow_tcp: true, ..default_policy().transport };
    let policy = UpdatePolicy { retain_bytes: u64::from(wanted.retain) << 20, silence_ms: 30_000, transport, ..default_policy() };
    GroupSpec {
        target: None,
        name: name.to_owned(),
        address: Ipv4Addr::LOCALHOST.into(),
        directory: folder.to_owned(),
        versions: versions.to_owned(),
        pods: std::iter::once(trainer).chain(rollouts).collect(),
        policy,
        join: JoinPolicy::Immediate,
        debounce: wanted.debounce,
        program: PathBuf::from(PROGRAM),
        guard: PathBuf::from(PROGRAM),
    }
}

//! The order of the demo's events: start, first version to all, second version with a kill in the middle, rejoin, third version to all.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::engines::{Fresh, command, make_checkpoints, make_snapshot, venv};
use super::kill::{Kill, Killed, noticed};
use super::model::{LONGEST_TENSOR, Weights, tensors};
use super::show::{Outcome, Published, Screen};
use super::verify::Verifier;
use super::{DemoArgs, DemoEngine, DemoTransport};
use weightsync_agent::client::SocketName;
use weightsync_agent::client::trainer::TrainerClient;
use weightsync_coordinator::local::{EngineProgram, Group, GroupSpec, PodSpec, default_policy, free_port};
use weightsync_core::membership::{GroupStage, JoinPolicy, MembershipView};
use weightsync_core::protocol::{
    Activation, ClientRequest, EngineAssignment, PausePolicy, Preflight, PublishResult, QueuePolicy, TransportPolicy, TransportWish,
};
use weightsync_core::weights::IgnoredTensors;
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_net::shutdown;

const VERSIONS: [u64; 3] = [1, 2, 3];
/// A real vLLM on a busy machine takes a minute and more to start.
const START_REAL: Duration = Duration::from_secs(300);
const START_SIMULATED: Duration = Duration::from_secs(60);

struct Replica {
    name: String,
    port: u16,
}

struct Demo {
    args: DemoArgs,
    folder: PathBuf,
    replicas: Vec<Replica>,
    group: Arc<Group>,
    socket: SocketName,
    verifier: Verifier,
    screen: Screen,
    outcome: Outcome,
}

/// Runs the demo; the exit code says whether all agreed.
pub async fn tell(args: DemoArgs) -> anyhow::Result<ExitCode> {
    let folder = std::env::temp_dir().join(format!("weightsync-demo-{}", std::process::id()));
    std::fs::create_dir_all(&folder).with_context(|| format!("{} cannot be made", folder.display()))?;
    let versions = PathBuf::from(format!("/dev/shm/weightsync-demo-{}", std::process::id()));
    let keep = args.keep;
    // Engines lead process groups of their own: a Ctrl-C at a terminal reaches this process alone.
    let stop = shutdown::on_signals_and_hangup().context("signals cannot be awaited")?;
    let notified = run(args, &folder, &versions, &stop).await;
    let _ = std::fs::remove_dir_all(&versions);
    let failed = !matches!(&notified, Ok(outcome) if outcome.verified);
    if keep || (failed && !stop.is_cancelled()) {
        eprintln!("logs and checkpoints: {}", folder.display());
    } else {
        let _ = std::fs::remove_dir_all(&folder);
    }
    let outcome = notified?;
    Ok(if outcome.verified { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What `work` gives, unless the demo is interrupted before.
async fn unless_stopped<T>(stop: &CancellationToken, work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    stop.run_until_cancelled(work).await.unwrap_or_else(|| Err(anyhow!("interrupted")))
}

async fn run(mut args: DemoArgs, folder: &Path, versions: &Path, stop: &CancellationToken) -> anyhow::Result<Outcome> {
    let screen = Screen::new(args.output);
    let mut gpus = Vec::new();
    if let Some(wanted) = args.gpu {
        gpus = unless_stopped(stop, super::gpus::find(usize::try_from(wanted)?, &screen)).await?;
        args.replicas = Some(u32::try_from(gpus.len())?.saturating_sub(1));
    }
    let weights = unless_stopped(stop, make_weights(&args, folder, &screen)).await?;
    let mut replicas = Vec::new();
    for number in 0..args.rollouts() {
        replicas.push(Replica { name: format!("actor-{number}"), port: free_port().context("no port on 127.0.0.1")? });
    }
    if args.engine == DemoEngine::SimulatedFastdeploy {
        for replica in &replicas {
            make_snapshot(&folder.join("v0"), &folder.join(&replica.name))?;
        }
    }
    let spec = group_spec(&args, folder, versions, &replicas, &gpus)?;
    let socket = format!("@weightsync/{}-trainer", spec.name).parse().map_err(|error| anyhow!("{error}"))?;
    let group = Arc::new(Group::start(spec).await?);
    let page = match args.ui {
        Some(port) => Some(group.serve_page(port).await.with_context(|| format!("--ui: no page at 127.0.0.1 port {port}"))?),
        None => None,
    };
    if let Some(page) = &page {
        screen.say(&format!("web page of the group: {}", page.url));
    }
    let proof = match args.engine {
        DemoEngine::Vllm => "each version's completions, log-probs included, were equal on all servers, and the last on a fresh one too",
        _ => "what every engine served is, byte for byte, what was published",
    };
    let outcome = Outcome { replicas: args.rollouts(), proof, seed: args.seed, ..Outcome::default() };
    let mut demo = Demo { args, folder: folder.to_owned(), replicas, group, socket, verifier: Verifier::new()?, screen, outcome };
    let notified = unless_stopped(stop, demo.story(weights)).await;
    if notified.is_ok() {
        demo.outcome.print(demo.args.output);
        if let Some(page) = &page {
            demo.screen.say(&format!("\nThe demo is over. The group and its web page stay until Ctrl-C: {}", page.url));
            stop.cancelled().await;
        }
    }
    demo.group.stop().await;
    notified.map(|()| demo.outcome)
}

impl Demo {
    async fn story(&mut self, weights: Vec<Weights>) -> anyhow::Result<()> {
        let patience = if self.args.engine == DemoEngine::Vllm { START_REAL } else { START_SIMULATED };
        self.screen.say(&format!(
            "This demo plays a trainer and starts {} {}. It publishes three versions of the weights to all of them.\n\
             In the middle of version 2, one server is {}. The others must serve version 2 all the same, and it must come back with it.\n",
            self.replicas.len(),
            self.args.engine.described(),
            self.args.fault.done(),
        ));
        self.wait_for("the group to form", patience, |view, total| view.stage == GroupStage::Committed && view.ready == total).await?;
        let view = self.group.view().borrow().clone();
        let transport = view.transport.as_ref().map_or_else(String::new, |choice| choice.name().to_owned());
        self.screen.say(&format!(
            "epoch {}: a group of world size {} was formed (the trainer and the servers); weights travel over {transport}",
            view.epoch, view.world_size
        ));
        self.outcome.transport = transport;
        let victim = usize::try_from(self.args.seed % u64::from(self.args.rollouts()))?;
        let mut before: Option<String> = None;
        for (version, weights) in VERSIONS.into_iter().zip(weights) {
            let weights = Arc::new(weights);
            let kill = (version == 2).then(|| self.kill_of(victim)).transpose()?;
            if version == 3 && self.args.corrupt {
                let port = self.replicas.first().context("no replica")?.port;
                self.verifier.corrupt(port).await?;
                self.screen.say("one engine will flip one byte of what it loads");
            }
            self.publish(version, &weights, kill.as_ref()).await?;
            if let Some(kill) = kill {
                self.rejoin(&kill, version).await?;
            }
            before = self.verify(version, &weights, before.as_deref()).await?;
        }
        if let Some(answer) = before {
            self.compare_with_a_fresh_server(VERSIONS.len(), &answer).await?;
        }
        Ok(())
    }

    /// Starts a server on the last version's checkpoint and compares what the rollouts answered with what it answers.
    async fn compare_with_a_fresh_server(&mut self, version: usize, answer: &str) -> anyhow::Result<()> {
        let port = free_port().context("no port on 127.0.0.1")?;
        let program = std::env::current_exe().context("this program's own path is unknown")?;
        let (words, environment) = command(&self.args, &program, &self.folder.join(format!("v{version}")), port, None);
        let mut fresh = Fresh::start(&words, &environment, self.folder.join("fresh-engine.log"))?;
        let deadline = Instant::now() + START_REAL;
        while !self.verifier.healthy(port).await {
            fresh.alive()?;
            ensure!(Instant::now() < deadline, "a fresh server did not start within {START_REAL:?}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        if self.verifier.completion(port).await? == answer {
            self.screen.say(&format!("version {version}: a fresh server on its checkpoint answers the same, log-probs included"));
        } else {
            self.outcome.disagree(format!("version {version}: a fresh server on its checkpoint answers differently"));
        }
        Ok(())
    }

    fn kill_of(&self, victim: usize) -> anyhow::Result<Kill> {
        let replica = self.replicas.get(victim).context("no such replica")?;
        let view = self.group.view();
        let view = view.borrow();
        let member = view.members.iter().find(|member| member.pods.iter().any(|pod| pod.name == replica.name));
        let member = member.context("the victim is not in the group")?.name.clone();
        // Between 35 and 64 %: some buckets are on their way when the choice is made.
        Ok(Kill { pod: replica.name.clone(), member, at_percent: 35 + self.args.seed % 30, fault: self.args.fault, done: Arc::default() })
    }

    async fn publish(&mut self, version: u64, weights: &Arc<Weights>, kill: Option<&Kill>) -> anyhow::Result<()> {
        let epoch = self.group.view().borrow().epoch;
        let kill_now = kill.map(|kill| Kill {
            pod: kill.pod.clone(),
            member: kill.member.clone(),
            at_percent: kill.at_percent,
            fault: kill.fault,
            done: Arc::clone(&kill.done),
        });
        let notices = kill.map(|_| tokio::spawn(noticed(self.group.view(), epoch)));
        let (socket, group, handle) = (self.socket.clone(), Arc::clone(&self.group), Handle::current());
        let (weights, progress) = (Arc::clone(weights), self.screen.progress(version));
        let publish = move || -> anyhow::Result<PublishResult> {
            let request = ClientRequest::Publish {
                version,
                tensors: weights.specs(),
                queue: QueuePolicy::Wait,
                activation: Activation::Auto,
                repeatable: true,
                timeout_ms: 120_000,
                gpu: None,
            };
            let mut client = TrainerClient::connect(&socket, "weightsync-dev demo")?;
            let mut fill = |layout: &weightsync_core::weights::Layout, bucket: weightsync_core::weights::Bucket, into: &mut [u8]| {
                if let Some(kill) = &kill_now {
                    kill.before_bucket(&group, &handle, bucket.offset, layout.total_bytes)?;
                }
                Ok(weights.fill(layout, bucket, into)?)
            };
            Ok(client.publish(&request, &mut fill, &mut |reply| progress.heard(reply))?)
        };
        let started = Instant::now();
        let result = tokio::task::spawn_blocking(publish).await?.with_context(|| format!("version {version} was not published"))?;
        let took = started.elapsed();
        if let Some(kill) = kill {
            let killed = kill.done.lock().clone();
            let killed = killed.context("the rollout was not killed: the model is too small for the moment to be caught")?;
            self.killed(kill, &killed, notices, &result).await?;
        }
        self.screen.published(&result, took);
        self.outcome.versions.push(Published::new(&result, took));
        self.outcome.bytes += result.bytes;
        Ok(())
    }

    async fn killed(
        &mut self,
        kill: &Kill,
        killed: &Killed,
        notices: Option<tokio::task::JoinHandle<Instant>>,
        result: &PublishResult,
    ) -> anyhow::Result<()> {
        let recovered = killed.at.elapsed();
        let noticed = match notices {
            Some(notices) => tokio::time::timeout(Duration::from_secs(10), notices).await.context("the kill was not detected")??,
            None => killed.at,
        };
        let detected = noticed.saturating_duration_since(killed.at);
        ensure!((20..=80).contains(&killed.percent()), "the rollout was killed at {} % of its bytes", killed.percent());
        ensure!(!result.installed.contains(&kill.member), "a killed rollout is reported as installed");
        self.outcome.kill(&kill.member, killed.percent(), detected, recovered);
        self.screen.killed(&kill.member, kill.fault, killed.percent(), detected, recovered);
        Ok(())
    }

    async fn rejoin(&mut self, kill: &Kill, version: u64) -> anyhow::Result<()> {
        let started = Instant::now();
        ensure!(self.group.replace(&kill.pod).await, "there is no pod {}", kill.pod);
        let patience = if self.args.engine == DemoEngine::Vllm { START_REAL } else { START_SIMULATED };
        self.wait_for("the rollout to come back with the current version", patience, |view, total| {
            view.stage == GroupStage::Committed && view.ready == total && view.version.as_ref().is_some_and(|held| held.version == version)
        })
        .await?;
        let epoch = self.group.view().borrow().epoch;
        self.outcome.rejoined_ms = Some(super::show::ms(started.elapsed()));
        self.screen.say(&format!(
            "epoch {epoch}: {} is back and was fed version {version} in {} ms",
            kill.member,
            super::show::ms(started.elapsed())
        ));
        Ok(())
    }

    /// Asks every engine what it serves; returns what real servers answered, to be compared with the next version.
    async fn verify(&mut self, version: u64, weights: &Weights, before: Option<&str>) -> anyhow::Result<Option<String>> {
        let mut answers = Vec::new();
        let expected = if self.args.engine == DemoEngine::Vllm { Vec::new() } else { weights.digests()? };
        for replica in &self.replicas {
            let checked = if self.args.engine == DemoEngine::Vllm {
                self.verifier.completion(replica.port).await.map(|answer| answers.push(answer))
            } else {
                self.verifier.simulator_serves(replica.port, &expected).await
            };
            if let Err(error) = checked {
                self.outcome.disagree(format!("version {version}, {}: {error:#}", replica.name));
            }
        }
        let answer = answers.first().cloned();
        if answers.iter().any(|other| Some(other) != answer.as_ref()) {
            self.outcome.disagree(format!("version {version}: servers answer differently"));
        }
        if before.is_some() && before == answer.as_deref() {
            self.outcome.disagree(format!("version {version}: servers answer as they did with the version before"));
        }
        self.screen.say(&format!(
            "version {version}: {}",
            if self.outcome.disagreements.is_empty() { "checked, every engine serves it" } else { "NOT all engines serve it" }
        ));
        self.outcome.epochs = self.group.view().borrow().epoch;
        self.outcome.verified = self.outcome.disagreements.is_empty() && self.outcome.versions.len() == VERSIONS.len();
        Ok(answer)
    }

    async fn wait_for(&self, what: &str, patience: Duration, reached: impl Fn(&MembershipView, u32) -> bool) -> anyhow::Result<()> {
        let mut view = self.group.view();
        let total = self.args.rollouts();
        let waited = tokio::time::timeout(patience, view.wait_for(|view| reached(view, total))).await;
        let ended = match waited {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(_)) => "the group ended".to_owned(),
            Err(_) => format!("not within {patience:?}"),
        };
        let view = self.group.view().borrow().clone();
        let members: Vec<_> =
            view.members.iter().map(|member| format!("{}: {:?} {}", member.name, member.standing, member.message)).collect();
        Err(anyhow!("waited for {what}: {ended}; {}; logs: {}", members.join("; "), self.folder.display()))
    }
}

/// Versions 1 to 3, and on disk the checkpoint that engines start with.
async fn make_weights(args: &DemoArgs, folder: &Path, screen: &Screen) -> anyhow::Result<Vec<Weights>> {
    if args.engine == DemoEngine::Vllm {
        screen.say("making the checkpoints of four versions");
        let seed = |version: u64| args.seed * 10 + version;
        let seeds: Vec<u64> = std::iter::once(0).chain(VERSIONS).map(seed).collect();
        make_checkpoints(venv(args), folder, &seeds).await?;
        for version in std::iter::once(0).chain(VERSIONS) {
            std::fs::rename(folder.join(seed(version).to_string()), folder.join(format!("v{version}")))?;
        }
        let open = |version| Checkpoint::open(&folder.join(format!("v{version}"))).map(Weights::Checkpoint);
        return Ok(VERSIONS.into_iter().map(open).collect::<Result<_, _>>()?);
    }
    screen.say(&format!("making a checkpoint of {} MiB", args.megabytes));
    let seeded = |version: u64| Weights::seeded(tensors(args.megabytes), bucket_bytes(args), args.seed * 10 + version);
    seeded(0)?.save(&folder.join("v0"))?;
    VERSIONS.into_iter().map(seeded).collect()
}

/// Enough buckets that an update has a middle.
fn bucket_bytes(args: &DemoArgs) -> u64 {
    match args.engine {
        DemoEngine::Vllm => 128 << 10,
        // Buckets hold whole tensors there.
        DemoEngine::SimulatedLmdeploy => (u64::from(args.megabytes) << 20).div_ceil(64).max(LONGEST_TENSOR),
        _ => (u64::from(args.megabytes) << 20) / 64,
    }
}

fn group_spec(args: &DemoArgs, folder: &Path, versions: &Path, replicas: &[Replica], gpus: &[String]) -> anyhow::Result<GroupSpec> {
    let program = std::env::current_exe().context("this program's own path is unknown")?;
    // One GPU a pod, or none for all.
    let gpu = |place: usize| gpus.get(place).cloned().into_iter().collect();
    let trainer = PodSpec { name: "trainer".into(), pool: None, size: 1, gpus: gpu(0), engine: None };
    let rollouts = replicas.iter().zip(1..).map(|(replica, place)| {
        let model = folder.join(if args.engine == DemoEngine::SimulatedFastdeploy { &replica.name } else { "v0" });
        let (command, environment) = command(args, &program, &model, replica.port, gpus.get(place));
        let assignment = EngineAssignment { kind: args.engine.kind().into(), port: replica.port };
        PodSpec {
            name: replica.name.clone(),
            pool: Some("actors".into()),
            size: 1,
            gpus: gpu(place),
            engine: Some(EngineProgram { assignment, registered: None, ignored: IgnoredTensors::default(), command, environment }),
        }
    });
    let mut policy = default_policy();
    policy.health.period_ms = 500;
    if matches!(args.engine, DemoEngine::SimulatedLmdeploy | DemoEngine::SimulatedFastdeploy) {
        // Their pauses keep no request.
        policy.pause = PausePolicy::Abort;
    }
    policy.bucket_bytes = bucket_bytes(args);
    policy.transport = TransportPolicy {
        wish: match (gpus, args.transport) {
            ([], DemoTransport::Tcp) => TransportWish::Tcp,
            ([], DemoTransport::Gdr) => TransportWish::Gdr,
            _ => TransportWish::Nccl,
        },
        // Slots as small as the chain's buckets, so that a rollout can be killed in the middle of a small model.
        slot_bytes: bucket_bytes(args),
        allow_tcp: args.transport == DemoTransport::Gdr,
        preflight: Preflight::Off,
        ..TransportPolicy::default()
    };
    Ok(GroupSpec {
        name: format!("demo-{}", std::process::id()),
        address: Ipv4Addr::LOCALHOST.into(),
        directory: folder.to_owned(),
        versions: versions.to_owned(),
        pods: std::iter::once(trainer).chain(rollouts).collect(),
        policy,
        join: JoinPolicy::Immediate,
        target: None,
        debounce: Duration::from_millis(200),
        guard: program.clone(),
        program,
    })
}

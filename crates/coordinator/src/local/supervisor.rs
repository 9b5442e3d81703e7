//! Keeps the processes of a group running, and reports which pods exist. Decides when a process is restarted (with a growing wait). Never
//! decides membership, and never checks what the processes do.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::folder::VersionsFolder;
use super::guard::Guard;
use super::guard::Whole;
use super::pod::{EngineProgram, PodSpec};
use super::process::{Process, Start, tail};
use super::restarts::Restarts;
use super::spec::GroupSpec;
use crate::{Addresses, CoordinatorHandle, Directory, ProvenPod, Registered, SingleUseTokens};
use weightsync_core::membership::{GroupStage, MemberView, MembershipView};
use weightsync_core::plan::Candidate;
use weightsync_core::protocol::{Assignment, EngineAssignment, HeldVersion, MemberName, PodRef, Role, Version};
use weightsync_net::identity::Ca;

/// Longest wait for members to leave the group when it is stopped.
const RELEASE: Duration = Duration::from_secs(5);

/// Longest wait for an engine that continues without `local` and may hold half an update: its agent restores complete weights (60 s at
/// most) and leaves its group (10 s).
const RESTORE: Duration = Duration::from_secs(75);

/// Time between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(5);

pub(super) enum Order {
    /// Send a signal to a pod's processes and do not start them again.
    Signal { pod: String, signal: Signal, done: oneshot::Sender<bool> },
    /// Restart a dead pod.
    Replace { pod: String, done: oneshot::Sender<bool> },
    /// Set or clear the target version.
    Target { target: Option<Version>, done: oneshot::Sender<bool> },
    /// A process ended.
    Exited { pod: usize, part: Part, life: u64, how: String },
    /// The wait before a restart ended.
    Restart { pod: usize, part: Part, life: u64 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Agent,
    Engine,
}

struct Pod {
    spec: PodSpec,
    /// Changes when the pod is recreated, so that late messages about the old one are recognised.
    life: u64,
    alive: bool,
    agent: Option<Process>,
    engine: Option<Process>,
    agent_restarts: Restarts,
    engine_restarts: Restarts,
}

impl Pod {
    /// Whether another program started its engine, which continues without `local`.
    fn goes_on(&self) -> bool {
        self.alive && self.spec.engine.as_ref().is_some_and(|engine| engine.command.is_empty())
    }

    /// Time between SIGTERM and SIGKILL for one of its processes.
    fn grace(&self, part: Part) -> Duration {
        if part == Part::Agent && self.goes_on() { RESTORE } else { GRACE }
    }

    fn restarts(&mut self, part: Part) -> &mut Restarts {
        if part == Part::Agent { &mut self.agent_restarts } else { &mut self.engine_restarts }
    }
}

pub(super) struct Supervisor {
    spec: GroupSpec,
    weightsync: String,
    controller: String,
    ca: Arc<Ca>,
    tokens: SingleUseTokens,
    directory: Directory,
    coordinator: CoordinatorHandle,
    /// Ends the coordinator and its server, also when this ends early.
    _over: DropGuard,
    orders: mpsc::WeakSender<Order>,
    guard: Arc<Guard>,
    pods: Vec<Pod>,
    /// The version in the agents' assignment that every rollout should hold.
    current: Option<HeldVersion>,
    /// Goes after the processes have ended.
    _versions: VersionsFolder,
}

/// One of a pod's processes, to be started.
struct Child {
    program: String,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    input: Option<String>,
}

/// Ends when other engines are registered; never, where there are none to come.
async fn changed(registered: &mut Option<watch::Receiver<Registered>>) {
    let seen = async { registered.as_mut()?.changed().await.ok() };
    if seen.await.is_none() {
        std::future::pending::<()>().await;
    }
}

/// `None` if another program starts the engine.
fn engine(engine: &EngineProgram) -> Option<Child> {
    let (program, arguments) = engine.command.split_first()?;
    let environment = engine.environment.clone().into_iter().collect();
    Some(Child { program: program.clone(), arguments: arguments.to_vec(), environment, input: None })
}

impl Supervisor {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn new(
        spec: GroupSpec,
        weightsync: String,
        controller: String,
        ca: Arc<Ca>,
        tokens: SingleUseTokens,
        directory: Directory,
        coordinator: CoordinatorHandle,
        over: DropGuard,
        orders: mpsc::WeakSender<Order>,
        guard: Guard,
        versions: VersionsFolder,
    ) -> Self {
        let pod = |spec: &PodSpec| Pod {
            spec: spec.clone(),
            life: 1,
            alive: true,
            agent: None,
            engine: None,
            agent_restarts: Restarts::new(),
            engine_restarts: Restarts::new(),
        };
        let pods = spec.pods.iter().map(pod).collect();
        Self {
            spec,
            weightsync,
            controller,
            ca,
            tokens,
            directory,
            coordinator,
            _over: over,
            orders,
            guard: Arc::new(guard),
            _versions: versions,
            pods,
            current: None,
        }
    }

    pub(super) async fn run(mut self, mut inbox: mpsc::Receiver<Order>, cancel: CancellationToken) {
        self.tell();
        self.directory.settle();
        for pod in 0..self.pods.len() {
            self.start(pod, Part::Engine);
            self.start(pod, Part::Agent);
        }
        let mut view = self.coordinator.view.clone();
        let mut registered = self.directory.registered(&self.weightsync);
        loop {
            let order = tokio::select! {
                () = cancel.cancelled() => break,
                () = changed(&mut registered) => {
                    self.tell();
                    continue;
                }
                Ok(()) = view.changed() => {
                    let version = view.borrow_and_update().version.clone();
                    if version != self.current {
                        self.current = version;
                        self.tell();
                    }
                    continue;
                }
                order = inbox.recv() => order,
            };
            match order {
                Some(Order::Signal { pod, signal, done }) => {
                    let _ = done.send(self.signal(&pod, signal));
                }
                Some(Order::Replace { pod, done }) => {
                    let _ = done.send(self.replace(&pod));
                }
                Some(Order::Target { target, done }) => {
                    self.coordinator.change(|wanted| wanted.config.target = target);
                    let _ = done.send(true);
                }
                Some(Order::Exited { pod, part, life, how }) => self.exited(pod, part, life, &how),
                Some(Order::Restart { pod, part, life }) if self.pods.get(pod).is_some_and(|pod| pod.alive && pod.life == life) => {
                    self.start(pod, part);
                }
                Some(Order::Restart { .. }) => {}
                None => break,
            }
        }
        self.let_go(view).await;
        self.stop().await;
    }

    /// Engines that another program started continue without `local`. They resume, and leave the NCCL group that they joined, which would
    /// keep GPU memory. Members that do not respond delay the others only briefly.
    async fn let_go(&self, mut view: watch::Receiver<MembershipView>) {
        if !self.pods.iter().any(Pod::goes_on) {
            return;
        }
        self.coordinator.change(|wanted| wanted.delete = true);
        let released = view.wait_for(|view| view.stage == GroupStage::Released && view.released);
        if tokio::time::timeout(RELEASE, released).await.is_err() {
            tracing::warn!("not every member left the group before it was stopped; its engine leaves it when it joins another");
        }
        let ours: Vec<MemberName> = self.pods.iter().filter(|pod| pod.goes_on()).map(|pod| pod.spec.member()).collect();
        let held = |view: &MembershipView| -> Vec<MemberView> {
            view.members.iter().filter(|member| member.dirty && ours.contains(&member.name)).cloned().collect()
        };
        if held(&view.borrow()).is_empty() {
            return;
        }
        tracing::warn!("an engine may hold half an update: its agent gives it whole weights first");
        if tokio::time::timeout(RESTORE, view.wait_for(|view| held(view).is_empty())).await.is_err() {
            for member in held(&view.borrow()) {
                let (engine, why) = (member.engine_url.unwrap_or_default(), member.message);
                tracing::error!(member = %member.name, engine, why, "the engine stays out of service: restart it");
            }
        }
    }

    /// Agents first: they resume engines that they paused, and complete their work with them, while the engines still respond.
    async fn stop(self) {
        let (mut agents, mut engines) = (Vec::new(), Vec::new());
        for pod in self.pods {
            let grace = pod.grace(Part::Agent);
            agents.extend(pod.agent.map(|agent| agent.stop(grace)));
            engines.extend(pod.engine.map(|engine| engine.stop(GRACE)));
        }
        futures::future::join_all(agents).await;
        futures::future::join_all(engines).await;
    }

    fn uid(&self, pod: &Pod) -> String {
        format!("{}-{}-{}", self.spec.name, pod.spec.name, pod.life)
    }

    /// Ports of the engines of a pod that take part.
    fn ports(&self, pod: &Pod, registered: &Registered) -> Vec<u16> {
        let Some(engine) = &pod.spec.engine else { return Vec::new() };
        let Some(most) = engine.registered else { return vec![engine.assignment.port] };
        registered.get(&self.uid(pod)).into_iter().flatten().copied().take(most).collect()
    }

    /// Reports which pods exist, with their assignments. A pod whose processes ended is still reported: its agent's silence shows the loss.
    fn tell(&self) {
        let mut claims = HashMap::new();
        let mut candidates = Vec::new();
        let registered = self.directory.registered(&self.weightsync).map(|registered| registered.borrow().clone()).unwrap_or_default();
        for pod in &self.pods {
            let uid = self.uid(pod);
            let ports = self.ports(pod, &registered);
            let at = |port: &u16| pod.spec.engine.as_ref().map(|engine| EngineAssignment { port: *port, ..engine.assignment.clone() });
            let engines = ports.iter().filter_map(at).collect();
            let (role, current, transport) = (pod.spec.role(), self.current.clone(), self.spec.policy.transport.clone());
            claims.insert(
                uid.clone(),
                Assignment {
                    role,
                    engines,
                    registered: pod.spec.engine.as_ref().is_some_and(|engine| engine.registered.is_some()),
                    serve_before_first_version: true,
                    current,
                    returned: None,
                    newest: None,
                    suspended: false,
                    transport,
                    hindrance: None,
                    ignored: pod.spec.engine.as_ref().map(|engine| engine.ignored.clone()).unwrap_or_default(),
                },
            );
            let candidate = |port: Option<u16>| Candidate {
                name: port.map_or_else(|| pod.spec.member(), |port| pod.spec.member_at(port)),
                role: pod.spec.role(),
                size: pod.spec.size,
                pods: vec![PodRef { name: pod.spec.name.clone(), uid: uid.clone(), node: None, ips: Vec::new() }],
                port,
            };
            match role {
                Role::Source => candidates.push(candidate(None)),
                Role::Rollout => candidates.extend(ports.into_iter().map(|port| candidate(Some(port)))),
            }
        }
        self.directory.claim(&self.weightsync, claims, Addresses::Callers);
        self.coordinator.change(|wanted| wanted.members = Some((candidates, Vec::new())));
    }

    fn log(&self, pod: &Pod, part: Part) -> PathBuf {
        let kind = if part == Part::Agent { "agent" } else { "engine" };
        self.spec.directory.join(format!("{}-{kind}.log", pod.spec.name))
    }

    fn start(&mut self, index: usize, part: Part) {
        let Some(pod) = self.pods.get(index) else { return };
        let (log, life, grace) = (self.log(pod, part), pod.life, pod.grace(part));
        let child = match part {
            Part::Agent => Some(self.agent(pod)),
            Part::Engine => pod.spec.engine.as_ref().and_then(engine),
        };
        let Some(Child { program, arguments, environment, input }) = child else { return };
        let orders = self.orders.clone();
        let exited = move |how| {
            if let Some(orders) = orders.upgrade() {
                tokio::spawn(async move { orders.send(Order::Exited { pod: index, part, life, how }).await });
            }
        };
        let whole = if part == Part::Engine { Whole::Group } else { Whole::Process };
        let guard = self.guard.clone();
        let start = Start { program: &program, arguments: &arguments, environment, log: &log, input, whole, grace, guard };
        let started = Process::start(start, exited);
        let Some(pod) = self.pods.get_mut(index) else { return };
        match started {
            Ok(process) => {
                tracing::debug!(pod = %pod.spec.name, ?part, pid = process.id(), "started");
                *(if part == Part::Agent { &mut pod.agent } else { &mut pod.engine }) = Some(process);
                pod.restarts(part).started(Instant::now());
            }
            Err(error) => {
                tracing::error!(pod = %pod.spec.name, ?part, %program, %error, "cannot be started");
                self.later(index, part);
            }
        }
    }

    fn agent(&self, pod: &Pod) -> Child {
        let uid = self.uid(pod);
        let proven = ProvenPod { namespace: "local".into(), pod: pod.spec.name.clone(), pod_uid: uid.clone() };
        let token = self.tokens.mint(proven, Vec::new());
        let role = if pod.spec.role() == Role::Source { "trainer" } else { "rollout" };
        let environment = [
            ("WEIGHTSYNC_ROLE", role.to_owned()),
            ("POD_NAME", pod.spec.name.clone()),
            ("POD_NAMESPACE", "local".to_owned()),
            ("POD_UID", uid),
            ("POD_IP", self.spec.address.to_string()),
            ("WEIGHTSYNC_CONTROLLER_URL", self.controller.clone()),
            ("WEIGHTSYNC_CONTROLLER_CA", self.ca.certificate_pem().to_owned()),
            ("WEIGHTSYNC_TOKEN_FILE", "/dev/stdin".to_owned()),
            ("WEIGHTSYNC_VERSION_DIR", self.spec.versions.join(&pod.spec.name).to_string_lossy().into_owned()),
            ("WEIGHTSYNC_SOCKET", self.socket(pod)),
            ("WEIGHTSYNC_STATUS_ADDRESS", SocketAddr::new(self.spec.address, 0).to_string()),
            // All agents see all GPUs of this host, so each needs the list of its own.
            ("WEIGHTSYNC_GPUS", if pod.spec.gpus.is_empty() { "none".to_owned() } else { pod.spec.gpus.join(",") }),
        ];
        let environment = environment.map(|(name, value)| (name.to_owned(), value)).to_vec();
        let program = self.spec.program.to_string_lossy().into_owned();
        // Not `localhost`: another user of this host may listen at the other loopback address.
        let engines = match self.spec.address {
            address if address.is_loopback() => address,
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        };
        let arguments = ["agent".to_owned(), "--engine-host".to_owned(), engines.to_string()];
        Child { program, arguments: arguments.to_vec(), environment, input: Some(format!("{token}\n")) }
    }

    /// The trainer's socket keeps its name when its agent's pod is recreated.
    fn socket(&self, pod: &Pod) -> String {
        format!("@weightsync/{}-{}", self.spec.name, pod.spec.name)
    }

    fn exited(&mut self, index: usize, part: Part, life: u64, how: &str) {
        let Some(pod) = self.pods.get_mut(index).filter(|pod| pod.life == life) else { return };
        *(if part == Part::Agent { &mut pod.agent } else { &mut pod.engine }) = None;
        if !pod.alive {
            return;
        }
        let name = pod.spec.name.clone();
        let log = self.pods.get(index).map(|pod| self.log(pod, part)).unwrap_or_default();
        tracing::warn!(pod = %name, ?part, how, log = %log.display(), "ended, will be started again; its last lines:\n{}", tail(&log, 5));
        self.later(index, part);
    }

    fn later(&mut self, index: usize, part: Part) {
        let Some(pod) = self.pods.get_mut(index) else { return };
        let wait = pod.restarts(part).ended(Instant::now());
        let (orders, life) = (self.orders.clone(), pod.life);
        tokio::spawn(async move {
            tokio::time::sleep(wait).await;
            if let Some(orders) = orders.upgrade() {
                let _ = orders.send(Order::Restart { pod: index, part, life }).await;
            }
        });
    }

    fn signal(&mut self, name: &str, signal: Signal) -> bool {
        let Some(pod) = self.pods.iter_mut().find(|pod| pod.spec.name == name) else { return false };
        pod.alive = false;
        for process in pod.agent.iter().chain(&pod.engine) {
            process.signal(signal);
        }
        true
    }

    fn replace(&mut self, name: &str) -> bool {
        let Some(index) = self.pods.iter().position(|pod| pod.spec.name == name) else { return false };
        if let Some(pod) = self.pods.get_mut(index) {
            (pod.agent, pod.engine, pod.alive, pod.life) = (None, None, true, pod.life + 1);
            (pod.agent_restarts, pod.engine_restarts) = (Restarts::new(), Restarts::new());
        }
        self.tell();
        self.start(index, Part::Engine);
        self.start(index, Part::Agent);
        true
    }
}

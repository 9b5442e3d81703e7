//! Starts and ends the endpoints of one claim: servers, listeners, supervision, announcements.
//!
//! Every address is bound before it is asked to anyone. It decides nothing about groups or versions.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rustls_pki_types::ServerName;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::pages::Pages;
use super::{AgentError, Settings};
use crate::client::{ClientServer, ClientServerConfig, PublishQueue, SocketError, SourceWorker};
use crate::core::{Core, Facts};
use crate::enrollment::{Announcer, AnnouncingEnded, Enrolled};
use crate::external::{ExternalDesk, epochs};
use crate::fabric::Fabric;
use crate::gpu::{GpuChoice, Gpus, Share};
use crate::group::{Me, Standing};
use crate::lead::Leader;
use crate::lead::feed::Feeder;
use crate::registry::{Registry, Reporter};
use crate::rollout::readiness::Assigned;
use crate::rollout::{Places, Rollout, StartError};
use crate::server::{Endpoint, Part, router};
use crate::source::Source;
use crate::{attempts::Attempts, roster};
use weightsync_core::protocol::{Announcement, Assignment, EngineAssignment, Incarnation, MemberName, Protocols, Role, RosterView};
use weightsync_engine::{Engine, EngineError};
use weightsync_net::https::{Access, AgentClient, ControllerClient, Limits, serve_https};
use weightsync_net::identity::{ClientCertificates, Identity, IdentityError, agent_name};
use weightsync_net::listen::listen;
use weightsync_transport::TransportError;
use weightsync_transport::gdr::GdrTransport;
use weightsync_transport::nccl::NcclTransport;
use weightsync_transport::tcp::{DataTls, TcpOptions, TcpTransport};

/// How long the end of a registered engine's endpoint waits for a switch of that engine.
const LEAVING: Duration = Duration::from_secs(5);

/// A listener that acknowledges nothing for this long is gone. A pod that was deleted by force takes its network away without a word; an
/// agent that still believed in that controller would not announce itself to the next one in time to keep its epoch.
const STALLED: Duration = Duration::from_secs(2);

/// Connects to an engine; at the given address, or at the usual one without it.
pub type EngineFactory = Arc<dyn Fn(&EngineAssignment, Option<IpAddr>) -> Result<Arc<dyn Engine>, EngineError> + Send + Sync>;

#[derive(Debug, thiserror::Error)]
pub(super) enum StartFailed {
    #[error("the engine on port {port}: {source}")]
    Engine { port: u16, source: EngineError },
    #[error(transparent)]
    Rollout(#[from] StartError),
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Listen(#[from] AgentError),
    #[error("the socket for engines: {0}")]
    Socket(#[from] SocketError),
    #[error("the object names no engine for this pod")]
    NoEngine,
}

/// What all claims of a process share.
pub(super) struct Session {
    pub(super) settings: Settings,
    pub(super) identity: Identity,
    pub(super) client: ControllerClient,
    pub(super) queue: Arc<PublishQueue>,
    pub(super) external: Arc<ExternalDesk>,
    pub(super) roster: watch::Sender<RosterView>,
    /// What the trainer's socket shows of the source's GPU.
    pub(super) source_gpu: watch::Sender<Result<SourceWorker, String>>,
}

/// The endpoints of one claim.
pub(super) struct Running {
    placed: Vec<Placed>,
    assignment: watch::Sender<Assignment>,
    unclaimed: watch::Sender<Option<String>>,
    /// The engines that registered, if the object wants those.
    registry: Option<Arc<Registry>>,
    tasks: JoinSet<()>,
    cancel: CancellationToken,
}

/// One endpoint, and what it takes to end it alone.
struct Placed {
    /// Its place among the endpoints of the pod; no two have the same.
    number: u16,
    engine: Option<EngineAssignment>,
    endpoint: Arc<Endpoint>,
    tasks: JoinSet<()>,
    cancel: CancellationToken,
}

impl Placed {
    fn rollout(&self) -> Option<&Arc<Rollout>> {
        match &self.endpoint.part {
            Part::Rollout(rollout) => Some(rollout),
            Part::Source(_) => None,
        }
    }

    /// Ends its tasks; an engine that is being switched has so long to end that.
    async fn end(mut self, switching: Duration) {
        if let Some(rollout) = self.rollout() {
            rollout.settled(switching).await;
        }
        self.cancel.cancel();
        join(&mut self.tasks).await;
    }
}

impl Session {
    pub(super) async fn start(&self, enrolled: &Enrolled, pages: &Pages, cancel: &CancellationToken) -> Result<Running, StartFailed> {
        let assignment = &enrolled.assignment;
        let mut running = Running {
            placed: Vec::new(),
            assignment: watch::Sender::new(assignment.clone()),
            unclaimed: watch::Sender::new(None),
            registry: None,
            tasks: JoinSet::new(),
            cancel: cancel.clone(),
        };
        match assignment.role {
            Role::Source => self.add(0, None, &mut running, pages).await?,
            Role::Rollout if assignment.registered => {
                self.let_engines_register(&mut running, pages)?;
                self.follow(&mut running, assignment, pages).await?;
            }
            Role::Rollout if assignment.engines.is_empty() => return Err(StartFailed::NoEngine),
            Role::Rollout => {
                for (number, engine) in (0_u16..).zip(&assignment.engines) {
                    self.add(number, Some(engine), &mut running, pages).await?;
                }
            }
        }
        running.assign(assignment);
        Ok(running)
    }

    /// Ends the endpoints of registered engines that are gone, and starts those of new ones.
    pub(super) async fn follow(&self, running: &mut Running, assignment: &Assignment, pages: &Pages) -> Result<(), StartFailed> {
        let wanted = |placed: &Placed| placed.engine.as_ref().is_some_and(|engine| assignment.engines.contains(engine));
        let (kept, gone) = std::mem::take(&mut running.placed).into_iter().partition(wanted);
        running.placed = kept;
        for placed in gone {
            if let Some(rollout) = placed.rollout() {
                pages.remove(rollout);
            }
            placed.end(LEAVING).await;
        }
        for engine in &assignment.engines {
            if running.placed.iter().any(|placed| placed.engine.as_ref() == Some(engine)) {
                continue;
            }
            let free = (0..=u16::MAX).find(|number| running.placed.iter().all(|placed| placed.number != *number)).unwrap_or(0);
            self.add(free, Some(engine), running, pages).await?;
        }
        Ok(())
    }

    /// Opens the socket where engines register, and reports them to the controller.
    fn let_engines_register(&self, running: &mut Running, pages: &Pages) -> Result<(), StartFailed> {
        let settings = &self.settings;
        let registry = Registry::new(settings.ip);
        let socket = ClientServerConfig { engines: Some(registry.clone()), ..settings.socket.clone() };
        let server = ClientServer::bind(socket, self.queue.clone(), self.roster.subscribe())?;
        running.tasks.spawn(server.run(running.cancel.clone()));
        let reporter = Reporter {
            client: self.client.clone(),
            namespace: settings.applicant.namespace.clone(),
            incarnation: settings.applicant.incarnation.clone(),
            registry: registry.clone(),
            assignment: running.assignment.clone(),
        };
        let (unclaimed, over) = (running.unclaimed.clone(), running.cancel.clone());
        running.tasks.spawn(async move {
            if let AnnouncingEnded::Unclaimed { message } = reporter.run(over).await {
                unclaimed.send_replace(Some(message));
            }
        });
        running.registry = Some(registry);
        pages.engines_register();
        Ok(())
    }

    async fn add(&self, number: u16, engine: Option<&EngineAssignment>, running: &mut Running, pages: &Pages) -> Result<(), StartFailed> {
        let settings = &self.settings;
        let me = Me {
            incarnation: Incarnation {
                pod_uid: settings.applicant.incarnation.pod_uid.clone(),
                instance: uuid::Uuid::new_v4().simple().to_string(),
            },
            role: if engine.is_some() { Role::Rollout } else { Role::Source },
            port: engine.map(|engine| engine.port),
        };
        let (mut tasks, cancel) = (JoinSet::new(), running.cancel.child_token());
        let core = Core::new(me.clone(), Facts::default());
        let control = bind(settings.ip, port(settings.control_port, number))?;
        let data = SocketAddr::new(settings.ip, port(settings.data_port, number));
        let options = TcpOptions { tls: Some(self.data_tls(&core)?), ..TcpOptions::default() };
        let nccl = Arc::new(NcclTransport::new(TcpTransport::bind(data, core.clone(), options).await?));
        let transport = Arc::new(GdrTransport::new(nccl.clone()));
        let data_address = weightsync_transport::Transport::address(transport.as_ref());
        let leader = Leader::new(core.clone(), AgentClient::new(self.identity.clone()), transport.clone());
        let (policy, engines) = {
            let assignment = running.assignment.borrow();
            (assignment.transport.clone(), assignment.engines.len().max(1))
        };
        let share = Share { number: usize::from(number), of: engines };
        let reported = engine.is_none().then(|| self.source_gpu.clone());
        let mut gpu_settings = settings.gpus.clone();
        if running.registry.is_some() {
            // How many engines will share the GPUs is not known, and which of them this one has is not either.
            gpu_settings.choice = GpuChoice::None;
        }
        let gpus = Gpus::new(core.clone(), gpu_settings, settings.fabric.devices.clone(), share, &policy, nccl, reported);
        tasks.spawn(gpus.clone().supervise(cancel.clone()));
        leader.set_gpus(gpus.clone());
        leader.set_fabric(Fabric::new(core.clone(), settings.fabric.clone(), settings.cgroups.clone(), gpus.clone(), transport));
        let part = if let Some(engine) = engine {
            let rollout = self.rollout(engine, &core, running.registry.as_deref())?;
            tasks.spawn(rollout.clone().supervise(cancel.clone()));
            rollout.set_gpus(gpus);
            pages.add(rollout.clone());
            let feeder = Feeder::new(leader.clone(), rollout.clone(), Arc::<Attempts>::default());
            spawn(&mut tasks, &cancel, async move { feeder.run().await });
            Part::Rollout(rollout)
        } else {
            let source = Source::new(leader.clone(), settings.cgroups.clone(), self.roster.subscribe());
            tasks.spawn(source.clone().run(self.queue.clone(), cancel.clone()));
            tasks.spawn(source.clone().run_external(self.external.clone(), cancel.clone()));
            tasks.spawn(epochs::keep(core.clone(), leader.clone(), self.external.clone(), cancel.clone()));
            Part::Source(source)
        };
        let shown = if number == 0 { self.roster.clone() } else { pages.more_roster() };
        tasks.spawn(roster::keep(core.clone(), leader.clone(), shown, cancel.clone()));
        let rollout = match &part {
            Part::Rollout(rollout) => Some(rollout),
            Part::Source(_) => None,
        };
        pages.count(&core, rollout, &mut tasks, &cancel);
        let control_address = control.local_addr().map_or_else(|_| String::new(), |address| address.to_string());
        let endpoint = Arc::new(Endpoint { core: core.clone(), leader, part, data_address });
        let (identity, routes, over) = (self.identity.clone(), router(endpoint.clone()), cancel.clone());
        let limits = Limits { stalled: STALLED, ..Limits::default() };
        tasks.spawn(async move {
            if let Err(error) = serve_https(control, identity, Access::Group, routes, limits, over).await {
                tracing::error!(%error, "the control server cannot run");
            }
        });
        tracing::info!(control = %control_address, data = %endpoint.data_address, engine = ?engine.map(|engine| engine.port), "endpoint");
        let announcer = Announcer {
            client: self.client.clone(),
            announcement: Announcement {
                namespace: settings.applicant.namespace.clone(),
                pod: settings.applicant.pod.clone(),
                incarnation: me.incarnation,
                role: me.role,
                engine_port: me.port,
                control_address,
                program: env!("CARGO_PKG_VERSION").into(),
                speaks: Protocols::OURS,
                attached: false,
            },
            refresh: core.events().refresh().clone(),
            attached: Arc::new(move || core.events().has_coordinator()),
            assignment: running.assignment.clone(),
        };
        let (unclaimed, over) = (running.unclaimed.clone(), cancel.clone());
        tasks.spawn(async move {
            if let AnnouncingEnded::Unclaimed { message } = announcer.run(over).await {
                unclaimed.send_replace(Some(message));
            }
        });
        running.placed.push(Placed { number, engine: engine.cloned(), endpoint, tasks, cancel });
        Ok(())
    }

    fn rollout(&self, engine: &EngineAssignment, core: &Arc<Core>, registry: Option<&Registry>) -> Result<Arc<Rollout>, StartFailed> {
        let settings = &self.settings;
        let address = registry.and_then(|registry| registry.address(engine.port));
        let adapter = (settings.engines)(engine, address).map_err(|source| StartFailed::Engine { port: engine.port, source })?;
        let name = format!("{}-{}", settings.places.name, engine.port);
        let places = Places { name, ..settings.places.clone() };
        Ok(Rollout::start(core.clone(), adapter, places, settings.cgroups.clone())?)
    }

    /// TLS of the data path; a member's certificate must name the pod that the epoch says it is in.
    fn data_tls(&self, core: &Arc<Core>) -> Result<DataTls, IdentityError> {
        let standing = core.standing();
        let name_of = move |member: &MemberName| {
            let pod_uid = match &*standing.borrow() {
                Standing::Committing(epoch) | Standing::Committed(epoch) => epoch.address(member)?.incarnation.pod_uid.clone(),
                Standing::Idle | Standing::Prepared(_) => return None,
            };
            ServerName::try_from(agent_name(&pod_uid)).ok()
        };
        Ok(DataTls {
            server: self.identity.server_config(ClientCertificates::Required)?,
            client: Arc::new(self.identity.client_config()?),
            server_name: Arc::new(name_of),
        })
    }
}

impl Running {
    pub(super) fn assignment(&self) -> watch::Receiver<Assignment> {
        self.assignment.subscribe()
    }

    /// Passes on what the object wants of endpoints that run already.
    pub(super) fn assign(&self, assignment: &Assignment) {
        for endpoint in self.endpoints() {
            endpoint.core.learn_hindrance(assignment.hindrance.clone());
            if matches!(endpoint.part, Part::Source(_)) {
                endpoint.core.learn_later(assignment.current.as_ref());
            }
        }
        for rollout in self.rollouts() {
            rollout.assign(Assigned {
                known: true,
                serve_before_first_version: assignment.serve_before_first_version,
                suspended: assignment.suspended,
                current: assignment.current.clone(),
                returned: assignment.returned,
                newest: assignment.newest,
            });
        }
    }

    /// Waits until the controller says that the pod is not claimed.
    pub(super) async fn unclaimed_by(&self) -> String {
        let mut unclaimed = self.unclaimed.subscribe();
        let message = unclaimed.wait_for(Option::is_some).await.ok().and_then(|message| message.clone());
        match message {
            Some(message) => message,
            None => std::future::pending().await,
        }
    }

    /// Leaves the group for good.
    pub(super) async fn unclaimed(&self, message: &str) {
        for endpoint in self.endpoints() {
            endpoint.core.unclaimed(message);
        }
        for rollout in self.rollouts() {
            rollout.release().await;
        }
    }

    /// What this pod is about is gone: no engine is next to the agent any more, or no trainer.
    pub(super) fn command_ended(&self, reason: &str) {
        for endpoint in self.endpoints() {
            match &endpoint.part {
                Part::Rollout(rollout) => rollout.engine_ended(reason),
                Part::Source(_) => endpoint.core.set_facts(|facts| facts.reason = Some(reason.to_owned())),
            }
        }
    }

    /// Ends all tasks; engines that are being switched have so long to end that.
    pub(super) async fn end(mut self, switching: Duration) {
        for rollout in self.rollouts() {
            rollout.settled(switching).await;
        }
        self.cancel.cancel();
        for placed in std::mem::take(&mut self.placed) {
            self.tasks.spawn(placed.end(Duration::ZERO));
        }
        join(&mut self.tasks).await;
    }

    fn endpoints(&self) -> impl Iterator<Item = &Arc<Endpoint>> {
        self.placed.iter().map(|placed| &placed.endpoint)
    }

    fn rollouts(&self) -> impl Iterator<Item = &Arc<Rollout>> {
        self.placed.iter().filter_map(Placed::rollout)
    }
}

/// Waits for the end of tasks that were cancelled; those that take longer than a few seconds are ended.
async fn join(tasks: &mut JoinSet<()>) {
    let ended = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(Duration::from_secs(5), ended).await.is_err() {
        tasks.abort_all();
    }
}

fn spawn(tasks: &mut JoinSet<()>, cancel: &CancellationToken, work: impl Future<Output = ()> + Send + 'static) {
    let cancel = cancel.clone();
    tasks.spawn(async move {
        tokio::select! {
            () = cancel.cancelled() => {}
            () = work => {}
        }
    });
}

/// Fixed ports count up with the endpoints of a pod; 0 stays 0.
fn port(first: u16, number: u16) -> u16 {
    if first == 0 { 0 } else { first.saturating_add(number) }
}

fn bind(ip: IpAddr, port: u16) -> Result<TcpListener, AgentError> {
    let address = SocketAddr::new(ip, port);
    listen(address).map_err(|source| AgentError::Listen { address, source })
}

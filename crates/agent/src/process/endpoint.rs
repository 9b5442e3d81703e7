//! One endpoint: its servers, listeners and announcements, and the watch over its engine, which lasts longer.
//!
//! Every address is bound before it is asked to anyone. It decides nothing about groups or versions, nor when an endpoint starts or ends.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustls_pki_types::ServerName;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::pages::Pages;
use super::{AgentError, Settings};
use crate::client::{PublishQueue, SocketError, SourceWorker};
use crate::core::{Core, Facts};
use crate::enrollment::{Announcer, AnnouncingEnded};
use crate::external::{ExternalDesk, epochs};
use crate::fabric::Fabric;
use crate::gpu::{GpuChoice, Gpus, Share};
use crate::group::{Me, Standing};
use crate::lead::Leader;
use crate::lead::feed::Feeder;
use crate::locks::lock;
use crate::registry::{Registered, Registry};
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

/// A listener that acknowledges nothing for this long is gone. A pod that was deleted by force takes its network away without a word; an
/// agent that still believed in that controller would not announce itself to the next one in time to keep its epoch.
const STALLED: Duration = Duration::from_secs(2);

/// Connects to an engine: as its registration says, or as the agent was started for one that the object lists.
pub type EngineFactory = Arc<dyn Fn(&EngineAssignment, Option<&Registered>) -> Result<Arc<dyn Engine>, EngineError> + Send + Sync>;

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

/// An engine that is to have an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EngineAt {
    pub(super) engine: EngineAssignment,
    /// What its registration says of it; none for one that the object lists.
    pub(super) registered: Option<Registered>,
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

/// What the endpoints of one claim share.
pub(super) struct Claim {
    pub(super) assignment: watch::Sender<Assignment>,
    /// Why no object claims the pod any more, once that is so.
    pub(super) unclaimed: watch::Sender<Option<String>>,
    /// The engines that registered, if the object wants those.
    pub(super) registry: Option<Arc<Registry>>,
    pub(super) endpoints: Mutex<Vec<Arc<Endpoint>>>,
}

/// One endpoint, and what it takes to end it alone.
pub(super) struct Placed {
    claim: Arc<Claim>,
    pub(super) endpoint: Arc<Endpoint>,
    tasks: JoinSet<()>,
    cancel: CancellationToken,
}

/// An engine that is watched: its health, its start and what it holds are known. This does not depend on a claim.
pub(super) struct Watched {
    pub(super) rollout: Arc<Rollout>,
    tasks: JoinSet<()>,
    cancel: CancellationToken,
}

impl Placed {
    /// Ends its servers and its announcements. The watch over its engine goes on.
    pub(super) async fn close(mut self) {
        self.cancel.cancel();
        join(&mut self.tasks).await;
        lock(&self.claim.endpoints).retain(|endpoint| !Arc::ptr_eq(endpoint, &self.endpoint));
    }
}

impl Watched {
    pub(super) async fn end(mut self) {
        self.cancel.cancel();
        join(&mut self.tasks).await;
    }
}

impl Claim {
    /// What is known of the pod's engines and trainer is over: no engine is next to the agent any more, or no trainer.
    pub(super) fn command_ended(&self, reason: &str) {
        for endpoint in lock(&self.endpoints).iter() {
            match &endpoint.part {
                Part::Rollout(rollout) => rollout.engine_ended(reason),
                Part::Source(_) => endpoint.core.set_facts(|facts| facts.reason = Some(reason.to_owned())),
            }
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
}

impl Session {
    /// Starts the endpoint of the engine that is `wanted`, or of the trainer. `number` is its place among the endpoints of the pod: no two have
    /// the same. It ends with `cancel`, the watch over its engine does not.
    pub(super) async fn open(
        &self,
        claim: &Arc<Claim>,
        number: u16,
        wanted: Option<&EngineAt>,
        pages: &Pages,
        cancel: CancellationToken,
    ) -> Result<(Placed, Option<Watched>), StartFailed> {
        let settings = &self.settings;
        let engine = wanted.map(|wanted| &wanted.engine);
        let me = Me {
            incarnation: Incarnation {
                pod_uid: settings.applicant.incarnation.pod_uid.clone(),
                instance: uuid::Uuid::new_v4().simple().to_string(),
            },
            role: if engine.is_some() { Role::Rollout } else { Role::Source },
            port: engine.map(|engine| engine.port),
        };
        let mut tasks = JoinSet::new();
        let core = Core::new(me.clone(), Facts::default());
        let control = bind(settings.ip, port(settings.control_port, number))?;
        let data = SocketAddr::new(settings.ip, port(settings.data_port, number));
        let options = TcpOptions { tls: Some(self.data_tls(&core)?), ..TcpOptions::default() };
        let nccl = Arc::new(NcclTransport::new(TcpTransport::bind(data, core.clone(), options).await?));
        let transport = Arc::new(GdrTransport::new(nccl.clone()));
        let data_address = weightsync_transport::Transport::address(transport.as_ref());
        let leader = Leader::new(core.clone(), AgentClient::new(self.identity.clone()), transport.clone());
        let (policy, engines) = {
            let assignment = claim.assignment.borrow();
            (assignment.transport.clone(), assignment.engines.len().max(1))
        };
        let share = Share { number: usize::from(number), of: engines };
        let reported = engine.is_none().then(|| self.source_gpu.clone());
        let mut gpu_settings = settings.gpus.clone();
        if claim.registry.is_some() {
            // How many engines will share the GPUs is not known, and which of them this one has is not either.
            gpu_settings.choice = GpuChoice::None;
        }
        let gpus = Gpus::new(core.clone(), gpu_settings, settings.fabric.devices.clone(), share, &policy, nccl, reported);
        tasks.spawn(gpus.clone().supervise(cancel.clone()));
        leader.set_gpus(gpus.clone());
        leader.set_fabric(Fabric::new(core.clone(), settings.fabric.clone(), settings.cgroups.clone(), gpus.clone(), transport));
        let mut watched = None;
        let part = if let Some(wanted) = wanted {
            let rollout = self.rollout(wanted, &core)?;
            rollout.set_gpus(gpus);
            let watch = watched.insert(Watched { rollout: rollout.clone(), tasks: JoinSet::new(), cancel: CancellationToken::new() });
            watch.tasks.spawn(rollout.clone().supervise(watch.cancel.clone()));
            pages.count(&core, Some(&rollout), &mut watch.tasks, &watch.cancel);
            let feeder = Feeder::new(leader.clone(), rollout.clone(), Arc::<Attempts>::default());
            spawn(&mut tasks, &cancel, async move { feeder.run().await });
            Part::Rollout(rollout)
        } else {
            let source = Source::new(leader.clone(), settings.cgroups.clone(), self.roster.subscribe());
            tasks.spawn(source.clone().run(self.queue.clone(), cancel.clone()));
            tasks.spawn(source.clone().run_external(self.external.clone(), cancel.clone()));
            tasks.spawn(epochs::keep(core.clone(), leader.clone(), self.external.clone(), cancel.clone()));
            pages.count(&core, None, &mut tasks, &cancel);
            Part::Source(source)
        };
        let shown = if number == 0 { self.roster.clone() } else { pages.more_roster() };
        tasks.spawn(roster::keep(core.clone(), leader.clone(), shown, cancel.clone()));
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
            assignment: claim.assignment.clone(),
        };
        let (unclaimed, over) = (claim.unclaimed.clone(), cancel.clone());
        tasks.spawn(async move {
            if let AnnouncingEnded::Unclaimed { message } = announcer.run(over).await {
                unclaimed.send_replace(Some(message));
            }
        });
        let mut assigned = claim.assignment.subscribe();
        assign(&endpoint, &assigned.borrow_and_update());
        let follows = endpoint.clone();
        spawn(&mut tasks, &cancel, async move {
            while assigned.changed().await.is_ok() {
                assign(&follows, &assigned.borrow_and_update());
            }
        });
        lock(&claim.endpoints).push(endpoint.clone());
        // From here on the readiness of the pod depends on it.
        if let Some(watched) = &watched {
            pages.add(watched.rollout.clone());
        }
        Ok((Placed { claim: claim.clone(), endpoint, tasks, cancel }, watched))
    }

    fn rollout(&self, wanted: &EngineAt, core: &Arc<Core>) -> Result<Arc<Rollout>, StartFailed> {
        let settings = &self.settings;
        let EngineAt { engine, registered } = wanted;
        let adapter =
            (settings.engines)(engine, registered.as_ref()).map_err(|source| StartFailed::Engine { port: engine.port, source })?;
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

/// Passes on what the object wants of an endpoint that runs.
fn assign(endpoint: &Endpoint, assignment: &Assignment) {
    endpoint.core.learn_hindrance(assignment.hindrance.clone());
    match &endpoint.part {
        Part::Source(_) => endpoint.core.learn_later(assignment.current.as_ref()),
        Part::Rollout(rollout) => rollout.assign(Assigned {
            known: true,
            serve_before_first_version: assignment.serve_before_first_version,
            suspended: assignment.suspended,
            current: assignment.current.clone(),
            returned: assignment.returned,
            newest: assignment.newest,
            ignored: assignment.ignored.clone(),
        }),
    }
}

/// Waits for the end of tasks that were cancelled; those that take longer than a few seconds are ended.
pub(super) async fn join(tasks: &mut JoinSet<()>) {
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

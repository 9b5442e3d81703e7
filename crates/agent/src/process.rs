//! An agent as a process: obtains its certificate, runs one endpoint for each engine next to it (or one for the trainer), announces them,
//! and ends them in good order.
//!
//! What an agent is to do comes from its object, with its certificate; it starts without any configuration of engines. When no object claims
//! its pod any more it releases its engines and waits to be claimed again. It never ends because the controller is away.

mod endpoint;
mod engines;
mod labels;
mod numbers;
mod pages;
mod progress;
mod shown;
mod watchers;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep_until;
use tokio_util::sync::CancellationToken;

pub use self::endpoint::EngineFactory;
use self::endpoint::Session;
use self::engines::{Order, Resting, Running};
pub use self::numbers::DEFINITIONS as METRICS;
use self::pages::Pages;
use super::client::{ClientServer, ClientServerConfig, PublishQueue, SocketError};
use super::enrollment::{Applicant, Enrolled, EnrollmentError, NotEnrolled, enroll};
use super::external::ExternalDesk;
use weightsync_core::protocol::{Assignment, Role, RosterView};
use weightsync_net::backoff::Backoff;
use weightsync_net::https::{ControllerClient, Limits, serve_plain};
use weightsync_net::identity::{Identity, IdentityError};
use weightsync_net::listen;

#[derive(Clone)]
#[allow(missing_docs)]
pub struct Settings {
    /// What the pod is by its label; the object's word decides in the end.
    pub role: Role,
    /// Pod, this process, and how it proves itself.
    pub applicant: Applicant,
    /// Address of the pod: servers listen here.
    pub ip: IpAddr,
    /// Port of the first control server; 0 takes a free one.
    pub control_port: u16,
    /// Port of the first data listener; 0 takes a free one.
    pub data_port: u16,
    /// Where the status pages are; port 0 takes a free one.
    pub status: SocketAddr,
    /// Where probes are answered, apart from everything else; port 0 takes a free one.
    pub probes: SocketAddr,
    /// The controller, `HOST:PORT`.
    pub controller: String,
    /// PEM of the operator's CA.
    pub ca_pem: String,
    /// Where versions lie and what belongs next to them; the name of each endpoint is added.
    pub places: super::rollout::Places,
    pub socket: ClientServerConfig,
    pub engines: EngineFactory,
    pub cgroups: super::space::Cgroups,
    pub gpus: super::gpu::GpuSettings,
    pub fabric: super::fabric::FabricSettings,
    /// After which time the pod serves although no operator claimed it; none for never.
    pub serve_unclaimed_after: Option<Duration>,
    /// How the command ended that runs below this agent, once it did; none for an agent that started no command.
    pub command: Option<watch::Receiver<Option<String>>>,
}

impl Settings {
    /// Waits until the command below this agent ended; for ever where there is none.
    async fn command_ended(&self) -> String {
        let Some(command) = &self.command else { return std::future::pending().await };
        let ended = command.clone().wait_for(Option::is_some).await.ok().and_then(|ended| ended.clone());
        match ended {
            Some(ended) => ended,
            None => std::future::pending().await,
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum AgentError {
    #[error("cannot listen on {address}: {source}")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Enrollment(#[from] EnrollmentError),
    #[error("the trainer's socket: {0}")]
    Socket(#[from] SocketError),
}

/// How long the end of the command below an agent takes to reach those who listen, before their connections close. A machine whose cores are
/// all busy takes some hundred milliseconds over it; what comes too late is reported as a lost agent, which hides the exit status.
const REPORTED: Duration = Duration::from_millis(500);

/// Runs until `cancel`, or until the command below it ended and everybody was informed.
pub async fn run(settings: Settings, cancel: CancellationToken) -> Result<(), AgentError> {
    let stop = cancel.clone().drop_guard();
    let roster = watch::Sender::new(RosterView { epoch: None, version: None, replicas: Vec::new() });
    let pages = Arc::new(Pages::new(settings.role, roster.subscribe(), settings.serve_unclaimed_after));
    let listener = listen(settings.status, "status pages")?;
    let probes = listen(settings.probes, "probes")?;
    let mut background = JoinSet::new();
    background.spawn(serve_plain(listener, pages.router(), Limits::pages(), cancel.clone()));
    background.spawn(serve_plain(probes, pages.probes(), Limits::probes(), cancel.clone()));
    let queue: Arc<PublishQueue> = Arc::default();
    let source_gpu = watch::Sender::new(Err("the agent is in no group yet".to_owned()));
    let external: Arc<ExternalDesk> = Arc::default();
    if settings.role == Role::Source {
        // Before anything else is there: a trainer may connect at once, and its publish waits for a group.
        let socket = ClientServerConfig { gpu: source_gpu.subscribe(), external: external.clone(), ..settings.socket.clone() };
        let server = ClientServer::bind(socket, queue.clone(), roster.subscribe())?;
        background.spawn(server.run(cancel.clone()));
    }
    let identity = Identity::new(&settings.ca_pem)?;
    let client = ControllerClient::new(identity.clone(), settings.controller.clone());
    let session = Arc::new(Session { settings, identity, client, queue, external, roster, source_gpu });
    let outcome = sessions(&session, &pages, &cancel).await;
    drop(stop);
    while background.join_next().await.is_some() {}
    outcome
}

fn listen(address: SocketAddr, what: &str) -> Result<TcpListener, AgentError> {
    let listener = listen::listen(address).map_err(|source| AgentError::Listen { address, source })?;
    if let Ok(address) = listener.local_addr() {
        tracing::info!(%address, "{what}");
    }
    Ok(listener)
}

/// From one claim to the next, until `cancel`. Between two claims engines are watched: a pod stays ready only as long as they answer.
async fn sessions(session: &Arc<Session>, pages: &Arc<Pages>, cancel: &CancellationToken) -> Result<(), AgentError> {
    let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));
    let mut resting = Resting::default();
    loop {
        let tell = |cause| session.queue.not_enrolled(cause);
        tell(NotEnrolled::Asking { controller: session.settings.controller.clone() });
        let enrolled = tokio::select! {
            enrolled = enroll(&session.client, &session.identity, &session.settings.applicant, tell, cancel) => enrolled,
            () = resting.follow(pages) => continue,
        };
        let enrolled = match enrolled {
            Ok(enrolled) => {
                session.queue.enrolled();
                enrolled
            }
            Err(EnrollmentError::Cancelled) => break,
            Err(error @ EnrollmentError::Token { .. }) => {
                tracing::warn!(%error, "not enrolled yet");
                tell(NotEnrolled::NoToken(Arc::new(error)));
                if again(backoff.failed(), cancel).await {
                    continue;
                }
                break;
            }
            Err(error) => {
                resting.end().await;
                return Err(error.into());
            }
        };
        // Directories of the claim before must be gone before their names are taken again.
        pages.forget_endpoints();
        std::mem::take(&mut resting).end().await;
        let over = cancel.child_token();
        let ended = match Running::start(session, &enrolled.assignment, pages, &over).await {
            Ok(mut running) => {
                backoff.succeeded();
                let ended = attend(session, enrolled, &mut running, pages, cancel).await;
                let order = match &ended {
                    Ended::Cancelled => Order::End,
                    Ended::Differs => Order::Rest,
                    Ended::Unclaimed(message) => {
                        tracing::warn!(message, "no object claims this pod: engines are released");
                        Order::Unclaimed(message.clone())
                    }
                };
                resting = running.end(order).await;
                ended
            }
            Err(error) => {
                tracing::error!(%error, "this agent cannot do what its object wants");
                pages.failed(error.to_string());
                Ended::Differs
            }
        };
        if matches!(ended, Ended::Unclaimed(_)) {
            pages.unclaimed();
        }
        over.cancel();
        if matches!(ended, Ended::Cancelled) || !again(backoff.failed(), cancel).await {
            break;
        }
    }
    pages.forget_endpoints();
    resting.end().await;
    Ok(())
}

enum Ended {
    Cancelled,
    /// No one, or somebody else, claims the pod.
    Unclaimed(String),
    /// The object wants other engines, or another object claims the pod.
    Differs,
}

/// Renews the certificate and follows the assignment while the claim lasts.
async fn attend(
    session: &Arc<Session>,
    mut enrolled: Enrolled,
    running: &mut Running,
    pages: &Arc<Pages>,
    cancel: &CancellationToken,
) -> Ended {
    let claim = running.claim().clone();
    let mut assignment = claim.assignment.subscribe();
    let mut registrations = Box::pin(running.registrations());
    // What registered before that was not seen.
    running.follow(session, pages);
    // Engines that register come and go one by one; a change of the object's own list starts all endpoints again.
    let listed = |a: &Assignment| (!a.registered).then(|| a.engines.clone());
    let same_engines = |a: &Assignment, b: &Assignment| (a.role, listed(a)) == (b.role, listed(b));
    // Next to everything else: a controller that is away may keep it waiting for hours, and the command may end meanwhile.
    let renewed = |at| async move {
        sleep_until(at).await;
        enroll(&session.client, &session.identity, &session.settings.applicant, |_| (), cancel).await
    };
    let mut renewal = Box::pin(renewed(enrolled.renew_at));
    loop {
        tokio::select! {
            () = cancel.cancelled() => return Ended::Cancelled,
            // Its parent knows at once; anyone who probes the engine knows after so many failures.
            reason = session.settings.command_ended() => {
                tracing::warn!(reason, "the engine or trainer is gone");
                claim.command_ended(&reason);
                let _ = tokio::time::timeout(REPORTED, cancel.cancelled()).await;
                return Ended::Cancelled;
            }
            message = claim.unclaimed_by() => return Ended::Unclaimed(message),
            ended = &mut renewal => {
                match ended {
                    Ok(fresh) if fresh.weightsync != enrolled.weightsync => return Ended::Unclaimed("another object claims this pod".into()),
                    Ok(fresh) => enrolled = fresh,
                    Err(EnrollmentError::Cancelled) => return Ended::Cancelled,
                    Err(error @ EnrollmentError::Refused(_)) => return Ended::Unclaimed(error.to_string()),
                    Err(error) => {
                        tracing::warn!(%error, "the certificate cannot be renewed");
                        enrolled.renew_at = tokio::time::Instant::now() + Duration::from_secs(10);
                    }
                }
                renewal.set(renewed(enrolled.renew_at));
            }
            changed = assignment.changed() => {
                if changed.is_err() {
                    return Ended::Differs;
                }
                let now = assignment.borrow_and_update().clone();
                if !same_engines(&now, &enrolled.assignment) {
                    tracing::info!("the object wants other engines");
                    return Ended::Differs;
                }
                if now.registered {
                    running.follow(session, pages);
                }
            }
            () = &mut registrations => {
                registrations.set(running.registrations());
                running.follow(session, pages);
            }
        }
    }
}

/// Waits a moment before the next try; false when the agent is to end.
async fn again(wait: Duration, cancel: &CancellationToken) -> bool {
    tokio::time::timeout(wait, cancel.cancelled()).await.is_err()
}

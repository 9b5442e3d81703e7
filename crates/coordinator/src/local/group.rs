//! A group on one host: starts the supervisor and the coordinator. Commands control both through it.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::process::Signal;
use tokio::net::TcpListener;
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::folder::{FolderError, VersionsFolder};
use super::guard::Guard;
use super::page::PageServer;
use super::spec::GroupSpec;
use super::store::FileStore;
use super::supervisor::{Order, Supervisor};
use crate::page::RecentEvents;
use crate::{
    Context, Coordinator, CoordinatorEvent, Directory, Enrollment, EventSink, PersistError, SingleUseTokens, Timing, Wanted,
    keep_certified, router,
};
use weightsync_core::membership::{MembershipConfig, MembershipView, Restored};
use weightsync_core::protocol::Version;
use weightsync_net::https::{Access, AgentClient, Limits, serve_https};
use weightsync_net::identity::{Ca, IdentityError, PeerIdentity};

/// Lifetime of certificates, which are renewed after a third of it.
const CERTIFICATES: Duration = Duration::from_hours(24 * 7);
/// A token is used when its agent starts.
const TOKEN_LIFETIME: Duration = Duration::from_mins(1);
/// Events that are buffered for a slow listener.
const EVENTS: usize = 256;

/// Why a group cannot be started.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum GroupError {
    #[error("certificates cannot be made: {0}")]
    Identity(#[from] IdentityError),
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
    #[error(transparent)]
    Epoch(#[from] PersistError),
    #[error(transparent)]
    Folder(#[from] FolderError),
}

/// A running group. Dropping it kills every process that it started.
pub struct Group {
    orders: mpsc::Sender<Order>,
    view: watch::Receiver<MembershipView>,
    events: broadcast::Sender<CoordinatorEvent>,
    address: IpAddr,
    name: String,
    recent: RecentEvents,
    cancel: CancellationToken,
    _supervisor: AbortOnDropHandle<()>,
    _server: AbortOnDropHandle<Result<(), IdentityError>>,
    _certified: AbortOnDropHandle<()>,
}

struct Broadcast(broadcast::Sender<CoordinatorEvent>);

impl EventSink for Broadcast {
    fn publish(&self, event: CoordinatorEvent) {
        tracing::info!(reason = %event.reason, member = event.member.as_ref().map(tracing::field::display), "{}", event.message);
        // Without a listener, the log has the Event.
        let _ = self.0.send(event);
    }
}

impl Group {
    /// Starts everything. Returns when the processes are started, before the group is formed.
    pub async fn start(spec: GroupSpec) -> Result<Self, GroupError> {
        Self::start_certified(spec, CERTIFICATES).await
    }

    /// As [`start`](Self::start), with certificates of that lifetime.
    pub async fn start_certified(mut spec: GroupSpec, certificates: Duration) -> Result<Self, GroupError> {
        let io = |what: &str| {
            let what = what.to_owned();
            move |source| GroupError::Io { what, source }
        };
        let versions = VersionsFolder::make(&spec.versions, spec.pods.iter().map(|pod| pod.name.as_str()))?;
        spec.versions = versions.path().to_owned();
        let store = FileStore::new(&spec.directory);
        let epoch = store.read()?;
        let ca = Arc::new(Ca::generate()?);
        let identity = ca.issue(&PeerIdentity::Controller, certificates)?;
        let certified = keep_certified(ca.clone(), identity.clone(), PeerIdentity::Controller, certificates);
        let certified = AbortOnDropHandle::new(tokio::spawn(certified));
        let listener = TcpListener::bind(SocketAddr::new(spec.address, 0)).await.map_err(io(&format!("no port on {}", spec.address)))?;
        let address = listener.local_addr().map_err(io("no address"))?;
        // The coordinator runs until the supervisor has ended the processes: members are released first.
        let (cancel, over) = (CancellationToken::new(), CancellationToken::new());
        let (directory, tokens) = (Directory::default(), SingleUseTokens::new(TOKEN_LIFETIME));
        let enrollment =
            Enrollment { ca: ca.clone(), verifier: Arc::new(tokens.clone()), directory: directory.clone(), lifetime: certificates };
        let router = router(Arc::new(enrollment));
        let serve = serve_https(listener, identity.clone(), Access::Open, router, Limits::enrollment(), over.clone());
        let server = AbortOnDropHandle::new(tokio::spawn(serve));

        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let created = u64::try_from(created.as_millis()).unwrap_or(u64::MAX);
        let weightsync = format!("local-{}-{created}", spec.name);
        let mut rules = MembershipConfig::new(weightsync.clone(), created, spec.policy.clone());
        rules.target = spec.target;
        rules.join = spec.join;
        rules.debounce_ms = u64::try_from(spec.debounce.as_millis()).unwrap_or(u64::MAX);
        let wanted = Wanted { config: rules, members: None, suspend: false, delete: false };
        let (events, _) = broadcast::channel(EVENTS);
        let (own, name, recent) = (spec.address, spec.name.clone(), RecentEvents::default());
        let sink = Arc::new(recent.keep_from(Broadcast(events.clone())));
        let restored = Restored { epoch, ..Restored::default() };
        let context = Context {
            client: AgentClient::new(identity),
            directory: directory.clone(),
            store: Arc::new(store),
            events: sink,
            timing: Timing::default(),
        };
        let coordinator = Coordinator::start(wanted, restored, context, over.clone());
        let view = coordinator.view.clone();

        let guard =
            Guard::start(&spec.guard, &spec.directory.join("guard.log")).map_err(io("the guard of the processes cannot be started"))?;
        let (orders, inbox) = mpsc::channel(64);
        let controller = format!("https://{address}");
        let (over, weak) = (over.drop_guard(), orders.downgrade());
        let supervisor = Supervisor::new(spec, weightsync, controller, ca, tokens, directory, coordinator, over, weak, guard, versions);
        let supervisor = AbortOnDropHandle::new(tokio::spawn(supervisor.run(inbox, cancel.clone())));
        Ok(Self {
            orders,
            view,
            events,
            address: own,
            name,
            recent,
            cancel,
            _supervisor: supervisor,
            _server: server,
            _certified: certified,
        })
    }

    /// The view of membership, as it changes.
    pub fn view(&self) -> watch::Receiver<MembershipView> {
        self.view.clone()
    }

    /// Events from now on.
    pub fn events(&self) -> broadcast::Receiver<CoordinatorEvent> {
        self.events.subscribe()
    }

    /// Serves the web page of the group on a port of the group's address (0: a free one), until the result is dropped.
    pub async fn serve_page(&self, port: u16) -> std::io::Result<PageServer> {
        PageServer::start(SocketAddr::new(self.address, port), &self.name, self.view(), self.recent.clone()).await
    }

    /// Kills a pod's processes with SIGKILL and does not restart them. Returns false if the pod does not exist.
    pub async fn kill(&self, pod: &str) -> bool {
        self.order(|done| Order::Signal { pod: pod.to_owned(), signal: Signal::KILL, done }).await.unwrap_or(false)
    }

    /// Freezes a pod's processes with SIGSTOP: they keep their connections and send nothing. Returns false if the pod does not exist.
    pub async fn freeze(&self, pod: &str) -> bool {
        self.order(|done| Order::Signal { pod: pod.to_owned(), signal: Signal::STOP, done }).await.unwrap_or(false)
    }

    /// Restarts a killed or frozen pod under the same name with another UID. Returns false if the pod does not exist.
    pub async fn replace(&self, pod: &str) -> bool {
        self.order(|done| Order::Replace { pod: pod.to_owned(), done }).await.unwrap_or(false)
    }

    /// Sets or clears the target version of the group; false if the group is ending.
    pub async fn set_target(&self, target: Option<Version>) -> bool {
        self.order(|done| Order::Target { target, done }).await.unwrap_or(false)
    }

    async fn order(&self, order: impl FnOnce(oneshot::Sender<bool>) -> Order) -> Option<bool> {
        let (done, answer) = oneshot::channel();
        self.orders.send(order(done)).await.ok()?;
        answer.await.ok()
    }

    /// Releases engines that another program started, stops every process in order and waits for them.
    pub async fn stop(&self) {
        self.cancel.cancel();
        // The supervisor accepts no command after its processes have ended.
        let _ = tokio::time::timeout(Duration::from_secs(30), self.orders.closed()).await;
    }
}

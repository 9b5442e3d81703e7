//! The source agent's side of the trainer's socket: an abstract unix socket, JSON lines, tensors in shared memory.
//!
//! ```text
//! trainer's client ── lines ──> connection ── PublishJob ──> PublishQueue ── take ──> anyone who leads the update
//!        │                          ▲  progress, outcome                                      │
//!        └── tensors ──> ring of slots (memfd, or the worker's GPU memory) ── given back when dropped ─┘
//! ```
//!
//! This room decides who may speak, what fits the protocol ([`weightsync_core::protocol::ClientRequest`]), and that every publish hears one
//! outcome in bounded time. It never decides about versions, epochs or members.

mod connection;
mod external;
mod gpu;
mod gpu_ring;
mod host_ring;
mod lent;
mod publish;
mod queue;
mod ring;
mod slots;
mod socket;
pub mod trainer;
mod turn;
mod users;
mod wire;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use tokio::net::UnixListener;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use gpu::SourceWorker;
pub(crate) use gpu::{SourceGpu, no_source_gpu};
pub use queue::PublishQueue;
pub use socket::{SocketError, SocketName};
pub(crate) use users::TrainerUsers;
pub use weightsync_net::memfd;

use self::gpu_ring::GpuRings;
use crate::external::ExternalDesk;
use crate::registry::{RegisterError, Registry};
use weightsync_core::protocol::{CLIENT_PROTOCOL, RosterView};

const MOST_CLIENTS: usize = 64;

#[derive(Clone)]
#[allow(missing_docs)]
pub struct ClientServerConfig {
    pub socket: SocketName,
    /// Program and version, asked to clients.
    pub agent: String,
    /// Buckets of shared memory for each connection that publishes, at least 2 so that one is written while another is read.
    pub slots: u32,
    /// Length of a bucket in bytes as in [`weightsync_core::weights::Layout::new`]; 0 lets the size of the model decide.
    pub bucket_bytes: u64,
    /// Users that may connect besides this process's own and root.
    pub users: TrainerUsers,
    pub gpu: SourceGpu,
    pub external: Arc<ExternalDesk>,
    /// Where engines register: only for the agent of a rollout, which serves no trainer.
    pub engines: Option<Arc<Registry>>,
}

impl ClientServerConfig {
    /// Buckets of the usual ring.
    pub const SLOTS: u32 = 4;

    /// The usual ring at that socket.
    pub fn at(socket: SocketName) -> Self {
        let agent = concat!("weightsync ", env!("CARGO_PKG_VERSION")).to_owned();
        Self {
            socket,
            agent,
            slots: Self::SLOTS,
            bucket_bytes: 0,
            users: TrainerUsers::These(Vec::new()),
            gpu: no_source_gpu(),
            external: Arc::default(),
            engines: None,
        }
    }
}

/// A bound server that accepts no one yet.
pub struct ClientServer {
    listener: UnixListener,
    shared: Arc<Shared>,
}

struct Shared {
    agent: String,
    slots: u32,
    bucket_bytes: u64,
    gpu: SourceGpu,
    gpu_rings: Arc<GpuRings>,
    external: Arc<ExternalDesk>,
    engines: Option<Arc<Registry>>,
    /// None: everybody.
    uids: Option<Vec<u32>>,
    queue: Arc<PublishQueue>,
    roster: watch::Receiver<RosterView>,
}

#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(
        "this agent serves users {} only, the client runs as {uid}: run both under one user, \
         or name it in the pod's annotation weightsync.dev/trainer-uids (outside Kubernetes: WEIGHTSYNC_TRAINER_UIDS)",
        uids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    )]
    Uid { uid: u32, uids: Vec<u32> },
    #[error(
        "the client ({client}) speaks protocol {protocol}, the agent ({agent}) speaks {CLIENT_PROTOCOL}: \
         install the client of the agent's version"
    )]
    Protocol { client: String, protocol: u32, agent: String },
    #[error("{MOST_CLIENTS} clients are connected already")]
    TooMany,
    #[error("no hello came")]
    NoHello,
    #[error("this is the agent of a rollout's pod, where engines register: connect to the agent of the trainer's pod (WEIGHTSYNC_SOCKET)")]
    NoTrainer,
    #[error(
        "this is the agent of a trainer's pod: an engine registers with the agent of its own pod, which its WeightSync selects in \
         spec.rollouts with engine.discovery Registered"
    )]
    NoEngines,
    #[error("{0}")]
    Register(#[from] RegisterError),
    #[error("{0}")]
    Nonsense(String),
    #[error("the connection broke: {0}")]
    Io(String),
}

impl Shared {
    /// Only the agent's own user, root, and users that were named: anyone who speaks here decides what every engine serves.
    fn admit(&self, uid: u32) -> Result<(), Refused> {
        match &self.uids {
            Some(uids) if !uids.contains(&uid) => Err(Refused::Uid { uid, uids: uids.clone() }),
            _ => Ok(()),
        }
    }
}

impl ClientServer {
    /// Listens. Publishes go to `queue`; `roster` is asked to clients as it changes. Must be called on a tokio runtime.
    pub fn bind(config: ClientServerConfig, queue: Arc<PublishQueue>, roster: watch::Receiver<RosterView>) -> Result<Self, SocketError> {
        let listener = UnixListener::from_std(config.socket.listen()?);
        let listener = listener.map_err(|source| SocketError::Io { name: config.socket.clone(), source })?;
        let uids = config.users.with_own(rustix::process::geteuid().as_raw());
        let (agent, slots, bucket_bytes) = (config.agent, config.slots.max(2), config.bucket_bytes);
        let (gpu, gpu_rings, external, engines) = (config.gpu, Arc::default(), config.external, config.engines);
        let shared = Shared { agent, slots, bucket_bytes, gpu, gpu_rings, external, engines, uids, queue, roster };
        Ok(Self { listener, shared: Arc::new(shared) })
    }

    /// Serves until `shutdown`; then every connection is closed, and clients know that their agent is lost.
    pub async fn run(self, shutdown: CancellationToken) {
        let connections = TaskTracker::new();
        let places = Arc::new(Semaphore::new(MOST_CLIENTS));
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = shutdown.cancelled() => break,
            };
            match accepted {
                Ok((stream, _)) => {
                    if let Ok(place) = Arc::clone(&places).try_acquire_owned() {
                        let serving = connection::serve(stream, Arc::clone(&self.shared), shutdown.clone());
                        connections.spawn(async move {
                            serving.await;
                            drop(place);
                        });
                    } else {
                        // Closed without a word: a word to each of a thousand clients would itself need a place.
                        tracing::warn!(refused = %Refused::TooMany, "a trainer's client is sent away");
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "a trainer's client could not be accepted");
                    // Out of descriptors, most likely: accepting again at once would spin.
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                }
            }
        }
        connections.close();
        connections.wait().await;
    }
}

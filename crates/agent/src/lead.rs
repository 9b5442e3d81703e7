//! Leads updates: brings one version to the rollouts of one epoch. Used by the source, and by a rollout that feeds others.
//!
//! [`table`] decides what may follow from what members say; `attempt` carries it out. An attempt lives and dies with its epoch: it is
//! never repeated within it. Anyone who calls decides about versions and about trying again.

mod agreement;
mod attempt;
mod calls;
mod communicator;
mod engine_round;
mod engine_sink;
mod engines;
mod external;
mod fan;
pub mod feed;
mod keeping;
mod lending;
mod openings;
mod order;
pub mod peers;
mod phases;
mod preflight;
mod probe;
mod stream;
mod switching;
pub mod table;
pub mod waves;

use std::sync::{Arc, Mutex, OnceLock};

use tokio::sync::watch;

pub use self::attempt::{Brought, Plan, Stage};
use self::engines::EngineGroupsLed;
pub use self::external::ExternalPlan;
pub use self::keeping::Keep;
use self::peers::Peers;
use self::preflight::Known;
pub use self::preflight::now_ms;
use super::core::Core;
use super::fabric::Fabric;
use super::gpu::Gpus;
use super::group::Epoch;
use super::locks::lock;
use weightsync_core::protocol::{CarriedBy, EpochId, MemberName};
use weightsync_net::https::AgentClient;
use weightsync_transport::Transport;

/// What leading needs, for the life of the agent.
pub struct Leader {
    core: Arc<Core>,
    client: AgentClient,
    transport: Arc<dyn Transport>,
    peers: Mutex<Option<(EpochId, Arc<Peers>)>>,
    gpus: OnceLock<Arc<Gpus>>,
    fabric: OnceLock<Arc<Fabric>>,
    /// The groups of the present epoch that engines joined.
    engines: Mutex<Option<Arc<EngineGroupsLed>>>,
    /// The order of chains, once bytes of a member did not verify.
    order: Mutex<Vec<MemberName>>,
    /// What the pre-flight learned.
    known: Mutex<Known>,
    /// Attempts that run.
    busy: watch::Sender<u32>,
}

impl Leader {
    pub fn new(core: Arc<Core>, client: AgentClient, transport: Arc<dyn Transport>) -> Arc<Self> {
        core.statements().with_identity(client.identity());
        Arc::new(Self {
            core,
            client,
            transport,
            peers: Mutex::new(None),
            gpus: OnceLock::new(),
            fabric: OnceLock::new(),
            engines: Mutex::default(),
            order: Mutex::default(),
            known: Mutex::default(),
            busy: watch::Sender::new(0),
        })
    }

    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Takes part in communicators with these GPUs. Once, before the first epoch.
    pub fn set_gpus(&self, gpus: Arc<Gpus>) {
        let _ = self.gpus.set(gpus);
    }

    pub fn gpus(&self) -> Option<&Arc<Gpus>> {
        self.gpus.get()
    }

    /// Reads from members, and lets them read, by this. Once, before the first epoch.
    pub fn set_fabric(&self, fabric: Arc<Fabric>) {
        let _ = self.fabric.set(fabric);
    }

    pub fn fabric(&self) -> Option<&Arc<Fabric>> {
        self.fabric.get()
    }

    /// How payloads travel on a chain of an epoch whose members read them from each other; none in another epoch.
    fn read_by(&self, epoch: &Epoch) -> Option<CarriedBy> {
        let fabric = Some(self.fabric()?.offered(epoch)?);
        Some(CarriedBy { root: 0, passing: Vec::new(), lent: true, fabric })
    }

    /// The rollouts of an epoch, listened to from the first call on until another epoch is asked for.
    pub fn peers(&self, epoch: &Arc<Epoch>) -> Arc<Peers> {
        let mut peers = lock(&self.peers);
        if let Some((_, known)) = peers.as_ref().filter(|(id, _)| id == epoch.id()) {
            return known.clone();
        }
        let fresh = Arc::new(Peers::listen(&self.core, &self.client, epoch));
        *peers = Some((epoch.id().clone(), fresh.clone()));
        fresh
    }

    pub fn forget_peers(&self) {
        lock(&self.peers).take();
    }
}

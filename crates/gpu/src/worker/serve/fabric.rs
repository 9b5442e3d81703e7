//! The worker's side of a fabric: regions that peers read, peers, and READs from them.
//!
//! Decides which region and which peer a request means, and how many there may be. All calls of NIXL are made by one thread ([`calls`]), in the order in
//! which requests came; it answers through the loop. A call that hangs makes answers miss their deadlines, and the agent kills this process.

mod calls;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Instant;

use super::{Heard, Incoming, Server, invalid};
use crate::{GpuError, Nixl, NixlAgent};
use calls::{Calls, Order, Read};
use weightsync_core::protocol::worker::{
    FabricFacts, FabricMemory, FabricMetadata, Place, UcxSettings, WorkerAnswer, WorkerFault, WorkerRequest,
};

/// Most regions: each is an agent of NIXL with a thread.
const REGIONS: usize = 16;
/// Most peers of all regions.
const PEERS: usize = 1024;
/// Most READs that have not ended.
const READS: usize = 64;
/// Most orders that the thread has not taken.
const ORDERS: usize = 256;
/// Longest name in bytes.
const NAME: usize = 128;

pub(super) struct Fabric {
    orders: SyncSender<Order>,
    name: String,
    opened: bool,
    regions: HashMap<u64, FabricMemory>,
    /// The region of each peer.
    peers: HashMap<u64, u64>,
}

impl Server {
    pub(super) fn take_for_fabric(&mut self, incoming: Incoming) {
        let Incoming { id, begun, end, .. } = incoming;
        let taken = match incoming.request {
            WorkerRequest::OpenFabric { library, name, ucx } => self.open_fabric(id, library.as_deref(), name, &ucx),
            WorkerRequest::Register { what } => self.register(id, what),
            WorkerRequest::AddPeer { region, metadata } => self.add_peer(id, region, metadata),
            // After what was sent before it for the GPU.
            WorkerRequest::Read { .. } if self.gpu.is_some() => return self.issue_in_order(incoming),
            request => self.issue_read((id, begun, end), request),
        };
        if let Err(fault) = taken {
            self.answer(id, Err(fault));
        }
    }

    fn open_fabric(&mut self, id: u64, library: Option<&Path>, name: String, ucx: &UcxSettings) -> Result<(), WorkerFault> {
        if self.fabric.is_some() {
            return Err(invalid("the fabric is open, or is being opened: a worker opens one in its life"));
        }
        if name.is_empty() || name.len() > NAME || name.contains('\0') {
            return Err(invalid(format!("the name of a fabric has 1 to {NAME} bytes and no zero byte")));
        }
        let mut parameters = NixlAgent::parameters();
        for (variable, value) in ucx.environment().map_err(|error| invalid(error.to_string()))? {
            // UCX reads the environment, which cannot be changed safely while other threads may read it.
            if std::env::var(variable).as_deref() != Ok(&value) {
                let now = std::env::var(variable).unwrap_or_else(|_| "nothing".into());
                return Err(invalid(format!(
                    "{variable} of the worker is {now}, needed is {value}: start the worker with these settings of UCX"
                )));
            }
            parameters.insert(variable.to_owned(), value);
        }
        let (orders, taken) = sync_channel(ORDERS);
        let (to_self, device) = (self.to_self.clone(), self.device());
        let (library, base) = (library.map(Path::to_owned), name.clone());
        let run = move || {
            let driver = crate::driver_version();
            let opened = Nixl::load(library.as_deref(), driver).and_then(|nixl| {
                let facts = calls::prove(nixl, &base, device.as_deref(), driver, parameters)?;
                Ok((nixl, facts))
            });
            let nixl = opened.as_ref().ok().map(|(nixl, _)| *nixl);
            let opened = opened.map(|(_, facts)| facts);
            // The receiver lives as long as the process.
            let _ = to_self.send(Heard::Later(Box::new(move |server| server.fabric_opened(id, opened))));
            if let Some(nixl) = nixl {
                Calls::new(nixl, base, driver, to_self).run(&taken);
            }
        };
        let started = std::thread::Builder::new().name("nixl".into()).spawn(run);
        started.map_err(|error| invalid(format!("no thread can be started: {error}")))?;
        self.fabric = Some(Fabric { orders, name, opened: false, regions: HashMap::new(), peers: HashMap::new() });
        Ok(())
    }

    fn fabric_opened(&mut self, id: u64, opened: Result<FabricFacts, GpuError>) {
        match (&opened, self.fabric.as_mut()) {
            (Ok(facts), Some(fabric)) => {
                fabric.opened = true;
                tracing::info!(name = %fabric.name, path = %facts.path, version = ?facts.version, "NIXL is open");
            }
            _ => self.fabric = None,
        }
        self.answer(id, opened.map(|facts| WorkerAnswer::Fabric { facts }).map_err(|error| error.fault()));
    }

    fn fabric(&mut self) -> Result<&mut Fabric, WorkerFault> {
        self.fabric.as_mut().filter(|fabric| fabric.opened).ok_or_else(|| invalid("no fabric was opened"))
    }

    fn register(&mut self, id: u64, what: FabricMemory) -> Result<(), WorkerFault> {
        let (memory, device) = (self.tables.memory(what)?, self.device());
        let region = self.tables.number();
        let fabric = self.fabric()?;
        if let Some((region, _)) = fabric.regions.iter().find(|(_, other)| **other == what) {
            return Err(invalid(format!("{what:?} is registered as region {region}")));
        }
        if fabric.regions.len() >= REGIONS {
            return Err(invalid(format!("{REGIONS} regions are registered: release one")));
        }
        // Memory on the GPU came from the GPU that is open.
        let device = device.filter(|_| !memory.in_host_memory());
        fabric.order(Order::Register { id, region, memory, device })?;
        fabric.regions.insert(region, what);
        Ok(())
    }

    fn add_peer(&mut self, id: u64, region: u64, metadata: FabricMetadata) -> Result<(), WorkerFault> {
        let peer = self.tables.number();
        let fabric = self.fabric()?;
        if !fabric.regions.contains_key(&region) {
            return Err(invalid(format!("there is no region {region}")));
        }
        if fabric.peers.len() >= PEERS {
            return Err(invalid(format!("{PEERS} peers are known: release one")));
        }
        fabric.order(Order::AddPeer { id, region, peer, metadata })?;
        fabric.peers.insert(peer, region);
        Ok(())
    }

    /// A READ: it begins when what was given to the GPU for its slot is done.
    pub(super) fn issue_read(&mut self, (id, begun, end): (u64, Instant, Instant), request: WorkerRequest) -> Result<(), WorkerFault> {
        let WorkerRequest::Read { peer, from, to, bytes } = request else { return Err(invalid("not a READ")) };
        let fabric = self.fabric()?;
        let region = *fabric.peers.get(&peer).ok_or_else(|| invalid(format!("there is no peer {peer}")))?;
        let what = match to {
            Place::Slot { ring, .. } => Some(FabricMemory::Ring(ring)),
            Place::Host { host, .. } => Some(FabricMemory::Host(host)),
            Place::Memory { .. } => None,
        };
        if what.is_none() || what != fabric.regions.get(&region).copied() {
            return Err(invalid(format!("READs from peer {peer} go into the memory of its region {region} only")));
        }
        if bytes == 0 {
            return Err(invalid("a READ of no bytes"));
        }
        if self.tables.reads() >= READS {
            return Err(invalid(format!("{READS} READs have not ended: wait for one")));
        }
        let named = self.tables.begin_read(id, to, bytes)?;
        let after = self.tables.before(named.slot, super::tables::Use::Write);
        let read = Read { id, region, peer, from, to: named.span, after, begun, end };
        let ordered = self.fabric()?.order(Order::Read(Box::new(read)));
        if ordered.is_err() {
            self.tables.end_read(id);
        }
        ordered
    }

    pub(super) fn release_region(&mut self, id: u64, region: u64) {
        let released = self.fabric().and_then(|fabric| {
            if !fabric.regions.contains_key(&region) {
                return Err(invalid(format!("there is no region {region}")));
            }
            fabric.order(Order::Unregister { id, region })?;
            fabric.forget_region(region);
            Ok(())
        });
        if let Err(fault) = released {
            self.answer(id, Err(fault));
        }
    }

    pub(super) fn release_peer(&mut self, id: u64, peer: u64) {
        let released = self.fabric().and_then(|fabric| {
            let region = *fabric.peers.get(&peer).ok_or_else(|| invalid(format!("there is no peer {peer}")))?;
            fabric.order(Order::RemovePeer { id, region, peer })?;
            fabric.peers.remove(&peer);
            Ok(())
        });
        if let Err(fault) = released {
            self.answer(id, Err(fault));
        }
    }

    fn region_refused(&mut self, region: u64) {
        if let Some(fabric) = self.fabric.as_mut() {
            fabric.forget_region(region);
        }
    }

    fn peer_refused(&mut self, peer: u64) {
        if let Some(fabric) = self.fabric.as_mut() {
            fabric.peers.remove(&peer);
        }
    }

    /// Nothing is written any more where this READ wrote.
    fn read_ended(&mut self, id: u64) {
        self.tables.end_read(id);
    }
}

impl Fabric {
    fn order(&self, order: Order) -> Result<(), WorkerFault> {
        self.orders.try_send(order).map_err(|_| invalid(format!("{ORDERS} requests wait for NIXL: wait for an answer")))
    }

    fn forget_region(&mut self, region: u64) {
        self.regions.remove(&region);
        self.peers.retain(|_, of| *of != region);
    }
}

/// Parameters as they are shown.
type Parameters = BTreeMap<String, String>;

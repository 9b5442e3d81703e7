//! The thread that makes all calls of NIXL: takes orders, looks at READs under way, and answers through the worker's loop.
//!
//! Decides when a READ has ended. A READ whose time passed is answered so at once; it is looked at until it has ended, because bytes may still arrive. The
//! end of its region ends it too.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Instant;

use super::Parameters;
use crate::worker::serve::{Heard, LONGEST_NAP, SHORTEST_NAP, Server, invalid, late};
use crate::{Device, Event, GpuError, Memory, Nixl, NixlAgent, Span, Transfer};
use weightsync_core::protocol::worker::{FabricFacts, FabricMetadata, RemotePlace, WorkerAnswer, WorkerFault, WorkerFaultCode};

/// Memory of the GPU that is registered on trial.
const TRIAL_BYTES: u64 = 64 << 10;

/// What the loop wants done.
pub(super) enum Order {
    Register {
        id: u64,
        region: u64,
        memory: Memory,
        /// The GPU that it is on; none for host memory.
        device: Option<Arc<Device>>,
    },
    Unregister {
        id: u64,
        region: u64,
    },
    AddPeer {
        id: u64,
        region: u64,
        peer: u64,
        metadata: FabricMetadata,
    },
    RemovePeer {
        id: u64,
        region: u64,
        peer: u64,
    },
    Read(Box<Read>),
}

pub(super) struct Read {
    pub id: u64,
    pub region: u64,
    pub peer: u64,
    pub from: RemotePlace,
    pub to: Span,
    /// Work of the GPU on the same slot that comes first.
    pub after: Vec<Arc<Event>>,
    pub begun: Instant,
    pub end: Instant,
}

struct Region {
    agent: NixlAgent,
    device: Option<u32>,
    peers: HashMap<u64, Peer>,
}

struct Peer {
    name: String,
    /// It is forgotten when no READ uses it.
    released: bool,
}

struct UnderWay {
    read: Read,
    /// None while work of the GPU comes first.
    transfer: Option<Transfer>,
    answered: bool,
}

pub(super) struct Calls {
    nixl: &'static Nixl,
    name: String,
    driver: Option<u32>,
    to_loop: Sender<Heard>,
    regions: HashMap<u64, Region>,
    reads: Vec<UnderWay>,
}

/// Proves that NIXL's backend starts, and says what it can do.
pub(super) fn prove(
    nixl: &'static Nixl,
    name: &str,
    device: Option<&Device>,
    driver: Option<u32>,
    parameters: Parameters,
) -> Result<FabricFacts, GpuError> {
    if let Some(device) = device {
        device.bind()?;
    }
    let start = || NixlAgent::start(nixl, &format!("{name}.proof")).map_err(|error| GpuError::NoFabric { cause: error.to_string() });
    let mut agent = start()?;
    let memory = agent.memory_kinds()?;
    let trial = device.ok_or_else(|| GpuError::NoGpu { cause: "no GPU was opened".into() }).and_then(|device| {
        let memory = Memory::allocate(device, TRIAL_BYTES)?;
        agent.register(&memory, Some(device.ordinal()), driver).map(drop)
    });
    Ok(FabricFacts {
        path: nixl.path().to_owned(),
        version: nixl.version().map(str::to_owned),
        cuda: nixl.cuda(),
        plugin: crate::nixl::PLUGIN.to_string_lossy().into_owned(),
        memory,
        parameters,
        gpu_memory: trial.map_err(|error| error.to_string()),
    })
}

impl Calls {
    pub(super) fn new(nixl: &'static Nixl, name: String, driver: Option<u32>, to_loop: Sender<Heard>) -> Self {
        Self { nixl, name, driver, to_loop, regions: HashMap::new(), reads: Vec::new() }
    }

    pub(super) fn run(mut self, orders: &Receiver<Order>) {
        // Naps of 20 us would last 70 us. An error costs latency only.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        let mut moved = Instant::now();
        loop {
            let nap = (moved.elapsed() / 16).clamp(SHORTEST_NAP, LONGEST_NAP);
            let order =
                if self.reads.is_empty() { orders.recv().map_err(|_| RecvTimeoutError::Disconnected) } else { orders.recv_timeout(nap) };
            match order {
                Ok(order) => {
                    moved = Instant::now();
                    self.take(order);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if self.look() {
                moved = Instant::now();
            }
        }
    }

    fn later(&self, act: impl FnOnce(&mut Server) + Send + 'static) {
        // The receiver lives as long as the process.
        let _ = self.to_loop.send(Heard::Later(Box::new(act)));
    }

    fn answer(&self, id: u64, result: Result<WorkerAnswer, WorkerFault>) {
        self.later(move |server| server.answer(id, result));
    }

    fn take(&mut self, order: Order) {
        match order {
            Order::Register { id, region, memory, device } => {
                let registered = self.register(region, &memory, device.as_deref());
                self.later(move |server| {
                    if registered.is_err() {
                        server.region_refused(region);
                    }
                    server.answer(id, registered.map_err(|error| error.fault()));
                });
            }
            Order::Unregister { id, region } => {
                // READs go first: they keep the agent.
                let ended = self.reads.extract_if(.., |under_way| under_way.read.region == region);
                let ids: Vec<(u64, bool)> = ended.map(|under_way| (under_way.read.id, under_way.answered)).collect();
                drop(self.regions.remove(&region));
                self.later(move |server| {
                    for (read, answered) in ids {
                        server.read_ended(read);
                        if !answered {
                            let message = "the READ was ended: its region was released".into();
                            server.answer(read, Err(WorkerFault { code: WorkerFaultCode::Aborted, message }));
                        }
                    }
                    server.answer(id, Ok(WorkerAnswer::Done));
                });
            }
            Order::AddPeer { id, region, peer, metadata } => {
                let added = self.add_peer(region, peer, &metadata);
                self.later(move |server| {
                    if added.is_err() {
                        server.peer_refused(peer);
                    }
                    server.answer(id, added.map_err(|error| error.fault()));
                });
            }
            Order::RemovePeer { id, region, peer } => {
                if let Some(peer) = self.regions.get_mut(&region).and_then(|region| region.peers.get_mut(&peer)) {
                    peer.released = true;
                }
                self.forget_released();
                self.answer(id, Ok(WorkerAnswer::Done));
            }
            Order::Read(read) => self.reads.push(UnderWay { read: *read, transfer: None, answered: false }),
        }
    }

    fn register(&mut self, region: u64, memory: &Memory, device: Option<&Device>) -> Result<WorkerAnswer, GpuError> {
        if let Some(device) = device {
            device.bind()?;
        }
        let device = device.map(Device::ordinal);
        let mut agent = NixlAgent::start(self.nixl, &format!("{}.{region}", self.name))?;
        let metadata = agent.register(memory, device, self.driver)?;
        self.regions.insert(region, Region { agent, device, peers: HashMap::new() });
        Ok(WorkerAnswer::Registered { region, address: memory.address(), bytes: memory.bytes(), device, metadata })
    }

    fn add_peer(&mut self, region: u64, peer: u64, metadata: &FabricMetadata) -> Result<WorkerAnswer, GpuError> {
        let gone = || GpuError::Invalid { what: format!("there is no region {region}") };
        let region = self.regions.get_mut(&region).ok_or_else(gone)?;
        let name = region.agent.add_peer(metadata)?;
        if region.peers.values().any(|known| known.name == name) {
            return Err(GpuError::Invalid { what: format!("the peer {name} is known: release it first") });
        }
        region.peers.insert(peer, Peer { name: name.clone(), released: false });
        Ok(WorkerAnswer::Peer { peer, name })
    }

    /// Looks at every READ under way; whether something moved.
    fn look(&mut self) -> bool {
        let (mut left, mut moved) = (Vec::new(), false);
        for mut under_way in std::mem::take(&mut self.reads) {
            let id = under_way.read.id;
            match self.step(&mut under_way) {
                Ok(false) if under_way.answered || Instant::now() <= under_way.read.end => left.push(under_way),
                Ok(false) => {
                    moved = true;
                    under_way.answered = true;
                    self.answer(id, Err(late("a READ", under_way.read.begun)));
                    left.push(under_way);
                }
                ended => {
                    moved = true;
                    let answered = under_way.answered;
                    // It gives its memory up before the answer, after which the agent may release that.
                    drop(under_way);
                    let result = ended.map(|_| WorkerAnswer::Done);
                    self.later(move |server| {
                        server.read_ended(id);
                        if !answered {
                            server.answer(id, result);
                        }
                    });
                }
            }
        }
        self.reads = left;
        if moved {
            self.forget_released();
        }
        moved
    }

    /// One look at a READ: whether it is done.
    fn step(&self, under_way: &mut UnderWay) -> Result<bool, WorkerFault> {
        let read = &under_way.read;
        let gone = || invalid(format!("there is no peer {}", read.peer));
        let region = self.regions.get(&read.region).ok_or_else(gone)?;
        let name = &region.peers.get(&read.peer).ok_or_else(gone)?.name;
        if let Some(transfer) = &under_way.transfer {
            return transfer.is_done(name).map_err(|error| error.fault());
        }
        for event in &read.after {
            if !event.fired().map_err(|error| error.fault())? {
                // One that never began has ended.
                return if Instant::now() > read.end { Err(late("what comes before a READ", read.begun)) } else { Ok(false) };
            }
        }
        let begun = region.agent.read(name, read.from, &read.to, region.device);
        under_way.transfer = Some(begun.map_err(|error| error.fault())?);
        Ok(false)
    }

    fn forget_released(&mut self) {
        let reads = &self.reads;
        for region in self.regions.values_mut() {
            let agent = &region.agent;
            region.peers.retain(|number, peer| {
                let keep = !peer.released || reads.iter().any(|under_way| under_way.read.peer == *number);
                if !keep {
                    agent.remove_peer(&peer.name);
                }
                keep
            });
        }
    }
}

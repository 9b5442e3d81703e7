//! What an agent asks of a worker's fabric, and what it holds of it: regions that peers read, peers, and READs from them.
//!
//! Decides nothing. A region is released when the last clone, its peers and their READs are gone, or when it is closed.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::asks::Read;
use super::handle::done;
use super::held::{Held, HostMemory, Resource};
use super::peer::Peer;
use super::ring::Ring;
use super::{Worker, WorkerError};
use weightsync_core::protocol::worker::{
    FabricFacts, FabricMemory, FabricMetadata, RemotePlace, UcxSettings, WorkerAnswer, WorkerRequest, WorkerResource,
};

/// Registered memory. It is released when the last clone is dropped, without waiting: [`close`](Self::close) waits.
#[derive(Clone)]
pub struct Region {
    number: u64,
    address: u64,
    bytes: u64,
    device: Option<u32>,
    metadata: Arc<FabricMetadata>,
    resource: Resource,
}

impl Region {
    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What peers need to read it. Secret: who has it can read.
    pub fn metadata(&self) -> &FabricMetadata {
        &self.metadata
    }

    /// Closes it now, also while clones or peers of it are held: READs into it fail with `Aborted`. When this returns no peer can read it.
    pub async fn close(&self, within: Duration) -> Result<(), WorkerError> {
        let what = "release registered memory";
        let request = WorkerRequest::Release { what: WorkerResource::Region(self.number) };
        let worker = self.resource.worker();
        // The last clone's own request finds nothing to release then, and its answer is dropped.
        done(what, worker.ask(what, request, within, Vec::new(), None).await?)
    }

    /// What a peer names to read from `offset` on; none beyond the end.
    pub fn at(&self, offset: u64) -> Option<RemotePlace> {
        (offset < self.bytes).then(|| RemotePlace { address: self.address + offset, device: self.device })
    }
}

impl Worker {
    /// Opens NIXL as `name`, which no other worker's incarnation has. Once in a worker's life; needs no GPU. The worker must have been
    /// [started](super::WorkerStart::with_ucx) with these settings of UCX. The library is looked for where no path is given.
    pub async fn open_fabric(
        &self,
        library: Option<&Path>,
        name: &str,
        ucx: &UcxSettings,
        within: Duration,
    ) -> Result<FabricFacts, WorkerError> {
        let what = "open NIXL";
        let request = WorkerRequest::OpenFabric { library: library.map(Path::to_owned), name: name.to_owned(), ucx: ucx.clone() };
        match self.ask(what, request, within, Vec::new(), None).await? {
            WorkerAnswer::Fabric { facts } => Ok(facts),
            _ => Err(WorkerError::Nonsense { what }),
        }
    }

    /// Registers a whole ring: peers can read it, and READs can go into it.
    pub async fn register_ring(&self, ring: &Ring, within: Duration) -> Result<Region, WorkerError> {
        self.register(FabricMemory::Ring(ring.number()), Held::Ring(ring.clone()), within).await
    }

    /// Registers mapped host memory: peers can read it, and READs can go into it.
    pub async fn register_host(&self, host: &HostMemory, within: Duration) -> Result<Region, WorkerError> {
        self.register(FabricMemory::Host(host.number), Held::Resource(host.resource.clone()), within).await
    }

    async fn register(&self, memory: FabricMemory, held: Held, within: Duration) -> Result<Region, WorkerError> {
        let what = "register memory";
        match self.ask(what, WorkerRequest::Register { what: memory }, within, vec![held], None).await? {
            WorkerAnswer::Registered { region, address, bytes, device, metadata } => {
                let resource = Resource::new(self, WorkerResource::Region(region));
                Ok(Region { number: region, address, bytes, device, metadata: Arc::new(metadata), resource })
            }
            _ => Err(WorkerError::Nonsense { what }),
        }
    }

    /// Takes a peer's metadata, to read from it into `region`.
    pub async fn add_peer(&self, region: &Region, metadata: &FabricMetadata, within: Duration) -> Result<Peer, WorkerError> {
        let what = "add a peer";
        let request = WorkerRequest::AddPeer { region: region.number, metadata: metadata.clone() };
        match self.ask(what, request, within, vec![Held::Resource(region.resource.clone())], None).await? {
            WorkerAnswer::Peer { peer, name } => {
                let resource = Resource::new(self, WorkerResource::Peer(peer));
                Ok(Peer { number: peer, name: name.into(), resource, region: region.resource.clone() })
            }
            _ => Err(WorkerError::Nonsense { what }),
        }
    }

    /// Reads from a peer's memory; returns when the bytes are here. After `Late` the worker refuses what names the same bytes until the READ has ended.
    pub async fn read(&self, read: Read, within: Duration) -> Result<(), WorkerError> {
        self.read_now(read, within).await
    }

    /// As [`read`](Self::read), but asked for before this returns.
    pub fn read_now(&self, read: Read, within: Duration) -> impl Future<Output = Result<(), WorkerError>> + Send + use<> {
        let Read { peer, from, to, bytes } = read;
        let what = "read from a peer";
        let held = vec![to.held, Held::Resource(peer.resource), Held::Resource(peer.region)];
        let answer = self.ask(what, WorkerRequest::Read { peer: peer.number, from, to: to.place, bytes }, within, held, None);
        async move { done(what, answer.await?) }
    }
}

//! One rank's membership in one group.
//!
//! Decides when the communicator is made, and what a broadcast leaves in memory. A group of torch's nccl2 has members that take part in
//! nothing: what they "received" is whatever lay in their memory.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::super::memory::{GpuMemory, Opened};
use super::super::tensors::Taken;
use super::{Announced, FOR_EVER, Ranks, Trouble};
use weightsync_core::protocol::worker::{NcclId, Opaque, Proof};
use weightsync_gpu::worker::{Broadcast, Ring, Worker, WorkerError};
use weightsync_torch::store::{Client, nccl_id_keys};

/// How often a destroy looks whether the others have left.
const LOOK: Duration = Duration::from_millis(10);
/// Giving up a communicator takes half a second on real GPUs.
const ABORT: Duration = Duration::from_secs(60);

/// What fresh memory holds.
const UNINITIALISED: u8 = 0xa5;

pub(in super::super) struct Member {
    ranks: Arc<Ranks>,
    /// Which rank of the engine, which rank of the group, and how many ranks it has.
    local: usize,
    rank: u32,
    world: u32,
    state: State,
}

enum State {
    /// torch: the communicator is made with the first broadcast, of the id that is in the store.
    Store { client: Box<Client>, name: String },
    /// The communicator is there.
    Joined(Group),
    /// nccl2 with an empty list of ranks: a group that is none.
    Nothing,
}

struct Group {
    worker: Worker,
    number: u64,
    /// The group's name in the stand-in's folder: the text of its id.
    name: String,
}

/// Memory that a broadcast filled.
pub(in super::super) struct Received {
    memory: Option<Opened>,
    /// Kept until the bytes were read.
    _ring: Option<Ring>,
}

impl Member {
    /// torch's way: connects to the store and says hello, and returns.
    pub(in super::super) async fn meet(
        ranks: &Arc<Ranks>,
        local: usize,
        (host, port): (&str, u16),
        (rank, world): (u32, u32),
        name: &str,
        backend: &str,
    ) -> Result<Self, Trouble> {
        let options = ranks.options()?;
        let reach = async {
            let mut addresses = tokio::net::lookup_host((host, port)).await.map_err(|error| error.to_string())?;
            let address = addresses.next().ok_or_else(|| format!("{host} has no address"))?;
            let mut client = Client::connect(address, options.patience).await.map_err(|error| error.to_string())?;
            client.hello().await.map_err(|error| error.to_string())?;
            Ok::<_, String>(client)
        };
        let client = reach.await.map_err(Trouble::Raised)?;
        let state = match backend.to_ascii_lowercase().as_str() {
            // Both were initialised with the default group, whose device they then share.
            "nccl" if options.torch >= (2, 15) => State::Nothing,
            "nccl" => State::Store { client: Box::new(client), name: name.to_owned() },
            "nccl-legacy" if options.torch >= (2, 14) => State::Store { client: Box::new(client), name: name.to_owned() },
            other => return Err(Trouble::Raised(format!("Unknown c10d backend type {}", other.to_ascii_uppercase()))),
        };
        Ok(Self { ranks: Arc::clone(ranks), local, rank, world, state })
    }

    /// vLLM's way: makes the communicator at once, and enters an all-reduce of one element. Waits for all ranks, without an end.
    pub(in super::super) async fn join(
        ranks: &Arc<Ranks>,
        local: usize,
        id: [u8; 128],
        (rank, world): (u32, u32),
    ) -> Result<Self, Trouble> {
        let group = Group::join(ranks, local, Opaque(id), (rank, world), Proof::AllReduce, FOR_EVER).await?;
        Ok(Self { ranks: Arc::clone(ranks), local, rank, world, state: State::Joined(group) })
    }

    pub(in super::super) fn is_group(&self) -> bool {
        !matches!(self.state, State::Nothing)
    }

    /// Takes part in one broadcast from rank 0, up to `within`.
    pub(in super::super) async fn broadcast(&mut self, bytes: u64, within: Duration) -> Result<Received, Trouble> {
        if let State::Store { client, name } = &mut self.state {
            let [key, _] = nccl_id_keys(name);
            let id = client.get(&key, within).await.map_err(|error| Trouble::Raised(format!("[{}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but got error: {error}", self.rank)))?;
            let id: [u8; 128] = id.try_into().map_err(|_| Trouble::Raised("Invalid size for ncclUniqueId".to_owned()))?;
            let place = (self.rank, self.world);
            self.state = State::Joined(Group::join(&self.ranks, self.local, Opaque(id), place, Proof::Nothing, within).await?);
        }
        let State::Joined(group) = &self.state else { return Ok(Received { memory: None, _ring: None }) };
        group.broadcast(bytes, within, &self.ranks.memory).await
    }

    /// Leaves the group as torch's `destroy_process_group` does: a rendezvous with all other ranks that are still in it.
    pub(in super::super) async fn destroy(self) -> Result<(), Trouble> {
        let State::Joined(group) = self.state else { return Ok(()) };
        let folder = self.ranks.memory.groups();
        let lock_file = |rank: u32| folder.as_ref().map(|folder| folder.join(format!("{}.{rank}", group.name)));
        // From here on no member waits for this one.
        let _gone = lock_file(self.rank).map(std::fs::remove_file);
        let others: Vec<PathBuf> = (0..self.world).filter(|rank| *rank != self.rank).filter_map(lock_file).collect();
        while others.iter().any(|lock_file| is_taken(lock_file)) {
            tokio::time::sleep(LOOK).await;
        }
        group.worker.abort(group.number, ABORT).await.map_err(dead)
    }

    /// Leaves the group without regard for the others, as vLLM does.
    pub(in super::super) async fn abort(self) -> Result<(), Trouble> {
        let State::Joined(group) = self.state else { return Ok(()) };
        group.worker.abort(group.number, ABORT).await.map_err(dead)
    }
}

/// Whether a living process holds a rank's lock_file in a group: it keeps a lock on the lock_file's file as long as it has the communicator.
fn is_taken(lock_file: &std::path::Path) -> bool {
    use rustix::fs::{FlockOperation, flock};
    File::open(lock_file).is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockShared).is_err())
}

impl Group {
    async fn join(
        ranks: &Ranks,
        local: usize,
        id: NcclId,
        (rank, world): (u32, u32),
        proof: Proof,
        within: Duration,
    ) -> Result<Self, Trouble> {
        let worker = ranks.worker(local).await?;
        let number = ranks.number();
        let joined = worker.join_as(number, id, (rank, world), proof, within).await;
        joined.map_err(|error| match error {
            // NCCL has no time-out of its own, so this is torch's watchdog; anything else NCCL says itself.
            WorkerError::Fault { fault, .. } if fault.code != weightsync_core::protocol::worker::WorkerFaultCode::Late => {
                Trouble::Raised(format!("NCCL error: {}", fault.message))
            }
            other => dead(other),
        })?;
        let name = id.0.iter().copied().take_while(|byte| *byte != 0).collect();
        Ok(Self { worker, number, name: String::from_utf8(name).unwrap_or_default() })
    }

    async fn broadcast(&self, bytes: u64, within: Duration, memory: &GpuMemory) -> Result<Received, Trouble> {
        if bytes == 0 {
            // NCCL leaves out what is empty.
            return Ok(Received { memory: None, _ring: None });
        }
        let length = bytes.next_multiple_of(64);
        let ring = self.worker.ring(1, length, ABORT).await.map_err(|error| Trouble::Raised(format!("CUDA out of memory. {error}")))?;
        let slot = ring.try_take().ok_or_else(|| Trouble::Raised("no memory".to_owned()))?;
        let broadcast = Broadcast { group: self.number, root: 0, at: slot.at(0), bytes, parts: Vec::new(), after: None };
        self.worker.broadcast(broadcast, within).await.map_err(dead)?;
        let opened = memory.open(&ring.handle().0).map_err(Trouble::Raised)?;
        Ok(Received { memory: Some(opened), _ring: Some(ring) })
    }
}

fn dead(error: WorkerError) -> Trouble {
    Trouble::Dead(error.to_string())
}

impl Received {
    /// A tensor from a byte on.
    pub(in super::super) fn tensor(&self, tensor: &Announced, offset: u64) -> Result<Taken, String> {
        let bytes = match &self.memory {
            Some(memory) => memory.read(offset, tensor.bytes)?,
            None => vec![UNINITIALISED; usize::try_from(tensor.bytes).map_err(|error| error.to_string())?],
        };
        Ok(Taken::of(tensor.name.clone(), tensor.dtype, tensor.shape.clone(), &bytes))
    }
}

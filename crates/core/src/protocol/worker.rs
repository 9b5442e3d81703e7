//! What an agent and its GPU worker say to each other over a socket pair: requests, answers, faults, and how they are framed.
//!
//! A frame is a u32 (little-endian) length and that many bytes of JSON. Requests carry an id and the time they may take; several are under
//! way at once, answers come in any order. A request that needs a descriptor passes it with its frame (`SCM_RIGHTS`), in the order of the
//! frames. Decides nothing; knows no socket and no driver.
//!
//! Order on the GPU: requests for the same slot run one after the other in the order in which they were sent, without waiting for answers.
//! So "copy into slot 3, broadcast slot 3, copy slot 3 to the host" may be sent at once. Between host or imported memory and different
//! slots there is no order but that of answers and of events.
//!
//! A READ begins when the work that was sent before it for the same slot is done. What is sent after it for the same bytes is refused until the
//! READ has ended, which may be later than its answer when that says `Late`.
mod answer;
mod fabric;
mod frame;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use answer::{GpuFacts, GpuLink, NcclFacts, WorkerAnswer, WorkerFault, WorkerFaultCode};
pub use fabric::{FabricFacts, FabricMemory, FabricMetadata, MAX_FABRIC_METADATA, RemotePlace, UcxSettings, UcxSettingsError};
pub use frame::{IpcHandle, MAX_WORKER_FRAME, NcclId, Opaque, WorkerFrameError, decode_worker_frame, encode_worker_frame};

/// A request with its number and the time it may take.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkerCall {
    /// Number of the request, of the agent's choice; never used twice.
    pub id: u64,
    /// After this many ms the worker gives up and says so; a communicator in use is aborted then.
    pub within_ms: u64,
    /// What to do.
    pub request: WorkerRequest,
}

/// The answer to the request of the same number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkerReply {
    /// Number of the request.
    pub id: u64,
    /// What came of it.
    pub result: Result<WorkerAnswer, WorkerFault>,
}

/// What a worker can be asked to do. `Devices`, `Stats`, `MapHost`, `Release` and `OpenFabric` go at any time, what a fabric is needed for after
/// `OpenFabric`, everything else after `Open`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "camelCase", rename_all_fields = "camelCase")]
#[allow(missing_docs)]
pub enum WorkerRequest {
    /// Which GPUs and which NCCL are here. Makes no context on any GPU. Answered by `Devices`.
    Devices {
        /// NCCL's library by path; looked for when not given.
        nccl: Option<PathBuf>,
    },
    /// Takes one GPU and loads NCCL. Once in a worker's life. Answered by `Opened`.
    Open {
        /// UUID of the GPU (`GPU-...`). May be left out where exactly one is visible.
        gpu: Option<String>,
        /// NCCL's library by path; looked for when not given. A path that cannot be used is a fault; one that is not found is not.
        nccl: Option<PathBuf>,
    },
    /// Allocates one block of `slots * slot_bytes` bytes on the GPU, zeroed. Answered by `Ring`.
    Ring {
        slots: u32,
        /// Bytes of a slot; a multiple of 64.
        slot_bytes: u64,
    },
    /// Maps the sealed memfd passed with this frame, and registers it with the driver where a GPU is open. Answered by `Host`.
    MapHost {
        /// Bytes to map, from the start.
        bytes: u64,
    },
    /// Opens another process's allocation on the same GPU. Answered by `Memory`.
    Import {
        handle: IpcHandle,
        /// Bytes that it must have at least.
        bytes: u64,
    },
    /// Opens another process's event. Answered by `Event`.
    ImportEvent { handle: IpcHandle },
    /// Makes an event that other processes can open. Answered by `Event`, with the handle.
    NewEvent,
    /// Gives something up. Under-way requests that use it end first. Answered by `Done`.
    Release { what: WorkerResource },
    /// `ncclGetUniqueId`. Answered by `UniqueId`.
    UniqueId,
    /// Joins a new group without blocking, then proves it as `proof` says. Answered by `Joined`.
    /// On any fault the communicator is aborted, and the same `group` may be joined again with a new id.
    Join {
        /// Number of the group, of the agent's choice; one that was aborted may be used again.
        group: u64,
        /// Made by rank 0 for this group.
        id: NcclId,
        rank: u32,
        world: u32,
        /// The first collective operation of the group, which every rank must enter.
        #[serde(default)]
        proof: Proof,
    },
    /// One broadcast, in place. Every rank of the group asks for the same broadcasts in the same order. Answered by `Sums` when the bytes
    /// are there and the digests are computed. Any fault aborts the group.
    Broadcast {
        group: u64,
        root: u32,
        /// From where (root), or to where (others).
        at: Place,
        bytes: u64,
        /// What to digest after it; offsets from `at`. Empty: nothing.
        parts: Vec<Part>,
        /// Event to wait for on the GPU before it starts: when another process fills `at`.
        after: Option<u64>,
    },
    /// gsum64 of parts of memory on the GPU. Answered by `Sums`.
    Digest {
        /// Where offsets of parts count from; not `Host`.
        at: Place,
        parts: Vec<Part>,
        after: Option<u64>,
    },
    /// Copies without blocking. Answered by `Done` when the bytes are complete.
    Copy {
        from: Place,
        /// To where; of the two at most one is `Host`.
        to: Place,
        bytes: u64,
        after: Option<u64>,
        /// Event to record after it: another process can wait for it on its own stream.
        then: Option<u64>,
    },
    /// Aborts a group (`ncclCommAbort`), whatever it is doing; requests under way in it fail. Answered by `Done`, also when it was aborted
    /// before. A new group can be joined meanwhile.
    Abort { group: u64 },
    /// Makes a new group of the survivors without a new id (NCCL 2.27 or newer), proves it with a broadcast of one element, and aborts the
    /// old one. Answered by `Joined`.
    Shrink {
        group: u64,
        /// Number of the new group.
        into: u64,
        without: Vec<u32>,
        /// Revoke first (NCCL 2.28 or newer) instead of shrinking with an abort.
        revoke: bool,
    },
    /// Opens NIXL with its backend UCX, and proves that both work. Once in a worker's life; a failed attempt may be repeated. Needs no GPU; where
    /// one is open, memory of it is registered on trial. Answered by `Fabric`.
    OpenFabric {
        /// NIXL's C interface (`libnixl_capi.so`) by path; looked for when not given.
        library: Option<PathBuf>,
        /// Name of this worker among all peers, 1 to 128 bytes; no other incarnation may have it.
        name: String,
        /// What the worker was started with; a difference is a fault.
        ucx: UcxSettings,
    },
    /// Registers memory: peers that get its metadata can read it, and what is read from peers can go into it. Each region is an agent of NIXL of its
    /// own, so that no peer can read it after its release, over any transport. Answered by `Registered`.
    Register { what: FabricMemory },
    /// Takes a peer's metadata, for READs into this region. Answered by `Peer`.
    AddPeer {
        /// A region of this worker.
        region: u64,
        /// What the peer's worker answered to `Register`.
        metadata: FabricMetadata,
    },
    /// Reads from a peer's registered memory, without help of the peer's agent. Answered by `Done` when the bytes are here.
    Read {
        peer: u64,
        from: RemotePlace,
        /// In the memory of the peer's region.
        to: Place,
        bytes: u64,
    },
    /// What the worker holds. Answered by `Stats`.
    Stats,
}

/// How a group is proven when it is joined.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Proof {
    /// A broadcast of one byte from rank 0, compared by every rank: between WeightSync's workers.
    #[default]
    Broadcast,
    /// An all-reduce (sum) of one 32-bit float: what vLLM's ranks enter first.
    AllReduce,
    /// None: the ranks of SGLang and LMDeploy enter a broadcast of weights first.
    Nothing,
}

/// Where bytes are, by the numbers that the worker gave out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "in", rename_all = "camelCase", rename_all_fields = "camelCase")]
#[allow(missing_docs)]
pub enum Place {
    Slot {
        ring: u64,
        slot: u32,
        /// Bytes from its start.
        offset: u64,
    },
    /// Mapped host memory.
    Host { host: u64, offset: u64 },
    /// Imported GPU memory.
    Memory { memory: u64, offset: u64 },
}

/// A run of bytes to digest with gsum64.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Part {
    /// First byte; a multiple of 8.
    pub offset: u64,
    /// Length; a last word of fewer than 8 bytes counts as if zeros followed.
    pub bytes: u64,
    /// Index of its first 8-byte word in the thing that is digested: 0, or what earlier parts of it held, in words.
    pub first_word: u64,
}

/// What a worker can be asked to give up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "number", rename_all = "camelCase")]
#[allow(missing_docs)]
pub enum WorkerResource {
    Ring(u64),
    Host(u64),
    Memory(u64),
    Event(u64),
    /// Registered memory. No peer can read it when this is answered; its own peers are released too.
    Region(u64),
    /// A peer. Its metadata is forgotten when no READ uses it any more.
    Peer(u64),
}

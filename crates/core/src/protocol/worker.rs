//! Messages between an agent and its GPU worker over a socket pair: requests, answers, faults, and their frames.
//!
//! A frame is a u32 (little-endian) length and that many bytes of JSON. A request carries an id and a time limit. Several requests may be
//! in progress at once, and their answers come in any order. A request that needs a descriptor passes it with its frame (`SCM_RIGHTS`), in
//! the order of the frames. Decides nothing; knows no socket and no driver.
//!
//! Order on the GPU: requests for the same slot run in the order in which they were sent, without waiting for answers. So "copy into slot
//! 3, broadcast slot 3, copy slot 3 to the host" may be sent at once. Between host or imported memory and different slots, only answers and
//! events determine an order.
//!
//! A READ begins once the earlier work for the same slot is done. Later work for the same bytes is refused until the READ has ended, which
//! may be after its answer if that answer is `Late`.
mod answer;
mod fabric;
mod frame;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use answer::{GpuFacts, GpuLink, NcclFacts, WorkerAnswer, WorkerFault, WorkerFaultCode};
pub use fabric::{FabricFacts, FabricMemory, FabricMetadata, MAX_FABRIC_METADATA, RemotePlace, UcxSettings, UcxSettingsError};
pub use frame::{IpcHandle, MAX_WORKER_FRAME, NcclId, Opaque, WorkerFrameError, decode_worker_frame, encode_worker_frame};

/// A request with its number and time limit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkerCall {
    /// Number of the request, chosen by the agent; never used twice.
    pub id: u64,
    /// After this many ms the worker gives up and reports a fault; a communicator in use is aborted then.
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
    /// Its result.
    pub result: Result<WorkerAnswer, WorkerFault>,
}

/// The requests to a worker. `Devices`, `Stats`, `MapHost`, `Release` and `OpenFabric` are possible at any time, the requests for a fabric
/// after `OpenFabric`, and all others after `Open`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "camelCase", rename_all_fields = "camelCase")]
#[allow(missing_docs)]
pub enum WorkerRequest {
    /// Lists the GPUs and the NCCL of this machine. Makes no context on any GPU. Answered by `Devices`.
    Devices {
        /// Path of NCCL's library; searched for if not given.
        nccl: Option<PathBuf>,
    },
    /// Takes one GPU and loads NCCL. Only once for each worker. Answered by `Opened`.
    Open {
        /// UUID of the GPU (`GPU-...`). Optional if exactly one is visible.
        gpu: Option<String>,
        /// Path of NCCL's library; searched for if not given. A given path that is unusable is a fault; a failed search is not.
        nccl: Option<PathBuf>,
    },
    /// Allocates one block of `slots * slot_bytes` bytes on the GPU, zeroed. Answered by `Ring`.
    Ring {
        slots: u32,
        /// Bytes of a slot; a multiple of 64.
        slot_bytes: u64,
    },
    /// Maps the sealed memfd passed with this frame, and registers it with the driver if a GPU is open. Answered by `Host`.
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
    /// Releases a resource. Requests in progress that use it end first. Answered by `Done`.
    Release { what: WorkerResource },
    /// `ncclGetUniqueId`. Answered by `UniqueId`.
    UniqueId,
    /// Joins a new group without blocking, then proves it by `proof`. Answered by `Joined`. After any fault the communicator is aborted,
    /// and the same `group` may be joined again with a new id.
    Join {
        /// Number of the group, chosen by the agent; the number of an aborted group may be used again.
        group: u64,
        /// Made by rank 0 for this group.
        id: NcclId,
        rank: u32,
        world: u32,
        /// The first collective operation of the group, which every rank must enter.
        #[serde(default)]
        proof: Proof,
    },
    /// One broadcast, in place. Every rank of the group must request the same broadcasts in the same order. Answered by `Sums` once the
    /// bytes have arrived and the digests are computed. Any fault aborts the group.
    Broadcast {
        group: u64,
        root: u32,
        /// Source of the bytes (root), or their destination (others).
        at: Place,
        bytes: u64,
        /// Parts to digest after it, with offsets from `at`. Empty: none.
        parts: Vec<Part>,
        /// Event to wait for on the GPU before it starts, if another process fills `at`.
        after: Option<u64>,
    },
    /// gsum64 of parts of memory on the GPU. Answered by `Sums`.
    Digest {
        /// Start of the parts' offsets; not `Host`.
        at: Place,
        parts: Vec<Part>,
        after: Option<u64>,
    },
    /// Copies without blocking. Answered by `Done` once the bytes are complete.
    Copy {
        from: Place,
        /// Destination; at most one of the two is `Host`.
        to: Place,
        bytes: u64,
        after: Option<u64>,
        /// Event to record after it, so that another process can wait on its own stream.
        then: Option<u64>,
    },
    /// Aborts a group (`ncclCommAbort`) in any state; its requests in progress fail. Answered by `Done`, also if it was aborted before. A
    /// new group can be joined meanwhile.
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
    /// Opens NIXL with its backend UCX, and proves that both work. Only once for each worker; a failed attempt may be repeated. Needs no
    /// GPU; if one is open, some of its memory is registered as a test. Answered by `Fabric`.
    OpenFabric {
        /// Path of NIXL's C interface (`libnixl_capi.so`); searched for if not given.
        library: Option<PathBuf>,
        /// Name of this worker among all peers, 1 to 128 bytes; no other incarnation may have it.
        name: String,
        /// The settings with which the worker was started; a difference is a fault.
        ucx: UcxSettings,
    },
    /// Registers memory: peers with its metadata can read it, and reads from peers can write into it. Each region is a separate NIXL agent,
    /// so that after its release no peer can read it, over any transport. Answered by `Registered`.
    Register { what: FabricMemory },
    /// Takes a peer's metadata, for READs into this region. Answered by `Peer`.
    AddPeer {
        /// A region of this worker.
        region: u64,
        /// The metadata that the peer's worker returned for `Register`.
        metadata: FabricMetadata,
    },
    /// Reads from a peer's registered memory, without the peer's agent. Answered by `Done` once the bytes are here.
    Read {
        peer: u64,
        from: RemotePlace,
        /// Place in the memory of the peer's region.
        to: Place,
        bytes: u64,
    },
    /// Lists the worker's resources. Answered by `Stats`.
    Stats,
}

/// How a group is proven after it is joined.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Proof {
    /// A broadcast of one byte from rank 0, compared by every rank: between WeightSync's workers.
    #[default]
    Broadcast,
    /// An all-reduce (sum) of one 32-bit float, which vLLM's ranks enter first.
    AllReduce,
    /// None: the ranks of SGLang and LMDeploy first enter a broadcast of weights.
    Nothing,
}

/// A place in memory, by the numbers that the worker assigned.
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
    /// Length; a last word of fewer than 8 bytes is padded with zeros.
    pub bytes: u64,
    /// Index of its first 8-byte word in the digested item: 0, or the number of words in its earlier parts.
    pub first_word: u64,
}

/// A resource that a worker can release.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "number", rename_all = "camelCase")]
#[allow(missing_docs)]
pub enum WorkerResource {
    Ring(u64),
    Host(u64),
    Memory(u64),
    Event(u64),
    /// Registered memory. After the answer no peer can read it; the region's own peers are released too.
    Region(u64),
    /// A peer. Its metadata is removed once no READ uses it.
    Peer(u64),
}

//! What an agent and its GPU worker say to each other over a socket pair: requests, answers, faults, and how they are framed.
//!
//! A frame is a u32 (little-endian) length and that many bytes of JSON. Requests carry an id and the time they may take; several are under
//! way at once, answers come in any order. A request that needs a descriptor has it beside its frame (`SCM_RIGHTS`), in the order of the
//! frames. Decides nothing; knows no socket and no driver.
//!
//! Order on the GPU: requests that name the same slot run one behind the other in the order in which they were sent, without waiting for
//! answers. So "copy into slot 3, broadcast slot 3, copy slot 3 to the host" may be sent at once. Between host or imported memory and
//! different slots there is no order but that of answers and of events.

use std::fmt;
use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Longest frame in bytes; a digest of 100 000 parts takes a third of it.
pub const MAX_WORKER_FRAME: u32 = 16 << 20;

/// `N` opaque bytes that travel as base64. Never shown.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Opaque<const N: usize>(pub [u8; N]);

/// `CUipcMemHandle` or `CUipcEventHandle`: 64 bytes that another process on the same host opens. It names a whole allocation.
pub type IpcHandle = Opaque<64>;

/// `ncclUniqueId`: whoever has it can join the group. Secret.
pub type NcclId = Opaque<128>;

impl<const N: usize> fmt::Debug for Opaque<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{N} opaque bytes")
    }
}

impl<const N: usize> Opaque<N> {
    /// The bytes as base64, for a message that is itself carried safely.
    pub fn to_base64(&self) -> String {
        STANDARD.encode(self.0)
    }

    /// Reads [`to_base64`](Self::to_base64); none when it is no base64 or not `N` bytes.
    pub fn from_base64(text: &str) -> Option<Self> {
        STANDARD.decode(text).ok()?.try_into().ok().map(Self)
    }
}

impl<const N: usize> Serialize for Opaque<N> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.to_base64())
    }
}

impl<'de, const N: usize> Deserialize<'de> for Opaque<N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::from_base64(&text).ok_or_else(|| serde::de::Error::custom(format!("not {N} bytes in base64")))
    }
}

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

/// What a worker can be asked to do. `Devices` and `Stats` go at any time, everything else after `Open`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "camelCase", rename_all_fields = "camelCase")]
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
        /// Number of slots.
        slots: u32,
        /// Bytes of a slot; a multiple of 64.
        slot_bytes: u64,
    },
    /// Maps the sealed memfd beside this frame and registers it with the driver. Answered by `Host`.
    MapHost {
        /// Bytes to map, from the start.
        bytes: u64,
    },
    /// Opens another process's allocation on the same GPU. Answered by `Memory`.
    Import {
        /// Its handle.
        handle: IpcHandle,
        /// Bytes that it must have at least.
        bytes: u64,
    },
    /// Opens another process's event. Answered by `Event`.
    ImportEvent {
        /// Its handle.
        handle: IpcHandle,
    },
    /// Makes an event that other processes can open. Answered by `Event`, with the handle.
    NewEvent,
    /// Gives something up. Under-way requests that use it end first. Answered by `Done`.
    Release {
        /// What.
        what: WorkerResource,
    },
    /// `ncclGetUniqueId`. Answered by `UniqueId`.
    UniqueId,
    /// Joins a new group without blocking, then proves it with a broadcast of one element from rank 0. Answered by `Joined`.
    /// On any fault the communicator is aborted, and the same `group` may be joined again with a new id.
    Join {
        /// Number of the group, of the agent's choice; one that was aborted may be used again.
        group: u64,
        /// Made by rank 0 for this group.
        id: NcclId,
        /// Rank of this worker.
        rank: u32,
        /// Number of ranks.
        world: u32,
    },
    /// One broadcast, in place. Every rank of the group asks for the same broadcasts in the same order. Answered by `Sums` when the bytes
    /// are there and the digests are computed. Any fault aborts the group.
    Broadcast {
        /// The group.
        group: u64,
        /// Rank that sends.
        root: u32,
        /// From where (root), or to where (others).
        at: Place,
        /// How many bytes.
        bytes: u64,
        /// What to digest behind it; offsets from `at`. Empty: nothing.
        parts: Vec<Part>,
        /// Event to wait for on the GPU before it starts: when another process fills `at`.
        after: Option<u64>,
    },
    /// gsum64 of parts of memory on the GPU. Answered by `Sums`.
    Digest {
        /// Where offsets of parts count from; not `Host`.
        at: Place,
        /// The parts.
        parts: Vec<Part>,
        /// Event to wait for on the GPU before it starts.
        after: Option<u64>,
    },
    /// Copies without blocking. Answered by `Done` when the bytes are there.
    Copy {
        /// From where.
        from: Place,
        /// To where; of the two at most one is `Host`.
        to: Place,
        /// How many bytes.
        bytes: u64,
        /// Event to wait for on the GPU before it starts.
        after: Option<u64>,
        /// Event to record behind it: another process can wait for it on its own stream.
        then: Option<u64>,
    },
    /// Aborts a group (`ncclCommAbort`), whatever it is doing; requests under way in it fail. Answered by `Done`, also when it was aborted
    /// before. A new group can be joined meanwhile.
    Abort {
        /// The group.
        group: u64,
    },
    /// Makes a new group of the survivors without a new id (NCCL 2.27 or newer), proves it with a broadcast of one element, and aborts the
    /// old one. Answered by `Joined`.
    Shrink {
        /// The group that lost ranks.
        group: u64,
        /// Number of the new group.
        into: u64,
        /// Ranks that are gone.
        without: Vec<u32>,
        /// Revoke first (NCCL 2.28 or newer) instead of shrinking with an abort.
        revoke: bool,
    },
    /// What the worker holds. Answered by `Stats`.
    Stats,
}

/// What a worker answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum WorkerAnswer {
    /// It is done.
    Done,
    /// GPUs and NCCL of this machine, as this process sees them.
    Devices {
        /// The GPUs.
        gpus: Vec<GpuFacts>,
        /// `links[a][b]`: how GPU `a` reaches the memory of GPU `b`.
        links: Vec<Vec<GpuLink>>,
        /// NCCL, or why there is none that can be used.
        nccl: Result<NcclFacts, String>,
    },
    /// The GPU is taken.
    Opened {
        /// Process id of the worker.
        pid: u32,
        /// The GPU.
        gpu: GpuFacts,
        /// NCCL, or why there is none that can be used.
        nccl: Result<NcclFacts, String>,
    },
    /// A ring.
    Ring {
        /// Its number.
        ring: u64,
        /// The whole block, for other processes.
        handle: IpcHandle,
        /// Length of the block.
        bytes: u64,
    },
    /// Mapped host memory.
    Host {
        /// Its number.
        host: u64,
        /// Why it is not registered with the driver, when it is not: copies are slower then.
        unpinned: Option<String>,
    },
    /// Imported GPU memory.
    Memory {
        /// Its number.
        memory: u64,
        /// Length of the whole allocation.
        bytes: u64,
    },
    /// An event.
    Event {
        /// Its number.
        event: u64,
        /// For other processes, when it was made here.
        handle: Option<IpcHandle>,
    },
    /// A new id.
    UniqueId {
        /// The id.
        id: NcclId,
    },
    /// The group is joined and proven.
    Joined {
        /// Rank in it.
        rank: u32,
        /// Ranks of it.
        world: u32,
        /// Initialisation, in ms.
        init_ms: f64,
        /// The broadcast of one element, in ms.
        warm_up_ms: f64,
    },
    /// Digests, in the order of the parts.
    Sums {
        /// gsum64 of each part.
        sums: Vec<u64>,
        /// From the request to its end, in ms.
        ms: f64,
    },
    /// What the worker holds.
    Stats {
        /// Free memory of the GPU, whoever uses the rest. 0 before `Open`.
        gpu_free_bytes: u64,
        /// Memory of the GPU. 0 before `Open`.
        gpu_total_bytes: u64,
        /// Bytes of its rings.
        ring_bytes: u64,
        /// Open file descriptors.
        descriptors: u32,
        /// Threads.
        threads: u32,
        /// Resident memory of the process.
        resident_bytes: u64,
        /// Groups that are joined.
        groups: u32,
        /// Requests under way.
        under_way: u32,
    },
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuFacts {
    /// `GPU-` and the UUID, as `nvidia-smi -L` shows it.
    pub uuid: String,
    /// Name of the model.
    pub name: String,
    /// PCI address (`0000:1a:00.0`).
    pub bus: String,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Free memory in bytes; 0 where no context was made.
    pub free_bytes: u64,
    /// CUDA version that the driver speaks, e.g. 13000 for 13.0.
    pub driver: u32,
    /// Why the GPU cannot be used, where that is so: part of a partitioned (MIG) GPU.
    pub refused: Option<String>,
}

/// How one GPU reaches the memory of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum GpuLink {
    /// It is the same GPU.
    Same,
    /// Directly, with atomic operations, which only NVLink carries.
    Nvlink,
    /// Directly, over PCIe.
    Pcie,
    /// Through host memory.
    None,
}

/// The NCCL that a worker loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NcclFacts {
    /// File, as it was found or named.
    pub path: String,
    /// `ncclGetVersion`, e.g. 22809 for 2.28.9.
    pub version: u32,
    /// Optional functions that it lacks, e.g. `ncclCommShrink`.
    pub lacks: Vec<String>,
}

/// Where bytes are, by the numbers that the worker gave out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "in", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Place {
    /// A slot of a ring.
    Slot {
        /// The ring.
        ring: u64,
        /// The slot.
        slot: u32,
        /// Bytes from its start.
        offset: u64,
    },
    /// Mapped host memory.
    Host {
        /// Which.
        host: u64,
        /// Bytes from its start.
        offset: u64,
    },
    /// Imported GPU memory.
    Memory {
        /// Which.
        memory: u64,
        /// Bytes from its start.
        offset: u64,
    },
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
pub enum WorkerResource {
    /// A ring.
    Ring(u64),
    /// Mapped host memory.
    Host(u64),
    /// Imported GPU memory.
    Memory(u64),
    /// An event.
    Event(u64),
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkerFault {
    /// What kind of failure, as a closed word.
    pub code: WorkerFaultCode,
    /// For a person, with the next step where there is one.
    pub message: String,
}

/// Kinds of failures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WorkerFaultCode {
    /// There is no NVIDIA driver, or it does not work.
    NoDriver,
    /// The GPU that was asked for is not visible, or none was named and several are.
    NoGpu,
    /// The GPU is partitioned (MIG).
    Mig,
    /// There is no NCCL that can be used, or it lacks the function that was asked for.
    NoNccl,
    /// Too little memory.
    OutOfMemory,
    /// The time of the request passed.
    Late,
    /// The group was aborted.
    Aborted,
    /// NCCL reported an error.
    Nccl,
    /// The driver reported an error. Some of them make the process unusable: start another worker.
    Cuda,
    /// The request makes no sense.
    Invalid,
}

impl fmt::Display for WorkerFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Why bytes are no frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum WorkerFrameError {
    #[error("a frame of {bytes} bytes is longer than {MAX_WORKER_FRAME}")]
    TooLong { bytes: u64 },
    #[error("a frame makes no sense: {cause}")]
    Nonsense { cause: String },
}

/// A message as it travels.
pub fn encode_worker_frame<T: Serialize>(message: &T) -> Result<Vec<u8>, WorkerFrameError> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message).map_err(|error| WorkerFrameError::Nonsense { cause: error.to_string() })?;
    let bytes = frame.len() as u64 - 4;
    let length = u32::try_from(bytes).ok().filter(|length| *length <= MAX_WORKER_FRAME);
    let length = length.ok_or(WorkerFrameError::TooLong { bytes })?.to_le_bytes();
    frame.iter_mut().zip(length).for_each(|(to, from)| *to = from);
    Ok(frame)
}

/// Takes one whole message off the front of `received`; none while it is not all there.
pub fn decode_worker_frame<T: DeserializeOwned>(received: &mut Vec<u8>) -> Result<Option<T>, WorkerFrameError> {
    let Some(length) = received.first_chunk::<4>().map(|bytes| u32::from_le_bytes(*bytes)) else { return Ok(None) };
    if length > MAX_WORKER_FRAME {
        return Err(WorkerFrameError::TooLong { bytes: length.into() });
    }
    let end = 4 + length as usize;
    let Some(body) = received.get(4..end) else { return Ok(None) };
    let message = serde_json::from_slice(body).map_err(|error| WorkerFrameError::Nonsense { cause: error.to_string() })?;
    received.drain(..end);
    Ok(Some(message))
}

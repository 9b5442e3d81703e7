//! Answers of a worker: results, facts, and faults with a closed list of kinds.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{FabricFacts, FabricMetadata, IpcHandle, NcclId};

/// An answer of a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "camelCase", rename_all_fields = "camelCase")]
#[allow(missing_docs)]
pub enum WorkerAnswer {
    Done,
    /// GPUs and NCCL of this machine, as this process sees them.
    Devices {
        gpus: Vec<GpuFacts>,
        /// `links[a][b]`: how GPU `a` reaches the memory of GPU `b`.
        links: Vec<Vec<GpuLink>>,
        /// NCCL, or why it has no usable one.
        nccl: Result<NcclFacts, String>,
    },
    Opened {
        pid: u32,
        gpu: GpuFacts,
        nccl: Result<NcclFacts, String>,
    },
    Ring {
        ring: u64,
        /// Handle of the whole block, for other processes.
        handle: IpcHandle,
        bytes: u64,
    },
    Host {
        host: u64,
        /// Why it is not registered with the driver, when it is not: copies are slower then.
        unpinned: Option<String>,
    },
    Memory {
        memory: u64,
        /// Length of the whole allocation.
        bytes: u64,
    },
    Event {
        event: u64,
        /// For other processes, if it was made here.
        handle: Option<IpcHandle>,
    },
    UniqueId {
        id: NcclId,
    },
    /// The group is joined and proven.
    Joined {
        rank: u32,
        world: u32,
        init_ms: f64,
        /// The broadcast of one element, in ms.
        warm_up_ms: f64,
    },
    /// Digests, in the order of the parts.
    Sums {
        /// gsum64 of each part.
        sums: Vec<u64>,
        /// Time from the request to its end, in ms.
        ms: f64,
    },
    Fabric {
        facts: FabricFacts,
    },
    Registered {
        region: u64,
        /// Address of the first byte, which peers use to read it.
        address: u64,
        bytes: u64,
        /// Ordinal of the GPU; none for host memory.
        device: Option<u32>,
        /// What peers need to read it.
        metadata: FabricMetadata,
    },
    Peer {
        peer: u64,
        /// The name in its metadata: the name of its worker, and a number for its region.
        name: String,
    },
    Stats {
        /// Free memory of the GPU. 0 before `Open`.
        gpu_free_bytes: u64,
        /// Memory of the GPU. 0 before `Open`.
        gpu_total_bytes: u64,
        ring_bytes: u64,
        descriptors: u32,
        threads: u32,
        resident_bytes: u64,
        groups: u32,
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
    /// Free memory in bytes; 0 without a context.
    pub free_bytes: u64,
    /// CUDA version that the driver supports, e.g. 13000 for 13.0.
    pub driver: u32,
    /// Why the GPU cannot be used: it is part of a partitioned (MIG) GPU. `None` if it can.
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
    /// Its file, as found or given.
    pub path: String,
    /// `ncclGetVersion`, e.g. 22809 for 2.28.9.
    pub version: u32,
    /// Optional functions that it lacks, e.g. `ncclCommShrink`.
    pub lacks: Vec<String>,
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkerFault {
    /// Kind of the failure, from a closed list.
    pub code: WorkerFaultCode,
    /// Text with the next step, if there is one.
    pub message: String,
}

/// Kinds of failures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum WorkerFaultCode {
    /// There is no NVIDIA driver, or it does not work.
    NoDriver,
    /// The requested GPU is not visible, or several are visible and none was named.
    NoGpu,
    /// The GPU is partitioned (MIG).
    Mig,
    /// There is no usable NCCL, or it lacks the requested function.
    NoNccl,
    /// There is no usable NIXL, or its backend UCX does not start.
    NoFabric,
    /// NIXL refused, or a READ failed. The message has the required change, or the lost peer.
    Fabric,
    OutOfMemory,
    Late,
    Aborted,
    Nccl,
    /// The driver reported an error. Some make the process unusable: start another worker.
    Cuda,
    Invalid,
}

impl fmt::Display for WorkerFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

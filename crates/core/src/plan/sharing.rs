//! Whether an agent can use a GPU, and share its memory (CUDA IPC) with the engine or trainer in the same pod, as far as both can see.
//!
//! Pure: takes facts, returns a verdict with the exact reason and the required change. Without it, two containers silently use a slow path
//! (vllm-project/vllm#55906), or an update ends in an error number of the driver. It never guesses: an unknown fact is no obstacle. It
//! reports the driver's message unchanged.

use serde::{Deserialize, Serialize};

use super::units::show_free;
use crate::protocol::worker::GpuFacts;

/// Shared memory that is enough for NCCL and for engines with several ranks; a pod has 64 MiB by default.
const ENOUGH_SHM: u64 = 512 << 20;

/// The environment of one process, as far as it matters.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessView {
    /// Number of its PID namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid_namespace: Option<u64>,
    /// `NVIDIA_VISIBLE_DEVICES`: the devices that the container runtime was configured to add.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvidia_visible_devices: Option<String>,
    /// `NVIDIA_DRIVER_CAPABILITIES`: the parts of the driver that the container runtime was configured to add.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_capabilities: Option<String>,
    /// `CUDA_VISIBLE_DEVICES`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda_visible_devices: Option<String>,
    /// `PYTORCH_ALLOC_CONF`, or the older `PYTORCH_CUDA_ALLOC_CONF`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocator: Option<String>,
}

/// The engine or trainer, as its agent sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Neighbour {
    /// It does not exist yet, or was not checked.
    #[default]
    Unknown,
    /// The agent started it in its own container (`weightsync run`).
    Child(ProcessView),
    /// A process of another container that this one can see.
    Seen(ProcessView),
    /// It listens on its port, but no visible process owns that socket.
    Hidden,
}

/// Facts about a container and about the other process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharingFacts {
    /// Device files of GPUs (`nvidia0`, ...), without `/dev`.
    pub gpu_files: Vec<String>,
    /// Whether `/dev/nvidiactl` exists.
    pub control_file: bool,
    /// Size of `/dev/shm`; `None` if it does not exist.
    pub shm_bytes: Option<u64>,
    /// The GPUs that the agent's worker found, or the error.
    pub gpus: Result<Vec<GpuFacts>, String>,
    /// The agent's process.
    pub agent: ProcessView,
    /// The other process.
    pub neighbour: Neighbour,
}

/// Why there is no usable GPU, or none to share.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum NoSharing {
    #[error(
        "no GPU is in the agent's container ({what}): a device plugin gives a GPU to the one container that asks for it; run the agent in \
         that container (agent.launch: Wrap)"
    )]
    NoGpu { what: String },
    #[error(
        "the container runtime was asked for the driver's parts \"{capabilities}\" (NVIDIA_DRIVER_CAPABILITIES): set compute,utility, or \
         CUDA has no library here"
    )]
    NoCompute { capabilities: String },
    #[error("the GPU cannot be used: {cause}")]
    Driver { cause: String },
    #[error("{gpu} is a slice of a partitioned GPU (MIG): NCCL and CUDA IPC do not work between slices; give the container a whole GPU")]
    Mig { gpu: String },
    #[error(
        "{who} is in another PID namespace ({detail}), and CUDA IPC works within one only: run the agent in the same container \
         (agent.launch: Wrap), or set shareProcessNamespace: true in the pod"
    )]
    PidNamespace { who: &'static str, detail: String },
    #[error(
        "the agent has {agent}, {who} has {other}: memory can be shared on one GPU only; run the agent in the same container (agent.launch: Wrap)"
    )]
    OtherGpu { who: &'static str, agent: String, other: String },
}

impl NoSharing {
    /// Whether the agent can use no GPU at all. Otherwise it can use one, but not share it.
    pub fn no_gpu(&self) -> bool {
        match self {
            Self::NoGpu { .. } | Self::NoCompute { .. } | Self::Driver { .. } | Self::Mig { .. } => true,
            Self::PidNamespace { .. } | Self::OtherGpu { .. } => false,
        }
    }
}

/// Verdict about one agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sharing {
    /// UUIDs of the GPUs whose memory can be shared, in the driver's order; or the obstacle.
    pub gpus: Result<Vec<String>, NoSharing>,
    /// Working settings that should still be changed, or that require care.
    pub notes: Vec<String>,
}

/// The verdict.
pub fn sharing(facts: &SharingFacts) -> Sharing {
    let gpus = usable(facts).and_then(|gpus| shared(facts, gpus));
    let notes = if gpus.is_ok() { notes(facts) } else { Vec::new() };
    Sharing { gpus, notes }
}

/// GPUs that the agent itself can use.
fn usable(facts: &SharingFacts) -> Result<Vec<String>, NoSharing> {
    let found = match &facts.gpus {
        Ok(gpus) if !gpus.is_empty() => gpus,
        none => return Err(missing(facts, none.as_ref().err())),
    };
    let whole: Vec<String> = found.iter().filter(|gpu| gpu.refused.is_none()).map(|gpu| gpu.uuid.clone()).collect();
    match (whole.is_empty(), found.first()) {
        (true, Some(gpu)) => Err(NoSharing::Mig { gpu: gpu.uuid.clone() }),
        _ => Ok(whole),
    }
}

/// Why the worker found no GPU. The container's own settings come first, because they can be changed.
fn missing(facts: &SharingFacts, cause: Option<&String>) -> NoSharing {
    let agent = &facts.agent;
    if facts.gpu_files.is_empty() {
        let what = match agent.nvidia_visible_devices.as_deref() {
            Some(said @ ("" | "void" | "none")) => format!("NVIDIA_VISIBLE_DEVICES is \"{said}\""),
            _ if facts.control_file => "/dev/nvidiactl exists, but no /dev/nvidia0".to_owned(),
            _ => "no /dev/nvidia0".to_owned(),
        };
        return NoSharing::NoGpu { what };
    }
    let complete = |said: &str| said.split(',').any(|part| matches!(part.trim(), "all" | "compute"));
    if let Some(said) = agent.driver_capabilities.as_deref().filter(|said| !said.trim().is_empty() && !complete(said)) {
        return NoSharing::NoCompute { capabilities: said.to_owned() };
    }
    let hidden = agent.cuda_visible_devices.as_ref().map(|said| format!(", CUDA_VISIBLE_DEVICES is \"{said}\""));
    let unseen = || format!("the driver shows no GPU to the agent{}", hidden.unwrap_or_default());
    NoSharing::Driver { cause: cause.cloned().unwrap_or_else(unseen) }
}

/// The GPUs among them whose memory can be shared with the other process.
fn shared(facts: &SharingFacts, gpus: Vec<String>) -> Result<Vec<String>, NoSharing> {
    const WHO: &str = "the engine or trainer";
    let other = match &facts.neighbour {
        // A child has the agent's devices, namespaces and environment, so it shares all GPUs.
        Neighbour::Unknown | Neighbour::Child(_) => return Ok(gpus),
        Neighbour::Hidden => {
            return Err(NoSharing::PidNamespace { who: WHO, detail: "its port is open and no process here has it".to_owned() });
        }
        Neighbour::Seen(other) => other,
    };
    if let (Some(mine), Some(theirs)) = (facts.agent.pid_namespace, other.pid_namespace)
        && mine != theirs
    {
        return Err(NoSharing::PidNamespace { who: WHO, detail: format!("{theirs}, the agent is in {mine}") });
    }
    // Each container numbers its GPUs from its own first one, so only UUIDs identify a GPU.
    let named = [&other.cuda_visible_devices, &other.nvidia_visible_devices].into_iter().flatten().find(|said| names_by_uuid(said));
    let Some(named) = named else { return Ok(gpus) };
    if let Some(slice) = named.split(',').map(str::trim).find(|name| name.starts_with("MIG-")) {
        return Err(NoSharing::Mig { gpu: slice.to_owned() });
    }
    // CUDA also accepts the first characters of a UUID.
    let theirs: Vec<&str> = named.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    let both: Vec<String> = gpus.iter().filter(|gpu| theirs.iter().any(|name| gpu.starts_with(name))).cloned().collect();
    if both.is_empty() {
        return Err(NoSharing::OtherGpu { who: WHO, agent: gpus.join(", "), other: theirs.join(", ") });
    }
    Ok(both)
}

fn names_by_uuid(said: &str) -> bool {
    said.split(',').any(|name| name.trim().starts_with("GPU-") || name.trim().starts_with("MIG-"))
}

fn notes(facts: &SharingFacts) -> Vec<String> {
    let mut notes = Vec::new();
    match facts.shm_bytes {
        Some(bytes) if bytes < ENOUGH_SHM => notes.push(format!(
            "/dev/shm has {}: NCCL and engines of several ranks fail when it is full; mount an emptyDir of medium Memory there",
            show_free(bytes)
        )),
        None => notes.push("there is no /dev/shm: NCCL needs it; mount an emptyDir of medium Memory there".to_owned()),
        Some(_) => {}
    }
    let allocator = match &facts.neighbour {
        Neighbour::Child(view) | Neighbour::Seen(view) => view.allocator.as_deref(),
        Neighbour::Unknown | Neighbour::Hidden => None,
    };
    if allocator.is_some_and(expandable_segments) {
        notes.push(
            "torch's allocator makes expandable segments (PYTORCH_ALLOC_CONF): such memory cannot be shared by CUDA IPC, so tensors pass \
             through the ring"
                .to_owned(),
        );
    }
    notes
}

/// Whether a setting of torch's allocator (`PYTORCH_ALLOC_CONF`) makes memory that CUDA IPC cannot share.
pub fn expandable_segments(setting: &str) -> bool {
    setting
        .split(',')
        .filter_map(|pair| pair.split_once(':'))
        .any(|(key, value)| key.trim().eq_ignore_ascii_case("expandable_segments") && value.trim().eq_ignore_ascii_case("true"))
}

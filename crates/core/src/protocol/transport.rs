//! How bytes travel in a group: what the object asks for, what members have, and what was chosen.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{EngineGroups, FabricPlan, MemberName, Preflight};

/// What the object asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportWish {
    /// The best that all members have.
    #[default]
    Auto,
    /// A chain of connections.
    Tcp,
    /// Broadcasts between GPUs; a member that cannot take part is left out.
    Nccl,
    /// Each member reads from the memory of the one before it (NIXL); a member that cannot take part is left out.
    Gdr,
}

/// How bytes are to travel, as the object says it. What is 0 is chosen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TransportPolicy {
    /// Which transport.
    pub wish: TransportWish,
    /// NCCL: bytes of one slot of the ring on each GPU. GDR: bytes of one registered slot.
    #[serde(default)]
    pub slot_bytes: u64,
    /// NCCL: slots of the ring on each GPU. GDR: registered slots.
    #[serde(default)]
    pub slots: u32,
    /// GDR: whether reads may go over TCP where there is no RDMA device. NCCL: whether broadcasts may pass TCP sockets where there is one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allow_tcp: bool,
    /// NCCL: its settings, `NCCL_*` of the allow-list.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// NCCL: settings that hold where neither the object nor the agent's own environment has them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub defaults: BTreeMap<String, String>,
    /// Whether edges are measured before they carry weights.
    #[serde(default, skip_serializing_if = "Preflight::is_auto")]
    pub preflight: Preflight,
    /// Name of the latest request to measure all edges again; empty without one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub preflight_asked: String,
}

impl TransportPolicy {
    /// The same for engines of these kinds that join groups by themselves. Ranks of one communicator must allocate their buffers in the same way,
    /// or it is not made (`unhandled cuda error`, `invalid argument`: NCCL 2.28.9 on H200). SGLang (0.5.23) starts its workers with
    /// `NCCL_CUMEM_ENABLE=0`, the others leave NCCL's own choice, which is -2.
    #[must_use]
    pub fn with_engines<'a>(mut self, kinds: impl IntoIterator<Item = &'a str>) -> Self {
        let mut kinds = kinds.into_iter().peekable();
        let sglang = kinds.peek().is_some() && kinds.all(|kind| kind == "sglang");
        self.defaults.insert("NCCL_CUMEM_ENABLE".to_owned(), if sglang { "0" } else { "-2" }.to_owned());
        self
    }
}

/// A GPU that a member's agent has a worker on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemberGpu {
    /// `GPU-` and the UUID.
    pub uuid: String,
    /// Name of the model.
    pub name: String,
    /// Bytes free, in addition to what the worker holds already.
    pub free_bytes: u64,
    /// Bytes in all.
    pub memory_bytes: u64,
}

/// The GPUs of a member, or why there is none that a group could use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuReport {
    /// One a worker, in the order of the member's ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<MemberGpu>,
    /// `ncclGetVersion` of the library that the workers loaded (22809 is 2.28.9); none when there is none that can be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nccl: Option<u32>,
    /// Why there is no GPU or no NCCL, as text. Empty when there are both.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Why GPU memory cannot be shared with the engine (CUDA IPC), so that weights pass through the host there. Empty when nothing speaks
    /// against it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub unshared: String,
}

/// How bytes travel in an epoch; chosen when all members prepared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TransportChoice {
    /// The communicator; none: over TCP or by reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nccl: Option<CommunicatorPlan>,
    /// The slots that members read from each other; none: over TCP or NCCL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gdr: Option<FabricPlan>,
    /// The groups that engines join by themselves; none: agents move the bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engines: Option<EngineGroups>,
    /// Why this and not another, for status.
    pub reason: String,
}

/// A communicator of an epoch: every member has a rank for each of its GPUs, but for guests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CommunicatorPlan {
    /// Slots of the ring on each GPU.
    pub slots: u32,
    /// Bytes of one slot.
    pub slot_bytes: u64,
    /// Members in the order of their ranks, sources first, with the UUIDs of their GPUs.
    pub ranks: Vec<(MemberName, Vec<String>)>,
    /// Members without a rank, because their GPU is the source's: they copy from its ring (CUDA IPC), or get the stream over connections.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub guests: Vec<MemberName>,
}

impl CommunicatorPlan {
    /// Ranks in all.
    pub fn world(&self) -> u32 {
        self.ranks.iter().map(|(_, gpus)| count(gpus)).sum()
    }

    /// First rank of a member, and the UUIDs of its GPUs.
    pub fn ranks_of(&self, member: &MemberName) -> Option<(u32, &[String])> {
        let at = self.ranks.iter().position(|(name, _)| name == member)?;
        let before = self.ranks.iter().take(at).map(|(_, gpus)| count(gpus)).sum();
        self.ranks.get(at).map(|(_, gpus)| (before, gpus.as_slice()))
    }
}

fn count(gpus: &[String]) -> u32 {
    u32::try_from(gpus.len()).unwrap_or(u32::MAX)
}

impl TransportChoice {
    /// Over TCP, for this reason.
    pub fn tcp(reason: impl Into<String>) -> Self {
        Self { nccl: None, gdr: None, engines: None, reason: reason.into() }
    }

    /// With what came of it, for status.
    #[must_use]
    pub fn noted(mut self, note: Option<&str>) -> Self {
        if let Some(note) = note {
            self.reason = format!("{}; {note}", self.reason);
        }
        self
    }

    /// `tcp`, `nccl` or `gdr`; shown in status.
    pub fn name(&self) -> &'static str {
        match (self.nccl.is_some() || self.engines.is_some(), self.gdr.is_some()) {
            (true, _) => "nccl",
            (false, true) => "gdr",
            (false, false) => "tcp",
        }
    }
}

impl Default for TransportChoice {
    fn default() -> Self {
        Self::tcp("no other was chosen")
    }
}

/// Asks a member to join the communicator of a committed or committing epoch (`POST /v1/epoch/join`, over mutual TLS, from the agent that
/// proves the epoch). It answers [`JoinResponse`] when the communicator moved one element on all ranks.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JoinRequest {
    /// The epoch.
    pub id: super::EpochId,
    /// The communicator's id. Secret: any process that has it can join.
    pub nccl: super::worker::NcclId,
    /// Answer within this long.
    pub deadline_ms: u64,
}

/// A member joined.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JoinResponse {
    /// Initialisation of the slowest of its ranks, in ms.
    pub init_ms: f64,
    /// The broadcast of one element, in ms.
    pub warm_up_ms: f64,
}

//! How bytes travel in a group: the object's request, the members' means, and the choice.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{EngineGroups, FabricPlan, MemberName, Preflight};

/// The requested transport.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportWish {
    /// The best that all members support.
    #[default]
    Auto,
    /// A chain of connections.
    Tcp,
    /// Broadcasts between GPUs; a member that cannot take part is left out.
    Nccl,
    /// Each member reads from the previous member's memory (NIXL); a member that cannot take part is left out.
    Gdr,
}

/// The object's transport settings. A value of 0 means "choose".
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TransportPolicy {
    /// The requested transport.
    pub wish: TransportWish,
    /// NCCL: bytes of one slot of the ring on each GPU. GDR: bytes of one registered slot.
    #[serde(default)]
    pub slot_bytes: u64,
    /// NCCL: slots of the ring on each GPU. GDR: registered slots.
    #[serde(default)]
    pub slots: u32,
    /// GDR: whether reads may use TCP on hosts without an RDMA device. NCCL: whether broadcasts may use TCP sockets although there is one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allow_tcp: bool,
    /// NCCL: its settings, `NCCL_*` of the allow-list.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// NCCL: settings that apply if neither the object nor the agent's environment sets them.
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
    /// The same settings for engines of these kinds that join groups by themselves. Ranks of one communicator must allocate their buffers
    /// in the same way; otherwise NCCL does not create it (`unhandled cuda error`, `invalid argument`: NCCL 2.28.9 on H200). SGLang
    /// (0.5.23) starts its workers with `NCCL_CUMEM_ENABLE=0`; the others leave NCCL's default, which is -2.
    #[must_use]
    pub fn with_engines<'a>(mut self, kinds: impl IntoIterator<Item = &'a str>) -> Self {
        let mut kinds = kinds.into_iter().peekable();
        let sglang = kinds.peek().is_some() && kinds.all(|kind| kind == "sglang");
        self.defaults.insert("NCCL_CUMEM_ENABLE".to_owned(), if sglang { "0" } else { "-2" }.to_owned());
        self
    }
}

/// A GPU on which a member's agent has a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemberGpu {
    /// `GPU-` and the UUID.
    pub uuid: String,
    /// Name of the model.
    pub name: String,
    /// Free bytes, in addition to those that the worker already holds.
    pub free_bytes: u64,
    /// Bytes in all.
    pub memory_bytes: u64,
}

/// The GPUs of a member, or why a group can use none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuReport {
    /// One for each worker, in the order of the member's ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<MemberGpu>,
    /// `ncclGetVersion` of the library that the workers loaded (22809 is 2.28.9); `None` without a usable library.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nccl: Option<u32>,
    /// Why there is no GPU or no NCCL, as text. Empty if there are both.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Why GPU memory cannot be shared with the engine (CUDA IPC), so that weights pass through the host. Empty if it can.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub unshared: String,
}

/// How bytes travel in an epoch; chosen when all members prepared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TransportChoice {
    /// The communicator; `None` over TCP or by reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nccl: Option<CommunicatorPlan>,
    /// The slots that members read from each other; `None` over TCP or NCCL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gdr: Option<FabricPlan>,
    /// The groups that engines join by themselves; `None` if agents move the bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engines: Option<EngineGroups>,
    /// Why it was chosen, for status.
    pub reason: String,
}

/// A communicator of an epoch: every member except guests has a rank for each of its GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CommunicatorPlan {
    /// Slots of the ring on each GPU.
    pub slots: u32,
    /// Bytes of one slot.
    pub slot_bytes: u64,
    /// Members in the order of their ranks, sources first, with the UUIDs of their GPUs.
    pub ranks: Vec<(MemberName, Vec<String>)>,
    /// Members without a rank, because their GPU is the source's. They copy from its ring (CUDA IPC), or receive the stream over
    /// connections.
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

    /// The same with a remark, for status.
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

/// Requests that a member joins the communicator of a committed or committing epoch. The response comes once the communicator moved one
/// element on all ranks.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JoinRequest {
    /// The epoch.
    pub id: super::EpochId,
    /// The communicator's id. Secret: any process that has it can join.
    pub nccl: super::worker::NcclId,
    /// Deadline for the response, in ms.
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

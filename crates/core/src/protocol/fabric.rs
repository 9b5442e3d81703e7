//! Memory of a member that others may read through NIXL during one epoch; and whether a member has NIXL.
//!
//! A member never lets others write into its memory: the next member of a chain reads each piece. The metadata contains keys of the network
//! card, so it travels only in hellos, whose connections carry the weights too. It becomes invalid with the registration.

use serde::{Deserialize, Serialize};

use super::cut;
use super::worker::{FabricMetadata, RemotePlace};

/// Slots of a member's ring, as its readers see them: back to back in one registered region.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OfferedSlots {
    /// NIXL's description of the region. Secret: a process that has it can read the region.
    pub metadata: FabricMetadata,
    /// Address of the first slot.
    pub first: RemotePlace,
    /// Number of slots.
    pub slots: u32,
    /// Bytes of a slot.
    pub slot_bytes: u64,
}

impl OfferedSlots {
    /// Place of the first `bytes` bytes of a slot; `None` if they do not fit.
    pub fn at(&self, slot: u32, bytes: u64) -> Option<RemotePlace> {
        let offset = u64::from(slot).checked_mul(self.slot_bytes).filter(|_| slot < self.slots && bytes <= self.slot_bytes)?;
        Some(RemotePlace { address: self.first.address.checked_add(offset)?, device: self.first.device })
    }
}

/// Never shows keys.
impl std::fmt::Debug for OfferedSlots {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} slots of {} bytes", self.slots, self.slot_bytes)
    }
}

/// The slots that each member registers in an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FabricPlan {
    /// Slots of each member.
    pub slots: u32,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// Whether members whose slots can be on their GPUs have them there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub on_gpus: bool,
}

impl FabricPlan {
    /// Slots in host memory, as requested; 0 is replaced by a default. Several slots let a read, a hash and the next member's read run at
    /// once.
    pub fn of(slots: u32, slot_bytes: u64) -> Self {
        let slot_bytes = if slot_bytes == 0 { 16 << 20 } else { slot_bytes };
        Self { slots: if slots == 0 { 4 } else { slots }, slot_bytes, on_gpus: false }
    }
}

impl FabricPlan {
    /// Bytes of all slots of a member.
    pub fn bytes(self) -> u64 {
        u64::from(self.slots).saturating_mul(self.slot_bytes)
    }
}

/// Most transports, GPUs, and devices of one GPU that a member lists.
pub const MOST_FABRIC_NAMES: usize = 16;
/// Longest path of a library and longest other name that a member lists, in bytes.
pub const LONGEST_FABRIC_NAME: (usize, usize) = (512, 64);

/// The means by which a member reads the memory of others, for status.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemberFabric {
    /// File of NIXL's C interface.
    pub library: String,
    /// Version of NIXL; `None` if the file belongs to no package.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// NIXL's backend.
    pub plugin: String,
    /// Transports that the backend may use.
    pub transports: Vec<String>,
    /// Network devices, by GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<GpuDevices>,
}

/// The network devices for slots on one GPU, or in host memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuDevices {
    /// UUID of the GPU; `None` for host memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// Names of the devices, e.g. `mlx5_0:1`.
    pub names: Vec<String>,
}

impl MemberFabric {
    /// The same, cut to the limits of a report.
    #[must_use]
    pub fn bounded(mut self) -> Self {
        let (path, name) = LONGEST_FABRIC_NAME;
        self.library = cut(&self.library, path);
        self.plugin = cut(&self.plugin, name);
        if let Some(version) = &mut self.version {
            *version = cut(version, name);
        }
        cut_all(&mut self.transports, name);
        self.devices.truncate(MOST_FABRIC_NAMES);
        for GpuDevices { gpu, names } in &mut self.devices {
            if let Some(gpu) = gpu {
                *gpu = cut(gpu, name);
            }
            cut_all(names, name);
        }
        self
    }
}

fn cut_all(names: &mut Vec<String>, most: usize) {
    names.truncate(MOST_FABRIC_NAMES);
    for name in names {
        *name = cut(name, most);
    }
}

/// Whether a member can read the memory of others, and let them read its own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FabricReport {
    /// Library, plugin and transports, for status; `None` if a group cannot use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nixl: Option<String>,
    /// Whether the host has an RDMA device.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rdma: bool,
    /// Whether its slots can lie in memory of its GPUs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gpu: bool,
    /// Why a group cannot use it, as text. Empty if it can.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

//! One-sided READs between workers, over NIXL: the settings, the registered memory, and names for a peer's memory.
//!
//! Decides which transports may be listed and how long metadata may be. It knows no NIXL and no socket.

use std::collections::BTreeMap;
use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Longest metadata of one region in bytes. NIXL 1.5.1 with UCX over TCP writes 320 bytes; each device of a NIC adds some hundreds.
pub const MAX_FABRIC_METADATA: usize = 64 << 10;

/// UCX transports and devices that NIXL may use; all others are off.
///
/// UCX reads them from the environment of its process (`UCX_TLS`, `UCX_NET_DEVICES`), so a worker is started with them. NIXL's own
/// parameter for UCX's settings cannot carry them: it splits its text at commas (`engine_config`, nixl 1.5.1, read).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UcxSettings {
    /// Transports by UCX's names, e.g. `rc`, `cuda_copy`, `cuda_ipc`, `tcp`. At least one; neither `all` nor an exclusion (`^tcp`).
    pub tls: Vec<String>,
    /// Network devices, e.g. `mlx5_0:1`, `eth0`. Empty: every device of these transports.
    pub devices: Vec<String>,
}

/// Why settings are refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum UcxSettingsError {
    #[error("no transport of UCX is listed: list at least one, e.g. rc or tcp")]
    NoTransport,
    #[error("{name:?} is no transport of UCX that can be listed: name each one, without \"all\" and \"^\"")]
    Transport { name: String },
    #[error("{name:?} is no network device: names look like mlx5_0:1 or eth0")]
    Device { name: String },
}

impl UcxSettings {
    /// The environment of a worker with these settings.
    ///
    /// Without `tcp`, the software emulation of reads is off, so that memory which no listed transport can read is an error and never slow.
    /// Two more settings are the same for all (UCX 1.23, run on an H100). `cuda_ipc` may read: by default UCX excludes that if it sees no
    /// NVLink, even between processes on one GPU. And UCX does not patch functions of libc and CUDA to observe allocations, which takes 0.4
    /// to 1 s while it opens. That would only serve its cache of registrations, and a worker registers each ring itself.
    pub fn environment(&self) -> Result<[(&'static str, String); 5], UcxSettingsError> {
        let plain = |name: &str, others: &str| {
            !name.is_empty() && name.chars().all(|letter| letter.is_ascii_alphanumeric() || others.contains(letter))
        };
        if self.tls.is_empty() {
            return Err(UcxSettingsError::NoTransport);
        }
        if let Some(name) = self.tls.iter().find(|name| !plain(name, "_") || name.as_str() == "all") {
            return Err(UcxSettingsError::Transport { name: name.clone() });
        }
        if let Some(name) = self.devices.iter().find(|name| !plain(name, "_:.-")) {
            return Err(UcxSettingsError::Device { name: name.clone() });
        }
        let devices = if self.devices.is_empty() { "all".to_owned() } else { self.devices.join(",") };
        let emulation = if self.tls.iter().any(|name| name == "tcp") { "y" } else { "n" };
        Ok([
            ("UCX_TLS", self.tls.join(",")),
            ("UCX_NET_DEVICES", devices),
            ("UCX_PROTO_EMULATION_ENABLE", emulation.to_owned()),
            ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on".to_owned()),
            ("UCX_MEM_EVENTS", "n".to_owned()),
        ])
    }
}

/// The NIXL that a worker opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FabricFacts {
    /// File of its C interface, as found or given.
    pub path: String,
    /// Version of the package that contains the file; the library itself does not report one.
    pub version: Option<String>,
    /// CUDA major version that it was built for, from its folder's name.
    pub cuda: Option<u32>,
    /// NIXL's backend.
    pub plugin: String,
    /// Kinds of memory that the backend supports, in NIXL's terms (`DRAM`, `VRAM`).
    pub memory: Vec<String>,
    /// Parameters of the backend, and UCX's environment.
    pub parameters: BTreeMap<String, String>,
    /// Whether memory of the worker's GPU could be registered as a test; otherwise the cause.
    pub gpu_memory: Result<(), String>,
}

/// Memory of a worker that can be registered, by the numbers that the worker assigned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "number", rename_all = "camelCase")]
#[allow(missing_docs)]
pub enum FabricMemory {
    Host(u64),
    Ring(u64),
}

/// A place in a peer's registered memory. The peer announces address and device with its metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RemotePlace {
    /// First byte, in the peer's address space.
    pub address: u64,
    /// The peer's ordinal of its GPU; `None` for host memory.
    pub device: Option<u32>,
}

/// NIXL's description of one registered region: a process that has it can read the region. Travels as base64. Never shown.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct FabricMetadata(Vec<u8>);

impl FabricMetadata {
    /// `None` if it is empty or longer than [`MAX_FABRIC_METADATA`].
    pub fn new(bytes: Vec<u8>) -> Option<Self> {
        (1..=MAX_FABRIC_METADATA).contains(&bytes.len()).then_some(Self(bytes))
    }

    /// The bytes as NIXL wrote them.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for FabricMetadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of metadata", self.0.len())
    }
}

impl Serialize for FabricMetadata {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for FabricMetadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = STANDARD.decode(text).ok().and_then(Self::new);
        bytes.ok_or_else(|| serde::de::Error::custom(format!("not 1 to {MAX_FABRIC_METADATA} bytes in base64")))
    }
}

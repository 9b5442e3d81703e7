//! RDMA devices of this host, as files of the kernel describe them, and which of them are nearest to a GPU.
//!
//! Decides whether a device can be used, and which devices share the longest PCI path with a GPU. It opens no device and asks no library. What
//! cannot be read is left out.

use std::fs;
use std::path::{Component, Path, PathBuf};

use rustix::thread::CapabilitySet;
use serde::Serialize;

/// Where the kernel lists RDMA devices.
pub const DEVICES: &str = "/sys/class/infiniband";

/// What an RDMA device needs locked at least, in bytes: UCX 1.23 registers receive queues of 40 MB (RC) and 21 MB (UD) for each device before
/// any slot (run). With less it asks for them without end while it opens, and says nothing to its caller (run with 64 KiB).
pub const LOCKED: u64 = 64 << 20;

/// An RDMA device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Rdma {
    /// Name, e.g. `mlx5_0`.
    pub name: String,
    /// Its ports, by number.
    pub ports: Vec<RdmaPort>,
    /// The file by which a process uses it, e.g. `/dev/infiniband/uverbs0`; none where this process does not see that file.
    pub file: Option<String>,
    /// Where it hangs in the tree of devices; none for a software device.
    #[serde(skip)]
    pub path: Option<PathBuf>,
}

/// A port of an RDMA device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RdmaPort {
    /// From 1.
    pub number: u32,
    /// `ACTIVE`, `DOWN`, ...
    pub state: String,
    /// `InfiniBand` or `Ethernet` (RoCE).
    pub link_layer: String,
    /// Addresses in its GID table. A RoCE port without one can send nothing.
    pub gids: u32,
}

impl RdmaPort {
    /// Whether it is up.
    pub fn active(&self) -> bool {
        self.state == "ACTIVE"
    }
}

impl Rdma {
    /// Whether a port is up.
    pub fn active(&self) -> bool {
        self.ports.iter().any(RdmaPort::active)
    }

    /// Its active ports by UCX's names, e.g. `mlx5_0:1`.
    pub fn ucx_names(&self) -> impl Iterator<Item = String> + '_ {
        self.ports.iter().filter(|port| port.active()).map(|port| format!("{}:{}", self.name, port.number))
    }
}

/// Names of the devices that a process can open and that have an active port: NCCL can use them.
pub fn usable(root: &Path) -> Vec<String> {
    let usable = |device: &Rdma| device.active() && device.file.is_some();
    devices(root).into_iter().filter(usable).map(|device| device.name).collect()
}

/// All devices below `root`, which is `/` but in tests, by name.
pub fn devices(root: &Path) -> Vec<Rdma> {
    let all = root.join(DEVICES.trim_start_matches('/'));
    entries(&all).into_iter().map(|name| device(root, &all.join(&name), name)).collect()
}

fn device(root: &Path, folder: &Path, name: String) -> Rdma {
    let ports = folder.join("ports");
    let numbers = entries(&ports).into_iter().filter_map(|number| Some((number.parse().ok()?, ports.join(number))));
    let ports = numbers.map(|(number, folder)| port(number, &folder)).collect();
    let path = fs::canonicalize(folder.join("device")).ok();
    let verbs = entries(&folder.join("device/infiniband_verbs"));
    // A software device has no `device`; its file is listed by class.
    let class = root.join("sys/class/infiniband_verbs");
    let of_class = || entries(&class).into_iter().find(|verbs| text(&class.join(verbs).join("ibdev")).as_ref() == Some(&name));
    let verbs = verbs.into_iter().next().or_else(of_class);
    let file = verbs.map(|verbs| format!("dev/infiniband/{verbs}")).filter(|file| root.join(file).exists());
    Rdma { name, ports, file: file.map(|file| format!("/{file}")), path }
}

fn port(number: u32, folder: &Path) -> RdmaPort {
    // "4: ACTIVE"
    let state = text(&folder.join("state")).unwrap_or_default();
    let state = state.split_once(": ").map_or(state.as_str(), |(_, word)| word).to_owned();
    let link_layer = text(&folder.join("link_layer")).unwrap_or_default();
    // Unused entries are all zeros.
    let used = |entry: &String| text(&folder.join("gids").join(entry)).is_some_and(|gid| gid.chars().any(|letter| !"0:".contains(letter)));
    let gids = entries(&folder.join("gids")).iter().filter(|entry| used(entry)).count();
    RdmaPort { number, state, link_layer, gids: u32::try_from(gids).unwrap_or(u32::MAX) }
}

/// Those of the active devices that share the longest PCI path with the GPU at that PCI address (`0000:1a:00.0`). All of them where the GPU's place
/// is not known, or where none shares more than another.
pub fn nearest<'a>(root: &Path, devices: &'a [Rdma], gpu: &str) -> Vec<&'a Rdma> {
    let active: Vec<&Rdma> = devices.iter().filter(|device| device.active()).collect();
    let Ok(gpu) = fs::canonicalize(root.join("sys/bus/pci/devices").join(gpu.to_ascii_lowercase())) else { return active };
    let shared = |device: &&Rdma| device.path.as_ref().map_or(0, |path| common(path, &gpu));
    let most = active.iter().map(shared).max().unwrap_or(0);
    active.into_iter().filter(|device| shared(device) == most).collect()
}

/// The PCI address of the GPU with that UUID, as NVIDIA's kernel module lists it (`/proc/driver/nvidia/gpus/ADDRESS/information`).
pub fn gpu_address(root: &Path, uuid: &str) -> Option<String> {
    let gpus = root.join("proc/driver/nvidia/gpus");
    let is_it = |address: &String| {
        let said = text(&gpus.join(address).join("information")).unwrap_or_default();
        said.lines().filter_map(|line| line.strip_prefix("GPU UUID:")).any(|found| found.trim() == uuid)
    };
    entries(&gpus).into_iter().find(is_it)
}

fn common(one: &Path, other: &Path) -> usize {
    let parts = |path: &Path| path.components().map(|part: Component<'_>| part.as_os_str().to_owned()).collect::<Vec<_>>();
    parts(one).iter().zip(parts(other).iter()).take_while(|(one, other)| one == other).count()
}

/// The bytes that a process may lock, where that is too little for an RDMA device. `limit` is its RLIMIT_MEMLOCK (none: any number), and `status` its
/// `/proc/self/status`.
pub fn locks_too_little(limit: Option<u64>, status: &str) -> Option<u64> {
    let limit = limit.filter(|limit| *limit < LOCKED)?;
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let capabilities = capabilities.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    // The kernel asks no limit of who has it.
    let unlimited = CapabilitySet::from_bits_retain(capabilities).contains(CapabilitySet::IPC_LOCK);
    (!unlimited).then_some(limit)
}

fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Names of a folder's entries, sorted.
fn entries(folder: &Path) -> Vec<String> {
    let listing = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<_> = listing.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

#[cfg(test)]
pub(crate) mod tests;

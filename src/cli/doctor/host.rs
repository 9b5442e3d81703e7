//! What files of the kernel say of this machine: RDMA devices, limits, namespaces, and the environment that NCCL reads.
//!
//! What cannot be read is left out; it asks no library and no GPU.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use weightsync_agent::space::Cgroups;

/// Inode of the first PID namespace of a kernel (`PROC_PID_INIT_INO`, include/linux/proc_ns.h).
const FIRST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Variables besides `NCCL_*` that decide what GPUs and libraries do.
const TELLING: [&str; 5] =
    ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Rdma {
    /// Name, e.g. `mlx5_0`.
    pub name: String,
    /// Its ports: number, state (`ACTIVE`), and `InfiniBand` or `Ethernet`.
    pub ports: Vec<RdmaPort>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RdmaPort {
    pub number: u32,
    /// `ACTIVE`, `DOWN`, ...
    pub state: String,
    /// `InfiniBand` or `Ethernet` (RoCE).
    pub link_layer: String,
}

impl Rdma {
    /// Whether a port is up.
    pub fn active(&self) -> bool {
        self.ports.iter().any(|port| port.state == "ACTIVE")
    }
}

/// What processes here may use; `None` is no limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Limits {
    /// Memory that a process may lock (`ulimit -l`), in bytes.
    pub locked_bytes: Option<u64>,
    pub open_files: Option<u64>,
    /// Memory of this process's control group, the tightest of its levels.
    pub memory_bytes: Option<u64>,
    /// Size of /dev/shm; none when there is none.
    pub shm_bytes: Option<u64>,
    /// What is free of it.
    pub shm_free_bytes: Option<u64>,
}

/// The PID namespace: CUDA IPC works between processes of the same one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PidNamespace {
    /// Its number, to compare with what `readlink /proc/self/ns/pid` says elsewhere.
    pub number: u64,
    pub of_host: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Host {
    /// Version of NVIDIA's kernel module, when it is loaded.
    pub kernel_module: Option<String>,
    pub rdma: Vec<Rdma>,
    /// Whether `nvidia_peermem` is loaded, by which RDMA devices reach GPU memory.
    pub peermem: bool,
    pub limits: Limits,
    pub pid_namespace: Option<PidNamespace>,
    /// Variables of this process that NCCL and CUDA read.
    pub environment: BTreeMap<String, String>,
}

impl Host {
    /// Reads below `root`, which is `/` but in tests.
    pub fn read(root: &Path) -> Self {
        let telling = |name: &str| name.starts_with("NCCL_") || TELLING.contains(&name);
        let environment = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        Self {
            kernel_module: kernel_module(root),
            rdma: rdma(&root.join("sys/class/infiniband")),
            peermem: root.join("sys/module/nvidia_peermem").exists(),
            limits: limits(&root.join("dev/shm")),
            pid_namespace: pid_namespace(root),
            environment: environment.filter(|(name, _)| telling(name)).collect(),
        }
    }
}

fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// `580.159.04` of `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build ...`.
fn kernel_module(root: &Path) -> Option<String> {
    let text = text(&root.join("proc/driver/nvidia/version"))?;
    let looks_like_one = |word: &&str| word.contains('.') && word.chars().all(|letter| letter.is_ascii_digit() || letter == '.');
    text.lines().next()?.split_whitespace().find(looks_like_one).map(str::to_owned)
}

/// Names of a folder's entries, sorted.
fn entries(folder: &Path) -> Vec<String> {
    let listing = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<_> = listing.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

fn rdma(folder: &Path) -> Vec<Rdma> {
    let port = |ports: &Path, name: String| {
        let number = name.parse().ok()?;
        // "4: ACTIVE"
        let state = text(&ports.join(&name).join("state")).unwrap_or_default();
        let state = state.split_once(": ").map_or(state.as_str(), |(_, word)| word).to_owned();
        let link_layer = text(&ports.join(&name).join("link_layer")).unwrap_or_default();
        Some(RdmaPort { number, state, link_layer })
    };
    let device = |name: String| {
        let ports = folder.join(&name).join("ports");
        let ports = entries(&ports).into_iter().filter_map(|number| port(&ports, number)).collect();
        Rdma { name, ports }
    };
    entries(folder).into_iter().map(device).collect()
}

fn limits(shm: &Path) -> Limits {
    let found = rustix::fs::statvfs(shm).ok();
    Limits {
        locked_bytes: getrlimit(Resource::Memlock).current,
        open_files: getrlimit(Resource::Nofile).current,
        memory_bytes: Cgroups::of_this_process().tightest().map(|found| found.limit),
        shm_bytes: found.as_ref().map(|found| found.f_blocks.saturating_mul(found.f_frsize)),
        shm_free_bytes: found.map(|found| found.f_bavail.saturating_mul(found.f_frsize)),
    }
}

/// `pid:[4026531836]`.
fn pid_namespace(root: &Path) -> Option<PidNamespace> {
    let link = fs::read_link(root.join("proc/self/ns/pid")).ok()?;
    let number = link.to_str()?.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok()?;
    Some(PidNamespace { number, of_host: number == FIRST_PID_NAMESPACE })
}

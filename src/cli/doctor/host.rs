//! Facts of this machine from files of the kernel: devices, limits, namespaces, and the environment that NCCL reads.
//!
//! What cannot be read is left out; it asks no library and no GPU.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use weightsync_agent::rdma::{self, Rdma};
use weightsync_agent::space::Cgroups;

/// Inode of the first PID namespace of a kernel (`PROC_PID_INIT_INO`, include/linux/proc_ns.h).
const FIRST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// The version line of NVIDIA's kernel module.
const MODULE: &str = "proc/driver/nvidia/version";

/// Variables besides `NCCL_*` that decide what GPUs and libraries do.
const TELLING: [&str; 5] =
    ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];

/// What processes here may use; `None` is no limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Limits {
    /// Memory that a process may lock (`ulimit -l`), in bytes.
    pub locked_bytes: Option<u64>,
    /// The same, where it is too little for an RDMA device.
    #[serde(skip)]
    pub locks_too_little: Option<u64>,
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
    /// Its number, to compare with `readlink /proc/self/ns/pid` in another container.
    pub number: u64,
    pub of_host: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Host {
    /// Version of NVIDIA's kernel module, when it is loaded.
    pub kernel_module: Option<String>,
    /// Whether that module is the open one, which can share GPU memory as dma-buf.
    pub open_module: bool,
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
            open_module: text(&root.join(MODULE)).is_some_and(|text| text.contains("Open Kernel Module")),
            rdma: rdma::devices(root),
            peermem: root.join("sys/module/nvidia_peermem").exists(),
            limits: limits(root),
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
    let text = text(&root.join(MODULE))?;
    let looks_like_one = |word: &&str| word.contains('.') && word.chars().all(|letter| letter.is_ascii_digit() || letter == '.');
    text.lines().next()?.split_whitespace().find(looks_like_one).map(str::to_owned)
}

fn limits(root: &Path) -> Limits {
    let found = rustix::fs::statvfs(root.join("dev/shm")).ok();
    let locked_bytes = getrlimit(Resource::Memlock).current;
    let status = text(&root.join("proc/self/status")).unwrap_or_default();
    Limits {
        locked_bytes,
        locks_too_little: rdma::locks_too_little(locked_bytes, &status),
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

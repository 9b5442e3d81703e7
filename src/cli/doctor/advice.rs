//! What each transport would use on a machine, and why a better path is not used. Decides from facts alone.

use serde::Serialize;

use super::found::Gpus;
use super::host::Host;
use weightsync_agent::rdma::Rdma;
use weightsync_core::protocol::worker::{GpuFacts, GpuLink};

/// The default size of a container's /dev/shm.
const SMALL_SHM: u64 = 64 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Way {
    /// Which members it connects: `within this host`, `to other hosts`.
    pub between: &'static str,
    pub uses: String,
    /// Why a better path is not used; `None` if there is no better one.
    pub not_better: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Advice {
    /// Its name, as in `spec.transport`.
    pub transport: &'static str,
    /// Why it cannot be used; `None` if it can.
    pub unusable: Option<String>,
    pub ways: Vec<Way>,
}

/// NCCL and TCP, the better one first.
pub fn advise(gpus: &Gpus, host: &Host) -> Vec<Advice> {
    let unusable = nccl_unusable(gpus);
    let ways = if unusable.is_some() { Vec::new() } else { vec![within(gpus), beyond(host)] };
    let not_better = match &unusable {
        Some(_) => "nccl cannot be used here".to_owned(),
        None => "nccl moves the bytes from GPU to GPU; tcp is for groups with a member that has none".to_owned(),
    };
    let tcp = Way { between: "all members", uses: "host memory and TCP connections".into(), not_better: Some(not_better) };
    vec![Advice { transport: "nccl", unusable, ways }, Advice { transport: "tcp", unusable: None, ways: vec![tcp] }]
}

fn usable(gpus: &Gpus) -> Vec<(usize, &GpuFacts)> {
    gpus.gpus.iter().enumerate().filter(|(_, gpu)| gpu.refused.is_none()).collect()
}

fn nccl_unusable(gpus: &Gpus) -> Option<String> {
    if let Err(why) = gpus.driver.get() {
        return Some(why.to_owned());
    }
    if usable(gpus).is_empty() {
        let reasons: Vec<_> = gpus.gpus.iter().filter_map(|gpu| gpu.refused.as_deref()).collect();
        return Some(format!("no GPU can be used: {}", reasons.first().unwrap_or(&"there is none")));
    }
    gpus.nccl.get().err().map(str::to_owned)
}

/// Between the GPUs of this host: as good as the worst pair, since a broadcast passes all of them.
fn within(gpus: &Gpus) -> Way {
    let between = "within this host";
    let usable = usable(gpus);
    let link = |a: usize, b: usize| gpus.links.get(a).and_then(|row| row.get(b)).copied().unwrap_or(GpuLink::None);
    let pairs = || usable.iter().flat_map(|(a, _)| usable.iter().filter(move |(b, _)| a < b).map(move |(b, _)| (*a, *b)));
    let first = |wanted: GpuLink| pairs().find(|(a, b)| link(*a, *b) == wanted);
    let way = |uses: String, not_better: Option<String>| Way { between, uses, not_better };
    if usable.len() < 2 {
        return way("nothing: one GPU is visible".into(), None);
    }
    if let Some((a, b)) = first(GpuLink::None) {
        let why = format!("GPU {a} cannot reach the memory of GPU {b}");
        return way("host memory, between GPUs that cannot reach each other".into(), Some(why));
    }
    if let Some((a, b)) = first(GpuLink::Pcie) {
        return way("PCIe from GPU to GPU".into(), Some(format!("no NVLink between GPU {a} and GPU {b}")));
    }
    way(format!("NVLink between all {} GPUs", usable.len()), None)
}

/// To GPUs of other hosts.
fn beyond(host: &Host) -> Way {
    let between = "to other hosts";
    let active: Vec<_> = host.rdma.iter().filter(|device| device.active()).map(|device| device.name.as_str()).collect();
    if active.is_empty() {
        let why = if host.rdma.is_empty() { "there is no RDMA device".to_owned() } else { down(&host.rdma) };
        return Way { between, uses: "TCP, through host memory".into(), not_better: Some(why) };
    }
    let names = active.join(", ");
    if host.peermem {
        return Way { between, uses: format!("RDMA from GPU memory by {names}"), not_better: None };
    }
    let why = "nvidia_peermem is not loaded; NCCL then reaches GPU memory only where driver and kernel share it as dma-buf".to_owned();
    Way { between, uses: format!("RDMA by {names}"), not_better: Some(why) }
}

fn down(devices: &[Rdma]) -> String {
    let names: Vec<_> = devices.iter().map(|device| device.name.as_str()).collect();
    format!("no port of {} is active", names.join(", "))
}

pub fn notes(gpus: &Gpus, host: &Host) -> Vec<String> {
    let mut notes = Vec::new();
    if let (Err(_), Some(module)) = (gpus.driver.get(), &host.kernel_module) {
        notes.push(format!(
            "NVIDIA's kernel module {module} is loaded, but this process has no GPU: in a container, ask for one, with the driver capability \
             `compute`"
        ));
    }
    if let Some(bytes) = host.limits.shm_bytes.filter(|bytes| *bytes <= SMALL_SHM && !gpus.gpus.is_empty()) {
        let size = weightsync_core::plan::show_bytes(bytes);
        notes.push(format!("/dev/shm has {size}, and NCCL keeps its buffers there: mount a memory-backed emptyDir of 1 GiB or more"));
    }
    if let Some(bytes) = host.limits.locked_bytes.filter(|_| host.rdma.iter().any(Rdma::active)) {
        let size = weightsync_core::plan::show_bytes(bytes);
        notes.push(format!("a process may lock {size} of memory, and RDMA locks all that it sends from: allow it without limit"));
    }
    if host.pid_namespace.as_ref().is_some_and(|namespace| !namespace.of_host) && !gpus.gpus.is_empty() {
        notes.push(
            "this is a PID namespace of its own: CUDA IPC reaches only engines and trainers in the same one (shareProcessNamespace, or \
             launch: Wrap)"
                .to_owned(),
        );
    }
    for (name, value) in &host.environment {
        if name.starts_with("PYTORCH_") && value.contains("expandable_segments:True") {
            notes.push(format!(
                "{name} asks for expandable segments, whose memory cannot be shared by CUDA IPC: a trainer must not use them"
            ));
        }
    }
    notes
}

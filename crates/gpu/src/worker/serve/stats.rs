//! What the worker holds, counted: what must not grow from epoch to epoch.

use std::fs;

use super::Gpu;
use super::tables::Tables;
use crate::GpuError;
use weightsync_core::protocol::worker::WorkerAnswer;

fn entries(folder: &str) -> u32 {
    fs::read_dir(folder).map_or(0, |entries| u32::try_from(entries.count()).unwrap_or(u32::MAX))
}

fn resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) * 1024
}

pub(super) fn stats(gpu: Option<&Gpu>, tables: &Tables) -> Result<WorkerAnswer, GpuError> {
    let (gpu_free_bytes, gpu_total_bytes) = gpu.map_or(Ok((0, 0)), |gpu| gpu.device.memory())?;
    Ok(WorkerAnswer::Stats {
        gpu_free_bytes,
        gpu_total_bytes,
        ring_bytes: tables.ring_bytes(),
        descriptors: entries("/proc/self/fd"),
        threads: entries("/proc/self/task"),
        resident_bytes: resident_bytes(),
        groups: gpu.map_or(0, |gpu| gpu.groups.joined()),
        under_way: gpu.map_or(0, |gpu| gpu.works.under_way()).saturating_add(u32::try_from(tables.reads()).unwrap_or(u32::MAX)),
    })
}

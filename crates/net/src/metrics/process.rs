//! Resources of this process, read from `/proc/self` at each scrape. Values that cannot be read are left out, never guessed.

use std::fmt::Error;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};

use super::{Definition, In};

const CPU: Definition = Definition::seconds("process_cpu", "Processor time that the process used");
const MEMORY: Definition = Definition::gauge_in("process_resident_memory", In::Bytes, "Resident memory of the process");
const THREADS: Definition = Definition::gauge("process_threads", "Threads of the process");
const FILES: Definition = Definition::gauge("process_open_files", "Open file descriptors of the process");

/// The metrics of the process.
pub const DEFINITIONS: &[Definition] = &[CPU, MEMORY, THREADS, FILES];

/// Reads `/proc/self`.
#[derive(Debug, Default)]
pub(super) struct Process;

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let read = |name: &str| std::fs::read_to_string(format!("/proc/self/{name}")).unwrap_or_default();
        if let Some(seconds) = processor_seconds(&read("stat")) {
            CPU.encode(&mut encoder)?.encode_counter::<NoLabelSet, f64, f64>(&seconds, None)?;
        }
        let status = read("status");
        if let Some(kibibytes) = field(&status, "VmRSS") {
            MEMORY.encode(&mut encoder)?.encode_gauge(&kibibytes.saturating_mul(1024))?;
        }
        if let Some(threads) = field(&status, "Threads") {
            THREADS.encode(&mut encoder)?.encode_gauge(&threads)?;
        }
        if let Ok(files) = std::fs::read_dir("/proc/self/fd") {
            // The listing itself has one file open.
            FILES.encode(&mut encoder)?.encode_gauge(&i64::try_from(files.count().saturating_sub(1)).unwrap_or(i64::MAX))?;
        }
        Ok(())
    }
}

/// Ticks of a second in `/proc`: USER_HZ, a part of Linux' interface on all machines that this is built for.
const TICKS: f64 = 100.0;

/// Fields 14 and 15 (utime, stime) of proc(5) `stat`; the third is the one after the name.
fn processor_seconds(stat: &str) -> Option<f64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(14 - 3);
    let mut ticks = || fields.next()?.parse::<u32>().ok();
    Some((f64::from(ticks()?) + f64::from(ticks()?)) / TICKS)
}

/// A number of proc(5) `status`.
fn field(status: &str, name: &str) -> Option<i64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests;

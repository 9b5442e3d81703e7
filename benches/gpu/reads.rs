//! Reads of one worker's memory by another through NIXL: as they are, with digests on both ends, and next to NIXL's own Python package.
//!
//! The source's worker is on the first GPU and the reader's on the last one, or both are on the only one. `--memory host` needs no GPU. All slots
//! are in flight, and each is read again and again. UCX may use TCP: hosts without an RDMA device connect over it.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use weightsync_core::protocol::worker::{RemotePlace, UcxSettings, WorkerAnswer};
use weightsync_core::weights::gsum64;
use weightsync_gpu::worker::{HostMemory, Peer, Read, Region, Slot, Span, Worker, WorkerStart};
use weightsync_net::memfd::SharedMemory;

use crate::Settings;
use crate::fleet::{self, AMPLE};
use crate::report::Report;

/// Buckets of one measurement.
const BUCKETS: usize = 64;
/// As an agent allows UCX with `transport.gdr.allowTcp`.
const TLS: [&str; 7] = ["rc", "dc", "ud", "cuda_copy", "cuda_ipc", "self", "tcp"];

/// Where the slots lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Memory {
    Gpu,
    Host,
}

impl Memory {
    fn name(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Host => "host",
        }
    }
}

/// A worker with registered slots.
struct End {
    worker: Worker,
    region: Region,
    slots: Slots,
}

enum Slots {
    Gpu(Vec<Slot>),
    Host(HostMemory, Arc<SharedMemory>),
}

pub async fn run(settings: &Settings, report: &mut Report) -> Result<()> {
    let bytes = settings.mib << 20;
    let gpus = if settings.memory == Memory::Gpu { visible(settings).await? } else { vec![String::new()] };
    let (Some(first), Some(last)) = (gpus.first(), gpus.last()) else { bail!("no GPU is visible") };
    let bare = bare(settings)?;
    let begun = Instant::now();
    let source = End::start(settings, first, "source").await?;
    println!("# a worker with NIXL and registered slots after {:?}", begun.elapsed());
    let reader = End::start(settings, last, "reader").await?;
    let peer = reader.worker.add_peer(&reader.region, source.region.metadata(), AMPLE).await?;
    let pair = Pair { source, reader, peer, bytes };
    let (mut plain, mut digested) = (Vec::new(), Vec::new());
    pair.once(settings.slots, true).await?;
    for _ in 0..settings.runs {
        plain.push(pair.once(settings.slots, false).await?);
        digested.push(pair.once(settings.slots, true).await?);
    }
    drop(pair);
    let bare = [bare, self::bare(settings)?].concat();
    let what = format!("reads of {} MiB buckets, {} memory", settings.mib, settings.memory.name());
    report.compare(&what, "GB/s", ("weightsync", &plain), ("bare NIXL", &bare), "0.9 on GPUs, 0.95 on hosts");
    let what = format!("{what}, with digests on both ends");
    report.compare(&what, "GB/s", ("with digests", &digested), ("bare NIXL", &bare), "0.9 on GPUs, 0.95 on hosts");
    Ok(())
}

/// UUIDs of all GPUs, or of as many as are to be used.
async fn visible(settings: &Settings) -> Result<Vec<String>> {
    let WorkerAnswer::Devices { gpus, .. } = fleet::start_worker(settings, "list")?.devices(settings.nccl.as_deref(), AMPLE).await? else {
        bail!("a worker lists no devices");
    };
    let count = if settings.gpus == 0 { gpus.len() } else { settings.gpus };
    Ok(gpus.into_iter().take(count).map(|gpu| gpu.uuid).collect())
}

/// GB/s of NIXL's own package, one value a measurement.
fn bare(settings: &Settings) -> Result<Vec<f64>> {
    let output = Command::new(&settings.python)
        .arg(&settings.bare_reads)
        .args(["--memory", settings.memory.name(), "--mib", &settings.mib.to_string(), "--buffers", &settings.slots.to_string()])
        .args(["--buckets", &BUCKETS.to_string(), "--runs", &settings.runs.to_string()])
        .envs(ucx().environment()?)
        .stderr(Stdio::inherit())
        .output()
        .context("python cannot be started")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find_map(|line| line.strip_prefix("GB/s ")).with_context(|| format!("{}: {text}", output.status))?;
    line.split(' ').map(|run| Ok(run.parse()?)).collect()
}

fn ucx() -> UcxSettings {
    UcxSettings { tls: TLS.map(str::to_owned).to_vec(), devices: Vec::new() }
}

impl End {
    async fn start(settings: &Settings, gpu: &str, name: &str) -> Result<Self> {
        let worker = Worker::start(&WorkerStart::own(name)?.with_ucx(&ucx())?)?;
        let bytes = settings.mib << 20;
        let step = Instant::now();
        if settings.memory == Memory::Gpu {
            // Reads need no NCCL.
            let _ = worker.open(Some(gpu), settings.nccl.as_deref(), AMPLE).await?;
        }
        let (opened, step) = (step.elapsed(), Instant::now());
        let facts = worker.open_fabric(settings.nixl.as_deref(), name, &ucx(), AMPLE).await?;
        println!("# {name}: GPU open after {opened:?}, NIXL {:?} {:?} later", facts.version, step.elapsed());
        let (region, slots) = match settings.memory {
            Memory::Gpu => {
                let ring = worker.ring(settings.slots, bytes, AMPLE).await?;
                let mut slots = Vec::new();
                for _ in 0..settings.slots {
                    slots.push(ring.take(AMPLE).await?);
                }
                (worker.register_ring(&ring, AMPLE).await?, Slots::Gpu(slots))
            }
            Memory::Host => {
                let all = bytes * u64::from(settings.slots);
                let memory = SharedMemory::create("slots", usize::try_from(all)?)?;
                let host = worker.map_host(memory.fd(), all, AMPLE).await?;
                (worker.register_host(&host, AMPLE).await?, Slots::Host(host, Arc::new(memory)))
            }
        };
        Ok(Self { worker, region, slots })
    }

    fn span(&self, slot: usize, bytes: u64) -> Span {
        match &self.slots {
            Slots::Gpu(slots) => slots[slot].at(0),
            Slots::Host(host, _) => host.at(slot as u64 * bytes),
        }
    }

    /// Where a peer finds a slot.
    fn place(&self, slot: usize, bytes: u64) -> Result<RemotePlace> {
        let offset = match &self.slots {
            Slots::Gpu(slots) => slots[slot].offset(),
            Slots::Host(..) => slot as u64 * bytes,
        };
        self.region.at(offset).context("a slot lies beyond its region")
    }

    async fn digest(&self, slot: usize, bytes: u64) -> Result<u64> {
        if let Slots::Host(_, memory) = &self.slots {
            let (memory, bytes) = (memory.clone(), usize::try_from(bytes)?);
            // As an agent sums a slot: in its own mapping.
            let summed = tokio::task::spawn_blocking(move || memory.bytes(slot * bytes..(slot + 1) * bytes).map(gsum64));
            return summed.await?.context("a slot lies beyond the memory");
        }
        let sums = self.worker.digest(self.span(slot, bytes), fleet::whole(bytes), None, AMPLE).await?;
        sums.sums.first().copied().context("a worker answers without a digest")
    }
}

struct Pair {
    source: End,
    reader: End,
    peer: Peer,
    bytes: u64,
}

impl Pair {
    /// GB/s of one measurement.
    async fn once(&self, slots: u32, digests: bool) -> Result<f64> {
        let begun = Instant::now();
        let slots = slots as usize;
        // In order: a slot is used again only when its bucket was read.
        let reads = stream::iter(0..BUCKETS).map(|number| self.read(number % slots, digests)).buffered(slots);
        reads.try_collect::<Vec<()>>().await?;
        Ok(BUCKETS as f64 * self.bytes as f64 / 1e9 / begun.elapsed().as_secs_f64())
    }

    /// Of one bucket.
    async fn read(&self, slot: usize, digests: bool) -> Result<()> {
        let (from, to) = (self.source.place(slot, self.bytes)?, self.reader.span(slot, self.bytes));
        let read = Read { peer: self.peer.clone(), from, to, bytes: self.bytes };
        if !digests {
            return Ok(self.reader.worker.read(read, AMPLE).await?);
        }
        // A source's agent sums a bucket while the one before it travels; so does the receiver.
        let sent = self.source.digest(slot, self.bytes).await?;
        self.reader.worker.read(read, AMPLE).await?;
        ensure!(self.reader.digest(slot, self.bytes).await? == sent, "a bucket does not have the source's digest");
        Ok(())
    }
}

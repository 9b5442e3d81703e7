//! Workers, one on each GPU, with a ring and host memory each; and groups of them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use futures::future::try_join_all;
use rustix::fs::{MemfdFlags, SealFlags};
use weightsync_core::protocol::worker::{NcclId, Part, WorkerAnswer};
use weightsync_gpu::worker::{Broadcast, Copy, HostMemory, Joined, Ring, Slot, Worker, WorkerStart};

use crate::Settings;

/// Long enough for everything that goes well.
pub const AMPLE: Duration = Duration::from_secs(60);

pub struct Member {
    pub worker: Worker,
    pub pid: i32,
    pub ring: Ring,
    pub host: HostMemory,
    pub gpu: String,
    memfd: File,
}

/// Starts a worker of this program.
pub fn start_worker(settings: &Settings, label: &str) -> Result<Worker> {
    let mut start = WorkerStart::own(label)?;
    let pairs = settings.environment.iter().filter_map(|pair| pair.split_once('='));
    start.environment = pairs.map(|(name, value)| (name.into(), value.into())).collect();
    Ok(Worker::start(&start)?)
}

/// UUIDs of the GPUs to use.
pub async fn gpus(settings: &Settings) -> Result<Vec<String>> {
    let worker = start_worker(settings, "list")?;
    let WorkerAnswer::Devices { gpus, nccl, .. } = worker.devices(settings.nccl.as_deref(), AMPLE).await? else {
        bail!("a worker lists no devices");
    };
    let nccl = nccl.map_err(anyhow::Error::msg)?;
    let count = if settings.gpus == 0 { gpus.len() } else { settings.gpus };
    ensure!((2..=gpus.len()).contains(&count), "{count} GPUs, of {} that are visible", gpus.len());
    println!("# {count} x {} driver {} NCCL {} ({}) lacks {:?}", gpus[0].name, gpus[0].driver, nccl.version, nccl.path, nccl.lacks);
    Ok(gpus.into_iter().take(count).map(|gpu| gpu.uuid).collect())
}

impl Member {
    pub async fn start(settings: &Settings, gpu: &str) -> Result<Self> {
        let worker = start_worker(settings, gpu)?;
        let (pid, facts, nccl) = worker.open(Some(gpu), settings.nccl.as_deref(), AMPLE).await?;
        nccl.map_err(anyhow::Error::msg)?;
        let bytes = settings.mib << 20;
        let ring = worker.ring(settings.slots, bytes, AMPLE).await?;
        let memfd = rustix::fs::memfd_create("bucket", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&memfd, bytes)?;
        rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW)?;
        let host = worker.map_host(&memfd, bytes, AMPLE).await?;
        if let Some(why) = host.unpinned() {
            println!("# host memory of {} is not pinned: {why}", facts.uuid);
        }
        Ok(Self { worker, pid: i32::try_from(pid)?, ring, host, gpu: gpu.to_owned(), memfd: File::from(memfd) })
    }

    /// Puts bytes into a slot.
    pub async fn fill(&self, slot: &Slot, bytes: &[u8]) -> Result<()> {
        self.memfd.write_all_at(bytes, 0)?;
        let copy = Copy { from: self.host.at(0), to: slot.at(0), bytes: bytes.len() as u64, after: None, then: None };
        Ok(self.worker.copy(copy, AMPLE).await?)
    }

    /// Gets the bytes of a slot.
    pub async fn read(&self, slot: &Slot, bytes: usize) -> Result<Vec<u8>> {
        let copy = Copy { from: slot.at(0), to: self.host.at(0), bytes: bytes as u64, after: None, then: None };
        self.worker.copy(copy, AMPLE).await?;
        let mut read = vec![0; bytes];
        self.memfd.read_exact_at(&mut read, 0)?;
        Ok(read)
    }
}

/// One worker on each GPU.
pub async fn start(settings: &Settings) -> Result<Vec<Member>> {
    let gpus = gpus(settings).await?;
    try_join_all(gpus.iter().map(|gpu| Member::start(settings, gpu))).await
}

/// A number that no group had.
pub fn next_group() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Forms a group of all members, the first being rank 0; how long that took, with the making of the id.
pub async fn form(members: &[Member]) -> Result<(u64, Duration, Vec<Joined>)> {
    let begun = Instant::now();
    let id = members[0].worker.unique_id(AMPLE).await?;
    let (group, joined) = join(members, id, members.len(), AMPLE).await?;
    Ok((group, begun.elapsed(), joined))
}

/// Has members join as the first ranks of a group.
pub async fn join(members: &[Member], id: NcclId, world: usize, within: Duration) -> Result<(u64, Vec<Joined>)> {
    let group = next_group();
    let world = u32::try_from(world)?;
    let joins = (0..).zip(members).map(|(rank, member)| member.worker.join(group, id, rank, world, within));
    Ok((group, try_join_all(joins).await?))
}

/// The whole of a bucket, as a part to digest.
pub fn whole(bytes: u64) -> Vec<Part> {
    vec![Part { offset: 0, bytes, first_word: 0 }]
}

/// One broadcast of slots from rank 0, digested on all ranks; the digest, which all agree on.
pub async fn broadcast(members: &[Member], group: u64, slots: &[Slot], bytes: u64) -> Result<u64> {
    let asked = members.iter().zip(slots).map(|(member, slot)| {
        let broadcast = Broadcast { group, root: 0, at: slot.at(0), bytes, parts: whole(bytes), after: None };
        member.worker.broadcast_now(broadcast, AMPLE)
    });
    let sums = try_join_all(asked).await?;
    let mut sums = sums.iter().map(|sums| sums.sums.first().copied());
    let first = sums.next().flatten().context("no digest")?;
    if sums.any(|sum| sum != Some(first)) {
        bail!("the digests of the ranks differ");
    }
    Ok(first)
}

/// A slot of every member.
pub async fn slots(members: &[Member]) -> Result<Vec<Slot>> {
    Ok(try_join_all(members.iter().map(|member| member.ring.take(AMPLE))).await?)
}

//! Feeds an engine from a checkpoint on this host, through the rings of its GPUs: for engines that load no directory.
//!
//! Decides how bytes get to the GPU: read into a small memfd that the worker has mapped, copied into a slot, handed over. Nothing is kept of
//! the checkpoint beyond two buckets.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags};

use super::HandOver;
use weightsync_core::protocol::HeldVersion;
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_core::weights::{Bucket, Gsum64, Layout};
use weightsync_engine::{DeviceJob, Engine, EngineError, InstallError, InstallReport, Left};
use weightsync_gpu::worker::{Copy, HostMemory, Ring, Slot, WorkerError};

/// Buckets in host memory: one is read while the other is copied.
const BUCKETS: u64 = 2;

#[derive(Debug, thiserror::Error)]
pub enum FeedError {
    #[error("the checkpoint cannot be read: {0}")]
    Read(String),
    #[error(transparent)]
    Worker(#[from] WorkerError),
    #[error(transparent)]
    Install(#[from] InstallError),
}

impl FeedError {
    /// As the outcome of an install that left the engine so.
    pub fn into_install(self, left: Left) -> InstallError {
        match self {
            Self::Install(error) => error,
            other => {
                let source = EngineError::Unsupported { what: other.to_string(), next_step: "it is fed again in full".into() };
                InstallError { step: "load", left, source }
            }
        }
    }
}

/// Host memory that a worker copies from.
struct Window {
    file: File,
    mapped: Vec<HostMemory>,
    bucket_bytes: u64,
}

impl Window {
    async fn new(rings: &[Ring], bucket_bytes: u64, within: Duration) -> Result<Self, FeedError> {
        let bucket_bytes = bucket_bytes.max(1).next_multiple_of(4096);
        let file = memfd(bucket_bytes * BUCKETS).map_err(|error| FeedError::Read(format!("no memory to read it into: {error}")))?;
        let mut mapped = Vec::with_capacity(rings.len());
        for ring in rings {
            mapped.push(ring.worker().map_host(&file, bucket_bytes * BUCKETS, within).await?);
        }
        Ok(Self { file: file.into(), mapped, bucket_bytes })
    }

    /// Reads a bucket and copies it into a slot of every ring; answers the gsum64 of each of its tensors, of the bytes that were read.
    async fn load(
        &self,
        layout: &Arc<Layout>,
        checkpoint: &Arc<Checkpoint>,
        bucket: Bucket,
        slots: &[Slot],
        within: Duration,
    ) -> Result<Vec<u64>, FeedError> {
        let base = u64::from(bucket.sequence) % BUCKETS * self.bucket_bytes;
        let (layout, checkpoint) = (layout.clone(), checkpoint.clone());
        let file = self.file.try_clone().map_err(|error| FeedError::Read(error.to_string()))?;
        let read = tokio::task::spawn_blocking(move || read(&layout, &checkpoint, bucket, &file, base)).await;
        let sums = read.map_err(|ended| FeedError::Read(ended.to_string()))??;
        for (slot, host) in slots.iter().zip(&self.mapped) {
            let copy = Copy { from: host.at(base), to: slot.at(0), bytes: bucket.bytes, after: None, then: None };
            slot.ring().worker().copy(copy, within).await?;
        }
        Ok(sums)
    }
}

fn memfd(bytes: u64) -> rustix::io::Result<OwnedFd> {
    let memory = rustix::fs::memfd_create("weightsync-feed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&memory, bytes)?;
    rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(memory)
}

fn read(layout: &Layout, checkpoint: &Checkpoint, bucket: Bucket, into: &File, base: u64) -> Result<Vec<u64>, FeedError> {
    const PART: u64 = 8 << 20;
    let failed = |error: String| FeedError::Read(error);
    let (mut buffer, mut sum, mut sums) = (Vec::new(), Gsum64::new(), Vec::new());
    for part in layout.parts(bucket.offset, bucket.bytes) {
        let mut done = 0;
        while done < part.bytes {
            let length = PART.min(part.bytes - done);
            buffer.resize(usize::try_from(length).unwrap_or_default(), 0);
            checkpoint.read_tensor(part.index, part.in_tensor + done, &mut buffer).map_err(|error| failed(error.to_string()))?;
            into.write_all_at(&buffer, base + part.in_range + done).map_err(|error| failed(error.to_string()))?;
            sum.update(&buffer);
            done += length;
        }
        sums.push(sum.take());
    }
    Ok(sums)
}

/// Feeds an engine with a checkpoint whose tensors, in its order, are those of `job.layout`. With `preload`
/// all of it is laid into the rings before the engine is paused, which they must have slots for: what is measured then is the engine alone.
/// Gives the report, and the time from the first bucket to the end.
pub async fn feed_checkpoint(
    engine: &dyn Engine,
    job: &DeviceJob,
    version: HeldVersion,
    checkpoint: Arc<Checkpoint>,
    rings: &[Ring],
    preload: bool,
) -> Result<(InstallReport, Duration), FeedError> {
    let layout = job.layout.clone();
    let window = Window::new(rings, layout.largest_bucket(), job.silence).await?;
    let take = || async {
        let mut slots = Vec::with_capacity(rings.len());
        for ring in rings {
            slots.push(ring.take(job.silence).await?);
        }
        Ok::<_, WorkerError>(slots)
    };
    let mut loaded = Vec::new();
    if preload {
        for bucket in layout.buckets() {
            let slots = take().await?;
            let sums = window.load(&layout, &checkpoint, bucket, &slots, job.silence).await?;
            loaded.push((bucket, slots, sums));
        }
    }
    let mut over = HandOver::begin(engine, job).await?;
    let begun = Instant::now();
    let fed = async {
        if preload {
            for (bucket, slots, sums) in loaded {
                over.bucket(bucket, slots, sums).await?;
            }
            return Ok(());
        }
        for bucket in layout.buckets() {
            let slots = take().await?;
            let sums = window.load(&layout, &checkpoint, bucket, &slots, job.silence).await?;
            over.bucket(bucket, slots, sums).await?;
        }
        Ok::<_, FeedError>(())
    };
    match fed.await {
        Ok(()) => Ok((over.finish(version).await?, begun.elapsed())),
        Err(FeedError::Install(error)) => Err(error.into()),
        Err(error) => {
            let left = over.abandon(&error.to_string()).await;
            Err(error.into_install(left).into())
        }
    }
}

//! Feeds an engine whose workers read shared memory from a checkpoint on this host, through memory of any size.
//!
//! Decides where each bucket lies and when its place is used again: never, where all of the checkpoint fits; else when every worker has copied
//! it. Nothing is kept of the checkpoint.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;

use super::FeedError;
use crate::rollout::ring::Ring;
use weightsync_core::protocol::{HeldVersion, KvCachePolicy, PausePolicy};
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_core::weights::{Bucket, Layout};
use weightsync_engine::{Engine, HostBucket, HostDigest, HostJob, HostMemory, HostTensor, InstallReport, InstallTerms};
use weightsync_net::memfd::SharedMemory;

#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct MemoryFeed {
    /// The version that the engine holds afterwards.
    pub version: HeldVersion,
    /// Tensors of the checkpoint in its order, cut between tensors.
    pub layout: Arc<Layout>,
    /// Most bytes of shared memory; at least two of the longest bucket are taken. None: all of the checkpoint.
    pub memory: Option<u64>,
    pub pause: PausePolicy,
    pub kv_cache: KvCachePolicy,
    pub timeout: Duration,
}

/// Feeds the engine. Gives the report, the bytes of shared memory, and the time from the first bucket to the end.
pub async fn feed_memory(
    engine: &dyn Engine,
    feed: &MemoryFeed,
    checkpoint: Arc<Checkpoint>,
) -> Result<(InstallReport, u64, Duration), FeedError> {
    let layout = &feed.layout;
    let all = layout.total_bytes.max(64).next_multiple_of(64);
    let least = layout.largest_bucket().next_multiple_of(64).saturating_mul(2);
    let bytes = feed.memory.map_or(all, |most| most.max(least).next_multiple_of(64).min(all));
    let failed = |error: String| FeedError::Read(error);
    let length = usize::try_from(bytes).map_err(|error| failed(error.to_string()))?;
    let made = spawn_blocking(move || SharedMemory::create_writable("weightsync-feed", length)).await;
    let mut memory = made.map_err(|ended| failed(ended.to_string()))?.map_err(|error| failed(format!("no memory: {error}")))?;
    let shared = HostMemory::of(&memory.fd(), bytes).map_err(|error| failed(format!("the memory cannot be shared: {error}")))?;
    let job = HostJob {
        terms: InstallTerms {
            version: feed.version.clone(),
            pause: feed.pause,
            kv_cache: feed.kv_cache,
            canary: None,
            timeout: feed.timeout,
            cancel: CancellationToken::new(),
        },
        layout: layout.clone(),
        memory: Arc::new(shared),
        silence: feed.timeout,
    };
    let mut install = engine.begin_host(&job).await?;
    let digest = install.digest();
    let begun = Instant::now();
    let (mut ring, mut taken) = (Ring::new(bytes), 0);
    for bucket in layout.buckets() {
        let start = loop {
            if let Some(start) = ring.take(bucket.bytes.next_multiple_of(64).min(bytes)) {
                break start;
            }
            let now = install.taken(taken).await?;
            (taken..now).for_each(|_| ring.give_back());
            taken = now;
        };
        let (layout, checkpoint, copy) = (layout.clone(), checkpoint.clone(), bytes < all);
        let filled = spawn_blocking(move || {
            let bucket = fill(&layout, &checkpoint, &bucket, &mut memory, start, digest);
            (memory, bucket.map(|tensors| HostBucket { sequence: 0, copy, tensors }))
        });
        let (back, filled) = filled.await.map_err(|ended| failed(ended.to_string()))?;
        memory = back;
        match filled {
            Ok(filled) => install.bucket(HostBucket { sequence: bucket.sequence, ..filled }).await?,
            Err(error) => {
                let left = install.abandon(&error).await;
                return Err(failed(error).into_install(left).into());
            }
        }
    }
    Ok((install.finish(feed.version.clone()).await?, bytes, begun.elapsed()))
}

/// Reads a bucket into its place. Blocks.
fn fill(
    layout: &Layout,
    checkpoint: &Checkpoint,
    bucket: &Bucket,
    memory: &mut SharedMemory,
    start: u64,
    digest: HostDigest,
) -> Result<Vec<HostTensor>, String> {
    let place = usize::try_from(start).ok().zip(usize::try_from(start + bucket.bytes).ok());
    let into = place.and_then(|(first, end)| memory.bytes_mut(first..end)).ok_or("a bucket does not fit the memory")?;
    checkpoint.read_stream(layout, bucket.offset, into).map_err(|error| error.to_string())?;
    let tensor = |part: weightsync_core::weights::EntryPart<'_>| {
        let range = usize::try_from(part.in_range).ok().zip(usize::try_from(part.in_range + part.bytes).ok());
        let bytes = range.and_then(|(first, end)| into.get(first..end)).ok_or("a tensor does not fit its bucket")?;
        let spec = part.entry.tensor.clone();
        Ok(HostTensor { spec, offset: start + part.in_range, bytes: part.bytes, digest: digest.of(bytes) })
    };
    layout.parts(bucket.offset, bucket.bytes).map(tensor).collect()
}

//! Sends the stream of a version through the chain, once: read, hash and perhaps keep a bucket while the one before it is under way.
//!
//! Decides the digests that the manifest will hold, from the very bytes that were sent. It never decides who is in the chain.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;

use super::keeping::{Keep, Keeping};
use crate::version_source::{SourceError, VersionSource};
use weightsync_core::protocol::BucketHeader;
use weightsync_core::weights::{Bucket, BucketHasher, DigestAlgorithm, Layout, TensorHasherError};
use weightsync_gpu::worker::WorkerError;
use weightsync_transport::nccl::Staging;
use weightsync_transport::{BucketSink, Payload, TensorDigests, TransportError, digest, hashes_on_several_cores};

/// Buckets that are read and hashed ahead of the one being sent.
const AHEAD: usize = 2;
/// Bytes that fit into a core's cache.
const PIECE: usize = 256 << 10;

#[derive(Debug, thiserror::Error)]
pub(super) enum StreamError {
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error("the stream does not fit its layout: {0}")]
    Layout(String),
}

pub(super) struct Sending<'a> {
    pub(super) source: &'a mut dyn VersionSource,
    pub(super) layout: Arc<Layout>,
    pub(super) algorithm: DigestAlgorithm,
    pub(super) keep: Option<Arc<dyn Keep>>,
    /// Pinned memory of the source's worker.
    pub(super) staging: Option<Staging>,
}

impl Sending<'_> {
    /// Sends all of it; answers the digest of every tensor, in layout order. `sink` is none when no one waits for the stream.
    pub(super) async fn run(self, sink: Option<&mut Box<dyn BucketSink>>, silence: Duration) -> Result<Vec<u128>, StreamError> {
        let Self { source, layout, algorithm, keep, staging } = self;
        send(source, (algorithm, layout), sink, (keep, staging), silence).await
    }
}

async fn send(
    source: &mut dyn VersionSource,
    (algorithm, layout): (DigestAlgorithm, Arc<Layout>),
    mut sink: Option<&mut Box<dyn BucketSink>>,
    (keep, staging): (Option<Arc<dyn Keep>>, Option<Staging>),
    silence: Duration,
) -> Result<Vec<u128>, StreamError> {
    let (ready, mut to_send) = mpsc::channel::<(Bucket, Payload, u128)>(AHEAD);
    let hashes = sink.as_ref().is_some_and(|sink| sink.hashes());
    let takes_device = sink.as_ref().is_none_or(|sink| sink.takes_device());
    let mut hasher = TensorDigests::new(layout.clone(), algorithm);
    let mut keeping: Option<Keeping> = None;
    let produce = async {
        while let Some((bucket, payload)) = source.next(silence).await? {
            check(&layout, &hasher, &bucket, &payload)?;
            let bytes = match payload {
                Payload::Device(device) if takes_device && algorithm == DigestAlgorithm::Gsum64 => {
                    let shares = device.digest(&layout.digest_parts(bucket.offset, bucket.bytes), silence).await.map_err(on_gpu)?;
                    hasher.add(bucket.bytes, &shares).map_err(|error| StreamError::Layout(error.to_string()))?;
                    if ready.send((bucket, device.clone().into(), 0)).await.is_err() {
                        break;
                    }
                    // While the bytes are on the wire.
                    if let Some(keep) = &keep {
                        let keeping = keeping.get_or_insert_with(|| Keeping::new(keep.clone(), staging.clone(), silence));
                        keeping.copy(device);
                    }
                    continue;
                }
                Payload::Device(device) => device.to_host(staging.as_ref(), silence).await.map_err(on_gpu)?,
                Payload::Host(bytes) => bytes,
            };
            if let Some(keeping) = keeping.take() {
                keeping.settled().await.map_err(on_gpu)?;
            }
            let (back, bytes, digest) = hashed(hasher, bytes, keep.clone(), !hashes).await?;
            hasher = back;
            if ready.send((bucket, bytes.into(), digest)).await.is_err() {
                break;
            }
        }
        drop(ready);
        // Copies that are under way end by themselves: engines need not wait for them, see [`Keep::whole`].
        drop(keeping);
        Ok(hasher)
    };
    let consume = async {
        loop {
            let next = match sink.as_mut() {
                // While the trainer gathers its next bucket, a lost member is heard of at once.
                Some(sink) => tokio::select! {
                    next = to_send.recv() => next,
                    error = sink.failed() => return Err(StreamError::from(error)),
                },
                None => to_send.recv().await,
            };
            let Some((bucket, payload, digest)) = next else { return Ok(()) };
            if let Some(sink) = sink.as_mut() {
                let header = BucketHeader { sequence: bucket.sequence, flags: 0, offset: bucket.offset, bytes: bucket.bytes };
                sink.send(header, payload, digest).await?;
            }
        }
    };
    let (hasher, ()) = tokio::try_join!(produce, consume)?;
    let digests =
        spawn_blocking(move || hasher.finish()).await.map_err(|ended| StreamError::Layout(format!("hashing ended early: {ended}")))?;
    digests.map_err(|error| StreamError::Layout(error.to_string()))
}

/// Keeps a bucket where that is wanted, and hashes it for its tensors and, where that is wanted, as a bucket (0 else).
async fn hashed(
    mut hasher: TensorDigests,
    bytes: Bytes,
    keep: Option<Arc<dyn Keep>>,
    as_bucket: bool,
) -> Result<(TensorDigests, Bytes, u128), StreamError> {
    let ended = |ended| StreamError::Layout(format!("hashing ended early: {ended}"));
    let misfit = |error: TensorHasherError| StreamError::Layout(error.to_string());
    let bytes = match keep {
        Some(keep) => spawn_blocking(move || keep.keep(bytes)).await.map_err(ended)?,
        None => bytes,
    };
    let all = bytes.clone();
    if as_bucket && hashes_on_several_cores() {
        let tensors = spawn_blocking(move || hasher.update(&all).map(|()| hasher));
        let (tensors, digest) = tokio::join!(tensors, digest(bytes.clone()));
        return Ok((tensors.map_err(ended)?.map_err(misfit)?, bytes, digest.map_err(ended)?));
    }
    let both = spawn_blocking(move || {
        let mut bucket = BucketHasher::new();
        // Both digests of a piece while it is in the cache.
        for piece in all.chunks(PIECE) {
            if as_bucket {
                bucket.update(piece);
            }
            hasher.update(piece)?;
        }
        Ok((hasher, if as_bucket { bucket.take() } else { 0 }))
    });
    let (hasher, digest) = both.await.map_err(ended)?.map_err(misfit)?;
    Ok((hasher, bytes, digest))
}

fn on_gpu(error: WorkerError) -> StreamError {
    StreamError::Source(SourceError::Io { what: "the trainer's memory on the GPU cannot be read".into(), cause: error.to_string() })
}

fn check(layout: &Layout, hasher: &TensorDigests, bucket: &Bucket, bytes: &Payload) -> Result<(), StreamError> {
    let expected = layout.bucket(bucket.sequence);
    if expected.as_ref() != Some(bucket) || bytes.len() != bucket.bytes || hasher.position() != bucket.offset {
        return Err(StreamError::Layout(format!("bucket {} has {} bytes at {}", bucket.sequence, bytes.len(), bucket.offset)));
    }
    Ok(())
}

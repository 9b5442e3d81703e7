//! Sends the stream of a version through the chain, once: read, hash and perhaps keep a bucket while the one before it is under way.
//!
//! Decides the digests that the manifest will hold, from the very bytes that were sent. It never decides who is in the chain.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;

use crate::agent::version_source::{SourceError, VersionSource};
use crate::protocol::BucketHeader;
use crate::transport::{BucketSink, TransportError};
use crate::weights::{Bucket, Layout, TensorHasher, bucket_digest};

/// Buckets that are read and hashed ahead of the one being sent.
const AHEAD: usize = 2;

/// Why a stream did not reach its end.
#[derive(Debug, thiserror::Error)]
pub(super) enum StreamError {
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error("the stream does not fit its layout: {0}")]
    Layout(String),
}

/// Takes a copy of each bucket that is sent, in order; gives back what is to be sent, so that the source's own memory is free at once.
pub trait Keep: Send + Sync {
    /// Keeps the bucket; the same bytes, perhaps in other memory.
    fn keep(&self, bytes: Bytes) -> Bytes;
}

/// Sends all of it; answers the digest of every tensor, in layout order. `sink` is none when nobody waits for the stream.
pub(super) async fn send(
    source: &mut dyn VersionSource,
    layout: Arc<Layout>,
    mut sink: Option<&mut Box<dyn BucketSink>>,
    keep: Option<Arc<dyn Keep>>,
    silence: Duration,
) -> Result<Vec<u128>, StreamError> {
    let (ready, mut to_send) = mpsc::channel::<(Bucket, Bytes, u128)>(AHEAD);
    let produce = async {
        let mut hasher = TensorHasher::new(layout.clone());
        while let Some((bucket, bytes)) = source.next(silence).await? {
            check(&layout, &hasher, &bucket, &bytes)?;
            let keep = keep.clone();
            let hashed = tokio::task::spawn_blocking(move || {
                let bytes = match keep {
                    Some(keep) => keep.keep(bytes),
                    None => bytes,
                };
                let digest = bucket_digest(&bytes);
                hasher.update(&bytes).map(|()| (hasher, bytes, digest))
            });
            let (back, bytes, digest) = match hashed.await {
                Ok(hashed) => hashed.map_err(|error| StreamError::Layout(error.to_string()))?,
                Err(ended) => return Err(StreamError::Layout(format!("hashing ended early: {ended}"))),
            };
            hasher = back;
            if ready.send((bucket, bytes, digest)).await.is_err() {
                break;
            }
        }
        drop(ready);
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
            let Some((bucket, bytes, digest)) = next else { return Ok(()) };
            if let Some(sink) = sink.as_mut() {
                let header = BucketHeader { sequence: bucket.sequence, flags: 0, offset: bucket.offset, bytes: bucket.bytes };
                sink.send(header, bytes, digest).await?;
            }
        }
    };
    let (hasher, ()) = tokio::try_join!(produce, consume)?;
    hasher.finish().map_err(|error| StreamError::Layout(error.to_string()))
}

fn check(layout: &Layout, hasher: &TensorHasher, bucket: &Bucket, bytes: &Bytes) -> Result<(), StreamError> {
    let expected = layout.bucket(bucket.sequence);
    if expected.as_ref() != Some(bucket) || bytes.len() as u64 != bucket.bytes || hasher.position() != bucket.offset {
        return Err(StreamError::Layout(format!("bucket {} has {} bytes at {}", bucket.sequence, bytes.len(), bucket.offset)));
    }
    Ok(())
}

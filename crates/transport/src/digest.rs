//! The digest of a bucket, computed by several cores if some are free; those of tensors in [`tensors`].
//!
//! Decides how many cores hash at once; `weights` defines the digests.

mod tensors;

pub use tensors::TensorDigests;

use std::ops::Range;

use bytes::Bytes;
use tokio::task::{JoinError, spawn_blocking};

use super::tcp::default_lanes;
use weightsync_core::weights::{BLOCK_BYTES, BucketHasher, bucket_digest, tensor_digest};

/// Whether [`digest`] uses more than one core on this machine.
pub fn hashes_on_several_cores() -> bool {
    default_lanes() > 1
}

/// The [`bucket_digest`] of `bytes`, hashed by as many cores as send them. Fails only when the runtime ends.
pub async fn digest(bytes: Bytes) -> Result<u128, JoinError> {
    digest_by(default_lanes(), bytes).await
}

pub(super) async fn digest_by(workers: usize, bytes: Bytes) -> Result<u128, JoinError> {
    let blocks = bytes.len().div_ceil(BLOCK_BYTES);
    if workers <= 1 || blocks <= 1 {
        return spawn_blocking(move || bucket_digest(&bytes)).await;
    }
    let share = blocks.div_ceil(workers).max(1) * BLOCK_BYTES;
    let shares: Vec<_> = shares(bytes.len(), share)
        .map(|range| {
            let part = bytes.slice(range);
            spawn_blocking(move || part.chunks(BLOCK_BYTES).map(tensor_digest).collect::<Vec<_>>())
        })
        .collect();
    let mut hasher = BucketHasher::new();
    for share in shares {
        share.await?.into_iter().for_each(|block| hasher.block(block));
    }
    Ok(hasher.take())
}

fn shares(length: usize, share: usize) -> impl Iterator<Item = Range<usize>> {
    (0..length).step_by(share).map(move |start| start..length.min(start + share))
}

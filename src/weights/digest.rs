//! Digests of bytes that pass a CPU: xxh3-128 per bucket on the wire and per tensor for retention and reports.
//!
//! Decides how bytes become a digest, in one piece or while they arrive. It finds corruption, misplacement and loss, not an attacker:
//! who may send is decided by TLS and the epoch's secret. It never keeps bytes.

use std::sync::Arc;

use xxhash_rust::xxh3::{Xxh3Default, xxh3_128};

use super::{Layout, shown};

/// The xxh3-128 (seed 0) of a bucket or tensor.
pub fn bucket_digest(bytes: &[u8]) -> u128 {
    xxh3_128(bytes)
}

/// 32 lower-case hex digits, most significant first: what `xxhash.xxh3_128_hexdigest` of Python gives.
pub fn digest_hex(digest: u128) -> String {
    format!("{digest:032x}")
}

/// Reads what [`digest_hex`] wrote; none for anything else.
pub fn parse_digest_hex(hex: &str) -> Option<u128> {
    let canonical = hex.len() == 32 && hex.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    canonical.then(|| u128::from_str_radix(hex, 16).ok())?
}

/// The xxh3-128 of bytes that come in parts.
#[derive(Clone, Default)]
pub struct BucketHasher(Xxh3Default);

impl BucketHasher {
    /// Nothing hashed yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next part, of any length.
    pub fn update(&mut self, part: &[u8]) {
        self.0.update(part);
    }

    /// The digest of all parts since the start; the hasher is ready for the next bucket.
    pub fn take(&mut self) -> u128 {
        let digest = self.0.digest128();
        self.0.reset();
        digest
    }
}

/// Per-tensor digests of a stream that is fed in order, in parts of any length. Gaps between tensors do not count.
pub struct TensorHasher {
    layout: Arc<Layout>,
    position: u64,
    hasher: BucketHasher,
    /// Digests of the tensors that ended; the next one is the tensor being fed.
    done: Vec<u128>,
}

/// Why a stream has no digests.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum TensorHasherError {
    #[error("{extra} bytes came behind the end of the stream")]
    TooLong { extra: u64 },
    #[error("the stream ended in tensor {tensor}, after {position} of {total} bytes")]
    TooShort { tensor: String, position: u64, total: u64 },
}

impl TensorHasher {
    /// Nothing fed yet.
    pub fn new(layout: Arc<Layout>) -> Self {
        Self { layout, position: 0, hasher: BucketHasher::new(), done: Vec::new() }
    }

    /// Bytes fed so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Takes the next part of the stream.
    pub fn update(&mut self, mut part: &[u8]) -> Result<(), TensorHasherError> {
        let left = self.layout.total_bytes.saturating_sub(self.position);
        if part.len() as u64 > left {
            return Err(TensorHasherError::TooLong { extra: part.len() as u64 - left });
        }
        while let Some(entry) = self.layout.entries.get(self.done.len()) {
            let gap = entry.offset.saturating_sub(self.position);
            self.position += skip(&mut part, gap);
            if self.position < entry.offset {
                return Ok(());
            }
            let wanted = entry.end().saturating_sub(self.position);
            let (now, later) = split(part, wanted);
            self.hasher.update(now);
            self.position += now.len() as u64;
            part = later;
            if self.position < entry.end() {
                return Ok(());
            }
            let digest = self.hasher.take();
            self.done.push(digest);
        }
        Ok(())
    }

    /// The digest of every tensor in layout order, once the whole stream was fed.
    pub fn finish(mut self) -> Result<Vec<u128>, TensorHasherError> {
        // Empty tensors at the end of the stream, and a stream without bytes.
        self.update(&[])?;
        match self.layout.entries.get(self.done.len()) {
            None => Ok(self.done),
            Some(entry) => Err(TensorHasherError::TooShort {
                tensor: shown(&entry.tensor.name),
                position: self.position,
                total: self.layout.total_bytes,
            }),
        }
    }
}

/// The first `wanted` bytes of `part`, or all of it, and the rest.
fn split(part: &[u8], wanted: u64) -> (&[u8], &[u8]) {
    let length = usize::try_from(wanted).unwrap_or(usize::MAX).min(part.len());
    part.split_at_checked(length).unwrap_or((part, &[]))
}

/// Drops up to `wanted` bytes from the front of `part`; tells how many.
fn skip(part: &mut &[u8], wanted: u64) -> u64 {
    let (dropped, rest) = split(part, wanted);
    *part = rest;
    dropped.len() as u64
}

//! Digests: of buckets on a wire that passes a CPU, and of every tensor by the manifest's algorithm.
//!
//! Decides how bytes, or shares that a GPU computed from them, become a digest: in one piece, as they arrive, or block by block on several
//! cores. Digests of buckets, xxh3-128 and gsum64 detect corruption, misplacement and loss, but no attacker: other bytes with the same
//! digest can be made. blake3 also detects a member that passes on other bytes than it received. It never keeps bytes.

use std::sync::Arc;

use twox_hash::XxHash3_128;

use super::gsum::Gsum64;
use super::tree::first_half;
use super::{DigestAlgorithm, Layout, shown};

/// Length in bytes of the blocks of a bucket's digest; the last block of a bucket may be shorter.
pub const BLOCK_BYTES: usize = 1 << 20;

/// The xxh3-128 (seed 0) of a tensor.
pub fn tensor_digest(bytes: &[u8]) -> u128 {
    XxHash3_128::oneshot(bytes)
}

/// The digest of a bucket. Up to [`BLOCK_BYTES`]: the xxh3-128 (seed 0) of its bytes. Longer: the xxh3-128 of the digests of its blocks, in
/// order, 16 little-endian bytes each. So several cores can hash blocks at once.
pub fn bucket_digest(bytes: &[u8]) -> u128 {
    let mut hasher = BucketHasher::new();
    hasher.update(bytes);
    hasher.take()
}

/// 32 lower-case hex digits, most significant first, as from Python's `xxhash.xxh3_128_hexdigest`.
pub fn digest_hex(digest: u128) -> String {
    format!("{digest:032x}")
}

/// Reads the output of [`digest_hex`]; `None` for anything else.
pub fn parse_digest_hex(hex: &str) -> Option<u128> {
    let canonical = hex.len() == 32 && hex.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    canonical.then(|| u128::from_str_radix(hex, 16).ok())?
}

/// The xxh3-128 of bytes in parts.
#[derive(Clone)]
pub struct BlockHasher(XxHash3_128);

impl Default for BlockHasher {
    fn default() -> Self {
        Self::new()
    }
}

impl BlockHasher {
    /// A hasher without bytes.
    pub fn new() -> Self {
        Self(XxHash3_128::new())
    }

    /// Takes the next part, of any length.
    pub fn update(&mut self, part: &[u8]) {
        self.0.write(part);
    }

    /// The digest of all parts since the start. Resets the hasher for the next block or tensor.
    pub fn take(&mut self) -> u128 {
        std::mem::replace(&mut self.0, XxHash3_128::new()).finish_128()
    }
}

/// The [`bucket_digest`] of bytes in parts.
#[derive(Clone, Default)]
pub struct BucketHasher {
    block: BlockHasher,
    /// Hashed bytes of the present block.
    hashed: usize,
    /// Digests of complete blocks.
    blocks: Vec<u128>,
}

impl BucketHasher {
    /// A hasher without bytes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next part, of any length.
    pub fn update(&mut self, mut part: &[u8]) {
        while !part.is_empty() {
            if self.hashed == BLOCK_BYTES {
                self.end_block();
            }
            let (now, later) = part.split_at_checked(BLOCK_BYTES - self.hashed).unwrap_or((part, &[]));
            self.block.update(now);
            self.hashed += now.len();
            part = later;
        }
    }

    /// Takes the next block by a digest that was computed elsewhere.
    pub fn block(&mut self, digest: u128) {
        self.blocks.push(digest);
    }

    /// The digest of all parts since the start. Resets the hasher for the next bucket.
    pub fn take(&mut self) -> u128 {
        if self.hashed > 0 || self.blocks.is_empty() {
            self.end_block();
        }
        let digest = match self.blocks.as_slice() {
            [only] => *only,
            blocks => XxHash3_128::oneshot(&blocks.iter().flat_map(|digest| digest.to_le_bytes()).collect::<Vec<_>>()),
        };
        self.blocks.clear();
        digest
    }

    fn end_block(&mut self) {
        self.hashed = 0;
        let digest = self.block.take();
        self.blocks.push(digest);
    }
}

/// A share of one tensor's gsum64 that a GPU must compute from a part of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DigestPart {
    /// First byte, from the start of the part of the stream.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Index of its first 8-byte word in its tensor.
    pub first_word: u64,
}

impl Layout {
    /// The shares to compute for `bytes` bytes of the stream from `offset` on; [`TensorHasher::add`] takes the results. Parts of the stream
    /// that are cut at [`ALIGNMENT`](super::ALIGNMENT) start at multiples of 8 bytes of every tensor.
    pub fn digest_parts(&self, offset: u64, bytes: u64) -> Vec<DigestPart> {
        let parts = self.parts(offset, bytes);
        parts.map(|part| DigestPart { offset: part.in_range, bytes: part.bytes, first_word: part.in_tensor / 8 }).collect()
    }
}

/// The digest of one item in parts, by a manifest's algorithm.
#[derive(Clone)]
pub struct PartHasher(Running);

impl PartHasher {
    /// A hasher without bytes.
    pub fn new(algorithm: DigestAlgorithm) -> Self {
        Self(Running::new(algorithm))
    }

    /// Takes the next part, of any length.
    pub fn update(&mut self, part: &[u8]) {
        self.0.update(part);
    }

    /// The digest of all parts. Resets the hasher for the next item.
    pub fn take(&mut self) -> u128 {
        self.0.take()
    }
}

/// A digest in progress, by any of the algorithms.
#[derive(Clone)]
enum Running {
    Blake3(Box<blake3::Hasher>),
    Xxh3(Box<BlockHasher>),
    Gsum(Gsum64),
}

impl Running {
    fn new(algorithm: DigestAlgorithm) -> Self {
        match algorithm {
            DigestAlgorithm::Blake3 => Self::Blake3(Box::default()),
            DigestAlgorithm::Xxh3_128 => Self::Xxh3(Box::default()),
            DigestAlgorithm::Gsum64 => Self::Gsum(Gsum64::new()),
        }
    }

    fn update(&mut self, part: &[u8]) {
        match self {
            Self::Blake3(hasher) => drop(hasher.update(part)),
            Self::Xxh3(hasher) => hasher.update(part),
            Self::Gsum(sum) => sum.update(part),
        }
    }

    fn take(&mut self) -> u128 {
        match self {
            Self::Blake3(hasher) => {
                let digest = first_half(&hasher.finalize());
                hasher.reset();
                digest
            }
            Self::Xxh3(hasher) => hasher.take(),
            Self::Gsum(sum) => sum.take().into(),
        }
    }
}

/// Digests of the tensors of a stream that arrives in order, in parts of any length. Gaps between tensors do not count.
pub struct TensorHasher {
    layout: Arc<Layout>,
    position: u64,
    hasher: Running,
    /// Digests of complete tensors; the next tensor is the present one.
    done: Vec<u128>,
}

/// Why a stream has no digests.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum TensorHasherError {
    #[error("{extra} bytes came after the end of the stream")]
    TooLong { extra: u64 },
    #[error("the stream ended in tensor {tensor}, after {position} of {total} bytes")]
    TooShort { tensor: String, position: u64, total: u64 },
    #[error("the digests were not computed within {within:?}")]
    Late { within: std::time::Duration },
    #[error("shares of a digest came that no part of the stream asked for: {what}")]
    Shares { what: &'static str },
}

impl TensorHasher {
    /// A hasher without bytes.
    pub fn new(layout: Arc<Layout>, algorithm: DigestAlgorithm) -> Self {
        Self { layout, position: 0, hasher: Running::new(algorithm), done: Vec::new() }
    }

    /// The digests of the complete tensors, in layout order.
    pub fn ended(&self) -> &[u128] {
        &self.done
    }

    /// Bytes taken so far.
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

    /// Takes the next `bytes` bytes of the stream by the shares of [`Layout::digest_parts`] that a GPU computed. Only for gsum64.
    pub fn add(&mut self, bytes: u64, shares: &[u64]) -> Result<(), TensorHasherError> {
        let left = self.layout.total_bytes.saturating_sub(self.position);
        if bytes > left {
            return Err(TensorHasherError::TooLong { extra: bytes - left });
        }
        let (layout, offset) = (self.layout.clone(), self.position);
        let mut shares = shares.iter();
        for part in layout.parts(offset, bytes) {
            // Completes tensors without bytes, and gaps.
            self.position = part.entry.offset.saturating_add(part.in_tensor);
            self.end_before(part.index);
            let Running::Gsum(sum) = &mut self.hasher else {
                return Err(TensorHasherError::Shares { what: "the digest of this version is not gsum64" });
            };
            let share = shares.next().ok_or(TensorHasherError::Shares { what: "there are fewer than parts" })?;
            if sum.words() != part.in_tensor / 8 || !sum.add(part.bytes, *share) {
                return Err(TensorHasherError::Shares { what: "a part does not begin where the one before ended" });
            }
            self.position = self.position.saturating_add(part.bytes);
            if self.position >= part.entry.end() {
                self.end_before(part.index + 1);
            }
        }
        if shares.next().is_some() {
            return Err(TensorHasherError::Shares { what: "there are more than parts" });
        }
        self.position = offset.saturating_add(bytes);
        Ok(())
    }

    /// Completes the tensors before that one.
    fn end_before(&mut self, index: usize) {
        while self.done.len() < index {
            let digest = self.hasher.take();
            self.done.push(digest);
        }
    }

    /// The digest of every tensor in layout order, after the whole stream.
    pub fn finish(mut self) -> Result<Vec<u128>, TensorHasherError> {
        // Empty tensors at the end of the stream, and a stream without bytes.
        self.update(&[])?;
        match self.layout.entries.get(self.done.len()) {
            None => Ok(self.done),
            Some(entry) => Err(TensorHasherError::TooShort {
                tensor: shown(&entry.tensor.full_name()),
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

/// Drops up to `wanted` bytes from the front of `part`. Returns their number.
fn skip(part: &mut &[u8], wanted: u64) -> u64 {
    let (dropped, rest) = split(part, wanted);
    *part = rest;
    dropped.len() as u64
}

//! A version of weights: named tensors laid end to end, cut into buckets, proven by digests.
//!
//! Decides layout, digests and coverage. It never talks to a network, an engine or a clock. It never trusts a length that it read: every
//! number from outside is checked before memory is allocated.

mod coverage;
mod digest;
mod dtype;
mod gsum;
mod ignored;
mod layout;
mod manifest;
pub mod safetensors;
mod section;
mod tree;
mod wire;

pub use coverage::{Coverage, CoverageError};
pub use digest::{
    BLOCK_BYTES, BlockHasher, BucketHasher, DigestPart, PartHasher, TensorHasher, TensorHasherError, bucket_digest, digest_hex,
    parse_digest_hex, tensor_digest,
};
pub use dtype::{Dtype, SizeError};
pub use gsum::{Gsum64, gsum64, gsum64_from};
pub use ignored::{IgnoredTensors, LONGEST_PATTERN, MOST_PATTERNS, is_pattern};
pub use layout::{ALIGNMENT, Bucket, Cuts, Encoding, Entry, EntryPart, Layout, LayoutError, TensorSpec, default_bucket_bytes};
pub use manifest::{DigestAlgorithm, Manifest, ManifestError};
pub use section::Section;
pub use tree::{BlockValue, TREE_BLOCK, block_bytes, tree_digest};
pub use wire::{WireBucket, WireError};

/// A name from outside, made safe for an error or a log line: no control characters, at most 200 characters.
pub(crate) fn shown(name: &str) -> String {
    const LONGEST: usize = 200;
    let mut text: String = name.chars().take(LONGEST).flat_map(char::escape_debug).collect();
    if name.chars().nth(LONGEST).is_some() {
        text.push_str("...");
    }
    text
}

#[cfg(test)]
mod tests;

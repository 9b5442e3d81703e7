//! The full description of a version: its layout and the digest of every tensor, with a digest of its own.
//!
//! Decides the canonical bytes for blake3. So two programs with the same version compute the same digest, whatever their JSON. A changed
//! encoding needs a new domain line; otherwise old and new agents would disagree without a reason.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::{Cuts, Encoding, Layout, LayoutError, Section, TensorSpec, digest_hex, parse_digest_hex, shown};

/// The algorithm of all tensor digests of a version.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DigestAlgorithm {
    /// The first 128 bits of blake3: for bytes that pass through members. No member can find other bytes with the same digest.
    #[serde(rename = "blake3-128")]
    Blake3,
    /// xxh3-128, seed 0: for bytes that pass a CPU, if all members are trusted. A member can make other bytes with the same digest.
    #[default]
    #[serde(rename = "xxh3-128")]
    Xxh3_128,
    /// [`gsum64`](super::gsum64), in the low 64 bits: for bytes that pass GPUs.
    #[serde(rename = "gsum64")]
    Gsum64,
}

impl DigestAlgorithm {
    /// Its name in a manifest.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Blake3 => "blake3-128",
            Self::Xxh3_128 => "xxh3-128",
            Self::Gsum64 => "gsum64",
        }
    }
}

/// A version of one artifact: the places and digests of its tensors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// Number that the trainer gave.
    pub version: u64,
    /// Names, types, shapes and places of all tensors.
    pub layout: Layout,
    /// The algorithm of the digests below.
    pub algorithm: DigestAlgorithm,
    /// Digest of every tensor (32 hex digits), in layout order.
    pub tensor_digests: Vec<String>,
}

/// Why a manifest is invalid, or why a stream is not the version that it describes. Tensors are named, never shown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum ManifestError {
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error("{digests} digests for {tensors} tensors")]
    Count { digests: usize, tensors: usize },
    #[error("tensor {tensor}: its digest is not 32 lower-case hex digits")]
    NotADigest { tensor: String },
    #[error("tensor {tensor} differs from the manifest ({tensors} of {total} tensors do)")]
    Differs { tensor: String, tensors: usize, total: usize },
}

impl Manifest {
    /// A manifest of a layout and the digests of its tensors, in layout order.
    pub fn new(version: u64, layout: Layout, algorithm: DigestAlgorithm, tensor_digests: &[u128]) -> Result<Self, ManifestError> {
        let tensor_digests = tensor_digests.iter().copied().map(digest_hex).collect();
        let manifest = Self { version, layout, algorithm, tensor_digests };
        manifest.count_digests()?;
        Ok(manifest)
    }

    /// Checks a manifest that came over the wire or from a file.
    pub fn validate(&self) -> Result<(), ManifestError> {
        self.layout.validate()?;
        self.count_digests()?;
        match self.with_names().find(|(_, digest)| parse_digest_hex(digest).is_none()) {
            Some((name, _)) => Err(ManifestError::NotADigest { tensor: shown(&name) }),
            None => Ok(()),
        }
    }

    /// Compares digests that were computed from received bytes; an error names the first tensor that differs.
    pub fn compare(&self, computed: &[u128]) -> Result<(), ManifestError> {
        self.count_digests()?;
        if computed.len() != self.layout.entries.len() {
            return Err(ManifestError::Count { digests: computed.len(), tensors: self.layout.entries.len() });
        }
        let mut differing =
            self.with_names().zip(computed).filter(|((_, said), got)| parse_digest_hex(said) != Some(**got)).map(|((name, _), _)| name);
        match differing.next() {
            None => Ok(()),
            Some(name) => {
                Err(ManifestError::Differs { tensor: shown(&name), tensors: differing.count() + 1, total: self.layout.entries.len() })
            }
        }
    }

    /// blake3 (64 hex digits) of version, layout, algorithm and digests in their canonical encoding.
    pub fn digest(&self) -> String {
        let mut hash = Canonical::new("weightsync manifest 1\n");
        hash.number(self.version);
        hash.layout(&self.layout);
        hash.text(self.algorithm.name());
        hash.number(self.tensor_digests.len() as u64);
        self.tensor_digests.iter().for_each(|digest| hash.text(digest));
        hash.finish()
    }

    fn count_digests(&self) -> Result<(), ManifestError> {
        let (digests, tensors) = (self.tensor_digests.len(), self.layout.entries.len());
        if digests == tensors { Ok(()) } else { Err(ManifestError::Count { digests, tensors }) }
    }

    fn with_names(&self) -> impl Iterator<Item = (Cow<'_, str>, &str)> {
        self.layout.tensors().map(TensorSpec::full_name).zip(self.tensor_digests.iter().map(String::as_str))
    }
}

impl Layout {
    /// blake3 (64 hex digits) of names, types, shapes, sections, encodings, load units, places and the bucket cut, in their canonical
    /// encoding.
    pub fn digest(&self) -> String {
        let mut hash = Canonical::new("weightsync layout 1\n");
        hash.layout(self);
        hash.finish()
    }
}

/// The canonical encoding. Numbers are u64 little-endian; texts are their length and UTF-8 bytes; lists are their count and items. An
/// absent text is a count of 0; a present one is a count of 1 and the text.
struct Canonical(blake3::Hasher);

impl Canonical {
    fn new(domain: &str) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(domain.as_bytes());
        Self(hasher)
    }

    fn number(&mut self, number: u64) {
        self.0.update(&number.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.update(text.as_bytes());
    }

    fn layout(&mut self, layout: &Layout) {
        self.text(&layout.artifact);
        self.number(layout.total_bytes);
        self.number(layout.bucket_bytes);
        match layout.cuts {
            // Adds nothing, so that digests of earlier releases stay the same.
            Cuts::Even => {}
            Cuts::BetweenTensors => self.text("between tensors"),
        }
        self.number(layout.entries.len() as u64);
        for entry in &layout.entries {
            self.text(&entry.tensor.name);
            self.text(entry.tensor.dtype.name());
            self.number(entry.tensor.shape.len() as u64);
            entry.tensor.shape.iter().for_each(|size| self.number(*size));
            match &entry.tensor.load_unit {
                None => self.number(0),
                Some(unit) => {
                    self.number(1);
                    self.text(unit);
                }
            }
            // Adds nothing, so that digests of earlier releases stay the same.
            if entry.tensor.section != Section::Model {
                self.text(entry.tensor.section.name());
            }
            self.text(match entry.encoding {
                Encoding::Plain => "plain",
            });
            self.number(entry.offset);
            self.number(entry.bytes);
        }
    }

    fn finish(self) -> String {
        self.0.finalize().to_hex().to_string()
    }
}

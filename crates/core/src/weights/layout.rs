//! How the tensors of a version are placed in one run of bytes, and where that run is cut into buckets.
//!
//! The run ("stream") has the tensors in the given order, each at the next multiple of [`ALIGNMENT`]; the gaps are zero. A bucket is a
//! contiguous part of the stream. If it is cut evenly, one tensor may span several buckets, and a bucket may hold many tensors. If it is
//! cut between tensors, every bucket holds whole tensors, as engines require in GPU memory ([`Cuts`]). Decides offsets and cuts only; it
//! never reads a value and never allocates by an untrusted number.

mod cuts;

use std::collections::HashSet;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use super::dtype::SizeError;
use super::{Dtype, Section, shown};

/// Every tensor starts at a multiple of this many bytes, so that any element type can be read in place.
pub const ALIGNMENT: u64 = 64;

/// Longest stream: offsets must fit a file offset (`off_t`) and a `usize` of a 64-bit machine, with room for sums.
const LONGEST_STREAM: u64 = 1 << 62;

/// Longest tensor name in bytes; the longest in public checkpoints are near 150.
const LONGEST_NAME: usize = 4096;

/// A tensor as a trainer describes it, without a place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// The engine's name of the parameter (its name in a checkpoint).
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, in elements; empty for a scalar.
    pub shape: Vec<u64>,
    /// The engine loads tensors with the same load unit together (q, k, v of one fused layer).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_unit: Option<String>,
    /// The model to which it belongs.
    #[serde(default, skip_serializing_if = "Section::is_model")]
    pub section: Section,
}

impl TensorSpec {
    /// A tensor of the model that answers, without a load unit.
    pub fn new(name: String, dtype: Dtype, shape: Vec<u64>) -> Self {
        Self { name, dtype, shape, load_unit: None, section: Section::Model }
    }
}

/// How an entry's bytes become the tensor. At present only plain bytes; deltas and quantised forms would be added here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Encoding {
    /// The tensor's elements, little-endian, row-major.
    #[default]
    Plain,
}

/// A tensor with its place in the stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// What the tensor is.
    #[serde(flatten)]
    pub tensor: TensorSpec,
    /// How its bytes become the tensor.
    #[serde(default)]
    pub encoding: Encoding,
    /// First byte in the stream.
    pub offset: u64,
    /// Length in bytes; 0 for a tensor with a zero dimension.
    pub bytes: u64,
}

impl Entry {
    /// The first byte of the stream after the tensor.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }
}

/// A contiguous part of the stream, moved in one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bucket {
    /// Position in the order of sending, from 0.
    pub sequence: u32,
    /// First byte in the stream.
    pub offset: u64,
    /// Length in bytes, at least 1.
    pub bytes: u64,
}

/// The part of one tensor in a range of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryPart<'a> {
    /// Position of the tensor in [`Layout::entries`].
    pub index: usize,
    /// The tensor.
    pub entry: &'a Entry,
    /// First byte of the part, from the start of the tensor.
    pub in_tensor: u64,
    /// First byte of the part, from the start of the range.
    pub in_range: u64,
    /// Length of the part in bytes, at least 1.
    pub bytes: u64,
}

/// Where a stream is cut into buckets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Cuts {
    /// At multiples of the bucket's length: all buckets but the last have the same length, and tensors may span buckets.
    #[default]
    Even,
    /// Between tensors: a bucket holds as many whole tensors as its length allows. A longer tensor has a bucket of its own length. No
    /// bucket holds tensors of two sections. Engines that read tensors from GPU memory must see each one whole, so this is the cut if
    /// weights do not pass a host. Tensors of one load unit share a bucket if they fit.
    BetweenTensors,
}

/// All tensors of one artifact with their places, and the size of a bucket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Layout {
    /// Name of the artifact: `model` at present. A draft model is a [`Section`] of it.
    pub artifact: String,
    /// Tensors in stream order.
    pub entries: Vec<Entry>,
    /// Length of the stream in bytes.
    pub total_bytes: u64,
    /// Length of every bucket but the last, in bytes; a multiple of [`ALIGNMENT`]. Between tensors: the longest bucket with several
    /// tensors; see [`Layout::largest_bucket`].
    pub bucket_bytes: u64,
    /// Where the stream is cut.
    #[serde(default, skip_serializing_if = "is_even")]
    pub cuts: Cuts,
    /// The buckets between tensors, once one was asked for: they follow from the rest.
    #[serde(skip)]
    found: Found,
}

/// Why a list of tensors has no layout.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum LayoutError {
    #[error("tensor {name}: its size does not fit 64 bits")]
    TooLarge { name: String },
    #[error("tensor {name}: {bits} bits do not fill whole bytes")]
    PartialByte { name: String, bits: u64 },
    #[error("tensor {name} appears twice")]
    Duplicate { name: String },
    #[error("tensor {name} of the model comes after one of the draft model: the draft model's come last")]
    OutOfOrder { name: String },
    #[error("the version has tensors of a draft model and none of the model")]
    DraftAlone,
    #[error("tensor name {name:?} cannot be used: {what}")]
    BadName { name: String, what: &'static str },
    #[error("a bucket must hold at least {ALIGNMENT} bytes, {bytes} were asked for")]
    BucketTooSmall { bytes: u64 },
    #[error("{buckets} buckets are more than a sequence number can count: choose larger buckets")]
    TooManyBuckets { buckets: u64 },
    #[error("layout is not what its tensors say: {what}")]
    Inconsistent { what: String },
}

/// Length of a bucket for a stream of so many bytes. There are enough buckets that all members of a chain work at once, and each is so long
/// that the work for a bucket does not matter.
pub fn default_bucket_bytes(total_bytes: u64) -> u64 {
    const SMALLEST: u64 = 1 << 20;
    const LARGEST: u64 = 32 << 20;
    (total_bytes / 32).clamp(SMALLEST, LARGEST).next_multiple_of(ALIGNMENT)
}

impl Layout {
    /// Places tensors in the given order. `bucket_bytes` is rounded down to a multiple of [`ALIGNMENT`]; 0 means [`default_bucket_bytes`].
    pub fn new(artifact: impl Into<String>, tensors: Vec<TensorSpec>, bucket_bytes: u64) -> Result<Self, LayoutError> {
        let (places, total_bytes) = places(tensors.iter())?;
        let bucket_bytes = match bucket_bytes {
            0 => default_bucket_bytes(total_bytes),
            bytes if bytes < ALIGNMENT => return Err(LayoutError::BucketTooSmall { bytes }),
            bytes => bytes - bytes % ALIGNMENT,
        };
        count_buckets(total_bytes, bucket_bytes)?;
        let entries = tensors
            .into_iter()
            .zip(places)
            .map(|(tensor, (offset, bytes))| Entry { tensor, encoding: Encoding::Plain, offset, bytes })
            .collect();
        Ok(Self { artifact: artifact.into(), entries, total_bytes, bucket_bytes, cuts: Cuts::Even, found: Found::default() })
    }

    /// The same stream, cut between tensors.
    #[must_use]
    pub fn cut_between_tensors(mut self) -> Self {
        self.cuts = Cuts::BetweenTensors;
        self.found = Found::default();
        self
    }

    /// Checks a layout from the wire: it must be exactly the result of [`Layout::new`] for its tensors.
    pub fn validate(&self) -> Result<(), LayoutError> {
        let inconsistent = |what: String| Err(LayoutError::Inconsistent { what });
        let (places, total_bytes) = places(self.entries.iter().map(|entry| &entry.tensor))?;
        for (entry, (offset, bytes)) in self.entries.iter().zip(places) {
            if (entry.offset, entry.bytes) != (offset, bytes) {
                let name = shown(&entry.tensor.full_name());
                return inconsistent(format!(
                    "tensor {name} is declared as {} bytes at {}, it is {bytes} bytes at {offset}",
                    entry.bytes, entry.offset
                ));
            }
        }
        if self.total_bytes != total_bytes {
            return inconsistent(format!("the stream is declared as {} bytes, it is {total_bytes}", self.total_bytes));
        }
        if self.bucket_bytes < ALIGNMENT {
            return Err(LayoutError::BucketTooSmall { bytes: self.bucket_bytes });
        }
        if !self.bucket_bytes.is_multiple_of(ALIGNMENT) {
            return inconsistent(format!("a bucket of {} bytes is not a multiple of {ALIGNMENT}", self.bucket_bytes));
        }
        count_buckets(total_bytes, self.bucket_bytes).map(|_| ())
    }

    /// Number of buckets; 0 if no tensor has bytes.
    pub fn bucket_count(&self) -> u32 {
        match self.cuts {
            Cuts::Even => count_buckets(self.total_bytes, self.bucket_bytes).unwrap_or(u32::MAX),
            Cuts::BetweenTensors => u32::try_from(self.found.of(self).len()).unwrap_or(u32::MAX),
        }
    }

    /// The bucket with that sequence. Takes the same time for each, after the first question.
    pub fn bucket(&self, sequence: u32) -> Option<Bucket> {
        match self.cuts {
            Cuts::Even => {
                let offset = u64::from(sequence).checked_mul(self.bucket_bytes)?;
                let bytes = self.total_bytes.checked_sub(offset)?.min(self.bucket_bytes);
                (bytes > 0).then_some(Bucket { sequence, offset, bytes })
            }
            Cuts::BetweenTensors => self.found.of(self).get(usize::try_from(sequence).ok()?).copied(),
        }
    }

    /// All buckets in the order of sending.
    pub fn buckets(&self) -> impl Iterator<Item = Bucket> + '_ {
        (0_u32..).map_while(move |sequence| self.bucket(sequence))
    }

    /// Length of the longest bucket in bytes: the size of a place for any bucket.
    pub fn largest_bucket(&self) -> u64 {
        match self.cuts {
            Cuts::Even => self.bucket_bytes.min(self.total_bytes),
            Cuts::BetweenTensors => self.buckets().map(|bucket| bucket.bytes).max().unwrap_or(0),
        }
    }

    /// The parts of tensors in `bytes` bytes of the stream from `offset` on, in stream order. All bytes outside of parts are gaps.
    pub fn parts(&self, offset: u64, bytes: u64) -> impl Iterator<Item = EntryPart<'_>> + '_ {
        let end = offset.saturating_add(bytes);
        let first = self.entries.partition_point(|entry| entry.end() <= offset);
        let later = self.entries.iter().enumerate().skip(first);
        later.take_while(move |(_, entry)| entry.offset < end).filter_map(move |(index, entry)| {
            let start = entry.offset.max(offset);
            let bytes = entry.end().min(end).checked_sub(start).filter(|bytes| *bytes > 0)?;
            Some(EntryPart { index, entry, in_tensor: start - entry.offset, in_range: start - offset, bytes })
        })
    }

    /// The specs of all tensors, in stream order.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorSpec> + '_ {
        self.entries.iter().map(|entry| &entry.tensor)
    }
}

/// The buckets of a layout that is cut between tensors, found once. It is no part of what two layouts differ by.
#[derive(Debug, Clone, Default)]
struct Found(OnceLock<Box<[Bucket]>>);

impl Found {
    fn of(&self, layout: &Layout) -> &[Bucket] {
        let find = || {
            let cuts = (0_u32..).zip(cuts::Between::new(layout));
            cuts.map(|(sequence, (offset, bytes))| Bucket { sequence, offset, bytes }).collect()
        };
        self.0.get_or_init(find)
    }
}

impl PartialEq for Found {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Found {}

#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_even(cuts: &Cuts) -> bool {
    *cuts == Cuts::Even
}

/// Offset and length of each tensor, and the length of the stream.
fn places<'a>(tensors: impl Iterator<Item = &'a TensorSpec>) -> Result<(Vec<(u64, u64)>, u64), LayoutError> {
    let mut seen = HashSet::new();
    let mut end = 0u64;
    let mut places = Vec::new();
    let mut section = Section::Model;
    for tensor in tensors {
        let name = || shown(&tensor.full_name());
        check_name(&tensor.name)?;
        if !seen.insert(tensor.full_name()) {
            return Err(LayoutError::Duplicate { name: name() });
        }
        if tensor.section < section {
            return Err(LayoutError::OutOfOrder { name: name() });
        }
        if places.is_empty() && tensor.section == Section::Draft {
            return Err(LayoutError::DraftAlone);
        }
        section = tensor.section;
        let bytes = tensor.dtype.tensor_bytes(&tensor.shape).map_err(|error| match error {
            SizeError::TooLarge => LayoutError::TooLarge { name: name() },
            SizeError::PartialByte(bits) => LayoutError::PartialByte { name: name(), bits },
        })?;
        let offset = end.next_multiple_of(ALIGNMENT);
        end = offset.checked_add(bytes).filter(|end| *end <= LONGEST_STREAM).ok_or_else(|| LayoutError::TooLarge { name: name() })?;
        places.push((offset, bytes));
    }
    Ok((places, end))
}

/// Refuses names that a safetensors file cannot hold, before a byte moves.
fn check_name(name: &str) -> Result<(), LayoutError> {
    let what = match name {
        "" => "it is empty",
        "__metadata__" => "the safetensors format keeps it for itself",
        long if long.len() > LONGEST_NAME => "it is longer than 4096 bytes",
        _ => return Ok(()),
    };
    Err(LayoutError::BadName { name: shown(name), what })
}

fn count_buckets(total_bytes: u64, bucket_bytes: u64) -> Result<u32, LayoutError> {
    if bucket_bytes == 0 {
        return Err(LayoutError::BucketTooSmall { bytes: 0 });
    }
    let buckets = total_bytes.div_ceil(bucket_bytes);
    // The sequence `u32::MAX` ends the stream on the wire.
    u32::try_from(buckets).ok().filter(|count| *count < u32::MAX).ok_or(LayoutError::TooManyBuckets { buckets })
}

//! How a bucket is sent to engines that receive it themselves: as broadcasts of adjacent tensors.
//!
//! Decides which tensors share a broadcast, and their order. Both ends compute it from the same layout, so sender and engine never
//! disagree. An engine that expects other bytes than are sent hangs, or loads a mixture. One broadcast has one element type: LMDeploy
//! refuses a mixture before it enters (a sender would hang), and SGLang and vLLM refuse a tensor whose start is no multiple of its
//! element's length. Pure; sends nothing.

use super::{Bucket, Cuts, Dtype, Layout};

/// Tensors of one broadcast.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WireBucket {
    /// Element type of all of them.
    pub dtype: Dtype,
    /// Their positions in [`Layout::entries`], in the order of the wire. None is empty.
    pub tensors: Vec<usize>,
    /// The sent ranges of the bucket, in order: offset from the bucket's first byte, and length. Adjacent ranges are one run.
    pub runs: Vec<(u64, u64)>,
    /// Length of the broadcast in bytes, at least 1.
    pub bytes: u64,
}

/// Why a bucket cannot be sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum WireError {
    #[error("bucket {sequence} tears tensor {name}: engines take whole tensors, cut the layout between tensors")]
    Torn { sequence: u32, name: String },
}

impl Layout {
    /// The broadcasts of a bucket: one for each element type, longest elements first, tensors in the order of the layout. Tensors without
    /// bytes are in none.
    pub fn wire(&self, bucket: &Bucket) -> Result<Vec<WireBucket>, WireError> {
        let mut wire: Vec<WireBucket> = Vec::new();
        for part in self.parts(bucket.offset, bucket.bytes) {
            let tensor = &part.entry.tensor;
            if self.cuts != Cuts::BetweenTensors || part.in_tensor != 0 || part.bytes != part.entry.bytes {
                return Err(WireError::Torn { sequence: bucket.sequence, name: super::shown(&tensor.full_name()) });
            }
            let at = wire.iter().position(|wire| wire.dtype == tensor.dtype).unwrap_or(wire.len());
            if at == wire.len() {
                wire.push(WireBucket { dtype: tensor.dtype, tensors: Vec::new(), runs: Vec::new(), bytes: 0 });
            }
            if let Some(wire) = wire.get_mut(at) {
                wire.add(part.index, part.in_range, part.bytes);
            }
        }
        wire.sort_by_key(|wire| (std::cmp::Reverse(wire.dtype.bits()), wire.dtype));
        Ok(wire)
    }
}

impl WireBucket {
    fn add(&mut self, tensor: usize, offset: u64, bytes: u64) {
        self.tensors.push(tensor);
        self.bytes = self.bytes.saturating_add(bytes);
        match self.runs.last_mut() {
            Some((start, length)) if start.saturating_add(*length) == offset => *length = length.saturating_add(bytes),
            _ => self.runs.push((offset, bytes)),
        }
    }

    /// Offset in the bucket, if the broadcast is one run there: it can be sent without a copy.
    pub fn in_place(&self) -> Option<u64> {
        match self.runs.as_slice() {
            [(offset, _)] => Some(*offset),
            _ => None,
        }
    }
}

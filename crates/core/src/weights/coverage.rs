//! The gate that decides whether every byte of a stream was written exactly once.
//!
//! Decides completeness from the reported ranges; parts may come in any order. It never reads bytes. A refused range changes nothing, so
//! the caller may report it and continue.

use std::collections::BTreeMap;

use super::{Layout, shown};

/// Written bytes of a stream, as disjoint ranges (start to end) with a gap between any two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coverage {
    total: u64,
    written: u64,
    ranges: BTreeMap<u64, u64>,
}

/// Why a range was refused, or what is missing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum CoverageError {
    #[error("bytes {offset} to {end} are beyond the end of the stream at {total}")]
    Beyond { offset: u64, end: u64, total: u64 },
    #[error("bytes {offset} to {end} were written before, in whole or in part")]
    Overlap { offset: u64, end: u64 },
    #[error("tensor {tensor} is missing bytes; {missing} of {total} bytes of the stream were never written")]
    Missing { tensor: String, missing: u64, total: u64 },
}

impl Coverage {
    /// An empty coverage of a stream of `total` bytes.
    pub fn new(total: u64) -> Self {
        Self { total, written: 0, ranges: BTreeMap::new() }
    }

    /// Records that `bytes` bytes from `offset` on were written.
    pub fn record(&mut self, offset: u64, bytes: u64) -> Result<(), CoverageError> {
        let end = offset.saturating_add(bytes);
        if end > self.total {
            return Err(CoverageError::Beyond { offset, end, total: self.total });
        }
        if bytes == 0 {
            return Ok(());
        }
        let before = self.ranges.range(..=offset).next_back().map(|(start, end)| (*start, *end));
        let after = self.ranges.range(offset..).next().map(|(start, end)| (*start, *end));
        if before.is_some_and(|(_, ended)| ended > offset) || after.is_some_and(|(starts, _)| starts < end) {
            return Err(CoverageError::Overlap { offset, end });
        }
        self.written += bytes;
        let start = before.filter(|(_, ended)| *ended == offset).map_or(offset, |(start, _)| start);
        let until = match after.filter(|(starts, _)| *starts == end) {
            Some((starts, ended)) => {
                self.ranges.remove(&starts);
                ended
            }
            None => end,
        };
        self.ranges.insert(start, until);
        Ok(())
    }

    /// Bytes written so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// The first range that was not written, as start and end.
    pub fn first_gap(&self) -> Option<(u64, u64)> {
        let start = self.ranges.first_key_value().filter(|(start, _)| **start == 0).map_or(0, |(_, end)| *end);
        let end = self.ranges.range(start..).next().map_or(self.total, |(next, _)| *next);
        (start < end).then_some((start, end))
    }

    /// `Ok` if every byte was written; otherwise an error with the first incomplete tensor.
    pub fn check(&self, layout: &Layout) -> Result<(), CoverageError> {
        let Some((gap, _)) = self.first_gap() else { return Ok(()) };
        // A gap between two tensors is reported with the tensor after it.
        let tensor =
            layout.entries.iter().find(|entry| entry.end() > gap).map_or_else(String::new, |entry| shown(&entry.tensor.full_name()));
        Err(CoverageError::Missing { tensor, missing: self.total - self.written, total: self.total })
    }
}

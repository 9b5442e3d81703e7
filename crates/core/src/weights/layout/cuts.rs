//! Cuts a stream between tensors.
//!
//! Decides which whole tensors of one section share a bucket, in the order of the stream. The gap before a tensor belongs to the previous
//! bucket, so that buckets follow each other without a hole. Works in one pass over the tensors and holds none of them.

use super::{Entry, Layout};

/// Offset and length of the buckets of a layout, one after another.
pub(super) struct Between<'a> {
    layout: &'a Layout,
    /// The first tensor without a bucket.
    next: usize,
}

impl<'a> Between<'a> {
    pub(super) fn new(layout: &'a Layout) -> Self {
        Self { layout, next: 0 }
    }

    /// Whether the tensor at `at` has another section than the previous one.
    fn begins_section(&self, at: usize) -> bool {
        let section = |at: usize| self.layout.entries.get(at).map(|entry| entry.tensor.section);
        at.checked_sub(1).is_some_and(|before| section(before) != section(at))
    }

    /// Number of tensors from `from` on that stay together: one, or all of the same load unit if they fit into a bucket.
    fn together(&self, from: usize) -> usize {
        let entries = self.layout.entries.get(from..).unwrap_or_default();
        let Some((first, unit)) = entries.first().and_then(|first| Some((first, first.tensor.load_unit.as_deref()?))) else { return 1 };
        let same = |entry: &&Entry| entry.tensor.load_unit.as_deref() == Some(unit) && entry.tensor.section == first.tensor.section;
        let unit: Vec<_> = entries.iter().take_while(same).collect();
        let fits = unit.last().is_some_and(|last| last.end().saturating_sub(first.offset) <= self.layout.bucket_bytes);
        if fits { unit.len().max(1) } else { 1 }
    }
}

impl Iterator for Between<'_> {
    type Item = (u64, u64);

    fn next(&mut self) -> Option<(u64, u64)> {
        let entries = &self.layout.entries;
        let start = if self.next == 0 { 0 } else { entries.get(self.next)?.offset };
        let mut taken = self.next;
        while let Some(last) = taken.checked_add(self.together(taken)).and_then(|end| entries.get(taken..end)).and_then(<[_]>::last) {
            if self.begins_section(taken) && entries.get(taken).is_some_and(|first| first.offset > start) {
                break;
            }
            let empty = entries.get(taken).is_none_or(|first| first.offset == start);
            if !empty && last.end().saturating_sub(start) > self.layout.bucket_bytes {
                break;
            }
            taken += self.together(taken);
        }
        self.next = taken;
        let end = entries.get(taken).map_or(self.layout.total_bytes, |entry| entry.offset);
        // Tensors without bytes at the very end need no bucket.
        (end > start).then_some((start, end - start))
    }
}

//! Which tensors an engine loads together, and which of those groups are whole after a part of the stream.
//!
//! Buckets are cut by length alone; whoever installs from a stream cuts anew here, so that no group that an engine must see whole is
//! handed over in halves.

use std::collections::HashMap;

use super::{Layout, Section};

/// Tensors that an engine loads together; a tensor without a load unit is one by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadUnit {
    /// Positions of its tensors in [`Layout::entries`], ascending.
    pub entries: Vec<usize>,
    /// First byte of the stream that belongs to it.
    pub start: u64,
    /// It is whole when the stream was received up to here.
    pub end: u64,
}

/// The load units of a layout in the order in which they become whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadUnits(Vec<LoadUnit>);

impl LoadUnits {
    /// Groups the tensors of a layout.
    pub fn new(layout: &Layout) -> Self {
        let mut units: Vec<LoadUnit> = Vec::new();
        let mut named: HashMap<(&str, Section), usize> = HashMap::new();
        for (index, entry) in layout.entries.iter().enumerate() {
            let known = entry.tensor.load_unit.as_deref().and_then(|name| named.get(&(name, entry.tensor.section)).copied());
            if let Some(unit) = known.and_then(|position| units.get_mut(position)) {
                unit.entries.push(index);
                unit.end = unit.end.max(entry.end());
                continue;
            }
            if let Some(name) = &entry.tensor.load_unit {
                named.insert((name, entry.tensor.section), units.len());
            }
            units.push(LoadUnit { entries: vec![index], start: entry.offset, end: entry.end() });
        }
        units.sort_by_key(|unit| (unit.end, unit.start));
        Self(units)
    }

    /// All units, in the order in which they become whole.
    pub fn all(&self) -> &[LoadUnit] {
        &self.0
    }

    /// The units that are whole once bytes `0..received` are there: a prefix of [`LoadUnits::all`].
    pub fn complete_after(&self, received: u64) -> &[LoadUnit] {
        let count = self.0.partition_point(|unit| unit.end <= received);
        self.0.get(..count).unwrap_or_default()
    }

    /// Most bytes of the stream that someone must hold who frees a unit as soon as it and all before it are whole: from the first
    /// byte of the oldest open unit to the last one received.
    pub fn most_bytes_open(&self) -> u64 {
        let mut oldest_later = u64::MAX;
        self.0.iter().rev().fold(0, |most, unit| {
            oldest_later = oldest_later.min(unit.start);
            most.max(unit.end.saturating_sub(oldest_later))
        })
    }
}

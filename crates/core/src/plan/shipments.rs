//! Which source sends which part of the stream to which ranks.
//!
//! Today one source sends every bucket to all ranks, and this gives the layout's own buckets back. It also plans several sources, each
//! with a part of the stream, and parts that only some ranks need, so that neither needs another shape of message later. It never lets a
//! byte that a rank needs be sent to it twice, or not at all.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::protocol::{Role, Roster};

/// Ranks that a part of the stream goes to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Destinations {
    /// Every rank of every rollout.
    All,
    /// These ranks only.
    Ranks(BTreeSet<u32>),
}

/// A part of the stream that some ranks need.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Need {
    /// First byte in the stream.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Who needs it.
    pub destinations: Destinations,
}

/// One bucket with its way. `(source, sequence)` names it within an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shipment {
    /// Rank of the source that sends it.
    pub source: u32,
    /// Position in the order in which that source sends, from 0.
    pub sequence: u32,
    /// First byte in the stream.
    pub offset: u64,
    /// Length in bytes, from 1 to the bucket size.
    pub bytes: u64,
    /// Who gets it.
    pub destinations: Destinations,
}

/// Why nothing can be shipped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum ShipmentError {
    #[error("the roster has no source")]
    NoSource,
    #[error("a bucket must hold at least one byte")]
    EmptyBucket,
    #[error("bytes {offset} to {end} are needed, the stream has {total}")]
    BeyondStream { offset: u64, end: u128, total: u64 },
    #[error("rank {rank} is no rollout's rank")]
    UnknownRank { rank: u32 },
    #[error("rank {rank} asks for byte {offset} twice")]
    Twice { rank: u32, offset: u64 },
    #[error("more buckets than a sequence number can count: choose larger ones")]
    TooManyBuckets,
}

/// Cuts the needed parts of the stream into buckets at multiples of `bucket_bytes` and at the ends of parts, and shares them among the
/// sources: each sends one run of the stream, and no two runs differ by more than about a bucket. No needs means: all to all.
pub fn shipments(roster: &Roster, total_bytes: u64, bucket_bytes: u64, needs: &[Need]) -> Result<Vec<Shipment>, ShipmentError> {
    let sources: Vec<u32> = roster.members.iter().filter(|member| member.role == Role::Source).map(|member| member.rank_offset).collect();
    if sources.is_empty() {
        return Err(ShipmentError::NoSource);
    }
    if bucket_bytes == 0 {
        return Err(ShipmentError::EmptyBucket);
    }
    let everything = [Need { offset: 0, bytes: total_bytes, destinations: Destinations::All }];
    let parts = parts(roster, total_bytes, if needs.is_empty() { &everything } else { needs })?;
    let wanted: u128 = parts.iter().map(|part| u128::from(part.end - part.offset)).sum();

    let mut shipments = Vec::new();
    let mut sequences: BTreeMap<u32, u32> = BTreeMap::new();
    let mut before: u128 = 0;
    for part in parts {
        let mut offset = part.offset;
        while offset < part.end {
            let bytes = (part.end - offset).min(bucket_bytes - offset % bucket_bytes);
            // The source whose share of all bytes this bucket begins in.
            let index = before * sources.len() as u128 / wanted.max(1);
            let source = usize::try_from(index).ok().and_then(|index| sources.get(index)).ok_or(ShipmentError::NoSource)?;
            let sequence = sequences.entry(*source).or_default();
            // `u32::MAX` ends a stream on the wire, so it is nobody's number.
            if *sequence == u32::MAX {
                return Err(ShipmentError::TooManyBuckets);
            }
            shipments.push(Shipment { source: *source, sequence: *sequence, offset, bytes, destinations: part.destinations.clone() });
            *sequence += 1;
            before += u128::from(bytes);
            offset += bytes;
        }
    }
    Ok(shipments)
}

struct Part {
    offset: u64,
    end: u64,
    destinations: Destinations,
}

/// Disjoint parts of the stream in order, each with everyone who needs it.
fn parts(roster: &Roster, total_bytes: u64, needs: &[Need]) -> Result<Vec<Part>, ShipmentError> {
    let ranks: BTreeSet<u32> = roster
        .members
        .iter()
        .filter(|member| member.role == Role::Rollout)
        .flat_map(|member| member.rank_offset..member.rank_offset.saturating_add(member.size))
        .collect();
    let mut wanted: Vec<(u64, u64, BTreeSet<u32>)> = Vec::new();
    for need in needs {
        let end = u128::from(need.offset) + u128::from(need.bytes);
        let Some(end) = u64::try_from(end).ok().filter(|end| *end <= total_bytes) else {
            return Err(ShipmentError::BeyondStream { offset: need.offset, end, total: total_bytes });
        };
        let destinations = match &need.destinations {
            Destinations::All => ranks.clone(),
            Destinations::Ranks(some) => match some.difference(&ranks).next() {
                Some(rank) => return Err(ShipmentError::UnknownRank { rank: *rank }),
                None => some.clone(),
            },
        };
        if need.offset < end && !destinations.is_empty() {
            wanted.push((need.offset, end, destinations));
        }
    }
    wanted.sort();
    let cuts: BTreeSet<u64> = wanted.iter().flat_map(|(offset, end, _)| [*offset, *end]).collect();
    let mut waiting = wanted.into_iter().peekable();
    let mut open: Vec<(u64, u64, BTreeSet<u32>)> = Vec::new();
    let mut parts = Vec::new();
    for (offset, end) in cuts.iter().zip(cuts.iter().skip(1)) {
        open.retain(|(_, end, _)| end > offset);
        while let Some(need) = waiting.next_if(|(start, _, _)| start <= offset) {
            open.push(need);
        }
        let mut here = BTreeSet::new();
        for rank in open.iter().flat_map(|(_, _, ranks)| ranks) {
            if !here.insert(*rank) {
                return Err(ShipmentError::Twice { rank: *rank, offset: *offset });
            }
        }
        if !here.is_empty() {
            let destinations = if here == ranks { Destinations::All } else { Destinations::Ranks(here) };
            parts.push(Part { offset: *offset, end: *end, destinations });
        }
    }
    Ok(parts)
}

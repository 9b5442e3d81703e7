//! Whether engines that received by themselves hold the same weights, by their own checksums.
//!
//! Pure. An engine's checksums are of its own layout, so the source has nothing to compare them with; replicas of one pool have each other. What
//! most pods report counts: all engines of a pod have one vote. An engine that reports something else is wrong. Where no value has a majority,
//! the value that most pods report goes on, of equally many that of the first replica. It is proven by responses alone, and the others are fed
//! in full: so one replica that lies does not stop a pool of two. A source that sent the same wrong bytes to all is not found.

use std::collections::BTreeMap;

use weightsync_core::protocol::{EngineChecksum, MemberName};

/// What a comparison found. Members that could be compared with no other one, or whose value leads without a majority, are in neither list.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Agreement {
    pub(super) agreed: Vec<MemberName>,
    /// With the reason.
    pub(super) wrong: Vec<(MemberName, String)>,
}

/// Whether two of them may be comparable.
pub(super) fn comparable(members: &[MemberName]) -> bool {
    members.iter().enumerate().any(|(at, member)| members.iter().skip(at + 1).any(|other| pool(other) == pool(member)))
}

pub(super) fn compare(said: &[(MemberName, EngineChecksum)]) -> Agreement {
    let mut alike: BTreeMap<(&str, &str), Vec<&(MemberName, EngineChecksum)>> = BTreeMap::new();
    for report in said {
        alike.entry((pool(&report.0), &report.1.of)).or_default().push(report);
    }
    let counts: BTreeMap<_, _> = alike.into_iter().map(|(of, reports)| (of, Counted::of(&reports))).collect();
    let mut found = Agreement::default();
    for (member, checksum) in said {
        let Some(counted) = counts.get(&(pool(member), checksum.of.as_str())).filter(|counted| counted.reports > 1) else { continue };
        if counted.leading != checksum.digest {
            let digest = checksum.digest.get(..12).unwrap_or_default();
            let others = counted.same.get(checksum.digest.as_str()).map_or(0, |same| same.saturating_sub(1));
            let why = format!(
                "after the load, its engine's own checksums ({digest}) are those of {others} of the {} other replicas of its pool: it does \
                 not hold what was sent",
                counted.reports - 1
            );
            found.wrong.push((member.clone(), why));
        } else if counted.majority {
            found.agreed.push(member.clone());
        }
    }
    found
}

/// What comparable replicas reported.
struct Counted<'a> {
    reports: usize,
    /// Replicas by the value that they reported.
    same: BTreeMap<&'a str, usize>,
    /// The value for which most pods vote; of equally many, the one that was reported first.
    leading: &'a str,
    /// Whether more than half of the pods vote for it.
    majority: bool,
}

impl<'a> Counted<'a> {
    fn of(reports: &[&'a (MemberName, EngineChecksum)]) -> Self {
        let (mut values, mut same, mut pods) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        for (member, checksum) in reports {
            let value = checksum.digest.as_str();
            let count: &mut usize = same.entry(value).or_default();
            if *count == 0 {
                values.push(value);
            }
            *count += 1;
            // A pod votes for the value that all of its engines report.
            let vote = pods.entry(member.voter()).or_insert(Some(value));
            *vote = vote.filter(|voted| *voted == value);
        }
        let mut votes: BTreeMap<&str, usize> = BTreeMap::new();
        for value in pods.values().flatten() {
            *votes.entry(value).or_default() += 1;
        }
        let votes = |value: &str| votes.get(value).copied().unwrap_or(0);
        let leading = values.into_iter().rev().max_by_key(|value| votes(value)).unwrap_or_default();
        Self { reports: reports.len(), same, leading, majority: 2 * votes(leading) > pods.len() }
    }
}

/// Replicas of one pool are started alike.
fn pool(member: &MemberName) -> &str {
    member.0.split('/').next().unwrap_or_default()
}

#[cfg(test)]
mod tests;

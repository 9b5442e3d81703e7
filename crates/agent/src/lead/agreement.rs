//! Whether engines that received by themselves hold the same weights, by their own checksums.
//!
//! Pure. An engine's checksums are of its own layout, so the source has nothing to compare them with; replicas of one pool have each other. What
//! most pods report counts: all engines of a pod have one vote. An engine that reports something else is wrong. Where no value has a majority,
//! the value that most pods report goes on, of equally many that of the first replica. It is proven by responses alone, and the others are fed
//! in full: so one replica that lies does not stop a pool of two. A source that sent the same wrong bytes to all is not found.

use std::collections::BTreeSet;

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
    let mut found = Agreement::default();
    for (member, checksum) in said {
        let alike: Vec<_> = said.iter().filter(|(other, of)| pool(other) == pool(member) && of.of == checksum.of).collect();
        let votes = votes(&alike);
        let pods = alike.iter().map(|(other, _)| other.voter()).collect::<BTreeSet<_>>().len();
        let same = votes.iter().find(|(digest, _)| *digest == checksum.digest).map_or(0, |(_, pods)| pods.len());
        // The first value in the order of ranks, of those with most votes.
        let leading = votes.iter().rev().max_by_key(|(_, pods)| pods.len()).is_some_and(|(digest, _)| *digest == checksum.digest);
        match (alike.len(), leading) {
            (..=1, _) => {}
            (_, true) if 2 * same > pods => found.agreed.push(member.clone()),
            (_, true) => {}
            (all, false) => {
                let digest = checksum.digest.get(..12).unwrap_or_default();
                let others = alike.iter().filter(|(_, of)| of.digest == checksum.digest).count().saturating_sub(1);
                let why = format!(
                    "after the load, its engine's own checksums ({digest}) are those of {others} of the {} other replicas of its pool: it does \
                     not hold what was sent",
                    all - 1
                );
                found.wrong.push((member.clone(), why));
            }
        }
    }
    found
}

/// The values in the order in which they were first reported, with the pods that vote for each: those whose engines all report it.
fn votes<'a>(said: &[&'a (MemberName, EngineChecksum)]) -> Vec<(&'a str, BTreeSet<&'a str>)> {
    let mut votes: Vec<(&str, BTreeSet<&str>)> = Vec::new();
    for (member, checksum) in said {
        let united = said.iter().all(|(other, of)| other.voter() != member.voter() || of.digest == checksum.digest);
        let at = votes.iter().position(|(digest, _)| *digest == checksum.digest).unwrap_or_else(|| {
            votes.push((&checksum.digest, BTreeSet::new()));
            votes.len() - 1
        });
        if let Some((_, pods)) = votes.get_mut(at).filter(|_| united) {
            pods.insert(member.voter());
        }
    }
    votes
}

/// Replicas of one pool are started alike.
fn pool(member: &MemberName) -> &str {
    member.0.split('/').next().unwrap_or_default()
}

#[cfg(test)]
mod tests;

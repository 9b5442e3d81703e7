//! Whether engines that received by themselves hold the same weights, by their own checksums.
//!
//! Pure. An engine's checksums are of its own layout, so the source has nothing to compare them with; replicas of one pool have each other. What
//! most of them report counts. An engine that reports something else is wrong; where no value has a majority, any of them may be. A source that
//! sent the same wrong bytes to all of them is not found.

use weightsync_core::protocol::{EngineChecksum, MemberName};

/// What a comparison found. Members that could be compared with no other one are in neither list.
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
        let alike = || said.iter().filter(|(other, of)| pool(other) == pool(member) && of.of == checksum.of);
        let (all, same) = (alike().count(), alike().filter(|(_, of)| of.digest == checksum.digest).count());
        match (all, same) {
            (..=1, _) => {}
            (all, same) if 2 * same > all => found.agreed.push(member.clone()),
            (all, same) => {
                let digest = checksum.digest.get(..12).unwrap_or_default();
                let others = same.saturating_sub(1);
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

/// Replicas of one pool are started alike.
fn pool(member: &MemberName) -> &str {
    member.0.split('/').next().unwrap_or_default()
}

#[cfg(test)]
mod tests;

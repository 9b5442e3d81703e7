//! Gives ranks: offsets without gaps in the order of the candidates, the world size, and the chain in which bytes travel.
//!
//! The one place in the crate where a rank offset is computed, so that no two parts can disagree about it.

use std::collections::BTreeMap;

use super::Candidate;
use crate::protocol::{MemberName, PodRef, Role, Roster, RosterMember};

/// The roster of these members. Sources come first whatever the order given; otherwise the order is kept. Every member has at least one
/// rank. Sums stay below [`MAX_WORLD_SIZE`](super::MAX_WORLD_SIZE) for candidates of one plan.
pub fn roster(candidates: &[Candidate]) -> Roster {
    let sources = candidates.iter().filter(|candidate| candidate.role == Role::Source);
    let rollouts = candidates.iter().filter(|candidate| candidate.role == Role::Rollout);
    let mut next = 0_u32;
    let members: Vec<RosterMember> = sources
        .chain(rollouts)
        .map(|candidate| {
            let rank_offset = next;
            let size = candidate.size.max(1);
            next = next.saturating_add(size);
            RosterMember {
                name: candidate.name.clone(),
                role: candidate.role,
                rank_offset,
                size,
                pods: candidate.pods.clone(),
                port: candidate.port,
            }
        })
        .collect();
    let chain = chain(&members);
    Roster { members, world_size: next, chain }
}

/// The order in which bytes travel: rollouts in rank order, but those on one node together, and those on the source's node first, so
/// that every node is entered once. A member of several pods stands where its head is; one whose node is unknown stands alone.
pub fn chain(members: &[RosterMember]) -> Vec<MemberName> {
    let node = |member: &RosterMember| member.pods.first().and_then(|pod: &PodRef| pod.node.clone());
    let mut place: BTreeMap<String, usize> = BTreeMap::new();
    for (position, source) in members.iter().enumerate().filter(|(_, member)| member.role == Role::Source) {
        if let Some(node) = node(source) {
            place.entry(node).or_insert(position);
        }
    }
    let mut rollouts: Vec<(usize, &MemberName)> = members
        .iter()
        .enumerate()
        .filter(|(_, member)| member.role == Role::Rollout)
        .map(|(position, member)| {
            let first_here = node(member).map_or(position, |node| *place.entry(node).or_insert(position));
            (first_here, &member.name)
        })
        .collect();
    rollouts.sort_by_key(|(place, _)| *place);
    rollouts.into_iter().map(|(_, name)| name.clone()).collect()
}

//! Assigns ranks: offsets without gaps in the order of the candidates, the world size, and the chain in which bytes travel.
//!
//! Only this file computes rank offsets, so no two parts can disagree about them.

use std::collections::BTreeMap;

use super::Candidate;
use crate::protocol::{MemberName, PodRef, Role, Roster, RosterMember};

/// The roster of these members. Sources come first, whatever the given order; the others keep theirs. Every member has at least one rank.
/// For candidates of one plan, sums stay below [`MAX_WORLD_SIZE`](super::MAX_WORLD_SIZE).
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

/// The order in which bytes travel: rollouts in rank order, but grouped by node, with those on the source's node first. So each node is
/// entered once. A member with several pods counts for the node of its head; a member without a known node stands alone.
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

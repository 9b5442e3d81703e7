//! In which order members stand in a chain: as the roster says, but those whose bytes did not verify in the last stream come first.
//!
//! Of a chain with one member that passes on wrong bytes, all behind it fail. Nobody can say who did it: the leader has the word of each only. So
//! those that failed stand in front next time, the last of them first, and get their bytes before anybody could change them. No member fails twice
//! in a row by the doing of one other. Decides an order only; who fails for its own cause fails there as well.

use weightsync_core::protocol::MemberName;

/// Members of a chain, those that failed in the last one first.
pub(super) fn in_order(members: Vec<MemberName>, failed: &[MemberName]) -> Vec<MemberName> {
    let (behind, mut chain): (Vec<MemberName>, Vec<MemberName>) = members.into_iter().partition(|member| !failed.contains(member));
    chain.sort_by_key(|member| failed.iter().position(|one| one == member));
    chain.extend(behind);
    chain
}

/// Those of a chain that failed, the last one first.
pub(super) fn that_failed(chain: &[MemberName], failed: impl Fn(&MemberName) -> bool) -> Vec<MemberName> {
    chain.iter().rev().filter(|member| failed(member)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<MemberName> {
        names.iter().map(|name| MemberName((*name).to_owned())).collect()
    }

    /// One stream through a chain in which `liar` spoils what it passes on, and says of itself what it likes.
    fn stream(chain: &[MemberName], liar: &MemberName, fails_itself: bool) -> Vec<MemberName> {
        let at = chain.iter().position(|member| member == liar).unwrap();
        that_failed(chain, |member| chain[at + 1..].contains(member) || fails_itself && member == liar)
    }

    #[test]
    fn chain_without_failures_is_that_of_the_roster() {
        assert_eq!(in_order(names(&["a", "b", "c"]), &[]), names(&["a", "b", "c"]));
        assert_eq!(in_order(names(&["a", "b", "c"]), &names(&["gone"])), names(&["a", "b", "c"]));
    }

    #[test]
    fn members_behind_a_liar_come_before_it_in_the_next_chain() {
        let (roster, liar) = (names(&["a", "liar", "b", "c"]), MemberName("liar".to_owned()));
        let next = in_order(roster.clone(), &stream(&roster, &liar, false));
        assert_eq!(next, names(&["c", "b", "a", "liar"]));
    }

    #[test]
    fn no_member_fails_twice_in_a_row_by_one_other() {
        let roster = names(&["a", "b", "c", "d"]);
        for liar in &roster {
            // It says each time as it likes whether it failed.
            for says in 0_u32..64 {
                let (mut failed, mut chain) = (Vec::new(), roster.clone());
                for round in 0..6 {
                    let before = std::mem::take(&mut failed);
                    chain = in_order(chain, &before);
                    failed = stream(&chain, liar, says >> round & 1 == 1);
                    let twice = failed.iter().find(|member| *member != liar && before.contains(member));
                    assert_eq!(twice, None, "{liar}, {says:b}, round {round}: {chain:?}");
                    chain.clone_from(&roster);
                }
            }
        }
    }
}

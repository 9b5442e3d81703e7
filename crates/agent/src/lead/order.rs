//! In which order members stand in a chain: as the roster says, until the bytes of some did not verify. Those come first from then on.
//!
//! One member that passes on wrong bytes makes all members after it fail. The leader has only the word of each and cannot know which it was.
//! So those that failed go to the front, the last of them first, and stay there. Then no member fails twice in a row by the doing of one other.
//! Decides an order only, and never judges a member: one that fails for its own cause fails in front as well.

use weightsync_core::protocol::MemberName;

/// Members of a chain in the order that is remembered; those that it does not name follow as they came.
pub(super) fn in_order(mut members: Vec<MemberName>, order: &[MemberName]) -> Vec<MemberName> {
    if !order.is_empty() {
        members.sort_by_cached_key(|member| order.iter().position(|one| one == member).unwrap_or(usize::MAX));
    }
    members
}

/// The order to remember once a stream through this chain ended.
pub(super) fn after(chain: &[MemberName], order: &[MemberName], failed: impl Fn(&MemberName) -> bool) -> Vec<MemberName> {
    let mut next: Vec<MemberName> = chain.iter().rev().filter(|member| failed(member)).cloned().collect();
    if next.is_empty() {
        return order.to_vec();
    }
    for member in order.iter().chain(chain) {
        if !next.contains(member) {
            next.push(member.clone());
        }
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<MemberName> {
        names.iter().map(|name| MemberName((*name).to_owned())).collect()
    }

    /// Who fails in a chain in which one member spoils what it passes on, and says of itself what it likes.
    fn fail<'a>(chain: &'a [MemberName], liar: &'a MemberName, fails_itself: bool) -> Vec<&'a MemberName> {
        let at = chain.iter().position(|member| member == liar).unwrap();
        chain.iter().enumerate().filter(|(number, _)| *number > at || fails_itself && *number == at).map(|(_, member)| member).collect()
    }

    #[test]
    fn chain_without_failures_is_that_of_the_roster() {
        let roster = names(&["a", "b", "c"]);
        let order = after(&roster, &[], |_| false);
        assert_eq!(in_order(roster.clone(), &order), roster);
    }

    #[test]
    fn members_after_a_liar_come_before_it_from_then_on() {
        let (roster, liar) = (names(&["a", "liar", "b", "c"]), MemberName("liar".to_owned()));
        let mut order = after(&roster, &[], |member| fail(&roster, &liar, false).contains(&member));
        for _ in 0..3 {
            let chain = in_order(roster.clone(), &order);
            assert_eq!(chain, names(&["c", "b", "a", "liar"]));
            order = after(&chain, &order, |member| fail(&chain, &liar, false).contains(&member));
            // One of them alone is fed.
            order = after(&names(&["b"]), &order, |_| false);
        }
    }

    #[test]
    fn no_member_fails_twice_in_a_row_by_one_other() {
        let roster = names(&["a", "b", "c", "d"]);
        for liar in &roster {
            // It says each time as it likes whether it failed.
            for says in 0_u32..64 {
                let (mut order, mut before) = (Vec::new(), Vec::new());
                for round in 0..6 {
                    let chain = in_order(roster.clone(), &order);
                    let failed: Vec<MemberName> = fail(&chain, liar, says >> round & 1 == 1).into_iter().cloned().collect();
                    let twice = failed.iter().find(|member| *member != liar && before.contains(*member));
                    assert_eq!(twice, None, "{liar}, {says:b}, round {round}: {chain:?}");
                    order = after(&chain, &order, |member| failed.contains(member));
                    before = failed;
                }
            }
        }
    }
}

//! Who is held responsible, for how long, and that it is nobody else.

use std::collections::BTreeMap;

use super::desk::*;
use crate::membership::backoff::{Backoff, Weight};
use crate::membership::group::unreachable;
use crate::membership::mutation::Switch;
use crate::membership::{BackoffConfig, MemberStanding, Observation};
use crate::protocol::*;

const RULES: BackoffConfig = BackoffConfig { base_ms: 1_000, max_ms: 10_000, reset_ms: 60_000 };

#[test]
fn waits_double_up_to_a_limit_and_a_first_loss_is_free() {
    for (weight, waits) in [(Weight::Loss, [0, 1, 2, 4, 8, 10, 10]), (Weight::Failure, [1, 2, 4, 8, 10, 10, 10])] {
        let mut backoff = Backoff::new(Switch::default());
        for wait in waits {
            backoff.strike(5, &name(1), RULES, weight, Reason::AgentLost, "gone");
            let until = backoff.holding_off(5, &name(1)).map_or(5, |strike| strike.until);
            assert_eq!(until, 5 + wait * 1_000, "{weight:?}");
        }
        assert_eq!(backoff.holding_off(5, &name(2)), None);
    }
}

#[test]
fn a_member_that_stands_long_enough_is_forgiven() {
    let mut backoff = Backoff::new(Switch::default());
    for _ in 0..4 {
        backoff.strike(0, &name(1), RULES, Weight::Loss, Reason::AgentLost, "gone");
    }
    assert_eq!(backoff.forgive(10_000, RULES, |_| true), Some(70_000));
    // Being out begins the time anew.
    backoff.forgive(20_000, RULES, |_| false);
    assert_eq!(backoff.forgive(30_000, RULES, |_| true), Some(90_000));
    assert_eq!(backoff.forgive(90_000, RULES, |_| true), None);
    backoff.strike(90_000, &name(1), RULES, Weight::Loss, Reason::AgentLost, "gone");
    assert_eq!(backoff.holding_off(90_000, &name(1)), None, "it counts as the first");
}

#[test]
fn f45_a_crash_looping_pod_backs_off_alone() {
    let mut desk = Desk::formed(2);
    let mut epochs = Vec::new();
    for number in 2..20 {
        let decisions = desk.lose(2);
        desk.obey(decisions);
        desk.reborn(2, number);
        let decisions = desk.announce(2);
        desk.obey(decisions);
        let decisions = desk.wait(2_000, &[0, 1, 2]);
        desk.obey(decisions);
        epochs.push(desk.epoch());
        assert_eq!(desk.member(1).standing, MemberStanding::Ready);
    }
    let early = epochs[3] - epochs[0];
    let late = epochs[17] - epochs[12];
    assert!(early >= 2 && late <= 2, "{epochs:?}");
    assert!(desk.member(2).retry_at.is_some());
}

#[test]
fn whoever_most_cannot_reach_is_left_out_and_of_two_never_the_source() {
    type Pairs<'a> = &'a [(u32, u32)];
    let table: [(Pairs, &[u32]); 7] = [
        (&[(0, 2)], &[2]),
        (&[(2, 0)], &[2]),
        (&[(0, 1), (0, 2)], &[0]),
        (&[(1, 3), (2, 3)], &[3]),
        (&[(3, 1), (3, 2), (3, 0)], &[3]),
        (&[(1, 2)], &[2]),
        (&[(0, 2), (1, 2), (0, 3), (1, 3)], &[2, 3]),
    ];
    for (pairs, expected) in table {
        let names: Vec<(MemberName, MemberName)> = pairs.iter().map(|(one, other)| (name(*one), name(*other))).collect();
        let reports = names.iter().map(|(one, other)| (one, other, "no route"));
        let roles: BTreeMap<MemberName, Role> = (0..4).map(|n| (name(n), if n == 0 { Role::Source } else { Role::Rollout })).collect();
        let blamed = unreachable(reports, |name| roles.get(name).copied());
        assert_eq!(blamed.keys().cloned().collect::<Vec<_>>(), expected.iter().map(|n| name(*n)).collect::<Vec<_>>(), "{pairs:?}");
    }
}

#[test]
fn a_member_that_others_cannot_reach_is_left_out_although_we_can() {
    let mut desk = Desk::formed(3);
    let id = desk.id();
    for n in [0, 1] {
        let from = life(n, 1);
        desk.see(Observation::PeerLost { from, id: id.clone(), peer: name(3), cause: "no route to host".to_owned() });
    }
    let decisions = desk.wait(400, &[0, 1, 2, 3]);
    desk.obey(decisions);
    let (member, message) = desk.event(Reason::PeerUnreachable).unwrap();
    assert_eq!(member, Some(name(3)));
    assert!(message.contains("no route to host"), "{message}");
    assert_eq!(desk.membership.view().world_size, 3);
}

#[test]
fn a_report_about_a_peer_that_died_costs_no_second_epoch() {
    let mut desk = Desk::formed(2);
    let id = desk.id();
    desk.see(Observation::PeerLost { from: life(0, 1), id, peer: name(2), cause: "connection closed".to_owned() });
    let decisions = desk.lose(2);
    desk.obey(decisions);
    desk.wait(5_000, &[0, 1]);
    assert_eq!(desk.epoch(), 2);
    assert!(desk.event(Reason::PeerUnreachable).is_none());
}

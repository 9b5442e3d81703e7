//! Which member is held responsible for a failure, and for how long.

use std::collections::{BTreeMap, BTreeSet};

use super::desk::*;
use crate::membership::backoff::{Backoff, Failure, Weight};
use crate::membership::group::unreachable;
use crate::membership::{BackoffConfig, MemberStanding, Observation};
use crate::protocol::*;

const RULES: BackoffConfig = BackoffConfig { base_ms: 1_000, max_ms: 10_000, reset_ms: 60_000 };

fn pods(uid: &str) -> BTreeSet<String> {
    BTreeSet::from([uid.to_owned()])
}

/// Records a failure of member 1 with one pod.
fn strike(backoff: &mut Backoff, now: u64, weight: Weight, uid: &str) {
    let failure = Failure { member: &name(1), pods: pods(uid), weight, reason: Reason::AgentLost, message: "gone" };
    backoff.strike(now, RULES, failure);
}

#[test]
fn waits_double_up_to_a_limit_and_a_first_loss_is_free() {
    for (weight, waits) in [(Weight::Loss, [0, 1, 2, 4, 8, 10, 10]), (Weight::Failure, [1, 2, 4, 8, 10, 10, 10])] {
        let mut backoff = Backoff::default();
        for wait in waits {
            strike(&mut backoff, 5, weight, "a");
            let until = backoff.holding_off(5, &name(1), &pods("a")).map_or(5, |strike| strike.until);
            assert_eq!(until, 5 + wait * 1_000, "{weight:?}");
        }
        assert_eq!(backoff.holding_off(5, &name(2), &pods("a")), None);
    }
}

#[test]
fn pod_with_a_failed_pods_name_inherits_nothing() {
    let mut backoff = Backoff::default();
    for _ in 0..4 {
        strike(&mut backoff, 0, Weight::Loss, "a");
    }
    assert_eq!(backoff.holding_off(0, &name(1), &pods("a")).map(|strike| strike.count), Some(4));
    assert_eq!(backoff.holding_off(0, &name(1), &pods("b")), None);
    let one_is_left = BTreeSet::from(["a".to_owned(), "b".to_owned()]);
    assert!(backoff.holding_off(0, &name(1), &one_is_left).is_some(), "a replica of several pods counts while one that failed is left");
    strike(&mut backoff, 0, Weight::Loss, "b");
    assert_eq!(backoff.holding_off(0, &name(1), &pods("b")), None, "its own first loss");
}

#[test]
fn a_member_that_stands_long_enough_is_forgiven() {
    let mut backoff = Backoff::default();
    for _ in 0..4 {
        strike(&mut backoff, 0, Weight::Loss, "a");
    }
    assert_eq!(backoff.forgive(10_000, RULES, |_| true), Some(70_000));
    // Time outside a group does not count: the time starts again.
    backoff.forgive(20_000, RULES, |_| false);
    assert_eq!(backoff.forgive(30_000, RULES, |_| true), Some(90_000));
    assert_eq!(backoff.forgive(90_000, RULES, |_| true), None);
    strike(&mut backoff, 90_000, Weight::Loss, "a");
    assert_eq!(backoff.holding_off(90_000, &name(1), &pods("a")), None, "it counts as the first");
}

#[test]
fn replaced_pod_joins_at_once_after_any_number_of_deaths() {
    let mut desk = Desk::formed(2);
    for number in 2..12 {
        let decisions = desk.lose(2);
        desk.obey(decisions);
        let uid = format!("uid-2-{number}");
        desk.reborn(2, number);
        desk.states[2].incarnation.pod_uid = uid.clone();
        let candidates = (0..3).map(|n| {
            let mut candidate = candidate(n);
            if n == 2 {
                candidate.pods[0].uid = uid.clone();
            }
            candidate
        });
        let decisions = desk.see(Observation::Candidates { candidates: candidates.collect(), left_out: Vec::new() });
        desk.obey(decisions);
        let decisions = desk.announce(2);
        desk.obey(decisions);
        let decisions = desk.wait(2_000, &[0, 1, 2]);
        desk.obey(decisions);
        assert_eq!(desk.member(2).standing, MemberStanding::Ready, "{number}");
    }
}

/// Story F45.
#[test]
fn a_crash_looping_pod_backs_off_alone() {
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
fn member_most_cannot_reach_is_left_out_never_the_source() {
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

/// Each of six engines of one pod reported two honest replicas, which were both left out.
#[test]
fn many_engines_of_one_pod_blame_as_one() {
    let honest = [name(1), name(2)];
    let lying: Vec<MemberName> = (1..=6).map(|port| MemberName(format!("actors/liar:{port}"))).collect();
    let reports = lying.iter().flat_map(|liar| honest.iter().map(move |peer| (liar, peer, "no route")));
    let blamed = unreachable(reports, |_| Some(Role::Rollout));
    assert_eq!(blamed.into_keys().collect::<Vec<_>>(), lying);
}

#[test]
fn member_unreachable_by_others_is_left_out() {
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

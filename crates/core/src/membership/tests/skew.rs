//! Which replicas may be in service while versions differ.

use super::desk::*;
use crate::membership::{MemberStanding, MembershipConfig, Observation, Restored};
use crate::protocol::*;

fn rules(max_skew: Option<Version>) -> MembershipConfig {
    MembershipConfig { policy: UpdatePolicy { max_skew, min_ready: 2, keep: 2, ..policy() }, ..config() }
}

/// Three replicas at version 1; these took version 2, and two replicas make it count.
fn at_one_and_two(max_skew: Option<Version>, took: &[u32]) -> Desk {
    let mut desk = Desk::restored(rules(max_skew), 3, Restored::default());
    desk.form(3);
    desk.serves(1);
    for n in took {
        desk.tell(*n, |state| (state.installed, state.earlier) = (Some(held(2)), vec![held(1)]));
    }
    desk
}

/// The replicas that may serve, by the view.
fn serving(desk: &Desk) -> Vec<u32> {
    let view = desk.membership.view();
    let may = |n: &u32| desk.member(*n).installed.is_some_and(|held| view.may_serve(&held).is_ok());
    (1..=3).filter(may).collect()
}

#[test]
fn served_versions_stay_within_the_skew_in_an_update() {
    // (limit, replicas with version 2, replicas that may serve)
    let cases: [(Option<Version>, &[u32], &[u32]); 6] = [
        (None, &[1], &[1, 2, 3]),
        (None, &[1, 2], &[1, 2]),
        // Only one replica has the newest version, so it takes no replica out of service.
        (Some(0), &[1], &[2, 3]),
        (Some(0), &[1, 2], &[1, 2]),
        (Some(1), &[1], &[1, 2, 3]),
        (Some(1), &[1, 2], &[1, 2, 3]),
    ];
    for (limit, took, expected) in cases {
        assert_eq!(serving(&at_one_and_two(limit, took)), expected, "{limit:?} with version 2 on {took:?}");
    }
}

#[test]
fn lagging_replica_serves_while_near_enough_and_says_so() {
    let mut desk = at_one_and_two(Some(1), &[1, 2]);
    let third = desk.member(3);
    assert_eq!(third.standing, MemberStanding::Behind, "it is brought the current version all the same");
    assert!(third.message.contains("serves meanwhile"), "{}", third.message);
    // One replica serves a third version: the first version is too old then.
    desk.tell(1, |state| state.installed = Some(held(3)));
    assert_eq!((desk.membership.view().newest, serving(&desk)), (Some(3), vec![1, 2]));
    let why = desk.membership.view().may_serve(&held(1)).unwrap_err();
    assert!(why.contains("version 1") && why.contains("newest in service is 3") && why.contains("maxSkew (1)"), "{why}");
    assert!(!desk.member(3).message.contains("meanwhile"), "{}", desk.member(3).message);
}

#[test]
fn replica_too_far_ahead_waits_and_says_so() {
    let mut desk = at_one_and_two(Some(0), &[1]);
    let why = desk.membership.view().may_serve(&held(2)).unwrap_err();
    assert!(why.contains("serves once 2 counts"), "{why}");
    assert!(desk.member(1).message.contains("serves once that counts"), "{}", desk.member(1).message);
    desk.tell(2, |state| state.installed = Some(held(2)));
    assert_eq!(serving(&desk), [1, 2]);
    assert!(desk.member(1).message.contains("serves version 2"), "{}", desk.member(1).message);
}

#[test]
fn replica_waiting_for_its_turn_serves_within_the_limit() {
    for (limit, standing) in [(None, MemberStanding::Updating), (Some(1), MemberStanding::Updating), (Some(0), MemberStanding::Behind)] {
        let mut policy = rules(limit).policy;
        (policy.max_unavailable, policy.min_ready) = (1, 1);
        let mut desk = Desk::restored(MembershipConfig { policy, ..config() }, 2, Restored::default());
        desk.form(2);
        desk.serves(1);
        desk.leads(2, 1, UpdatePhase::Activate, &[(1, InstallStep::Installed), (2, InstallStep::Delivered)]);
        desk.tell(2, |state| state.phase = MemberPhase::Updating);
        desk.tell(1, |state| state.installed = Some(held(2)));
        assert_eq!(desk.member(2).standing, standing, "{limit:?}");
    }
}

#[test]
fn both_versions_serve_in_a_rollback_until_enough_returned() {
    let mut desk = at_one_and_two(Some(0), &[1, 2, 3]);
    assert_eq!(serving(&desk), [1, 2, 3]);
    let decisions = desk.see(Observation::Configure(Box::new(MembershipConfig { target: Some(1), ..rules(Some(0)) })));
    desk.obey(decisions);
    desk.tell(1, |state| state.installed = Some(held(1)));
    assert_eq!((desk.membership.view().newest, serving(&desk)), (Some(1), vec![1, 2, 3]));
    desk.tell(2, |state| state.installed = Some(held(1)));
    assert_eq!(desk.membership.view().version, Some(held(1)));
    assert_eq!(serving(&desk), [1, 2]);
    let why = desk.membership.view().may_serve(&held(2)).unwrap_err();
    assert!(why.contains("the group went back to 1"), "{why}");
}

//! The return to an earlier version, and the next version after it.

use super::desk::*;
use crate::membership::{Decision, MemberStanding, MembershipConfig, Observation, Restored};
use crate::protocol::*;

fn target(version: Option<Version>) -> Observation {
    Observation::Configure(Box::new(MembershipConfig { target: version, ..config() }))
}

/// All rollouts serve version 2, and these keep version 1.
fn at_two(rollouts: u32, keep: &[u32]) -> Desk {
    let mut desk = Desk::formed(rollouts);
    for version in [1, 2] {
        desk.serves(version);
    }
    for n in keep {
        desk.tell(*n, |state| state.earlier = vec![held(1)]);
    }
    desk
}

/// The last commit that a member received.
fn reported(desk: &Desk, n: u32) -> CommitRequest {
    let commits = desk.decisions.iter().rev().find_map(|decision| match decision {
        Decision::Commit { member, request, .. } if *member == name(n) => Some((**request).clone()),
        _ => None,
    });
    commits.unwrap()
}

fn installs(desk: &mut Desk, n: u32, version: Version) {
    let decisions = desk.tell(n, |state| {
        let before = state.retained.replace(held(version));
        state.earlier = before.into_iter().filter(|before| before.version != version).collect();
        state.installed = Some(held(version));
    });
    desk.obey(decisions);
}

fn version(desk: &Desk) -> Option<Version> {
    desk.membership.view().version.map(|held| held.version)
}

#[test]
fn kept_version_is_sent_to_all_and_counts_when_enough_serve() {
    let mut desk = at_two(2, &[1]);
    let epoch = desk.epoch();
    let decisions = desk.see(target(Some(1)));
    desk.obey(decisions);
    assert_eq!(desk.epoch(), epoch + 1, "nothing is waited for");
    let commit = reported(&desk, 2);
    assert_eq!(commit.current, Some(held(1)));
    assert_eq!(commit.returned, Some(Returned { to: 1, from: 2, pinned: true }));
    assert_eq!(commit.feeder, Some(name(1)));
    let view = desk.membership.view();
    assert_eq!((version(&desk), view.ready, view.wanted), (Some(2), 2, Some(held(1))), "those that were not taken back yet serve on");
    assert!(desk.member(2).message.contains("until it is switched to version 1"), "{}", desk.member(2).message);

    installs(&mut desk, 1, 1);
    assert_eq!(version(&desk), Some(1), "minReady is 1");
    assert!(desk.event(Reason::RolledBack).unwrap().1.contains("2 was current before"));
    assert_eq!(desk.member(1).standing, MemberStanding::Ready);
    assert_eq!(desk.member(2).standing, MemberStanding::Behind);
    installs(&mut desk, 2, 1);
    assert_eq!((desk.member(2).standing, desk.membership.view().ready), (MemberStanding::Ready, 2));
    let epoch = desk.epoch();
    desk.wait(30_000, &[0, 1, 2]);
    assert_eq!(desk.epoch(), epoch, "what is as it should be is left alone");
}

#[test]
fn version_waits_for_min_ready_rollouts_without_the_source() {
    let mut policy = policy();
    policy.min_ready = 2;
    let rules = MembershipConfig { policy, ..config() };
    let mut desk = Desk::restored(rules.clone(), 2, Restored::default());
    desk.form(2);
    desk.serves(1);
    desk.serves(2);
    desk.tell(0, |state| (state.installed, state.earlier) = (Some(held(1)), vec![held(1)]));
    let decisions = desk.see(Observation::Configure(Box::new(MembershipConfig { target: Some(1), ..rules })));
    desk.obey(decisions);
    assert_eq!(reported(&desk, 1).feeder, Some(name(0)));
    installs(&mut desk, 1, 1);
    assert_eq!(version(&desk), Some(2));
    desk.tell(2, |state| (state.installed, state.phase) = (Some(held(1)), MemberPhase::Dirty));
    assert_eq!(version(&desk), Some(2), "half an update counts for nothing");
    desk.tell(2, |state| state.phase = MemberPhase::Ready);
    assert_eq!(version(&desk), Some(1));
}

#[test]
fn unkept_version_changes_nothing_and_kept_ones_are_listed() {
    let mut desk = at_two(2, &[2]);
    let epoch = desk.epoch();
    let decisions = desk.see(target(Some(7)));
    desk.obey(decisions);
    desk.wait(10_000, &[0, 1, 2]);
    assert_eq!((desk.epoch(), version(&desk)), (epoch, Some(2)));
    let degraded = desk.membership.view().degraded;
    let missing = degraded.iter().find(|degradation| degradation.reason == Reason::TargetVersionMissing).unwrap();
    assert!(missing.message.contains("version 7") && missing.message.contains("2 (by 3), 1 (by 1)"), "{}", missing.message);
    assert!(desk.event(Reason::TargetVersionMissing).is_some());
    // A member that keeps it arrives.
    let decisions = desk.tell(1, |state| state.earlier = vec![held(7)]);
    desk.obey(decisions);
    assert_eq!(reported(&desk, 1).current, Some(held(7)));
    assert!(!desk.reasons().contains(&Reason::TargetVersionMissing));
}

#[test]
fn removed_target_allows_higher_versions_and_no_stale_one() {
    let mut desk = at_two(2, &[1, 2]);
    let decisions = desk.see(target(Some(1)));
    desk.obey(decisions);
    installs(&mut desk, 1, 1);
    installs(&mut desk, 2, 1);
    let decisions = desk.see(target(None));
    desk.obey(decisions);
    assert_eq!(reported(&desk, 0).returned, Some(Returned { to: 1, from: 2, pinned: false }));
    // A member that was away reports its version from then.
    installs(&mut desk, 2, 2);
    assert_eq!((version(&desk), desk.member(2).standing), (Some(1), MemberStanding::Behind));
    installs(&mut desk, 2, 1);
    let epoch = desk.epoch();
    installs(&mut desk, 1, 3);
    assert_eq!(version(&desk), Some(3));
    installs(&mut desk, 2, 3);
    desk.wait(20_000, &[0, 1, 2]);
    assert_eq!((desk.epoch(), desk.membership.view().returned), (epoch, None), "no epoch for what the members see themselves");
}

#[test]
fn a_target_that_is_current_holds_the_group_there() {
    let mut desk = at_two(1, &[]);
    let decisions = desk.see(target(Some(2)));
    desk.obey(decisions);
    assert_eq!(reported(&desk, 0).returned, Some(Returned { to: 2, from: 2, pinned: true }));
    assert_eq!((version(&desk), desk.membership.view().ready), (Some(2), 1));
    let decisions = desk.see(target(None));
    desk.obey(decisions);
    assert_eq!(reported(&desk, 0).returned, None);
}

#[test]
fn rollouts_go_back_without_a_trainer_even_one_alone() {
    let mut desk = at_two(1, &[1]);
    let decisions = desk.lose(0);
    desk.obey(decisions);
    desk.plan(&[1], Vec::new());
    assert!(!desk.membership.view().committed);
    let decisions = desk.see(target(Some(1)));
    desk.obey(decisions);
    desk.wait(3_000, &[1]);
    assert_eq!((reported(&desk, 1).current, reported(&desk, 1).feeder), (Some(held(1)), Some(name(1))));
    installs(&mut desk, 1, 1);
    assert_eq!(version(&desk), Some(1));
}

#[test]
fn a_restarted_controller_takes_a_group_over_that_went_back() {
    let mut desk = at_two(2, &[1, 2]);
    let decisions = desk.see(target(Some(1)));
    desk.obey(decisions);
    installs(&mut desk, 1, 1);
    installs(&mut desk, 2, 1);
    let returned = desk.membership.view().returned;
    let restored = Restored { term: 1, epoch: desk.epoch(), version: desk.membership.view().version, highest: 2, refused: Vec::new() };
    let rules = MembershipConfig { target: Some(1), ..config() };
    let mut next = Desk::restored(rules, 2, restored);
    next.states.clone_from(&desk.states);
    for state in &mut next.states {
        state.returned = returned;
    }
    // The source reports that version 2 counted once.
    next.states[0].installed = Some(held(2));
    next.plan(&[0, 1, 2], Vec::new());
    for n in 0..=2 {
        let decisions = next.announce(n);
        next.obey(decisions);
    }
    next.wait(10_000, &[0, 1, 2]);
    assert!(next.event(Reason::GroupFormed).is_some());
    assert_eq!((next.epoch(), version(&next)), (desk.epoch(), Some(1)));
}

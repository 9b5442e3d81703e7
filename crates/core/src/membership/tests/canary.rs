//! Versions that replicas refuse by their canary: when a refusal counts for all, and the way back.

use super::desk::*;
use crate::membership::{Decision, MemberStanding, MembershipConfig, Observation, Restored};
use crate::protocol::*;

fn rules(min_ready: u32) -> MembershipConfig {
    let canary = CanaryPolicy { prompt: "p".into(), max_tokens: 1, least_log_prob_milli: -4000, greatest_log_prob_milli: 0 };
    MembershipConfig { policy: UpdatePolicy { canary: Some(canary), min_ready, keep: 2, ..policy() }, ..config() }
}

/// A group with a canary in which every member holds version 1.
fn at_one(rollouts: u32, min_ready: u32) -> Desk {
    let mut desk = Desk::restored(rules(min_ready), rollouts, Restored::default());
    desk.form(rollouts);
    desk.serves(1);
    desk
}

/// A replica's canary refuses a version: its engine stays paused, and it lists the version that it kept before.
fn refuses(desk: &mut Desk, n: u32, version: Version) -> Vec<Decision> {
    desk.tell(n, |state| {
        state.phase = MemberPhase::Dirty;
        state.installed = None;
        state.refused = vec![RefusedVersion { held: held(version), measured: "no number".to_owned() }];
    })
}

fn takes(desk: &mut Desk, n: u32, version: Version) -> Vec<Decision> {
    desk.tell(n, |state| {
        let before = state.retained.replace(held(version));
        state.earlier = before.into_iter().filter(|before| before.version != version).collect();
        (state.phase, state.installed) = (MemberPhase::Ready, Some(held(version)));
        state.refused.retain(|refused| refused.held.version > version);
    })
}

fn begins(desk: &mut Desk, n: u32) {
    desk.tell(n, |state| state.phase = MemberPhase::Updating);
}

fn reported(desk: &Desk, n: u32) -> CommitRequest {
    let commits = desk.decisions.iter().rev().find_map(|decision| match decision {
        Decision::Commit { member, request, .. } if *member == name(n) => Some((**request).clone()),
        _ => None,
    });
    commits.unwrap()
}

/// The last Event about a refusal by the whole group.
fn refusal(desk: &Desk) -> Option<String> {
    desk.decisions.iter().rev().find_map(|decision| match decision {
        Decision::Event { reason: Reason::VersionRefused, message, member: None, .. } => Some(message.clone()),
        _ => None,
    })
}

fn version(desk: &Desk) -> Option<Version> {
    desk.membership.view().version.map(|held| held.version)
}

#[test]
fn version_no_member_took_leaves_previous_and_spends_number() {
    let mut desk = at_one(2, 1);
    let epoch = desk.epoch();
    begins(&mut desk, 1);
    begins(&mut desk, 2);
    refuses(&mut desk, 1, 2);
    assert_eq!(refusal(&desk), None, "one may still take it");
    let decisions = refuses(&mut desk, 2, 2);
    assert_eq!((desk.member(1).standing, desk.member(1).reason), (MemberStanding::Dirty, Reason::VersionRefused));
    desk.obey(decisions);
    let message = refusal(&desk).unwrap();
    for said in ["version 2: 2 of 2 pods", "actors/r1: no number", "actors/r2: no number", "version 1 stays"] {
        assert!(message.contains(said), "{message}");
    }
    assert_eq!((version(&desk), desk.membership.view().refused), (Some(1), vec![2]));
    assert_eq!(desk.epoch(), epoch + 1, "the members are informed at once");
    let commit = reported(&desk, 0);
    assert_eq!((commit.current, commit.refused), (Some(held(1)), vec![2]));
    assert_eq!(commit.returned, Some(Returned { to: 1, from: 2, pinned: false }));
    assert!(desk.reasons().contains(&Reason::VersionRefused));
    // They serve after they were fed the previous version. The degradation stays until a higher version counts.
    for n in [1, 2] {
        let decisions = desk.tell(n, |state| (state.phase, state.installed) = (MemberPhase::Ready, Some(held(1))));
        desk.obey(decisions);
    }
    assert_eq!((desk.membership.view().ready, desk.reasons()), (2, vec![Reason::VersionRefused]));
    let epoch = desk.epoch();
    desk.wait(30_000, &[0, 1, 2]);
    assert_eq!(desk.epoch(), epoch, "what is as it should be is left alone");
    for n in [1, 2] {
        takes(&mut desk, n, 3);
    }
    assert_eq!((version(&desk), desk.reasons()), (Some(3), Vec::new()));
    assert_eq!(desk.membership.view().refused, [2], "what was refused stays known");
}

#[test]
fn counted_version_most_refuse_is_rolled_back() {
    let mut desk = at_one(3, 1);
    begins(&mut desk, 2);
    begins(&mut desk, 3);
    takes(&mut desk, 1, 2);
    assert_eq!(version(&desk), Some(2), "minReady is 1");
    refuses(&mut desk, 2, 2);
    assert_eq!(desk.membership.view().wanted, Some(held(2)), "one and one: the third decides");
    let decisions = refuses(&mut desk, 3, 2);
    desk.obey(decisions);
    let message = refusal(&desk).unwrap();
    assert!(message.contains("2 of 3 pods") && message.contains("goes back to version 1"), "{message}");
    let commit = reported(&desk, 1);
    assert_eq!((commit.current, commit.returned), (Some(held(1)), Some(Returned { to: 1, from: 2, pinned: false })));
    assert_eq!(version(&desk), Some(2), "until somebody serves the one before");
    let decisions = takes(&mut desk, 2, 1);
    desk.obey(decisions);
    assert_eq!(version(&desk), Some(1));
    assert!(desk.event(Reason::RolledBack).unwrap().1.contains("2 was current before"));
    assert_eq!(desk.member(1).standing, MemberStanding::Behind, "also the one that took it");
}

#[test]
fn minority_that_refuses_is_named_and_does_not_serve() {
    let mut desk = at_one(3, 1);
    for n in [1, 2] {
        takes(&mut desk, n, 2);
    }
    let decisions = refuses(&mut desk, 3, 2);
    desk.obey(decisions);
    assert_eq!((version(&desk), desk.membership.view().refused), (Some(2), Vec::new()));
    let (member, _) = desk.event(Reason::VersionRefused).unwrap();
    assert_eq!(member, Some(name(3)));
    assert_eq!((desk.member(3).standing, desk.member(3).reason), (MemberStanding::Dirty, Reason::VersionRefused));
    assert_eq!(desk.membership.view().ready, 2);
    // Those that accepted it move on to the next version, so they give no majority against the replica that is left.
    for n in [1, 2] {
        takes(&mut desk, n, 3);
    }
    assert_eq!((version(&desk), desk.membership.view().refused), (Some(3), Vec::new()));
}

#[test]
fn half_is_no_majority_and_unasked_replicas_do_not_count() {
    let mut desk = at_one(2, 1);
    takes(&mut desk, 1, 2);
    refuses(&mut desk, 2, 2);
    assert_eq!((version(&desk), desk.membership.view().refused), (Some(2), Vec::new()));
    // The replicas switch one after another, and the first of five refuses. The others keep their version: they were never asked.
    let mut desk = at_one(5, 1);
    refuses(&mut desk, 1, 2);
    assert_eq!(desk.membership.view().refused, [2]);
}

#[test]
fn no_replica_refuses_for_others_without_a_canary() {
    let mut desk = Desk::formed(1);
    desk.serves(1);
    refuses(&mut desk, 1, 2);
    assert_eq!(desk.membership.view().refused, Vec::<Version>::new());
}

#[test]
fn the_very_first_version_that_most_refuse_never_counts() {
    let mut desk = Desk::restored(rules(1), 3, Restored::default());
    desk.form(3);
    for n in [2, 3] {
        refuses(&mut desk, n, 1);
    }
    takes(&mut desk, 1, 1);
    desk.tell(0, |state| state.installed = Some(held(1)));
    assert_eq!((version(&desk), desk.membership.view().refused), (None, vec![1]));
    let message = refusal(&desk).unwrap();
    assert!(message.contains("no earlier version"), "{message}");
}

#[test]
fn refused_version_without_a_way_back_reaches_no_member() {
    let mut desk = at_one(3, 1);
    for n in 0..=3 {
        desk.tell(n, |state| state.retained = None);
    }
    desk.tell(1, |state| (state.retained, state.installed) = (Some(held(2)), Some(held(2))));
    for n in [2, 3] {
        let decisions = refuses(&mut desk, n, 2);
        desk.obey(decisions);
    }
    assert_eq!((version(&desk), desk.membership.view().wanted), (Some(2), None));
    let degraded = desk.membership.view().degraded;
    let refused = degraded.iter().find(|degradation| degradation.member.is_none() && degradation.reason == Reason::VersionRefused).unwrap();
    assert!(refused.message.contains("no member keeps an earlier version"), "{}", refused.message);
    // A member that keeps it arrives.
    let decisions = desk.tell(3, |state| state.retained = Some(held(1)));
    desk.obey(decisions);
    assert_eq!(reported(&desk, 2).current, Some(held(1)));
}

#[test]
fn restarted_controller_sends_no_refused_version() {
    let restored = Restored { epoch: 4, version: Some(held(2)), refused: vec![2], ..Restored::default() };
    let mut desk = Desk::restored(rules(1), 2, restored);
    for n in 0..=2 {
        desk.states[n].retained = Some(held(1));
        desk.states[n].earlier = vec![held(2)];
    }
    desk.states[1].installed = Some(held(2));
    desk.form(2);
    let commit = reported(&desk, 1);
    assert_eq!((commit.current, commit.refused), (Some(held(1)), vec![2]));
    takes(&mut desk, 1, 1);
    assert_eq!(version(&desk), Some(1));
    // Another incarnation of a source reports that it once counted.
    desk.tell(0, |state| state.installed = Some(held(2)));
    assert_eq!(version(&desk), Some(1));
}

#[test]
fn target_naming_a_refused_version_is_rejected_with_reason() {
    let mut desk = at_one(2, 1);
    for n in [1, 2] {
        refuses(&mut desk, n, 2);
    }
    desk.tell(0, |state| state.earlier = vec![held(2)]);
    let decisions = desk.see(Observation::Configure(Box::new(MembershipConfig { target: Some(2), ..rules(1) })));
    desk.obey(decisions);
    assert_eq!(desk.membership.view().wanted, Some(held(1)));
    let degraded = desk.membership.view().degraded;
    let missing = degraded.iter().find(|degradation| degradation.reason == Reason::TargetVersionMissing).unwrap();
    assert!(missing.message.contains("which the canary refused"), "{}", missing.message);
    // Without a canary, only `spec.targetVersion` decides.
    let decisions = desk.see(Observation::Configure(Box::new(MembershipConfig { target: Some(2), ..config() })));
    desk.obey(decisions);
    assert_eq!(desk.membership.view().wanted, Some(held(2)));
}

#[test]
fn engine_that_cannot_be_asked_has_its_own_reason() {
    let refusal = Refusal { code: RefusalCode::CanaryUnavailable, message: "it gives no log-probs".to_owned() };
    let desk = Desk::refused_by_second(rules(1), refusal);
    let (member, message) = desk.event(Reason::Unsupported).unwrap();
    assert_eq!(member, Some(name(2)));
    assert!(message.contains("no log-probs"), "{message}");
    assert!(desk.member(2).message.contains("Unsupported"), "{}", desk.member(2).message);
}

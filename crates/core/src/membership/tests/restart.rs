//! A controller that starts: which groups it takes over.

use super::desk::*;
use crate::membership::{Decision, GroupStage, MemberStanding, Observation, Restored};
use crate::plan::LeftOutCode;
use crate::protocol::*;

/// A controller that starts while this group works.
fn alongside(working: &Desk) -> Desk {
    let restored =
        Restored { term: 2, epoch: working.epoch(), version: working.membership.view().version, highest: 0, refused: Vec::new() };
    let mut desk = Desk::restored(config(), 0, restored);
    desk.states.clone_from(&working.states);
    desk
}

#[test]
fn a_working_group_is_taken_over_without_a_message() {
    let mut working = Desk::formed(2);
    working.serves(3);
    let mut desk = alongside(&working);
    desk.plan(&[0, 1, 2], Vec::new());
    assert_eq!(desk.membership.view().stage, GroupStage::Adopting);
    for n in 0..=2 {
        desk.announce(n);
    }
    assert!(desk.decisions.iter().all(|decision| matches!(decision, Decision::Event { .. })), "{:?}", desk.decisions);
    let view = desk.membership.view();
    assert_eq!((view.stage, view.epoch, view.ready), (GroupStage::Committed, 1, 2));
    assert_eq!(view.id.unwrap().term, 0, "it is still the old group");
    assert!(!persists(&desk.wait(60_000, &[0, 1, 2])));
}

#[test]
fn a_group_in_the_middle_of_an_update_is_taken_over_too() {
    let mut working = Desk::formed(2);
    working.serves(3);
    let mut desk = alongside(&working);
    desk.states[1].phase = MemberPhase::Updating;
    desk.states[1].healthy = false;
    desk.plan(&[0, 1, 2], Vec::new());
    for n in 0..=2 {
        desk.announce(n);
    }
    assert_eq!(desk.membership.view().stage, GroupStage::Committed);
}

#[test]
fn a_member_whose_pause_made_its_pod_unready_is_waited_for() {
    let mut working = Desk::formed(2);
    working.serves(3);
    let mut desk = alongside(&working);
    desk.states[1].phase = MemberPhase::Updating;
    desk.states[1].healthy = false;
    desk.plan(&[0, 2], vec![left_out(1, LeftOutCode::NotReady, "its pod is not ready")]);
    for n in 0..=2 {
        desk.announce(n);
    }
    assert!(!persists(&desk.wait(2_000, &[0, 1, 2])));
    // The update ended: the pod is ready again.
    desk.plan(&[0, 1, 2], Vec::new());
    desk.tell(1, |state| (state.phase, state.healthy) = (MemberPhase::Ready, true));
    let view = desk.membership.view();
    assert_eq!((view.stage, view.epoch, view.ready), (GroupStage::Committed, 1, 2));
}

/// Engines that register are not known before the agents of their pods report.
#[test]
fn pod_whose_engines_are_not_reported_yet_is_waited_for() {
    let mut working = Desk::formed(2);
    working.serves(3);
    let mut desk = alongside(&working);
    let unreported = left_out(2, LeftOutCode::NotReported, "its agent has not reported yet which engines are registered");
    desk.plan(&[0, 1], vec![unreported]);
    for n in 0..=2 {
        desk.announce(n);
    }
    assert!(!persists(&desk.wait(2_000, &[0, 1, 2])), "{:?}", desk.decisions);
    desk.plan(&[0, 1, 2], Vec::new());
    let view = desk.membership.view();
    assert_eq!((view.stage, view.epoch, view.ready), (GroupStage::Committed, 1, 2));
}

/// One that never reports does not keep the others from a group.
#[test]
fn pod_that_never_reports_its_engines_is_left_out_in_the_end() {
    let working = Desk::formed(2);
    let mut desk = alongside(&working);
    let unreported = left_out(2, LeftOutCode::NotReported, "its agent has not reported yet which engines are registered");
    desk.plan(&[0, 1], vec![unreported]);
    for n in 0..=1 {
        desk.announce(n);
    }
    let decisions = desk.wait(config().adopt_window_ms * 4, &[0, 1]);
    assert!(persists(&decisions), "{decisions:?}");
}

#[test]
fn version_reached_meanwhile_is_learned_from_members() {
    let mut working = Desk::formed(2);
    working.serves(3);
    let mut desk = alongside(&working);
    for state in &mut desk.states {
        (state.retained, state.installed) = (Some(held(5)), Some(held(5)));
    }
    desk.plan(&[0, 1, 2], Vec::new());
    for n in 0..=2 {
        desk.announce(n);
    }
    assert_eq!(desk.membership.view().version, Some(held(5)));
}

#[test]
fn agents_that_have_not_announced_themselves_yet_are_waited_for() {
    let working = Desk::formed(2);
    let mut desk = alongside(&working);
    desk.plan(&[0, 1, 2], Vec::new());
    desk.announce(0);
    desk.announce(1);
    let decisions = desk.wait(3_800, &[0, 1]);
    assert!(decisions.is_empty(), "{decisions:?}");
    desk.announce(2);
    assert_eq!(desk.membership.view().stage, GroupStage::Committed);
    assert_eq!(desk.epoch(), 1);
}

#[test]
fn members_that_come_one_by_one_extend_a_bounded_wait() {
    let working = Desk::formed(3);
    let mut desk = alongside(&working);
    desk.plan(&[0, 1, 2, 3], Vec::new());
    desk.announce(0);
    let mut decisions = Vec::new();
    for n in 1..=3 {
        let there: Vec<_> = (0..n).collect();
        decisions.extend(desk.wait(5_000, &there));
        desk.announce(n);
    }
    assert!(!persists(&decisions), "{decisions:?}");
    assert_eq!((desk.membership.view().stage, desk.epoch()), (GroupStage::Committed, 1), "15 s after the start it is taken over");

    // An agent that repeats its report is not one that reconnected.
    let mut desk = alongside(&working);
    desk.plan(&[0, 1, 2, 3], Vec::new());
    desk.announce(0);
    desk.wait(5_000, &[0]);
    desk.announce(0);
    desk.wait(2_200, &[0]);
    assert_ne!(desk.membership.view().stage, GroupStage::Adopting);
}

#[test]
fn no_member_is_gone_while_other_objects_agents_return() {
    let working = Desk::formed(2);
    let mut desk = alongside(&working);
    desk.plan(&[0, 1, 2], Vec::new());
    let begun = desk.now;
    let mut decisions = Vec::new();
    // For half a minute only agents of other objects report.
    for _ in 0..10 {
        decisions.extend(desk.wait(3_000, &[]));
        let at = desk.now;
        decisions.extend(desk.see(Observation::ComingBack { at }));
    }
    assert!(decisions.is_empty() && desk.membership.view().stage == GroupStage::Adopting, "{decisions:?}");
    for n in 0..=2 {
        desk.announce(n);
    }
    assert_eq!((desk.membership.view().stage, desk.epoch()), (GroupStage::Committed, 1));

    // The wait ends after a minute, although other agents still reconnect.
    let mut desk = alongside(&working);
    desk.plan(&[0, 1, 2], Vec::new());
    while desk.now < begun + 61_000 {
        desk.wait(3_000, &[]);
        let at = desk.now;
        desk.see(Observation::ComingBack { at });
    }
    assert_ne!(desk.membership.view().stage, GroupStage::Adopting);
}

#[test]
fn announced_agent_without_a_stream_yet_is_waited_for() {
    let working = Desk::formed(2);
    let mut desk = alongside(&working);
    desk.plan(&[0, 1, 2], Vec::new());
    desk.announce(0);
    desk.announce(1);
    let announced = desk.announcement(2);
    desk.see(Observation::Announced(announced));
    let decisions = desk.wait(5_000, &[0, 1]);
    assert!(!persists(&decisions), "{decisions:?}");
    desk.announce(2);
    assert_eq!((desk.membership.view().stage, desk.epoch()), (GroupStage::Committed, 1));
}

#[test]
fn group_with_a_gone_member_is_formed_again_after_announce_time() {
    let working = Desk::formed(2);
    let mut desk = alongside(&working);
    desk.plan(&[0, 1, 2], Vec::new());
    desk.announce(0);
    desk.announce(1);
    let decisions = desk.wait(7_200, &[0, 1]);
    assert!(persists(&decisions));
    desk.obey(decisions);
    assert_eq!((desk.epoch(), desk.id().term, desk.membership.view().world_size), (2, 2, 2));
}

#[test]
fn members_with_another_roster_are_not_taken_over() {
    let working = Desk::formed(2);
    let mut desk = alongside(&working);
    desk.states[1].roster_digest = Some("of another roster".to_owned());
    desk.plan(&[0, 1, 2], Vec::new());
    let mut decisions = Vec::new();
    for n in 0..=2 {
        decisions.extend(desk.announce(n));
    }
    desk.obey(decisions);
    assert_eq!(desk.epoch(), 2);
}

#[test]
fn numbers_that_agents_have_seen_are_not_used_again() {
    let working = Desk::formed(1);
    let mut desk = alongside(&working);
    desk.states[1].epoch.as_mut().unwrap().epoch = 41;
    desk.plan(&[0, 1], Vec::new());
    let mut decisions = desk.announce(0);
    decisions.extend(desk.announce(1));
    desk.obey(decisions);
    assert_eq!(desk.epoch(), 42);
}

#[test]
fn pod_of_newer_object_is_kept_and_of_older_one_is_taken() {
    for (created, taken) in [(9, false), (0, true)] {
        let mut desk = Desk::new(2);
        let other = EpochId { weightsync: "other".to_owned(), created, term: 7, epoch: 70 };
        desk.states[2].epoch = Some(other);
        desk.states[2].phase = MemberPhase::Ready;
        desk.form(2);
        let shown = desk.member(2);
        assert_eq!(shown.standing == MemberStanding::Ready, taken, "{shown:?}");
        assert_eq!(shown.reason == Reason::PodClaimed, !taken);
        assert_eq!(desk.epoch(), 1, "another object's numbers are not ours");
    }
}

#[test]
fn new_object_does_not_wait_for_an_old_group() {
    let mut desk = Desk::new(1);
    desk.plan(&[0, 1], Vec::new());
    desk.announce(0);
    assert!(persists(&desk.announce(1)));
}

#[test]
fn earlier_controllers_epoch_ends_with_no_member_to_await() {
    let mut working = Desk::formed(2);
    working.serves(3);
    let mut desk = alongside(&working);
    desk.plan(&[0, 1, 2], Vec::new());
    // The source never announces itself.
    desk.announce(1);
    desk.announce(2);
    assert!(desk.wait(5_900, &[1, 2]).iter().all(|decision| !matches!(decision, Decision::Fence { .. })));
    let decisions = desk.wait(200, &[1, 2]);
    let fenced = |n: u32| decisions.iter().any(|decision| matches!(decision, Decision::Fence { to, .. } if to.contains(&life(n, 1))));
    assert!(fenced(1) && fenced(2), "{decisions:?}");
    // An ended epoch is not taken over when the source arrives at last.
    desk.announce(0);
    desk.wait(1_100, &[0, 1, 2]);
    assert_eq!(desk.membership.view().stage, GroupStage::Persisting);
}

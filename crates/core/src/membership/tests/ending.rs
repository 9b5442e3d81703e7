//! How epochs end for agents that are not members any more.

use super::desk::*;
use crate::membership::{Decision, GroupStage, Observation};
use crate::plan::LeftOutCode;
use crate::protocol::*;

fn released(decisions: &[Decision]) -> Vec<Incarnation> {
    let lists = decisions.iter().filter_map(|decision| match decision {
        Decision::Release { to, .. } => Some(to.clone()),
        _ => None,
    });
    lists.flatten().collect()
}

#[test]
fn suspended_object_releases_all_until_states_show_it() {
    let mut desk = Desk::formed(2);
    let decisions = desk.see(Observation::Suspend(true));
    assert_eq!(released(&decisions).len(), 3);
    assert!(!desk.membership.view().released);
    let again = desk.wait(1_100, &[0, 1, 2]);
    assert_eq!(released(&again).len(), 3, "no one's state shows it yet");
    desk.obey(again);
    let view = desk.membership.view();
    assert_eq!((view.stage, view.released, view.committed), (GroupStage::Suspended, true, false));
    assert!(desk.wait(30_000, &[0, 1, 2]).is_empty());
    let decisions = desk.see(Observation::Suspend(false));
    desk.obey(decisions);
    assert_eq!((desk.membership.view().stage, desk.epoch()), (GroupStage::Committed, 2));
}

#[test]
fn unproven_engine_outside_any_epoch_is_released_too() {
    let mut desk = Desk::formed(2);
    desk.tell(2, |state| (state.epoch, state.phase) = (None, MemberPhase::Dirty));
    let decisions = desk.see(Observation::Delete);
    assert_eq!(released(&decisions).len(), 3);
    desk.obey(decisions);
    assert_eq!(released(&desk.wait(1_100, &[0, 1, 2])), [life(2, 1)], "its state does not show yet that its engine runs");
    desk.tell(2, |state| state.phase = MemberPhase::Idle);
    assert!(desk.wait(30_000, &[0, 1, 2]).is_empty());
}

#[test]
fn a_prepare_that_was_under_way_does_not_outlive_a_suspension() {
    let mut desk = Desk::new(1);
    desk.plan(&[0, 1], Vec::new());
    desk.announce(0);
    desk.announce(1);
    let prepares = desk.see(Observation::EpochPersisted { epoch: 1 });
    assert_eq!(released(&desk.see(Observation::Suspend(true))).len(), 2);
    // The prepare arrives after the release.
    desk.obey(prepares);
    let decisions = desk.wait(1_100, &[0, 1]);
    assert_eq!(released(&decisions).len(), 2);
}

#[test]
fn a_deleted_object_never_forms_a_group_again() {
    let mut desk = Desk::formed(2);
    let decisions = desk.see(Observation::Delete);
    desk.obey(decisions);
    assert!(desk.membership.view().released);
    desk.see(Observation::Suspend(false));
    assert!(!persists(&desk.wait(60_000, &[0, 1, 2])));
    assert_eq!(desk.membership.view().stage, GroupStage::Released);
}

#[test]
fn a_fence_that_a_state_does_not_show_is_sent_again() {
    let mut desk = Desk::formed(2);
    let decisions = desk.tell(2, |state| state.healthy = false);
    // All decisions except the fence are carried out.
    let others: Vec<Decision> = decisions.into_iter().filter(|decision| !matches!(decision, Decision::Fence { .. })).collect();
    let prepares = others.iter().find_map(|decision| match decision {
        Decision::PersistEpoch { epoch } => Some(*epoch),
        _ => None,
    });
    let decisions = desk.see(Observation::EpochPersisted { epoch: prepares.unwrap() });
    let first = decisions.iter().filter(|decision| matches!(decision, Decision::Fence { to, .. } if *to == [life(2, 1)])).count();
    assert_eq!(first, 1);
    desk.obey(decisions.into_iter().filter(|decision| !matches!(decision, Decision::Fence { .. })).collect());
    let later = desk.wait(3_500, &[0, 1, 2]);
    let fences = later.iter().filter(|decision| matches!(decision, Decision::Fence { to, .. } if *to == [life(2, 1)])).count();
    assert_eq!(fences, 3, "{later:?}");
}

#[test]
fn deselected_pod_is_released_and_broken_one_is_fenced() {
    let mut desk = Desk::formed(3);
    let decisions = desk.plan(&[0, 1], vec![left_out(2, LeftOutCode::NotReady, "the engine's container restarts")]);
    assert!(persists(&decisions));
    desk.see(Observation::EpochPersisted { epoch: 2 });
    let decisions = desk.wait(2_500, &[0, 1, 2, 3]);
    assert_eq!(released(&decisions).first(), Some(&life(3, 1)));
    let fenced =
        |life: Incarnation| decisions.iter().any(|decision| matches!(decision, Decision::Fence { to, .. } if *to == [life.clone()]));
    assert!(fenced(life(2, 1)) && !fenced(life(3, 1)), "{decisions:?}");
}

#[test]
fn a_member_that_left_the_epoch_by_itself_gets_a_new_one() {
    let mut desk = Desk::formed(2);
    desk.tell(2, |state| (state.epoch, state.phase) = (None, MemberPhase::Idle));
    assert!(!persists(&desk.wait(900, &[0, 1, 2])), "a state may be older than the commit that it has not seen");
    let decisions = desk.wait(300, &[0, 1, 2]);
    desk.obey(decisions);
    assert_eq!((desk.epoch(), desk.membership.view().world_size), (2, 3));
}

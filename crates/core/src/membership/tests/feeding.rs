//! Which member feeds which, and the report if no member can.

use super::desk::*;
use crate::membership::{Decision, GroupStage, MemberStanding, Observation};
use crate::plan::LeftOutCode;
use crate::protocol::*;

#[test]
fn source_feeds_if_it_retains_the_version_else_a_rollout() {
    // (versions that the source, rollout 1 and rollout 2 retain, the feeder)
    type Retained = Option<u64>;
    let table: [([Retained; 3], Option<u32>); 6] = [
        ([Some(3), Some(3), Some(3)], Some(0)),
        ([None, Some(3), Some(3)], Some(1)),
        ([None, None, Some(3)], Some(2)),
        ([None, None, None], None),
        // A newer version that never counted is not fed.
        ([Some(4), None, Some(3)], Some(2)),
        ([Some(2), Some(2), None], None),
    ];
    for ([source, one, two], feeder) in table {
        let mut desk = Desk::formed(2);
        desk.serves(3);
        for (n, retained) in [(0, source), (1, one), (2, two)] {
            desk.tell(n, |state| state.retained = retained.map(held));
        }
        desk.reborn(2, 2);
        desk.states[2].retained = two.map(held);
        let decisions = desk.announce(2);
        desk.obey(decisions);
        assert_eq!(desk.membership.view().feeder, feeder.map(name), "{source:?} {one:?} {two:?}");
    }
}

#[test]
fn version_no_member_retains_is_named_without_new_epochs() {
    let mut desk = Desk::formed(2);
    desk.serves(3);
    for n in 0..=2 {
        desk.tell(n, |state| state.retained = None);
    }
    desk.tell(2, |state| state.installed = None);
    desk.wait(120_000, &[0, 1, 2]);
    assert_eq!(desk.epoch(), 1);
    assert_eq!((desk.member(2).standing, desk.member(2).reason), (MemberStanding::Behind, Reason::NoFeeder));
    assert!(desk.reasons().contains(&Reason::NoFeeder));
    assert_eq!(desk.event(Reason::NoFeeder).unwrap().0, Some(name(2)));
}

#[test]
fn member_paused_for_feeding_before_last_commit_is_kept() {
    let mut desk = Desk::new(1);
    desk.plan(&[0, 1], Vec::new());
    desk.announce(0);
    desk.announce(1);
    let prepares = desk.see(Observation::EpochPersisted { epoch: 1 });
    desk.obey(prepares.into_iter().filter(|decision| matches!(decision, Decision::Prepare { .. })).collect());
    assert!(desk.membership.view().committed);
    // Once more, while the source's update runs and its response is under way.
    desk.reborn(1, 2);
    desk.lose(0);
    desk.reborn(0, 2);
    let mut decisions = desk.announce(0);
    decisions.extend(desk.announce(1));
    let mut last = None;
    while let Some(decision) = decisions.pop() {
        decisions.extend(match decision {
            Decision::PersistEpoch { epoch } => desk.see(Observation::EpochPersisted { epoch }),
            Decision::Prepare { to, request } => desk.prepare(&to, &request),
            Decision::Commit { to, member, request } if member == name(0) => {
                last = Some((to, member, request));
                Vec::new()
            }
            Decision::Commit { to, member, request } => desk.commit(&to, member, &request),
            _ => Vec::new(),
        });
    }
    let (to, member, request) = last.unwrap();
    desk.tell(1, |state| (state.phase, state.healthy) = (MemberPhase::Updating, false));
    let decisions = desk.plan(&[0], vec![left_out(1, LeftOutCode::NotReady, "its pod is not ready")]);
    assert!(decisions.is_empty(), "{decisions:?}");
    desk.commit(&to, member, &request);
    assert_eq!(desk.membership.view().stage, GroupStage::Committed);
}

#[test]
fn dirty_replica_stays_to_be_fed_and_never_counts() {
    let mut desk = Desk::formed(2);
    desk.serves(3);
    desk.tell(2, |state| (state.phase, state.installed) = (MemberPhase::Dirty, Some(held(3))));
    assert_eq!((desk.member(2).standing, desk.membership.view().ready), (MemberStanding::Dirty, 1));
    assert_eq!((desk.member(2).dirty, desk.member(2).installed), (true, None));
    assert!(desk.reasons().contains(&Reason::InstallFailed));
    let decisions = desk.wait(2_100, &[0, 1, 2]);
    assert!(persists(&decisions), "a new epoch is made to feed it");
    desk.obey(decisions);
    assert_eq!(desk.member(2).rank_offset, Some(2));
}

#[test]
fn epochs_for_a_member_that_cannot_be_fed_become_rarer() {
    let mut desk = Desk::formed(2);
    desk.serves(3);
    desk.tell(2, |state| state.installed = None);
    let mut at = Vec::new();
    let begin = desk.now;
    while desk.now < begin + 100_000 {
        let decisions = desk.wait(500, &[0, 1, 2]);
        if persists(&decisions) {
            at.push(desk.now - begin);
        }
        desk.obey(decisions);
    }
    assert!((4..=6).contains(&at.len()), "{at:?}");
}

#[test]
fn rollouts_feed_each_other_without_a_trainer() {
    let mut desk = Desk::formed(2);
    desk.serves(3);
    let decisions = desk.lose(0);
    desk.obey(decisions);
    assert!(!desk.membership.view().committed, "no one needs anything");
    let decisions = desk.tell(2, |state| (state.installed, state.retained) = (None, None));
    desk.obey(decisions);
    let decisions = desk.wait(1_100, &[1, 2]);
    desk.obey(decisions);
    let view = desk.membership.view();
    assert_eq!((view.committed, view.feeder, view.world_size), (true, Some(name(1)), 2));
    desk.tell(2, |state| state.installed = Some(held(3)));
    assert_eq!(desk.membership.view().ready, 2);
}

#[test]
fn running_update_is_not_cut_off_by_a_feeding_epoch() {
    let mut desk = Desk::formed(2);
    desk.serves(3);
    desk.tell(2, |state| (state.installed, state.phase) = (None, MemberPhase::Updating));
    assert!(!persists(&desk.wait(30_000, &[0, 1, 2])));
    assert_eq!(desk.member(2).reason, Reason::Updating);
}

#[test]
fn epoch_formed_for_feeding_names_member_and_version() {
    let mut desk = Desk::formed(2);
    desk.serves(3);
    desk.tell(2, |state| (state.installed, state.retained) = (None, None));
    let decisions = desk.wait(10_000, &[0, 1, 2]);
    desk.obey(decisions);
    let (_, message) = desk.event(Reason::GroupFormed).unwrap();
    assert!(message.starts_with("epoch 2: ") && message.ends_with("(Updating: actors/r2 without version 3)"), "{message}");
}

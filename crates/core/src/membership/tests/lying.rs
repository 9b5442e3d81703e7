//! What one member says about itself, true or not, changes nothing for the others.

use super::desk::*;
use crate::membership::{Decision, Observation};
use crate::protocol::*;

/// An epoch that no controller wrote.
fn claimed(epoch: u64) -> EpochId {
    EpochId { weightsync: "ws".to_owned(), created: 1, term: 0, epoch }
}

#[test]
fn epoch_claimed_far_above_the_written_changes_nothing() {
    let mut desk = Desk::formed(3);
    let mut decisions = desk.tell(3, |state| state.epoch = Some(claimed((1 << 63) - 2)));
    decisions.extend(desk.wait(5_000, &[0, 1, 2, 3]));
    desk.obey(decisions);
    let written = desk.decisions.iter().filter_map(|decision| match decision {
        Decision::PersistEpoch { epoch } => Some(*epoch),
        _ => None,
    });
    assert!(written.clone().all(|epoch| epoch < 10), "{:?}", written.collect::<Vec<_>>());
    let view = desk.membership.view();
    assert!(view.committed && view.epoch < 10, "the others go on: {view:?}");
    assert_eq!((desk.member(1).rank_offset, desk.member(2).rank_offset), (Some(1), Some(2)));
}

#[test]
fn epoch_claimed_before_the_first_group_changes_nothing() {
    let mut desk = Desk::new(2);
    desk.states[2].epoch = Some(claimed(u64::MAX));
    desk.form(2);
    assert!(desk.epoch() < 10, "{}", desk.epoch());
}

#[test]
fn rollout_that_calls_itself_a_source_is_not_preferred() {
    let mut desk = Desk::formed(2);
    desk.serves(3);
    desk.tell(0, |state| state.retained = None);
    let decisions = desk.tell(2, |state| state.role = Role::Source);
    desk.obey(decisions);
    let decisions = desk.lose(0);
    desk.obey(decisions);
    desk.reborn(0, 2);
    let decisions = desk.announce(0);
    desk.obey(decisions);
    assert_eq!(desk.membership.view().feeder, Some(name(1)));
}

#[test]
fn dirty_rollout_that_calls_itself_a_source_is_fed() {
    let mut desk = Desk::formed(2);
    desk.serves(3);
    desk.tell(2, |state| (state.role, state.installed, state.phase) = (Role::Source, None, MemberPhase::Dirty));
    let decisions = desk.wait(2_100, &[0, 1, 2]);
    assert!(persists(&decisions), "{decisions:?}");
}

#[test]
fn update_reported_by_a_member_that_leads_nothing_is_ignored() {
    let mut desk = Desk::formed(3);
    desk.serves(3);
    let (from, id) = (desk.states[3].incarnation.clone(), desk.id());
    for attempt in 1..=3 {
        let steps = [(1, InstallStep::Refused), (2, InstallStep::Refused), (3, InstallStep::Installed)];
        let update = Box::new(update(&id, 4, attempt, UpdatePhase::Failed, &steps));
        desk.see(Observation::Update { from: from.clone(), update });
    }
    let decisions = desk.wait(5_000, &[0, 1, 2, 3]);
    assert!(!persists(&decisions), "{decisions:?}");
    assert_eq!((desk.epoch(), desk.event(Reason::UpdateRefused), desk.membership.view().update), (1, None, None));
}

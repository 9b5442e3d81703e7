//! How a group comes about.

use super::desk::*;
use crate::membership::{Decision, GroupStage, MemberStanding, Observation};

#[test]
fn a_group_is_written_then_prepared_then_committed_with_the_source_last() {
    let desk = Desk::formed(2);
    let order: Vec<String> = desk
        .decisions
        .iter()
        .filter(|decision| !matches!(decision, Decision::Event { .. }))
        .map(|decision| format!("{decision:?}"))
        .collect();
    assert_eq!(
        order,
        [
            "PersistEpoch(1)",
            "Prepare(1, trainer/t)",
            "Prepare(1, actors/r1)",
            "Prepare(1, actors/r2)",
            "Commit(1, actors/r1)",
            "Commit(1, actors/r2)",
            "Commit(1, trainer/t)",
        ]
    );
    let view = desk.membership.view();
    assert_eq!((view.stage, view.epoch, view.world_size, view.ready, view.total), (GroupStage::Committed, 1, 3, 2, 2));
    assert!(view.members.iter().all(|member| member.standing == MemberStanding::Ready));
}

#[test]
fn nobody_hears_of_an_epoch_before_it_is_written() {
    let mut desk = Desk::new(1);
    desk.plan(&[0, 1], Vec::new());
    desk.announce(0);
    desk.announce(1);
    assert!(desk.decisions.iter().any(|decision| matches!(decision, Decision::PersistEpoch { epoch: 1 })));
    desk.wait(20_000, &[0, 1]);
    assert!(!desk.decisions.iter().any(|decision| matches!(decision, Decision::Prepare { .. })), "{:?}", desk.decisions);
    let decisions = desk.see(Observation::EpochPersisted { epoch: 1 });
    assert_eq!(decisions.iter().filter(|decision| matches!(decision, Decision::Prepare { .. })).count(), 2);
}

//! How a group is formed.

use super::desk::*;
use crate::membership::{Decision, GroupStage, MemberStanding, Observation};
use crate::protocol::{Reason, Refusal, RefusalCode};

#[test]
fn group_is_written_prepared_then_committed_source_last() {
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

/// A member that was given the deadline of a prepare for its commit would give a slow NCCL formation up at half its time.
#[test]
fn prepare_and_commit_each_tell_members_their_own_deadline() {
    let desk = Desk::formed(2);
    let given: Vec<(&str, u64)> = desk
        .decisions
        .iter()
        .filter_map(|decision| match decision {
            Decision::Prepare { request, .. } => Some(("prepare", request.deadline_ms)),
            Decision::Commit { request, .. } => Some(("commit", request.deadline_ms)),
            _ => None,
        })
        .collect();
    let (prepare, commit) = (config().prepare_deadline_ms, config().commit_deadline_ms);
    assert_ne!(prepare, commit);
    assert_eq!(given, [[("prepare", prepare); 3], [("commit", commit); 3]].concat());
}

#[test]
fn no_member_learns_an_epoch_before_it_is_written() {
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

#[test]
fn member_late_to_prepare_is_left_out_of_next_epoch_by_name() {
    let mut desk = Desk::new(2);
    desk.plan(&[0, 1, 2], Vec::new());
    for n in 0..=2 {
        desk.announce(n);
    }
    let prepares = desk.see(Observation::EpochPersisted { epoch: 1 });
    for decision in prepares {
        if let Decision::Prepare { to, request } = decision
            && request.member != name(2)
        {
            desk.prepare(&to, &request);
        }
    }
    desk.wait(4_500, &[0, 1, 2]);
    assert_eq!(desk.epoch(), 1);
    let late = desk.wait(600, &[0, 1, 2]);
    assert!(persists(&late), "{late:?}");
    assert_eq!(desk.event(Reason::FormationFailed).unwrap().0, Some(name(2)));
    assert_eq!(desk.member(2).reason, Reason::BackingOff);
    let prepares = desk.see(Observation::EpochPersisted { epoch: 2 });
    assert_eq!(asked(&prepares), [name(0), name(1)]);
}

#[test]
fn members_that_fail_for_one_cause_cost_one_epoch() {
    let mut desk = Desk::new(3);
    desk.plan(&[0, 1, 2, 3], Vec::new());
    for n in 0..=3 {
        desk.announce(n);
    }
    desk.see(Observation::EpochPersisted { epoch: 1 });
    let id = desk.id();
    for n in [1, 2] {
        let refusal = Refusal { code: RefusalCode::OutOfSpace, message: "no memory".to_owned() };
        desk.see(Observation::PrepareFailed { id: id.clone(), member: name(n), refusal });
    }
    let decisions = desk.wait(400, &[0, 1, 2, 3]);
    assert!(persists(&decisions));
    let prepares = desk.see(Observation::EpochPersisted { epoch: 2 });
    assert_eq!(asked(&prepares), [name(0), name(3)]);
}

/// radixark/miles#2510, NovaSky-AI/SkyRL#1271: offsets follow the engine's real size, not the configured one. PrimeIntellect-ai/prime-rl#3060:
/// data parallel ranks counted by the engine and by the spec, so that the trainer waits for ranks that never come.
/// Stories F16, F19.
#[test]
fn an_engine_of_another_size_is_left_out_with_both_numbers() {
    let mut desk = Desk::new(2);
    desk.states[2].engine.as_mut().unwrap().size = 4;
    desk.form(2);
    let shown = desk.member(2);
    assert_eq!((shown.standing, shown.reason), (MemberStanding::Out, Reason::SizeMismatch));
    assert!(shown.message.contains('4') && shown.message.contains('1'), "{}", shown.message);
    assert_eq!(desk.membership.view().world_size, 2);
    assert_eq!(desk.event(Reason::SizeMismatch).unwrap().0, Some(name(2)));
}

#[test]
fn unwritable_epoch_is_retried_and_old_group_stays() {
    let mut desk = Desk::formed(2);
    let decisions = desk.lose(2);
    assert!(persists(&decisions));
    let message = "the API server is away".to_owned();
    desk.see(Observation::PersistFailed { epoch: 2, message });
    assert!(desk.reasons().contains(&Reason::PersistFailed));
    let again = desk.wait(10_000, &[0, 1]);
    let tries = again.iter().filter(|decision| matches!(decision, Decision::PersistEpoch { epoch: 2 })).count();
    assert!((2..=6).contains(&tries), "{tries} tries in 10 s");
    assert!(asked(&again).is_empty());
    assert!(desk.membership.view().committed);
    let decisions = desk.see(Observation::EpochPersisted { epoch: 2 });
    assert_eq!(asked(&decisions), [name(0), name(1)]);
}

#[test]
fn a_controller_that_lost_the_lease_stops_deciding() {
    let mut desk = Desk::formed(2);
    desk.lose(2);
    let decisions = desk.see(Observation::PersistConflict { epoch: 2, message: "term 9 wrote".to_owned() });
    assert!(decisions.iter().any(|decision| matches!(decision, Decision::StepDown { .. })));
    assert_eq!(desk.membership.view().stage, GroupStage::SteppedDown);
    assert!(desk.lose(1).is_empty());
    assert_eq!(desk.membership.next_wakeup(), None);
}

#[test]
fn a_late_answer_about_an_earlier_write_is_no_conflict() {
    let mut desk = Desk::formed(2);
    desk.lose(2);
    let decisions = desk.see(Observation::PersistConflict { epoch: 1, message: "epoch 2 is there".to_owned() });
    assert!(decisions.is_empty(), "{decisions:?}");
    assert_eq!(asked(&desk.see(Observation::EpochPersisted { epoch: 2 })).len(), 2);
}

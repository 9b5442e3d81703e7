//! How members leave: lost, silent, unhealthy, recreated, or in good order.

use super::desk::*;
use crate::membership::{Decision, MemberStanding, Observation};
use crate::plan::LeftOutCode;
use crate::protocol::*;

/// The reasons of the new epoch in these prepares.
fn reported_why(decisions: &[Decision]) -> Vec<&str> {
    let whys = decisions.iter().filter_map(|decision| match decision {
        Decision::Prepare { request, .. } => Some(request.why.as_str()),
        _ => None,
    });
    whys.collect()
}

#[test]
fn a_lost_agent_is_left_out_in_the_same_step_and_named() {
    let mut desk = Desk::formed(2);
    let decisions = desk.lose(2);
    assert!(persists(&decisions));
    assert_eq!(desk.event(Reason::AgentLost).unwrap(), (Some(name(2)), "connection closed".to_owned()));
    let decisions = desk.see(Observation::EpochPersisted { epoch: 2 });
    assert_eq!(asked(&decisions), [name(0), name(1)]);
    // The prepare names the lost member to members that did not see the loss.
    assert_eq!(reported_why(&decisions), ["actors/r2: AgentLost: connection closed"; 2]);
    desk.obey(decisions);
    let view = desk.membership.view();
    assert_eq!((view.epoch, view.committed, view.world_size), (2, true, 2));
}

/// Two failures shortly after each other end a round: the group that is formed at last would otherwise name none of the lost members.
#[test]
fn member_lost_in_a_round_is_named_in_reason_of_next_epoch() {
    let mut desk = Desk::formed(3);
    desk.lose(3);
    desk.see(Observation::EpochPersisted { epoch: 2 });
    desk.lose(2);
    let decisions = desk.see(Observation::EpochPersisted { epoch: 3 });
    assert_eq!(reported_why(&decisions), ["actors/r2: AgentLost: connection closed"; 2]);
    desk.obey(decisions);
    assert!(desk.event(Reason::GroupFormed).unwrap().1.ends_with("(actors/r2: AgentLost: connection closed)"));
}

#[test]
fn members_learn_why_a_new_epoch_is_formed() {
    assert_eq!(reported_why(&Desk::formed(1).decisions), ["GroupForming", "GroupForming"]);
}

#[test]
fn silent_agent_is_left_out_after_three_heartbeats() {
    let mut desk = Desk::formed(2);
    assert!(!persists(&desk.wait(2_900, &[0, 1])));
    let decisions = desk.wait(200, &[0, 1]);
    assert!(persists(&decisions));
    let decisions = desk.see(Observation::EpochPersisted { epoch: 2 });
    let fenced = decisions.iter().any(|decision| matches!(decision, Decision::Fence { to, .. } if *to == [life(2, 1)]));
    assert!(fenced, "{decisions:?}");
    assert_eq!(desk.member(2).reason, Reason::AgentLost);
}

#[test]
fn time_without_calls_is_not_counted_against_members() {
    let mut desk = Desk::formed(2);
    desk.now += 60_000;
    let decisions = desk.see(Observation::Tick);
    assert!(!persists(&decisions), "{decisions:?}");
    assert!(!persists(&desk.wait(10_000, &[0, 1, 2])));
}

/// Story F28.
#[test]
fn pod_made_again_under_one_name_is_another_member() {
    let mut desk = Desk::formed(1);
    desk.serves(3);
    let mut candidates = vec![candidate(0), candidate(1)];
    candidates[1].pods[0].uid = "uid-1-again".to_owned();
    let decisions = desk.see(Observation::Candidates { candidates, left_out: Vec::new() });
    assert!(decisions.iter().any(|decision| matches!(decision, Decision::Fence { .. })), "{decisions:?}");
    // A message of the previous pod changes nothing.
    desk.tell(1, |_| ());
    let shown = desk.member(1);
    assert_eq!((shown.standing, shown.reason, shown.installed), (MemberStanding::Out, Reason::AgentMissing, None));
    assert_eq!(desk.membership.view().ready, 0);
}

#[test]
fn restarted_agent_of_a_pod_joins_by_a_new_epoch() {
    let mut desk = Desk::formed(2);
    desk.reborn(2, 2);
    let decisions = desk.announce(2);
    assert!(persists(&decisions));
    desk.obey(decisions);
    assert_eq!(desk.member(2).incarnation, Some(life(2, 2)));
    let before = desk.epoch();
    // A late message of the previous incarnation.
    let mut old = desk.states[2].clone();
    old.incarnation = life(2, 1);
    desk.see(Observation::State(Box::new(old)));
    desk.wait(5_000, &[0, 1, 2]);
    assert_eq!((desk.epoch(), desk.member(2).incarnation), (before, Some(life(2, 2))));
}

#[test]
fn an_unhealthy_engine_leaves_and_returns_when_it_is_well() {
    let mut desk = Desk::formed(2);
    let decisions = desk.tell(2, |state| {
        state.healthy = false;
        state.reason = Some("503 from /health three times".to_owned());
    });
    assert!(persists(&decisions));
    desk.obey(decisions);
    let shown = desk.member(2);
    assert_eq!((shown.standing, shown.reason), (MemberStanding::Out, Reason::EngineUnhealthy));
    assert!(shown.message.contains("503"), "{}", shown.message);
    assert_eq!(desk.states[2].epoch, None, "it was fenced");
    desk.tell(2, |state| state.healthy = true);
    let decisions = desk.wait(1_100, &[0, 1, 2]);
    desk.obey(decisions);
    assert_eq!(desk.member(2).standing, MemberStanding::Ready);
    assert_eq!(desk.epoch(), 3);
}

/// Story F42.
#[test]
fn probes_that_fail_because_of_an_update_are_no_failure() {
    let mut desk = Desk::formed(2);
    desk.leads(1, 1, UpdatePhase::Activate, &[(1, InstallStep::Installing), (2, InstallStep::Installing)]);
    let paused = |state: &mut MemberState| (state.healthy, state.phase) = (false, MemberPhase::Updating);
    assert!(!persists(&desk.tell(2, paused)));
    let unready = vec![left_out(2, LeftOutCode::NotReady, "readiness probe failed")];
    assert!(!persists(&desk.plan(&[0, 1], unready)));
    assert!(!persists(&desk.wait(4_000, &[0, 1, 2])));
    assert_eq!(desk.member(2).standing, MemberStanding::Updating);
    assert_eq!(desk.membership.view().ready, 2);
}

#[test]
fn a_member_that_is_in_one_update_for_ever_is_left_out() {
    let mut desk = Desk::formed(2);
    desk.tell(2, |state| (state.healthy, state.phase) = (false, MemberPhase::Updating));
    let decisions = desk.wait(64_000, &[0, 1, 2]);
    assert!(!persists(&decisions), "{decisions:?}");
    let decisions = desk.wait(2_000, &[0, 1, 2]);
    assert!(persists(&decisions));
    assert_eq!(desk.event(Reason::MemberFailed).unwrap().0, Some(name(2)));
}

#[test]
fn a_terminating_member_leaves_when_the_running_update_ends() {
    let mut desk = Desk::formed(2);
    desk.leads(1, 1, UpdatePhase::Transfer, &[(1, InstallStep::Receiving), (2, InstallStep::Receiving)]);
    assert!(!persists(&desk.plan(&[0, 1], vec![left_out(2, LeftOutCode::Terminating, "being deleted")])));
    assert_eq!(desk.event(Reason::MemberLeft).unwrap().0, Some(name(2)));
    let done = desk.leads(1, 1, UpdatePhase::Done, &[(1, InstallStep::Installed), (2, InstallStep::Installed)]);
    assert!(persists(&done));
    desk.obey(done);
    assert_eq!(desk.membership.view().world_size, 2);
}

#[test]
fn a_terminating_member_does_not_wait_for_ever() {
    let mut desk = Desk::formed(2);
    desk.plan(&[0, 1], vec![left_out(2, LeftOutCode::Terminating, "being deleted")]);
    let mut decisions = Vec::new();
    for bytes in 0..40 {
        let (from, id) = (life(0, 1), desk.id());
        let mut view = update(&id, 1, 1, UpdatePhase::Transfer, &[(1, InstallStep::Receiving)]);
        view.members[0].bytes = bytes;
        decisions.extend(desk.see(Observation::Update { from, update: Box::new(view) }));
        decisions.extend(desk.wait(300, &[0, 1, 2]));
    }
    assert!(persists(&decisions));
}

#[test]
fn source_learns_that_the_last_rollout_is_gone() {
    let mut desk = Desk::formed(1);
    let decisions = desk.lose(1);
    assert!(!persists(&decisions));
    assert!(decisions.iter().any(|decision| matches!(decision, Decision::Fence { to, .. } if *to == [life(0, 1)])));
    assert_eq!((desk.member(0).standing, desk.member(0).reason), (MemberStanding::Waiting, Reason::BelowMinReady));
    assert!(desk.reasons().contains(&Reason::BelowMinReady));
}

/// Story F44.
#[test]
fn rollouts_keep_serving_and_name_the_gone_trainer() {
    let mut desk = Desk::formed(2);
    desk.serves(4);
    let decisions = desk.lose(0);
    desk.obey(decisions);
    let view = desk.membership.view();
    assert!(!view.committed);
    assert_eq!(view.version, Some(held(4)));
    assert!(desk.reasons().contains(&Reason::NoSource));
    assert_eq!(desk.member(1).reason, Reason::NoSource);
    desk.reborn(0, 2);
    let decisions = desk.announce(0);
    desk.obey(decisions);
    assert_eq!(desk.membership.view().ready, 2);
}

#[test]
fn restarted_engine_is_named_once() {
    let mut desk = Desk::formed(2);
    let named = |decisions: &[Decision]| {
        let of = |decision: &Decision| match decision {
            Decision::Event { reason: Reason::MemberRestarted, member, warning, .. } => Some((member.clone(), *warning)),
            _ => None,
        };
        decisions.iter().filter_map(of).collect::<Vec<_>>()
    };
    assert_eq!(named(&desk.tell(1, |state| state.healthy = true)), []);
    let restarted = desk.tell(1, |state| state.engine_restarts = 1);
    assert_eq!(named(&restarted), [(Some(name(1)), true)]);
    assert_eq!(named(&desk.tell(1, |state| state.installed = Some(held(3)))), []);
    // An event that was missed counts when it arrives.
    desk.see(Observation::AgentLost { from: life(2, 0), cause: "gone".to_owned() });
    let mut decisions = desk.announce(2);
    decisions.extend(desk.tell(2, |state| state.engine_restarts = 2));
    assert_eq!(named(&decisions), [(Some(name(2)), true)]);
}

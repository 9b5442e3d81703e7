//! Groups that engines join by themselves: their members, by the facts from prepare.

use super::desk::*;
use crate::membership::{Decision, MembershipConfig, Observation, Restored};
use crate::protocol::*;

fn gpu(number: usize) -> GpuReport {
    let gpu = MemberGpu { uuid: format!("GPU-{number}"), name: "H200".into(), free_bytes: 64 << 30, memory_bytes: 141 << 30 };
    GpuReport { gpus: vec![gpu], nccl: Some(22809), ..GpuReport::default() }
}

fn can(rendezvous: Rendezvous) -> GroupFacts {
    GroupFacts { rendezvous, size: 1, why_not: String::new() }
}

/// A group under `delivery: Engine` whose rollouts report these facts.
fn formed(source: GpuReport, rollouts: &[Option<GroupFacts>]) -> Desk {
    let policy = UpdatePolicy { delivery: Delivery::Engine, ..policy() };
    let count = u32::try_from(rollouts.len()).unwrap();
    let mut desk = Desk::restored(MembershipConfig { policy, ..config() }, count, Restored::default());
    desk.gpus = std::collections::BTreeMap::from([(0, source)]);
    for (state, groups) in desk.states.iter_mut().skip(1).zip(rollouts) {
        state.engine.as_mut().unwrap().groups.clone_from(groups);
    }
    desk.form(count);
    desk
}

fn commits(desk: &Desk) -> Vec<TransportChoice> {
    let commits = desk.decisions.iter().filter_map(|decision| match decision {
        Decision::Commit { request, .. } => Some(request.transport.clone()),
        _ => None,
    });
    commits.collect()
}

#[test]
fn engines_of_several_kinds_get_own_groups_of_one_source() {
    let desk = formed(gpu(0), &[Some(can(Rendezvous::Store)), Some(can(Rendezvous::UniqueId)), Some(can(Rendezvous::Store))]);
    let choices = commits(&desk);
    assert_eq!(choices.len(), 4);
    assert!(choices.iter().all(|choice| choice == &choices[0]));
    let plan = choices[0].engines.as_ref().unwrap();
    assert_eq!(plan.groups.iter().map(EngineGroup::world).collect::<Vec<_>>(), [3, 2]);
    assert_eq!(plan.of(&name(3)).map(|(number, group)| (number, group.offset(&name(3)))), Some((0, Some(2))));
    assert_eq!((choices[0].name(), &choices[0].nccl), ("nccl", &None));
}

/// Story F60.
#[test]
fn engine_that_cannot_join_is_left_out_with_the_option() {
    let why = "its executor knows no groups: start LMDeploy with --distributed-executor-backend ray";
    let desk = formed(gpu(0), &[Some(can(Rendezvous::Store)), Some(GroupFacts::cannot(why))]);
    let (who, message) = desk.event(Reason::TransportUnavailable).unwrap();
    assert_eq!(who, Some(name(2)));
    assert!(message.contains("--distributed-executor-backend ray"), "{message}");
    let plan = commits(&desk).pop().unwrap().engines.unwrap();
    assert_eq!(plan.members(), [name(1)]);
}

#[test]
fn an_engine_that_was_never_asked_is_no_member() {
    let desk = formed(gpu(0), &[Some(can(Rendezvous::Store)), None]);
    assert_eq!(desk.event(Reason::TransportUnavailable).map(|(who, _)| who), Some(Some(name(2))));
}

#[test]
fn names_of_groups_are_those_of_one_object_and_one_epoch() {
    let id = EpochId { weightsync: "uid-1".into(), created: 7, term: 3, epoch: 12 };
    let names = [
        EngineGroup::name(&id, 0),
        EngineGroup::name(&id, 1),
        EngineGroup::name(&EpochId { epoch: 13, ..id.clone() }, 0),
        EngineGroup::name(&EpochId { term: 4, ..id.clone() }, 0),
        EngineGroup::name(&EpochId { weightsync: "uid-2".into(), ..id.clone() }, 0),
        EngineGroup::name(&EpochId { created: 8, ..id }, 0),
    ];
    let different: std::collections::BTreeSet<_> = names.iter().collect();
    assert_eq!(different.len(), names.len());
    assert!(names.iter().all(|name| !name.contains('/')), "torch joins keys with it");
}

#[test]
fn a_wedged_engine_is_named_as_that_and_not_as_ill() {
    let mut desk = formed(gpu(0), &[Some(can(Rendezvous::Store)), Some(can(Rendezvous::Store))]);
    let decisions = desk.tell(2, |state| {
        (state.healthy, state.wedged, state.phase) = (false, true, MemberPhase::EngineDown);
        state.reason = Some("its front answers".to_owned());
    });
    desk.obey(decisions);
    assert!(desk.reasons().contains(&Reason::EngineWedged), "{:?}", desk.reasons());
    let member = desk.member(2);
    assert!(member.wedged && member.reason == Reason::EngineWedged, "{member:?}");
}

/// Story F94.
#[test]
fn engine_that_refused_is_left_out_of_next_group_at_once() {
    let mut desk = formed(gpu(0), &[Some(can(Rendezvous::Store)), Some(can(Rendezvous::Store))]);
    let (from, id) = (life(0, 1), desk.id());
    let decisions = desk.see(Observation::PeerLost { from, id, peer: name(2), cause: "unknown group".to_owned() });
    desk.obey(decisions);
    assert_eq!(desk.event(Reason::PeerUnreachable), Some((Some(name(2)), "unknown group".to_owned())));
    assert_eq!(commits(&desk).pop().unwrap().engines.unwrap().members(), [name(1)]);
}

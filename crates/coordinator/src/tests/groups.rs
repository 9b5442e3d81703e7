//! Epochs carried out: forming, losing, adopting, stepping down.

use std::time::{Duration, Instant};

use super::world::{OBJECT, SOON, World, config, until};
use crate::Ended;
use weightsync_core::membership::{GroupStage, MemberStanding, MembershipConfig, MembershipView};
use weightsync_core::protocol::{
    AssignmentChanged, HeldVersion, InstallStep, MemberName, MemberPhase, MemberProgress, Reason, Role, UpdatePhase, UpdateView,
};
use weightsync_net::https::{AgentClient, CallError};
use weightsync_net::identity::PeerIdentity;

const PODS: [(&str, &str); 3] = [("trainer-0", "uid-t"), ("actor-0", "uid-0"), ("actor-1", "uid-1")];

fn committed(members: u32) -> impl Fn(&MembershipView) -> bool {
    move |view| view.stage == GroupStage::Committed && view.world_size == members
}

fn standing(view: &MembershipView, pod: &str) -> Option<MemberStanding> {
    view.members.iter().find(|member| member.name.0.ends_with(pod)).map(|member| member.standing)
}

#[tokio::test]
async fn announced_agents_form_a_group_after_the_epoch_is_written() {
    let world = World::new().await;
    let handle = world.coordinate(0, &PODS);
    let mut agents = Vec::new();
    for (pod, uid) in PODS {
        agents.push(world.agent(pod, uid, "a").await);
    }
    let view = until(&handle, "a group of three", committed(3)).await;
    assert_eq!(*world.store.epoch.lock(), view.epoch);
    for agent in &agents {
        agent.until("in the group", |state| state.phase == MemberPhase::Ready).await;
        assert_eq!(agent.state().epoch.map(|id| id.epoch), Some(view.epoch));
        assert_eq!(agent.secret(), agents[0].secret());
    }
    assert_eq!(agents[0].secret().unwrap().len(), 44, "32 bytes in base64");
}

/// A silence lasts an hour here: the end of its connection shows it.
#[tokio::test]
async fn a_killed_agent_is_found_at_once_and_the_others_go_on() {
    let world = World::new().await;
    let handle = world.coordinate(0, &PODS);
    let trainer = world.agent("trainer-0", "uid-t", "a").await;
    let survivor = world.agent("actor-0", "uid-0", "a").await;
    let victim = world.agent("actor-1", "uid-1", "a").await;
    let before = until(&handle, "a group of three", committed(3)).await;
    drop(victim);
    let after = until(&handle, "a group of two", |view| committed(2)(view) && view.epoch > before.epoch).await;
    for agent in [&trainer, &survivor] {
        agent.until("in the new group", |state| state.epoch.as_ref().is_some_and(|id| id.epoch == after.epoch)).await;
    }
    let reported = world.reported.0.lock().clone();
    assert!(
        reported.iter().any(|event| event.reason == Reason::AgentLost && event.member == Some(MemberName("actors/actor-1".into()))),
        "{reported:?}"
    );
}

#[tokio::test]
async fn an_agent_that_falls_silent_is_left_out_within_the_bound() {
    let world = World::new().await;
    let (begun, bound) = (Instant::now(), Duration::from_millis(400));
    let handle = world.coordinate_by(MembershipConfig { agent_silence_ms: 400, ..config() }, 0, &PODS);
    let _trainer = world.agent("trainer-0", "uid-t", "a").await;
    let _survivor = world.agent("actor-0", "uid-0", "a").await;
    let mute = world.agent("actor-1", "uid-1", "a").await;
    let before = until(&handle, "a group of three", committed(3)).await;
    let formed = begun.elapsed();
    mute.strike_dumb(true);
    let silent = Instant::now();
    until(&handle, "a group of two", |view| committed(2)(view) && view.epoch > before.epoch).await;
    let took = silent.elapsed();
    assert!(took < 3 * bound + 5 * formed, "{took:?}, and a group forms in {formed:?}");
    mute.strike_dumb(false);
    until(&handle, "a group of three again", committed(3)).await;
}

/// F05: where members are called one after another, a silent member delays all later ones.
#[tokio::test]
async fn one_silent_engine_of_many_delays_no_other() {
    let world = World::new().await;
    let names: Vec<(String, String)> = (0..24).map(|n| (format!("actor-{n:02}"), format!("uid-{n}"))).collect();
    let mut pods: Vec<(&str, &str)> = names.iter().map(|(pod, uid)| (pod.as_str(), uid.as_str())).collect();
    pods.insert(0, PODS[0]);
    // All agents are present before the first plan, so that the first group includes all of them.
    let handle = world.coordinate(0, &[]);
    world.plan(&handle, &pods);
    handle.change(|wanted| wanted.members = Some((vec![], vec![])));
    let mut agents = Vec::new();
    for (pod, uid) in &pods {
        agents.push(world.agent(pod, uid, "a").await);
    }
    for agent in &agents {
        agent.listened_to().await;
    }
    // Without the silent one: what a round takes on this machine.
    let silent = pods[3];
    let others: Vec<_> = pods.iter().copied().filter(|pod| *pod != silent).collect();
    let begun = Instant::now();
    world.plan(&handle, &others);
    let before = until(&handle, "a group of all others", committed(24)).await;
    let round = begun.elapsed();
    agents[3].hang_prepares();
    let begun = Instant::now();
    world.plan(&handle, &pods);
    until(&handle, "a group of all but one", |view| committed(24)(view) && view.epoch > before.epoch).await;
    let (took, deadline) = (begun.elapsed(), Duration::from_millis(config().prepare_deadline_ms));
    assert!(took < 2 * deadline + 5 * round, "one deadline and two rounds took {took:?}, a round {round:?}");
    assert_eq!(agents[3].prepares(), 0);
}

#[tokio::test]
async fn a_restarted_agent_takes_its_old_place_in_a_new_epoch() {
    let world = World::new().await;
    let handle = world.coordinate(0, &PODS);
    let _trainer = world.agent("trainer-0", "uid-t", "a").await;
    let _other = world.agent("actor-0", "uid-0", "a").await;
    let first = world.agent("actor-1", "uid-1", "a").await;
    let before = until(&handle, "a group of three", committed(3)).await;
    drop(first);
    let second = world.agent("actor-1", "uid-1", "b").await;
    until(&handle, "a group of three again", |view| committed(3)(view) && view.epoch > before.epoch).await;
    second.until("in the group", |state| state.phase == MemberPhase::Ready).await;
}

#[tokio::test]
async fn a_stale_life_of_an_agent_is_not_listened_to() {
    let world = World::new().await;
    let handle = world.coordinate(0, &PODS[..2]);
    let _trainer = world.agent("trainer-0", "uid-t", "a").await;
    let actor = world.agent("actor-0", "uid-0", "a").await;
    // From now on it reports another incarnation than the one that announced itself.
    actor.change(|state| state.incarnation.instance = "b".into());
    let view = until(&handle, "without the liar", |view| view.members.iter().any(|member| member.reason == Reason::AgentLost)).await;
    assert_ne!(standing(&view, "actor-0"), Some(MemberStanding::Ready));
}

#[tokio::test]
async fn member_that_lies_about_version_and_role_changes_nothing() {
    let world = World::new().await;
    let handle = world.coordinate(0, &PODS);
    let trainer = world.agent("trainer-0", "uid-t", "a").await;
    let honest = world.agent("actor-0", "uid-0", "a").await;
    let liar = world.agent("actor-1", "uid-1", "a").await;
    let held = |version| Some(HeldVersion { version, manifest: "m".into() });
    let before = until(&handle, "a group of three", committed(3)).await;
    for member in [&trainer, &honest] {
        member.change(|state| (state.installed, state.retained) = (held(5), held(5)));
    }
    until(&handle, "at version 5", |view| view.version == held(5)).await;
    // It signs its claim too, with the certificate of a rollout.
    liar.change(|state| {
        state.role = Role::Source;
        (state.installed, state.retained) = (held(99), held(99));
        state.epoch.as_mut().unwrap().epoch = (1 << 63) - 2;
    });
    let next = |view: &MembershipView| view.committed && view.epoch > before.epoch;
    let view = until(&handle, "a group that the liar was thrown out of", next).await;
    assert_eq!((view.version.clone(), view.wanted.clone()), (held(5), held(5)));
    assert_ne!(view.feeder, Some(MemberName("actors/actor-1".into())));
    let view = until(&handle, "the others at work", |view| standing(view, "actor-0") == Some(MemberStanding::Ready)).await;
    assert!(view.epoch < 100 && *world.store.epoch.lock() < 100, "{}", view.epoch);
}

/// The version counts by its replicas' reports. Only the controller can send it to the successor of the agent that led.
#[tokio::test]
async fn source_that_missed_a_switch_hears_what_counts() {
    let world = World::new().await;
    let handle = world.coordinate(0, &PODS);
    let trainer = world.agent("trainer-0", "uid-t", "a").await;
    let actors = [world.agent("actor-0", "uid-0", "a").await, world.agent("actor-1", "uid-1", "a").await];
    let held = HeldVersion { version: 5, manifest: "m".into() };
    let before = until(&handle, "a group of three", committed(3)).await;
    trainer.change(|state| state.retained = Some(held.clone()));
    let keeps = |view: &MembershipView| view.members.iter().any(|member| member.keeps.contains(&held));
    until(&handle, "the announced version", keeps).await;
    drop(trainer);
    let trainer = world.agent("trainer-0", "uid-t", "b").await;
    until(&handle, "a group of three again", |view| committed(3)(view) && view.epoch > before.epoch).await;
    // The new group has sent everything by now.
    trainer.beat(3).await;
    let mut calls = trainer.calls();
    let heard = *calls.borrow_and_update();
    for actor in &actors {
        actor.change(|state| state.installed = Some(held.clone()));
    }
    until(&handle, "at version 5", |view| view.version.as_ref() == Some(&held)).await;
    tokio::time::timeout(SOON, calls.wait_for(|calls| *calls > heard)).await.expect("it is reported").unwrap();
    let answer = trainer.try_announce(true).await.unwrap();
    assert_eq!(answer.assignment.current, Some(held));
    assert!(actors.iter().all(|actor| *actor.calls().borrow() == 0), "they took it themselves");
}

#[tokio::test]
async fn pod_that_invents_agents_is_listened_to_twice_for_each_engine() {
    let world = World::new().await;
    let _handle = world.coordinate(0, &PODS);
    let mut inventions = Vec::new();
    for instance in ["a", "b", "c", "d", "e"] {
        let agent = world.agent("actor-0", "uid-0", instance).await;
        agent.announce(false).await;
        inventions.push(agent);
    }
    let honest = world.agent("actor-1", "uid-1", "a").await;
    honest.listened_to().await;
    honest.beat(5).await;
    let opened = inventions.iter().filter(|agent| *agent.opened().borrow() > 0).count();
    assert!((1..=2).contains(&opened), "{opened} of them are listened to");
}

#[tokio::test]
async fn members_serve_no_agent_of_another_object() {
    let world = World::new().await;
    let handle = world.coordinate(0, &PODS[..2]);
    let _trainer = world.agent("trainer-0", "uid-t", "a").await;
    let actor = world.agent("actor-0", "uid-0", "a").await;
    until(&handle, "a group of two", committed(2)).await;
    let foreign = PeerIdentity::Agent { weightsync: "ws-other".into(), pod_uid: "uid-x".into(), role: Role::Rollout };
    let client = AgentClient::new(world.ca.issue(&foreign, SOON * 60).unwrap());
    let answer = client.tell(&actor.address, "uid-0", &AssignmentChanged, SOON).await;
    assert!(matches!(answer, Err(CallError::Refused { .. })), "{answer:?}");
    assert_eq!(actor.state().phase, MemberPhase::Ready);
}

#[tokio::test]
async fn a_restarted_coordinator_disturbs_nothing() {
    let world = World::new().await;
    let handle = world.coordinate(0, &PODS);
    let mut agents = Vec::new();
    for (pod, uid) in PODS {
        agents.push(world.agent(pod, uid, "a").await);
    }
    let before = until(&handle, "a group of three", committed(3)).await;
    for agent in &agents {
        agent.until("in the group", |state| state.phase == MemberPhase::Ready).await;
    }
    let prepares: Vec<_> = agents.iter().map(weightsync_testkit::fake_agent::FakeAgent::prepares).collect();
    drop(handle);
    world.directory.unsettle();
    let handle = world.coordinate(1, &PODS);
    let after = until(&handle, "the same group", committed(3)).await;
    assert_eq!(after.epoch, before.epoch);
    assert_eq!(after.id, before.id);
    assert_eq!(prepares, agents.iter().map(weightsync_testkit::fake_agent::FakeAgent::prepares).collect::<Vec<_>>());
}

#[tokio::test]
async fn epoch_write_conflict_ends_coordinator_before_agents_hear() {
    let world = World::new().await;
    *world.store.conflict.lock() = true;
    let handle = world.coordinate(0, &PODS[..2]);
    let _trainer = world.agent("trainer-0", "uid-t", "a").await;
    let actor = world.agent("actor-0", "uid-0", "a").await;
    let ended = tokio::time::timeout(SOON, handle.ended()).await.expect("it ends");
    assert!(matches!(ended, Ended::SteppedDown(_)), "{ended:?}");
    assert_eq!(actor.prepares(), 0);
}

#[tokio::test]
async fn deleted_object_releases_agents_and_gone_one_stops_them() {
    let world = World::new().await;
    let handle = world.coordinate(0, &PODS);
    let mut agents = Vec::new();
    for (pod, uid) in PODS {
        agents.push(world.agent(pod, uid, "a").await);
    }
    until(&handle, "a group of three", committed(3)).await;
    handle.change(|wanted| wanted.delete = true);
    until(&handle, "released", |view| view.released).await;
    for agent in &agents {
        agent.until("released", |state| state.epoch.is_none()).await;
    }
    drop(handle);
    world.directory.remove(OBJECT);
    agents[1].until("informed that no one claims it", |state| state.reason.as_deref() == Some("no one claims this pod")).await;
}

#[tokio::test]
async fn a_pod_that_leaves_the_plan_leaves_the_group() {
    let world = World::new().await;
    let handle = world.coordinate(0, &PODS);
    let mut agents = Vec::new();
    for (pod, uid) in PODS {
        agents.push(world.agent(pod, uid, "a").await);
    }
    until(&handle, "a group of three", committed(3)).await;
    world.plan(&handle, &PODS[..2]);
    until(&handle, "a group of two", committed(2)).await;
    agents[2].until("released", |state| state.epoch.is_none()).await;
}

#[tokio::test]
async fn member_outside_the_group_learns_a_new_version_at_once() {
    let world = World::new().await;
    let handle = world.coordinate(0, &PODS);
    let trainer = world.agent("trainer-0", "uid-t", "a").await;
    let member = world.agent("actor-0", "uid-0", "a").await;
    until(&handle, "a group of two", committed(2)).await;
    let ill = world.agent("actor-1", "uid-1", "a").await;
    ill.change(|state| state.healthy = false);
    ill.listened_to().await;
    until(&handle, "without the engine that is ill", |view| {
        committed(2)(view) && view.members.iter().any(|member| member.reason == Reason::EngineUnhealthy)
    })
    .await;
    for version in [1, 2] {
        let reported = *ill.calls().borrow();
        let held = HeldVersion { version, manifest: "m".into() };
        member.change(|state| state.installed = Some(held.clone()));
        trainer.tell_update(UpdateView {
            id: trainer.state().epoch.unwrap(),
            version,
            attempt: 1,
            phase: UpdatePhase::Done,
            total_bytes: 9,
            members: vec![MemberProgress {
                member: MemberName("actors/actor-0".into()),
                bytes: 9,
                step: InstallStep::Installed,
                reason: None,
            }],
            phases_ms: Vec::new(),
            failure: None,
            feeding: false,
        });
        trainer.change(|state| state.installed = Some(held));
        until(&handle, "at that version", |view| view.version.as_ref().is_some_and(|held| held.version == version)).await;
        let heard = tokio::time::timeout(SOON, ill.calls().wait_for(|calls| *calls > reported)).await.is_ok();
        assert!(heard, "version {version} was not reported");
    }
    assert_eq!(*member.calls().borrow(), 0, "it heard of both by the updates");
}

#[tokio::test]
async fn followed_agent_asking_its_assignment_is_not_reattached() {
    let world = World::new().await;
    let handle = world.coordinate(0, &PODS[..2]);
    let _trainer = world.agent("trainer-0", "uid-t", "a").await;
    let actor = world.agent("actor-0", "uid-0", "a").await;
    until(&handle, "a group of two", committed(2)).await;
    let mut opened = actor.opened();
    let before = *opened.borrow();
    // Until its stream counts as old.
    actor.beat(15).await;
    for attached in [true, true, false] {
        actor.announce(attached).await;
    }
    let once_more = opened.wait_for(|opened| *opened > before);
    tokio::time::timeout(SOON, once_more).await.expect("who says that no one listens is listened to").unwrap();
    actor.beat(5).await;
    assert_eq!(*opened.borrow(), before + 1, "the other two changed nothing");
}

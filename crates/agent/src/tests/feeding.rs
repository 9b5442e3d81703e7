//! Who lacks the group's version gets it: from the source, from another rollout, or from its own copy.

use std::time::Duration;

use super::engine::{Fault, TestEngine};
use super::fixture::*;
use super::trainer::*;
use weightsync_core::protocol::*;
use weightsync_net::https::CallError;

#[tokio::test(flavor = "multi_thread")]
async fn a_joiner_is_fed_by_the_source_before_it_is_ready() {
    let mut fixture = Fixture::new();
    let (source, first) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &first], Some(&source)).await;
    publish(&source, 3, TestSource::of(3)).outcome().await.unwrap();
    fixture.current = source.state().installed;
    let joiner = fixture.rollout("actors/r-1");
    joiner.engine.set(|inside| inside.slow = Duration::from_millis(300));
    fixture.form(&[&source, &first, &joiner], Some(&source)).await;
    let unready = joiner.rollout().ready().unwrap_err();
    assert!(unready.contains("version 3"), "{unready}");
    joiner.until_installed(3).await;
    assert_eq!(joiner.rollout().ready(), Ok(()));
    let (layout, bytes) = weights(3);
    assert_eq!(joiner.engine.serves(), Some(served(&layout, &bytes)));
    assert_eq!(first.engine.get(|inside| inside.installs), 1, "who holds it is not switched again");
    let received = joiner.state().received.unwrap();
    assert_eq!((received.version, received.from, received.by), (3, source.name.clone(), TransportKind::Tcp));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_joiner_is_fed_by_a_rollout_when_the_source_is_gone() {
    let mut fixture = Fixture::new();
    let (mut source, first) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &first], Some(&source)).await;
    publish(&source, 3, TestSource::of(3)).outcome().await.unwrap();
    fixture.current = source.state().installed;
    source.kill();
    let joiner = fixture.rollout("actors/r-1");
    fixture.form(&[&first, &joiner], Some(&first)).await;
    joiner.until_installed(3).await;
    let (layout, bytes) = weights(3);
    assert_eq!(joiner.engine.serves(), Some(served(&layout, &bytes)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_goes_before_a_feeding_and_takes_its_member_along() {
    let mut fixture = Fixture::new();
    let (source, first) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &first], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    fixture.current = source.state().installed;
    let joiner = fixture.rollout("actors/r-1");
    fixture.policy.min_ready = 2;
    fixture.form(&[&source, &first, &joiner], Some(&source)).await;
    let result = publish(&source, 2, TestSource::of(2)).outcome().await.unwrap();
    assert_eq!(result.installed.len(), 2, "{:?}", result.behind);
    joiner.until_installed(2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_engine_is_unready_until_it_holds_the_version() {
    let mut fixture = Fixture::new();
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &rollout], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    rollout.engine.restart();
    rollout.engine.set(|inside| inside.slow = Duration::from_millis(300));
    rollout.until("without a version", |state| state.installed.is_none()).await;
    assert!(rollout.rollout().ready().is_err());
    rollout.until_installed(1).await;
    assert_eq!(rollout.rollout().ready(), Ok(()));
    let (layout, bytes) = weights(1);
    assert_eq!(rollout.engine.serves(), Some(served(&layout, &bytes)));
}

#[tokio::test(flavor = "multi_thread")]
async fn restart_between_two_probes_is_unready_and_reported() {
    let mut fixture = Fixture::new();
    fixture.policy.health.period_ms = 3_600_000;
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &rollout], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    rollout.until("at version 1, seen by its engine's probe", |state| state.installed.is_some() && state.healthy).await;
    assert_eq!((rollout.rollout().ready(), rollout.state().engine_restarts), (Ok(()), 0));
    rollout.engine.restart();
    // No probe for an hour.
    let why = rollout.rollout().ready().unwrap_err();
    assert!(why.contains("gone or was replaced"), "{why}");
    assert_eq!(rollout.state().installed, None, "no version is counted for it");
    rollout.rollout().look_now();
    let state = rollout.until_installed(1).await;
    assert_eq!((rollout.rollout().ready(), state.engine_restarts), (Ok(()), 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn unseen_restart_is_reported_with_the_next_version() {
    let mut fixture = Fixture::new();
    fixture.policy.health.period_ms = 3_600_000;
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &rollout], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    rollout.engine.restart();
    let result = publish(&source, 2, TestSource::of(2)).outcome().await.unwrap();
    assert_eq!(result.installed.len(), 1, "{:?}", result.behind);
    let state = rollout.until_installed(2).await;
    assert_eq!((rollout.rollout().ready(), state.engine_restarts), (Ok(()), 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_kept_copy_is_not_installed_and_source_feeds() {
    let mut fixture = Fixture::new();
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &rollout], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    fixture.current = source.state().installed;
    let directory = rollout.engine.get(|inside| inside.directory.clone()).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(directory.join("model.safetensors")).unwrap();
    std::os::unix::fs::FileExt::write_at(&file, &[0xff], file.metadata().unwrap().len() - 3).unwrap();
    rollout.engine.restart();
    rollout.until("without a version", |state| state.installed.is_none()).await;
    rollout.until_installed(1).await;
    let (layout, bytes) = weights(1);
    assert_eq!(rollout.engine.serves(), Some(served(&layout, &bytes)));
    assert_ne!(rollout.engine.get(|inside| inside.directory.clone()).unwrap(), directory);
}

/// What an engine was given once may have changed since: its container can write there.
#[tokio::test(flavor = "multi_thread")]
async fn copy_damaged_after_a_failed_load_is_not_given_again() {
    let mut fixture = Fixture::new();
    let (source, rollouts) = (fixture.source(), fixture.rollouts(2));
    fixture.form(&[&source, &rollouts[0], &rollouts[1]], Some(&source)).await;
    rollouts[1].engine.set(|inside| inside.fault = Fault::FailsInLoad);
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    rollouts[1].until("dirty", |state| state.phase == MemberPhase::Dirty).await;
    let copy = rollouts[1].rollout().holding(&source.state().installed.unwrap()).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(copy.dir().path().join("model.safetensors")).unwrap();
    std::os::unix::fs::FileExt::write_at(&file, &[0xff], file.metadata().unwrap().len() - 3).unwrap();
    drop(copy);
    rollouts[1].engine.set(|inside| inside.fault = Fault::None);
    rollouts[1].until_installed(1).await;
    let (layout, bytes) = weights(1);
    assert_eq!(rollouts[1].engine.serves(), Some(served(&layout, &bytes)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dirty_engine_is_never_ready_and_is_fed_in_full() {
    let mut fixture = Fixture::new();
    let (source, rollouts) = (fixture.source(), fixture.rollouts(2));
    fixture.form(&[&source, &rollouts[0], &rollouts[1]], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    rollouts[1].engine.set(|inside| inside.fault = Fault::FailsInLoad);
    let result = publish(&source, 2, TestSource::of(2)).outcome().await.unwrap();
    assert_eq!(result.installed, [rollouts[0].name.clone()]);
    let state = rollouts[1].until("dirty", |state| state.phase == MemberPhase::Dirty).await;
    assert!(state.installed.is_none() && state.paused_until.is_some(), "{state:?}");
    assert!(rollouts[1].rollout().ready().is_err());
    assert!(rollouts[1].engine.get(|inside| inside.paused), "never resumed with half an update");
    rollouts[1].engine.set(|inside| inside.fault = Fault::None);
    rollouts[1].until_installed(2).await;
    assert_eq!(rollouts[1].rollout().ready(), Ok(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_seen_idle_after_install_is_dirty_and_named() {
    let mut fixture = Fixture::new();
    let (source, rollouts) = (fixture.source(), fixture.rollouts(2));
    fixture.form(&[&source, &rollouts[0], &rollouts[1]], Some(&source)).await;
    rollouts[1].engine.set(|inside| (inside.owes, inside.spoiled) = (true, Some(2)));
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    let result = publish(&source, 2, TestSource::of(2)).outcome().await.unwrap();
    assert_eq!(result.installed.len(), 2, "it is not waited for");
    let state = rollouts[1].until("dirty", |state| state.phase == MemberPhase::Dirty).await;
    assert!(state.installed.is_none() && state.paused_until.is_some(), "{state:?}");
    assert!(state.reason.as_ref().is_some_and(|reason| reason.contains("does not compute with it")), "{state:?}");
    assert!(rollouts[1].rollout().ready().is_err());
    rollouts[1].engine.set(|inside| inside.spoiled = None);
    rollouts[1].until_installed(2).await;
    assert_eq!((rollouts[0].rollout().ready(), rollouts[1].rollout().ready()), (Ok(()), Ok(())));
}

#[tokio::test(flavor = "multi_thread")]
async fn unfed_dirty_engine_is_restored_at_the_deadline() {
    let mut fixture = Fixture::new();
    fixture.policy.update_timeout_ms = 1_000;
    fixture.policy.retain_bytes = 0;
    let (mut source, rollouts) = (fixture.source(), fixture.rollouts(2));
    fixture.form(&[&source, &rollouts[0], &rollouts[1]], Some(&source)).await;
    rollouts[1].engine.set(|inside| inside.fault = Fault::FailsInLoad);
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    rollouts[1].until("dirty", |state| state.phase == MemberPhase::Dirty).await;
    source.kill();
    rollouts[1].engine.set(|inside| inside.fault = Fault::None);
    rollouts[1].until("put back", |state| state.phase != MemberPhase::Dirty).await;
    assert_eq!(rollouts[1].engine.get(|inside| (inside.put_back, inside.paused)), (1, false));
    assert!(rollouts[1].state().installed.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_killed_in_an_install_finds_half_an_update_on_restart() {
    let mut fixture = Fixture::new();
    let (source, mut rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    let engine = rollout.engine.clone();
    fixture.form(&[&source, &rollout], Some(&source)).await;
    engine.set(|inside| inside.fault = Fault::Hangs);
    let publishing = publish(&source, 1, TestSource::of(1));
    rollout.until("installing", |state| state.paused_until.is_some()).await;
    let pod = rollout.address.incarnation.pod_uid.clone();
    rollout.kill();
    fixture.fence(&[&source]).await;
    engine.set(|inside| inside.fault = Fault::None);
    drop(rollout);
    let again = fixture.pod("actors/r-0", Role::Rollout, engine.clone(), &pod);
    again.until("dirty", |state| state.phase == MemberPhase::Dirty).await;
    assert!(engine.get(|inside| inside.paused) && again.rollout().ready().is_err());
    fixture.form(&[&source, &again], Some(&source)).await;
    assert_eq!(publishing.outcome().await.unwrap().installed.len(), 1);
    assert_eq!(again.rollout().ready(), Ok(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_is_healthy_once_its_properties_are_known() {
    let mut fixture = Fixture::new();
    let engine = TestEngine::default();
    // Longer than a health check may take, as the first `/server_info` of a vLLM.
    engine.set(|inside| inside.slow_facts = Duration::from_secs(3));
    let (source, rollout) = (fixture.source(), fixture.member("actors/r-0", Role::Rollout, engine));
    for _ in 0..5 {
        let prepare = PrepareRequest { deadline_ms: 100, ..fixture.prepare_request(&[&source, &rollout], &rollout) };
        let refused = fixture.ask(&rollout, &prepare).await;
        assert!(matches!(refused, Err(CallError::Refused { .. })), "{refused:?}");
        assert!(!rollout.state().healthy, "a group would wait for what it is");
    }
    let state = rollout.until("its engine said what it is", |state| state.healthy).await;
    assert_eq!(state.engine.map(|facts| facts.size), Some(1));
    fixture.form(&[&source, &rollout], Some(&source)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unhealthy_engine_leaves_by_threshold_and_comes_back() {
    let mut fixture = Fixture::new();
    let (source, rollout) = (fixture.source(), fixture.member("actors/r-0", Role::Rollout, TestEngine::default()));
    fixture.form(&[&source, &rollout], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    rollout.engine.set(|inside| inside.fault = Fault::Down);
    rollout.until("down", |state| state.phase == MemberPhase::EngineDown && !state.healthy).await;
    assert!(rollout.rollout().ready().is_err());
    rollout.engine.set(|inside| inside.fault = Fault::None);
    let state = rollout.until("up", |state| state.phase == MemberPhase::Ready && state.healthy).await;
    // The same start: it still holds what it held.
    assert_eq!(state.installed.map(|held| held.version), Some(1));
    assert_eq!(rollout.rollout().ready(), Ok(()));
}

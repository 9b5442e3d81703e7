//! Installs whose end proved nothing: the replica serves only after its engine was asked, and no release leaves an engine paused.

use super::engine::Fault;
use super::fixture::*;
use super::trainer::*;
use weightsync_core::protocol::{HeldVersion, MemberPhase};

#[tokio::test(flavor = "multi_thread")]
async fn paused_engine_is_proven_when_it_runs_again() {
    let mut fixture = Fixture::new();
    fixture.policy.update_timeout_ms = 4_000;
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &rollout], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    rollout.until_installed(1).await;

    rollout.engine.set(|inside| (inside.fault, inside.lost_start_up) = (Fault::StaysPaused, true));
    publish(&source, 2, TestSource::of(2)).outcome().await.unwrap_err();
    let state = rollout.until("unknown", |state| state.phase == MemberPhase::Unknown).await;
    assert_eq!(state.installed, None, "the engine does not hold version 1 any more");
    assert!(state.paused_until.is_some() && state.reason.is_some(), "{state:?}");
    let why = rollout.rollout().ready().unwrap_err();
    assert!(why.contains("not known what the engine holds"), "{why}");

    rollout.engine.set(|inside| inside.fault = Fault::None);
    let state = rollout.until("proven", |state| state.installed.as_ref().is_some_and(|held| held.version == 2)).await;
    assert!(!rollout.engine.get(|inside| inside.paused));
    assert_eq!(state.paused_until, None);
    assert_eq!(rollout.engine.get(|inside| inside.installs), 2, "it was asked, and not fed again");
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_that_stays_paused_gets_its_start_up_weights_back() {
    let mut fixture = Fixture::new();
    fixture.policy.update_timeout_ms = 2_000;
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &rollout], Some(&source)).await;
    rollout.engine.set(|inside| inside.fault = Fault::StaysPaused);
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap_err();
    rollout.until("put back", |state| !state.phase.must_not_serve() && state.phase == MemberPhase::Ready).await;
    assert!(rollout.engine.get(|inside| inside.put_back > 0 && !inside.paused));
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_that_reports_another_version_is_fed_again() {
    let mut fixture = Fixture::new();
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &rollout], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    rollout.until_installed(1).await;
    let serves = rollout.engine.serves();

    rollout.engine.set(|inside| {
        inside.holding = Some(HeldVersion { version: 9, manifest: "f".repeat(64) });
        inside.serves = None;
    });
    let engine = rollout.engine.clone();
    let again = move || engine.get(|inside| inside.installs) == 2;
    rollout.until("fed again", |state| again() && state.installed.as_ref().is_some_and(|held| held.version == 1)).await;
    assert_eq!(rollout.engine.serves(), serves);
}

#[tokio::test(flavor = "multi_thread")]
async fn released_engine_with_half_an_update_gets_its_kept_version() {
    let mut fixture = Fixture::new();
    fixture.policy.update_timeout_ms = 3_000;
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &rollout], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    let serves = rollout.engine.serves();
    rollout.engine.set(|inside| inside.fault = Fault::FailsInLoad);
    publish(&source, 2, TestSource::of(2)).outcome().await.unwrap_err();
    rollout.until("dirty", |state| state.phase == MemberPhase::Dirty).await;
    assert!(rollout.engine.get(|inside| inside.paused));

    rollout.engine.set(|inside| inside.fault = Fault::None);
    rollout.rollout().release().await;
    assert!(!rollout.engine.get(|inside| inside.paused || inside.half.is_some()));
    assert_eq!(rollout.engine.serves(), serves);
}

//! Versions that would fail whenever they are published: reported at once, not retried until the deadline.

use std::sync::atomic::Ordering;

use super::engine::Fault;
use super::fixture::*;
use super::trainer::*;
use weightsync_core::protocol::{Activation, PublishErrorCode};

/// No deadline of an attempt or of the publish: what ends did so by itself.
#[tokio::test(flavor = "multi_thread")]
async fn version_that_every_engine_refuses_is_tried_once() {
    let mut fixture = Fixture::new();
    fixture.policy.update_timeout_ms = u64::try_from(HOUR.as_millis()).unwrap();
    let (source, rollouts) = (fixture.source(), fixture.rollouts(2));
    fixture.form(&[&source, &rollouts[0], &rollouts[1]], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    for rollout in &rollouts {
        rollout.engine.set(|inside| inside.fault = Fault::KnowsNoSuchTensor);
    }
    let version = TestSource::of(2);
    let restarts = version.restarts.clone();
    let error = publish_as(&source, 2, version, Activation::Auto, HOUR).outcome().await.unwrap_err();
    assert_eq!((error.code, error.retryable), (PublishErrorCode::Invalid, false), "{}", error.message);
    assert!(error.message.contains("'other'"), "it names the tensor: {}", error.message);
    assert_eq!(restarts.load(Ordering::SeqCst), 0, "its bytes were read once");

    for rollout in &rollouts {
        rollout.engine.set(|inside| inside.fault = Fault::None);
    }
    publish(&source, 3, TestSource::of(3)).outcome().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn version_that_one_engine_refuses_is_served_by_the_other() {
    let mut fixture = Fixture::new();
    let (source, rollouts) = (fixture.source(), fixture.rollouts(2));
    fixture.form(&[&source, &rollouts[0], &rollouts[1]], Some(&source)).await;
    rollouts[0].engine.set(|inside| inside.fault = Fault::KnowsNoSuchTensor);
    let result = publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    assert_eq!(result.installed, [rollouts[1].name.clone()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn version_that_lacks_a_tensor_of_the_one_before_is_refused() {
    let mut fixture = Fixture::new();
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &rollout], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    rollout.until_installed(1).await;
    let error = publish(&source, 2, TestSource::without_last(2)).outcome().await.unwrap_err();
    assert_eq!((error.code, error.retryable), (PublishErrorCode::Invalid, false), "{}", error.message);
    assert!(error.message.contains("it lacks"), "{}", error.message);
    assert_eq!(rollout.engine.get(|inside| inside.installs), 1, "no engine was touched");
    publish(&source, 3, TestSource::of(3)).outcome().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_whose_loader_stays_broken_is_named_until_it_restarts() {
    let mut fixture = Fixture::new();
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &rollout], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    rollout.engine.set(|inside| inside.fault = Fault::LoaderBroken);
    publish(&source, 2, TestSource::of(2)).outcome().await.unwrap_err();
    let state = rollout.until("known to be broken", |state| state.wedged).await;
    assert!(!state.healthy && state.reason.as_ref().is_some_and(|reason| reason.contains("restart it")), "{state:?}");

    rollout.engine.restart();
    rollout.until_installed(1).await;
    assert!(!rollout.state().wedged);
}

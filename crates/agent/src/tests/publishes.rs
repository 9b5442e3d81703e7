//! Publishes: what reaches whom, who is left out, and what happens when a member dies in the middle.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::Semaphore;

use super::corrupting::twins;
use super::engine::Fault;
use super::fixture::*;
use super::trainer::*;
use crate::rollout::readiness::Assigned;
use weightsync_core::protocol::*;
use weightsync_core::weights::{Dtype, IgnoredTensors, Layout, TensorSpec, bucket_digest};

fn all<'a>(source: &'a Member, rollouts: &'a [Member]) -> Vec<&'a Member> {
    std::iter::once(source).chain(rollouts).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn publish_to_three_rollouts_is_served_byte_for_byte() {
    let mut fixture = Fixture::new();
    let (source, rollouts) = (fixture.source(), fixture.rollouts(3));
    fixture.policy.min_ready = 3;
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    let result = publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    assert_eq!((result.version, result.attempts, result.installed.len(), result.behind.len()), (1, 1, 3, 0));
    let (layout, bytes) = weights(1);
    for rollout in &rollouts {
        assert_eq!(rollout.engine.serves(), Some(served(&layout, &bytes)), "{}", rollout.name);
        assert_eq!(rollout.rollout().ready(), Ok(()));
    }
    let phases: Vec<&str> = result.phases_ms.iter().map(|(phase, _)| phase.as_str()).collect();
    assert_eq!(phases, ["begin", "transfer", "verify", "activate"]);
    assert_eq!(source.state().retained.map(|held| held.manifest), Some(result.manifest));
}

#[tokio::test(flavor = "multi_thread")]
async fn rollouts_report_who_sent_a_version_and_how_fast() {
    let mut fixture = Fixture::new();
    let (source, rollouts) = (fixture.source(), fixture.rollouts(2));
    fixture.policy.min_ready = 2;
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    assert!(rollouts.iter().all(|rollout| rollout.state().received.is_none()));
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    let sent: Vec<Received> = rollouts.iter().map(|rollout| rollout.state().received.unwrap()).collect();
    let mut senders: Vec<&MemberName> = sent.iter().map(|received| &received.from).collect();
    senders.sort();
    assert!(senders.contains(&&source.name) && senders.iter().any(|sender| sender.0.starts_with("actors/")), "a chain: {senders:?}");
    let (layout, _) = weights(1);
    for received in &sent {
        assert_eq!((received.version, received.by, received.bytes), (1, TransportKind::Tcp, layout.total_bytes));
        assert!(received.microseconds > 0 && received.rate() > 0, "{received:?}");
    }
    assert_eq!(source.state().received, None, "it sent");
}

#[tokio::test(flavor = "multi_thread")]
async fn windows_of_an_engine_that_serves_reach_the_trainer() {
    let mut fixture = Fixture::new();
    let (source, rollouts) = (fixture.source(), fixture.rollouts(2));
    fixture.policy.min_ready = 2;
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    let window = |version| MixedWindow { version, begin_ms: version * 10, end_ms: Some(version * 10 + 5) };
    rollouts[0].engine.set(|inside| inside.mixed = vec![window(1), window(2)]);
    let result = publish(&source, 2, TestSource::of(2)).outcome().await.unwrap();
    assert_eq!(result.mixed, [(rollouts[0].name.clone(), vec![window(2)])], "of this version, and of who served");
    assert_eq!(rollouts[0].state().mixed, [window(1), window(2)]);
    assert_eq!(rollouts[1].state().mixed, []);
    let text = serde_json::to_string(&rollouts[1].state()).unwrap();
    assert!(!text.contains("mixed"), "{text}");
}

/// Story F53.
#[tokio::test(flavor = "multi_thread")]
async fn version_6_is_refused_after_7() {
    let mut fixture = Fixture::new();
    let (source, rollouts) = (fixture.source(), fixture.rollouts(1));
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    for version in [5, 7] {
        publish(&source, version, TestSource::of(u8::try_from(version).unwrap())).outcome().await.unwrap();
    }
    for version in [6, 7] {
        let error = publish(&source, version, TestSource::of(9)).outcome().await.unwrap_err();
        assert_eq!((error.code, error.retryable), (PublishErrorCode::VersionNotHigher, false), "{}", error.message);
    }
    let (layout, bytes) = weights(7);
    assert_eq!(rollouts[0].engine.serves(), Some(served(&layout, &bytes)));
    // Only the directory of the version that is served is left.
    let pod = &rollouts[0].address.incarnation.pod_uid;
    let left: Vec<String> = std::fs::read_dir(fixture.versions.path().join(pod))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with('v'))
        .collect();
    assert_eq!(left.len(), 1, "{left:?}");
    assert!(left[0].starts_with("v7-a1"), "{left:?}");
}

/// Story F04.
#[tokio::test(flavor = "multi_thread")]
async fn unanswering_engine_is_left_out_by_name() {
    let mut fixture = Fixture::new();
    let (source, rollouts) = (fixture.source(), fixture.rollouts(3));
    fixture.policy.min_ready = 2;
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    rollouts[1].engine.set(|inside| inside.fault = Fault::Down);
    let result = publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    assert_eq!(result.installed, [rollouts[0].name.clone(), rollouts[2].name.clone()]);
    let [(name, reason)] = result.behind.as_slice() else { panic!("{:?}", result.behind) };
    assert_eq!(*name, rollouts[1].name);
    assert!(reason.contains("did not respond"), "{reason}");
    // Its engine comes back: it is fed without a new epoch.
    rollouts[1].engine.set(|inside| inside.fault = Fault::None);
    rollouts[1].until_installed(1).await;
    let (layout, bytes) = weights(1);
    assert_eq!(rollouts[1].engine.serves(), Some(served(&layout, &bytes)));
}

#[tokio::test(flavor = "multi_thread")]
async fn too_few_able_replicas_fail_a_publish_unchanged() {
    let mut fixture = Fixture::new();
    let (source, rollouts) = (fixture.source(), fixture.rollouts(2));
    fixture.policy.min_ready = 2;
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    rollouts[0].engine.set(|inside| inside.fault = Fault::FailsBeforeLoad);
    let error = publish_as(&source, 2, TestSource::of(2), Activation::Auto, Duration::from_secs(3)).outcome().await.unwrap_err();
    assert_eq!(error.code, PublishErrorCode::Timeout, "{}", error.message);
    assert!(error.message.contains("actors/r-0") && error.retryable, "{}", error.message);
    let state = rollouts[0].state();
    assert_eq!(state.installed.map(|held| held.version), Some(1));
    assert_ne!(state.phase, MemberPhase::Dirty);
    // The number may be used again for the same weights, and for no others: also when every replica has the bytes already.
    let other = publish(&source, 2, TestSource::of(3)).outcome().await.unwrap_err();
    assert_eq!(other.code, PublishErrorCode::ManifestChanged, "{}", other.message);
    assert!(rollouts.iter().all(|rollout| rollout.engine.serves() != Some(served(&weights(3).0, &weights(3).1))));
    rollouts[0].engine.set(|inside| inside.fault = Fault::None);
    let again = publish(&source, 2, TestSource::of(2)).outcome().await.unwrap();
    assert_eq!(again.installed.len(), 2);
}

/// Publishes a version and stops its stream in the middle; answers the gate that lets the rest through.
async fn stop_in_the_middle(source: &Member, rollouts: &[Member], version: Version, repeatable: bool) -> (Publishing, Arc<Semaphore>) {
    let gate = Arc::new(Semaphore::new(0));
    let bytes = TestSource { gate: Some(gate.clone()), repeatable, ..TestSource::of(u8::try_from(version).unwrap()) };
    let half = bytes.layout.bucket_count() / 2;
    let total = bytes.layout.total_bytes;
    gate.add_permits(half as usize);
    let publishing = publish(source, version, bytes);
    for rollout in rollouts {
        let received = tokio::time::timeout(Duration::from_secs(10), async {
            loop {
                if let Ok(status) = rollout.rollout().status(None, &weightsync_net::identity::PeerIdentity::Controller).await
                    && status.update.version == version
                    && status.bytes * 100 / total >= 20
                {
                    return status.bytes * 100 / total;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        let percent = received.await.expect("bytes arrive");
        assert!((20..=80).contains(&percent), "{percent} %");
    }
    (publishing, gate)
}

#[tokio::test(flavor = "multi_thread")]
async fn rollout_killed_midway_costs_survivors_no_version() {
    let mut fixture = Fixture::new();
    let (source, mut rollouts) = (fixture.source(), fixture.rollouts(3));
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    let (publishing, gate) = stop_in_the_middle(&source, &rollouts, 2, true).await;
    let mut dead = rollouts.remove(1);
    dead.kill();
    // The leader names the dead one by itself, at once.
    let mut losses = Box::pin(source.core.events().stream(false));
    let lost = tokio::time::timeout(Duration::from_secs(5), async {
        loop {
            match futures::StreamExt::next(&mut losses).await {
                Some(AgentEvent::PeerLost { peer, .. }) => return peer,
                Some(_) => {}
                None => panic!("the stream ended"),
            }
        }
    });
    assert_eq!(lost.await.expect("a loss is reported"), dead.name);
    let survivors = all(&source, &rollouts);
    fixture.fence(&survivors).await;
    gate.add_permits(1000);
    fixture.form(&survivors, Some(&source)).await;
    let result = publishing.outcome().await.unwrap();
    assert_eq!((result.attempts, result.epoch, result.installed.len()), (2, 2, 2));
    let (layout, bytes) = weights(2);
    for rollout in &rollouts {
        assert_eq!(rollout.engine.serves(), Some(served(&layout, &bytes)));
        assert_eq!(rollout.engine.get(|inside| inside.installs), 2, "no engine was touched by the attempt that failed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn read_once_source_is_not_read_twice_unless_retained() {
    let mut fixture = Fixture::new();
    fixture.policy.retain_bytes = 0;
    let (source, rollouts) = (fixture.source(), fixture.rollouts(2));
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    let (publishing, gate) = stop_in_the_middle(&source, &rollouts, 1, false).await;
    fixture.fence(&all(&source, &rollouts)).await;
    gate.add_permits(1000);
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    let error = publishing.outcome().await.unwrap_err();
    assert!(error.message.contains("read only once") && error.retryable, "{}", error.message);
    assert!(rollouts.iter().all(|rollout| rollout.engine.serves().is_none()));
}

#[tokio::test(flavor = "multi_thread")]
async fn attempt_cut_off_continues_from_the_kept_buckets() {
    let mut fixture = Fixture::new();
    let (source, rollouts) = (fixture.source(), fixture.rollouts(2));
    fixture.policy.min_ready = 2;
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    let (publishing, gate) = stop_in_the_middle(&source, &rollouts, 1, false).await;
    fixture.fence(&all(&source, &rollouts)).await;
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    gate.add_permits(1000);
    let result = publishing.outcome().await.unwrap();
    assert_eq!((result.attempts, result.installed.len()), (2, 2));
    let (layout, bytes) = weights(1);
    assert!(rollouts.iter().all(|rollout| rollout.engine.serves() == Some(served(&layout, &bytes))));
    assert_eq!(source.state().retained.map(|held| held.manifest), Some(result.manifest));
}

#[tokio::test(flavor = "multi_thread")]
async fn fence_after_all_bytes_resumes_from_the_retained_copy() {
    let mut fixture = Fixture::new();
    let (source, rollouts) = (fixture.source(), fixture.rollouts(2));
    fixture.policy.min_ready = 2;
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    for rollout in &rollouts {
        rollout.engine.set(|inside| inside.slow = Duration::from_secs(1));
    }
    let bytes = TestSource { repeatable: false, ..TestSource::of(1) };
    let restarts = bytes.restarts.clone();
    let publishing = publish(&source, 1, bytes);
    rollouts[0].until("installing", |state| state.paused_until.is_some()).await;
    fixture.fence(&all(&source, &rollouts)).await;
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    let result = publishing.outcome().await.unwrap();
    assert_eq!((result.attempts, result.installed.len(), restarts.load(Ordering::SeqCst)), (2, 2, 0));
    // The engines were being switched when the epoch ended: they were let go on, and not switched twice.
    assert!(rollouts.iter().all(|rollout| rollout.engine.get(|inside| inside.installs) == 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_byte_that_flips_on_the_way_is_never_installed() {
    let mut fixture = Fixture::new();
    let (source, rollouts) = (fixture.source(), fixture.rollouts(2));
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    fixture.wrong.byte.store(true, Ordering::SeqCst);
    let publishing = publish(&source, 1, TestSource::of(1));
    source.until("out of the attempt", |state| state.phase == MemberPhase::Updating).await;
    source.until("out of the attempt", |state| state.phase == MemberPhase::Ready).await;
    let view = source.core.events().update().unwrap();
    assert_eq!(view.phase, UpdatePhase::Failed);
    assert!(view.failure.as_ref().is_some_and(|failure| failure.contains("digest")), "{:?}", view.failure);
    assert!(rollouts.iter().all(|rollout| rollout.engine.get(|inside| inside.installs) == 0));
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    assert_eq!(publishing.outcome().await.unwrap().attempts, 2);
    let (layout, bytes) = weights(1);
    assert!(rollouts.iter().all(|rollout| rollout.engine.serves() == Some(served(&layout, &bytes))));
}

/// Before the leader ended the attempt there, the member waited for its bytes as long as silence is allowed.
#[tokio::test(flavor = "multi_thread")]
async fn member_that_refuses_the_end_is_fed_without_a_wait() {
    let mut fixture = Fixture::new();
    fixture.policy.silence_ms = 120_000;
    fixture.policy.update_timeout_ms = 240_000;
    let (source, rollouts) = (fixture.source(), fixture.rollouts(2));
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    fixture.wrong.relay.store(true, Ordering::SeqCst);
    let result = publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    assert_eq!(result.installed, [rollouts[0].name.clone()]);
    let [(name, reason)] = result.behind.as_slice() else { panic!("{:?}", result.behind) };
    assert_eq!(*name, rollouts[1].name);
    assert!(reason.contains("by way of actors/r-0"), "{reason}");
    rollouts[1].until_installed(1).await;
    let (layout, bytes) = weights(1);
    assert_eq!(rollouts[1].engine.serves(), Some(served(&layout, &bytes)));
}

/// A version of one tensor, of which a member that passes it on can make another one with the same sums.
fn forgeable() -> TestSource {
    let [honest, _] = twins();
    let tensor = TensorSpec::new("w".into(), Dtype::U8, vec![honest.len() as u64]);
    let layout = Layout::new("model", vec![tensor], 64 << 10).unwrap();
    TestSource { layout, bytes: honest.into(), ..TestSource::of(1) }
}

#[test]
fn twins_differ_by_blake3_and_not_by_xxh3() {
    let [honest, forged] = twins();
    assert_ne!(honest, forged);
    assert_eq!(bucket_digest(&honest), bucket_digest(&forged));
    assert_ne!(blake3::hash(&honest), blake3::hash(&forged));
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_a_relay_forged_are_refused_by_their_blake3() {
    let mut fixture = Fixture::new();
    fixture.policy.digest = Digest::Blake3;
    let (source, rollouts) = (fixture.source(), fixture.rollouts(2));
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    fixture.wrong.byte.store(true, Ordering::SeqCst);
    let publishing = publish(&source, 1, forgeable());
    source.until("in the attempt", |state| state.phase == MemberPhase::Updating).await;
    source.until("out of the attempt", |state| state.phase == MemberPhase::Ready).await;
    let view = source.core.events().update().unwrap();
    assert_eq!(view.phase, UpdatePhase::Failed);
    assert!(view.failure.as_ref().is_some_and(|failure| failure.contains("differs from the manifest")), "{:?}", view.failure);
    assert!(rollouts.iter().all(|rollout| rollout.engine.get(|inside| inside.installs) == 0));
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    assert_eq!(publishing.outcome().await.unwrap().attempts, 2);
}

/// What `update.digest: Xxh3` does not protect from, as docs/security.md says.
#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_a_relay_forged_pass_where_xxh3_was_chosen() {
    let mut fixture = Fixture::new();
    fixture.policy.digest = Digest::Xxh3;
    let (source, rollouts) = (fixture.source(), fixture.rollouts(1));
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    fixture.wrong.byte.store(true, Ordering::SeqCst);
    assert_eq!(publish(&source, 1, forgeable()).outcome().await.unwrap().attempts, 1);
    assert!(!fixture.wrong.byte.load(Ordering::SeqCst), "the forged bytes were sent");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_staged_version_waits_for_the_trainer_and_is_switched_then() {
    let mut fixture = Fixture::new();
    let (source, rollouts) = (fixture.source(), fixture.rollouts(2));
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    let publishing = publish_as(&source, 1, TestSource::of(1), Activation::Manual, Duration::from_secs(10));
    assert_eq!(publishing.outcome().await.unwrap().installed.len(), 2);
}

/// Story F69.
#[tokio::test(flavor = "multi_thread")]
async fn publish_without_a_group_ends_at_its_deadline() {
    let mut fixture = Fixture::new();
    let source = fixture.source();
    let error = publish_as(&source, 1, TestSource::of(1), Activation::Auto, Duration::from_millis(300)).outcome().await.unwrap_err();
    assert_eq!(error.code, PublishErrorCode::NotEnoughReplicas);
    assert!(error.message.contains("no group"), "{}", error.message);
}

/// Story F48.
#[tokio::test(flavor = "multi_thread")]
async fn version_lacking_an_engines_tensor_is_refused_at_begin() {
    let mut fixture = Fixture::new();
    let (source, rollouts) = (fixture.source(), fixture.rollouts(1));
    rollouts[0].engine.set(|inside| inside.needs = Some("layer.1.w".into()));
    fixture.form(&all(&source, &rollouts), Some(&source)).await;
    let error = publish(&source, 1, TestSource::of(1)).outcome().await.unwrap_err();
    assert_eq!((error.code, error.retryable, error.phase), (PublishErrorCode::Invalid, false, Some(UpdatePhase::Begin)));
    assert!(error.message.contains("layer.1.w") && error.message.contains("actors/r-0"), "{}", error.message);
    assert_eq!(rollouts[0].engine.get(|inside| inside.installs), 0);
    // A pattern counts from the next version on, in the same group.
    let ignored = IgnoredTensors::new(vec!["layer.*.w".into()]);
    rollouts[0].rollout().assign(Assigned { known: true, serve_before_first_version: true, ignored, ..Assigned::default() });
    let result = publish(&source, 2, TestSource::of(1)).outcome().await.unwrap();
    let notes = vec!["its names and shapes were compared with nothing: its start-up weights are nowhere".to_owned()];
    assert_eq!(result.notes, [(MemberName("actors/r-0".into()), notes)]);
}

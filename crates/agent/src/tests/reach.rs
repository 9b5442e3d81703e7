//! What a trainer is informed when engines were switching while its publish ended.

use std::time::Duration;

use super::first_status;
use super::fixture::*;
use super::trainer::*;
use crate::lead::table::{Switching, Table};
use crate::source::history::History;
use crate::source::reach::Reach;
use weightsync_core::protocol::*;
use weightsync_core::weights::DigestAlgorithm;

fn name(number: u32) -> MemberName {
    MemberName(format!("actors/r-{number}"))
}

fn status(step: InstallStep) -> UpdateStatus {
    let epoch = EpochId { weightsync: "w".into(), created: 1, term: 0, epoch: 1 };
    first_status(UpdateId { epoch, version: 7, attempt: 1 }, step, 0)
}

fn timeout() -> PublishError {
    PublishError { code: PublishErrorCode::Timeout, message: "too late".into(), retryable: true, phase: None, member: None }
}

#[test]
fn member_lost_after_activate_may_serve_and_refuser_does_not() {
    let members = [name(0), name(1), name(2), name(3)];
    let mut table = Table::new(&members, 1);
    for member in &members {
        table.observe(member, &status(InstallStep::Delivered));
    }
    table.lost(&name(3), "gone before anybody was informed");
    table.reported(&members[..3]);
    assert_eq!(table.switching(), Switching { unheard: members[..3].to_vec(), ..Switching::default() });
    table.observe(&name(0), &status(InstallStep::Installed));
    table.observe(&name(1), &status(InstallStep::Failed));
    table.observe(&name(2), &status(InstallStep::Installing));
    for member in &members {
        table.lost(member, "the link is dead");
    }
    let known = table.switching();
    assert_eq!(known, Switching { installed: vec![name(0)], failed: vec![name(1)], unheard: vec![name(2)] });
    let lagging = table.behind();
    let why = |member: &MemberName| lagging.iter().find(|(name, _)| name == member).map(|(_, why)| why.as_str()).unwrap_or_default();
    assert!(why(&name(2)).contains("was not heard of since"), "{lagging:?}");
    assert!(!why(&name(3)).contains("asked to switch"), "{lagging:?}");
}

#[test]
fn failure_is_reported_unless_enough_engines_may_switch() {
    let judge = |min_ready: u32, heard: &[Switching]| {
        let mut reach = Reach::default();
        reach.needed(min_ready);
        for known in heard {
            reach.heard(known.clone());
        }
        reach.judge(7, timeout())
    };
    let unheard = |members: &[u32]| Switching { unheard: members.iter().copied().map(name).collect(), ..Switching::default() };
    assert_eq!(judge(1, &[]), timeout(), "no one was informed");
    let reported = judge(1, &[unheard(&[0, 1])]);
    assert_eq!((reported.code, reported.retryable), (PublishErrorCode::OutcomeUnknown, true));
    assert!(reported.message.contains("actors/r-0, actors/r-1 were asked to switch to version 7"), "{}", reported.message);
    assert!(reported.message.ends_with("too late"), "{}", reported.message);
    assert_eq!(judge(3, &[unheard(&[0, 1])]).code, PublishErrorCode::Timeout, "two of three cannot make it count");

    let failed = Switching { failed: vec![name(0)], ..Switching::default() };
    assert_eq!(judge(1, &[unheard(&[0]), failed]), timeout(), "it said later that it did not");
    let installed = Switching { installed: vec![name(0)], ..Switching::default() };
    let reported = judge(2, &[unheard(&[0]), installed.clone()]);
    assert_eq!(reported.code, PublishErrorCode::Timeout);
    assert!(reported.message.starts_with("actors/r-0 serve version 7"), "{}", reported.message);
    assert_eq!(judge(2, &[installed, unheard(&[1])]).code, PublishErrorCode::OutcomeUnknown);
}

#[test]
fn version_with_unknown_outcome_repeats_with_same_weights() {
    let held = |version, manifest: &str| HeldVersion { version, manifest: manifest.into() };
    let mut history = History::default();
    history.tried(7);
    assert!(history.admit(7, Some(&held(7, "seven"))).is_err(), "its weights were never read here");
    history.read(&held(7, "seven"), DigestAlgorithm::Gsum64);
    assert_eq!(history.admit(7, Some(&held(7, "seven"))), Ok(Some("seven".into())));
    assert_eq!(history.admit(7, Some(&held(7, ""))), Ok(Some("seven".into())));
    assert!(history.admit(7, Some(&held(7, "other"))).is_err(), "somebody else published that number");
    assert!(history.admit(7, Some(&held(8, "eight"))).is_err(), "the group is further");
    history.reached(held(7, "seven"));
    assert!(history.admit(7, Some(&held(7, "seven"))).is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn publish_that_times_out_in_the_switch_may_be_repeated() {
    let mut fixture = Fixture::new();
    fixture.policy.min_ready = 2;
    let (source, rollouts) = (fixture.source(), fixture.rollouts(2));
    fixture.form(&[&source, &rollouts[0], &rollouts[1]], Some(&source)).await;
    for rollout in &rollouts {
        rollout.engine.set(|inside| inside.slow = Duration::from_secs(12));
    }
    let limit = Duration::from_secs(10);
    let error = publish_as(&source, 1, TestSource::of(1), Activation::Auto, limit).outcome().await.unwrap_err();
    assert_eq!((error.code, error.retryable), (PublishErrorCode::OutcomeUnknown, true), "{}", error.message);
    assert!(rollouts.iter().all(|rollout| error.message.contains(&rollout.name.0)), "{}", error.message);

    // They did switch.
    let state = rollouts[0].until_installed(1).await;
    rollouts[1].until_installed(1).await;
    for rollout in &rollouts {
        rollout.engine.set(|inside| inside.slow = Duration::ZERO);
    }
    fixture.current = state.installed;
    fixture.form(&[&source, &rollouts[0], &rollouts[1]], Some(&source)).await;
    let installs = rollouts[0].engine.get(|inside| inside.installs);
    let other = publish(&source, 1, TestSource::of(9)).outcome().await.unwrap_err();
    assert_eq!(other.code, PublishErrorCode::ManifestChanged, "{}", other.message);
    let result = publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    assert_eq!(result.installed.len(), 2, "{:?}", result.behind);
    assert_eq!(rollouts[0].engine.get(|inside| inside.installs), installs, "nothing is switched a second time");
}

/// The group may find that the version counts, and its source is the one that can bring it to others.
#[tokio::test(flavor = "multi_thread")]
async fn version_of_unknown_outcome_is_fed_once_it_counts() {
    let mut fixture = Fixture::new();
    let (source, first) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &first], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    first.engine.set(|inside| inside.slow = Duration::from_secs(5));
    let limit = Duration::from_secs(3);
    let error = publish_as(&source, 2, TestSource::of(2), Activation::Auto, limit).outcome().await.unwrap_err();
    assert_eq!(error.code, PublishErrorCode::OutcomeUnknown, "{}", error.message);
    let counts = first.until_installed(2).await.installed;
    source.until("the version in doubt kept", |state| state.keeps().any(|kept| Some(kept) == counts.as_ref())).await;

    fixture.current = counts;
    let joiner = fixture.rollout("actors/r-1");
    fixture.form(&[&source, &first, &joiner], Some(&source)).await;
    joiner.until_installed(2).await;
}

//! What a trainer is told when engines were switching while its publish ended.

use std::time::Duration;

use super::bed::*;
use super::first_status;
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
fn who_was_told_to_switch_and_is_lost_may_serve_the_version_and_who_said_no_does_not() {
    let members = [name(0), name(1), name(2), name(3)];
    let mut table = Table::new(&members, 1);
    for member in &members {
        table.observe(member, &status(InstallStep::Delivered));
    }
    table.lost(&name(3), "gone before anybody was told");
    table.told(&members[..3]);
    assert_eq!(table.switching(), Switching { unheard: members[..3].to_vec(), ..Switching::default() });
    table.observe(&name(0), &status(InstallStep::Installed));
    table.observe(&name(1), &status(InstallStep::Failed));
    table.observe(&name(2), &status(InstallStep::Installing));
    for member in &members {
        table.lost(member, "the link is dead");
    }
    let known = table.switching();
    assert_eq!(known, Switching { installed: vec![name(0)], failed: vec![name(1)], unheard: vec![name(2)] });
    let behind = table.behind();
    let why = |member: &MemberName| behind.iter().find(|(name, _)| name == member).map(|(_, why)| why.as_str()).unwrap_or_default();
    assert!(why(&name(2)).contains("was not heard of since"), "{behind:?}");
    assert!(!why(&name(3)).contains("told to switch"), "{behind:?}");
}

#[test]
fn a_failure_is_told_as_one_unless_enough_engines_may_have_switched() {
    let judge = |min_ready: u32, heard: &[Switching]| {
        let mut reach = Reach::default();
        reach.needed(min_ready);
        for known in heard {
            reach.heard(known.clone());
        }
        reach.judge(7, timeout())
    };
    let unheard = |members: &[u32]| Switching { unheard: members.iter().copied().map(name).collect(), ..Switching::default() };
    assert_eq!(judge(1, &[]), timeout(), "nobody was told");
    let told = judge(1, &[unheard(&[0, 1])]);
    assert_eq!((told.code, told.retryable), (PublishErrorCode::OutcomeUnknown, true));
    assert!(told.message.contains("actors/r-0, actors/r-1 were told to switch to version 7"), "{}", told.message);
    assert!(told.message.ends_with("too late"), "{}", told.message);
    assert_eq!(judge(3, &[unheard(&[0, 1])]).code, PublishErrorCode::Timeout, "two of three cannot make it count");

    let failed = Switching { failed: vec![name(0)], ..Switching::default() };
    assert_eq!(judge(1, &[unheard(&[0]), failed]), timeout(), "it said later that it did not");
    let installed = Switching { installed: vec![name(0)], ..Switching::default() };
    let told = judge(2, &[unheard(&[0]), installed.clone()]);
    assert_eq!(told.code, PublishErrorCode::Timeout);
    assert!(told.message.starts_with("actors/r-0 serve version 7"), "{}", told.message);
    assert_eq!(judge(2, &[installed, unheard(&[1])]).code, PublishErrorCode::OutcomeUnknown);
}

#[test]
fn a_version_that_arrived_although_its_outcome_was_not_heard_may_come_again_with_its_own_weights_only() {
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
async fn a_publish_whose_time_ends_while_engines_switch_has_no_known_outcome_and_may_come_again() {
    let mut bed = Bed::new();
    bed.policy.min_ready = 2;
    let (source, rollouts) = (bed.source(), bed.rollouts(2));
    bed.form(&[&source, &rollouts[0], &rollouts[1]], Some(&source)).await;
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
    bed.current = state.installed;
    bed.form(&[&source, &rollouts[0], &rollouts[1]], Some(&source)).await;
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
    let mut bed = Bed::new();
    let (source, first) = (bed.source(), bed.rollout("actors/r-0"));
    bed.form(&[&source, &first], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    first.engine.set(|inside| inside.slow = Duration::from_secs(5));
    let limit = Duration::from_secs(3);
    let error = publish_as(&source, 2, TestSource::of(2), Activation::Auto, limit).outcome().await.unwrap_err();
    assert_eq!(error.code, PublishErrorCode::OutcomeUnknown, "{}", error.message);
    let counts = first.until_installed(2).await.installed;
    source.until("the version in doubt kept", |state| state.keeps().any(|kept| Some(kept) == counts.as_ref())).await;

    bed.current = counts;
    let joiner = bed.rollout("actors/r-1");
    bed.form(&[&source, &first, &joiner], Some(&source)).await;
    joiner.until_installed(2).await;
}

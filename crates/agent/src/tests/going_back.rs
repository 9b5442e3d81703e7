//! Earlier versions are kept, within their limits, and a group goes back to one: from the source's copy, from a rollout's, from its own.

use std::sync::Arc;

use super::fixture::*;
use super::trainer::*;
use crate::archive::{Archive, Archived};
use crate::rollout::readiness::Assigned;
use crate::source::history::History;
use weightsync_core::protocol::*;
use weightsync_core::weights::IgnoredTensors;

/// A group in which version 1 and then version 2 were published.
async fn at_two(fixture: &mut Fixture, source: &Member, rollouts: &[Member]) -> [HeldVersion; 2] {
    let mut members = vec![source];
    members.extend(rollouts);
    fixture.form(&members, Some(source)).await;
    let mut held = Vec::new();
    for version in [1, 2] {
        let result = publish(source, version, TestSource::of(u8::try_from(version).unwrap())).outcome().await.unwrap();
        assert_eq!(result.installed.len(), rollouts.len(), "{:?}", result.behind);
        held.push(source.state().installed.unwrap());
    }
    fixture.current = held.last().cloned();
    held.try_into().unwrap()
}

fn serves(member: &Member, seed: u8) -> bool {
    let (layout, bytes) = weights(seed);
    member.engine.serves() == Some(served(&layout, &bytes))
}

fn back(fixture: &mut Fixture, to: &HeldVersion, from: Version, pinned: bool) {
    fixture.current = Some(to.clone());
    fixture.returned = Some(Returned { to: to.version, from, pinned });
}

#[tokio::test(flavor = "multi_thread")]
async fn group_rolls_back_to_a_kept_version_then_takes_higher_one() {
    let mut fixture = Fixture::new();
    fixture.policy.keep = 2;
    let (source, rollouts) = (fixture.source(), fixture.rollouts(2));
    let [one, two] = at_two(&mut fixture, &source, &rollouts).await;
    assert_eq!((source.state().retained, source.state().earlier), (Some(two.clone()), vec![one.clone()]));
    assert_eq!((rollouts[0].state().retained, rollouts[0].state().earlier), (Some(two.clone()), vec![one.clone()]));

    back(&mut fixture, &one, 2, true);
    fixture.form(&[&source, &rollouts[0], &rollouts[1]], Some(&source)).await;
    for rollout in &rollouts {
        rollout.until_installed(1).await;
        assert!(serves(rollout, 1) && rollout.rollout().ready().is_ok());
        assert_eq!(rollout.state().retained, Some(one.clone()), "what is current is named first");
        assert_eq!(rollout.engine.get(|inside| inside.installs), 3);
    }
    let error = publish(&source, 3, TestSource::of(3)).outcome().await.unwrap_err();
    assert_eq!((error.code, error.retryable), (PublishErrorCode::VersionPinned, true));
    assert!(error.message.contains("targetVersion") && error.message.contains("version 1"), "{}", error.message);

    back(&mut fixture, &one, 2, false);
    fixture.form(&[&source, &rollouts[0], &rollouts[1]], Some(&source)).await;
    let error = publish(&source, 2, TestSource::of(9)).outcome().await.unwrap_err();
    assert_eq!(error.code, PublishErrorCode::VersionNotHigher);
    assert!(error.message.contains("before it went back to 1"), "{}", error.message);
    assert_eq!(publish(&source, 3, TestSource::of(3)).outcome().await.unwrap().installed.len(), 2);
    assert!(rollouts.iter().all(|rollout| serves(rollout, 3)));
    let mut kept: Vec<Version> = rollouts[0].state().keeps().map(|held| held.version).collect();
    kept.sort_unstable();
    assert_eq!(kept, [1, 3], "of what was left and what was gone back to, the last used stays");
}

#[tokio::test(flavor = "multi_thread")]
async fn rollout_that_keeps_the_version_rolls_back_without_trainer() {
    let mut fixture = Fixture::new();
    fixture.policy.keep = 2;
    let (mut source, first) = (fixture.source(), fixture.rollout("actors/r-0"));
    let [one, two] = at_two(&mut fixture, &source, std::slice::from_ref(&first)).await;
    source.kill();
    // One that never had version 1.
    let joiner = fixture.rollout("actors/r-1");
    fixture.form(&[&first, &joiner], Some(&first)).await;
    joiner.until_installed(2).await;
    assert!(joiner.state().earlier.is_empty());

    back(&mut fixture, &one, 2, true);
    fixture.form(&[&first, &joiner], Some(&first)).await;
    first.until_installed(1).await;
    joiner.until_installed(1).await;
    assert!(serves(&first, 1) && serves(&joiner, 1));
    assert_eq!(joiner.state().earlier, [two]);
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_earlier_copy_is_dropped_and_version_is_sent() {
    let mut fixture = Fixture::new();
    fixture.policy.keep = 2;
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &rollout], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    let one = source.state().installed.unwrap();
    let directory = rollout.engine.get(|inside| inside.directory.clone()).unwrap();
    publish(&source, 2, TestSource::of(2)).outcome().await.unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(directory.join("model.safetensors")).unwrap();
    std::os::unix::fs::FileExt::write_at(&file, &[0xff], file.metadata().unwrap().len() - 3).unwrap();
    back(&mut fixture, &one, 2, true);
    fixture.form(&[&source, &rollout], Some(&source)).await;
    rollout.until_installed(1).await;
    assert!(serves(&rollout, 1));
    assert_ne!(rollout.engine.get(|inside| inside.directory.clone()).unwrap(), directory);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_kept_beyond_the_objects_count_or_memory() {
    let mut fixture = Fixture::new();
    fixture.policy.keep = 3;
    // Room for one more than the one that serves.
    let (layout, _) = weights(1);
    fixture.policy.retain_bytes = layout.total_bytes * 3 / 2;
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &rollout], Some(&source)).await;
    for version in 1..=4 {
        publish(&source, u64::from(version), TestSource::of(version)).outcome().await.unwrap();
    }
    let numbers = |state: MemberState| state.keeps().map(|held| held.version).collect::<Vec<_>>();
    assert_eq!(numbers(source.state()), [4]);
    assert_eq!(numbers(rollout.state()), [4, 3]);
    fixture.policy.retain_bytes = 64 << 20;
    fixture.current = source.state().installed;
    fixture.form(&[&source, &rollout], Some(&source)).await;
    for version in 5..=8 {
        publish(&source, u64::from(version), TestSource::of(version)).outcome().await.unwrap();
    }
    assert_eq!((numbers(source.state()), numbers(rollout.state())), (vec![8, 7, 6], vec![8, 7, 6]));
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_not_rolled_back_serves_until_enough_were() {
    let mut fixture = Fixture::new();
    fixture.policy.keep = 2;
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    let [one, _] = at_two(&mut fixture, &source, std::slice::from_ref(&rollout)).await;
    let assigned = |returned| Assigned {
        known: true,
        serve_before_first_version: true,
        suspended: false,
        current: Some(one.clone()),
        returned,
        newest: None,
        ignored: IgnoredTensors::default(),
    };
    rollout.rollout().assign(assigned(None));
    assert_eq!(rollout.rollout().ready(), Ok(()));
    rollout.rollout().assign(assigned(Some(Returned { to: 1, from: 2, pinned: true })));
    assert!(rollout.rollout().ready().unwrap_err().contains("the group went back to 1"));
}

#[derive(Debug)]
struct Item(HeldVersion, u64);

impl Archived for Item {
    fn held(&self) -> &HeldVersion {
        &self.0
    }

    fn memory(&self) -> u64 {
        self.1
    }
}

#[test]
fn kept_versions_drop_the_least_recently_used() {
    let held = |version: Version| HeldVersion { version, manifest: format!("m{version}") };
    let mut archive = Archive::default();
    for (version, bytes) in [(1, 10), (2, 0), (3, 10), (4, 10)] {
        archive.put(Arc::new(Item(held(version), bytes)));
    }
    let numbers = |archive: &Archive<Item>| archive.all().map(|item| item.0.version).collect::<Vec<_>>();
    archive.put(Arc::new(Item(held(3), 10)));
    assert_eq!((numbers(&archive), archive.memory()), (vec![3, 4, 2, 1], 30));
    archive.touch(&held(1));
    assert_eq!(numbers(&archive), [1, 3, 4, 2]);
    assert_eq!(archive.make_room().unwrap().0.version, 4, "what takes no memory makes no room");
    let gone: Vec<Version> = archive.trim(2, 100).iter().map(|item| item.0.version).collect();
    assert_eq!((gone, numbers(&archive)), (vec![2], vec![1, 3]));
    let gone: Vec<Version> = archive.trim(2, 15).iter().map(|item| item.0.version).collect();
    assert_eq!((gone, numbers(&archive)), (vec![3], vec![1]));
    assert!(archive.find(&HeldVersion { version: 1, manifest: String::new() }).is_some(), "by its number alone");
    assert!(archive.find(&HeldVersion { version: 1, manifest: "other".into() }).is_none());
    assert!(archive.remove(&held(1)).is_some() && archive.make_room().is_none());
}

#[test]
fn numbers_rolled_back_from_are_never_published_again() {
    let held = |version: Version| HeldVersion { version, manifest: "m".into() };
    let mut history = History::default();
    history.reached(held(7));
    history.went_back(&held(4), 7);
    assert_eq!(history.done(), Some(&held(4)));
    for number in 1..=7 {
        assert!(history.admit(number, Some(&held(4))).is_err(), "{number}");
    }
    assert!(history.admit(8, Some(&held(4))).is_ok());
    history.reached(held(9));
    // Repeated by an epoch that is as old.
    history.went_back(&held(4), 7);
    assert_eq!(history.done(), Some(&held(9)));
    assert!(history.admit(9, None).is_err() && history.admit(10, None).is_ok());
    // A source that knows nothing of before.
    let mut fresh = History::default();
    fresh.went_back(&held(4), 7);
    assert!(fresh.admit(5, Some(&held(4))).unwrap_err().message.contains("7, which the group held before it went back to 4"));
}

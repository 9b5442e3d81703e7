//! Switching in waves: who may begin when (properties), and what engines and publishes see of it.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;

use super::engine::Fault;
use super::fixture::*;
use super::trainer::*;
use crate::lead::waves::{Waiting, Waves};
use weightsync_core::protocol::*;

fn name(number: usize) -> MemberName {
    MemberName(format!("actors/r-{number}"))
}

fn waves(serves: &[bool], limit: u32) -> (Waves, BTreeMap<MemberName, InstallStep>) {
    let waiting = serves.iter().enumerate().map(|(number, serves)| Waiting { member: name(number), serves: *serves });
    let steps = (0..serves.len()).map(|number| (name(number), InstallStep::Delivered)).collect();
    (Waves::new(waiting.collect(), limit), steps)
}

#[test]
fn replicas_that_do_not_serve_switch_first() {
    let (all, steps) = waves(&[true, true, false], 0);
    assert_eq!(all.next(|member| steps.get(member).copied()).len(), 3, "without a limit");
    let (mut some, mut steps) = waves(&[true, true, false, true], 1);
    let next = some.next(|member| steps.get(member).copied());
    assert_eq!(next, [name(0), name(2)]);
    some.begin(&next);
    assert!(some.next(|member| steps.get(member).copied()).is_empty());
    steps.insert(name(2), InstallStep::Failed);
    assert!(some.next(|member| steps.get(member).copied()).is_empty());
    steps.insert(name(0), InstallStep::Installed);
    let next = some.next(|member| steps.get(member).copied());
    assert_eq!(next, [name(1)]);
    some.begin(&next);
    steps.insert(name(1), InstallStep::Failed);
    assert!(some.next(|member| steps.get(member).copied()).is_empty() && !some.is_moving(|member| steps.get(member).copied()));
    assert_eq!(some.waiting(|member| steps.get(member).copied()).len(), 1, "the last one is left where it is");
}

proptest! {
    #[test]
    fn no_more_are_out_than_allowed_and_all_switch(
        serves in prop::collection::vec(any::<bool>(), 1..12),
        limit in 0u32..5,
        ends in prop::collection::vec((any::<prop::sample::Index>(), prop::bool::weighted(0.15)), 0..60),
    ) {
        let (mut waves, mut steps) = waves(&serves, limit);
        let most = if limit == 0 { usize::MAX } else { usize::try_from(limit).unwrap() };
        let mut failed = 0;
        let mut ends = ends.into_iter();
        loop {
            let next = waves.next(|member| steps.get(member).copied());
            for member in &next {
                steps.insert(member.clone(), InstallStep::Installing);
            }
            waves.begin(&next);
            let out = (0..serves.len()).filter(|number| {
                serves[*number] && matches!(steps[&name(*number)], InstallStep::Installing | InstallStep::Failed)
            });
            prop_assert!(out.count() <= most);
            let moving: Vec<MemberName> =
                steps.iter().filter(|(_, step)| **step == InstallStep::Installing).map(|(member, _)| member.clone()).collect();
            prop_assert_eq!(waves.is_moving(|member| steps.get(member).copied()), !moving.is_empty());
            let Some(first) = moving.first() else { break };
            let (which, fails) = ends.next().map_or((first.clone(), false), |(which, fails)| (which.get(&moving).clone(), fails));
            failed += usize::from(fails && serves[(0..serves.len()).find(|number| name(*number) == which).unwrap()]);
            steps.insert(which, if fails { InstallStep::Failed } else { InstallStep::Installed });
        }
        let waiting = waves.waiting(|member| steps.get(member).copied()).len();
        prop_assert!(waiting == 0 || failed >= most, "{} wait although {} failed", waiting, failed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_pause_one_by_one_and_others_serve() {
    let mut fixture = Fixture::new();
    (fixture.policy.max_unavailable, fixture.policy.min_ready) = (1, 3);
    let (source, rollouts) = (fixture.source(), fixture.rollouts(3));
    let all = [&source, &rollouts[0], &rollouts[1], &rollouts[2]];
    fixture.form(&all, Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    for rollout in &rollouts {
        rollout.engine.set(|inside| inside.slow = Duration::from_millis(150));
    }
    let publishing = publish(&source, 2, TestSource::of(2));
    let watching = async {
        let mut most = 0;
        while rollouts.iter().any(|rollout| rollout.state().installed.is_none_or(|held| held.version != 2)) {
            let paused = rollouts.iter().filter(|rollout| rollout.engine.get(|inside| inside.paused)).count();
            most = most.max(paused);
            for rollout in rollouts.iter().filter(|rollout| !rollout.engine.get(|inside| inside.paused)) {
                assert_eq!(rollout.rollout().ready(), Ok(()), "{}", rollout.name);
            }
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
        most
    };
    let most = tokio::time::timeout(SOON, watching).await.unwrap();
    assert_eq!(publishing.outcome().await.unwrap().installed.len(), 3);
    assert_eq!(most, 1, "paused at once");
}

#[tokio::test(flavor = "multi_thread")]
async fn version_engines_refuse_costs_one_replica_not_all() {
    let mut fixture = Fixture::new();
    (fixture.policy.max_unavailable, fixture.policy.min_ready) = (1, 2);
    let (source, rollouts) = (fixture.source(), fixture.rollouts(3));
    let all = [&source, &rollouts[0], &rollouts[1], &rollouts[2]];
    fixture.form(&all, Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    for rollout in &rollouts {
        rollout.until_installed(1).await;
        rollout.engine.set(|inside| inside.fault = Fault::FailsInLoad);
    }
    let error = publish(&source, 2, TestSource::of(2)).outcome().await.unwrap_err();
    assert_eq!(error.code, PublishErrorCode::NotEnoughReplicas);
    assert!(error.message.contains("maxUnavailable"), "{}", error.message);
    let (layout, bytes) = weights(1);
    assert_eq!(rollouts.iter().filter(|rollout| rollout.engine.serves() == Some(served(&layout, &bytes))).count(), 2);
    assert_eq!(rollouts.iter().filter(|rollout| rollout.engine.get(|inside| inside.installs) > 1).count(), 1);
}

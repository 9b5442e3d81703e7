//! Versions that canaries refuse: what the trainer hears, which engines are held, and the way back to the version before.

use super::fixture::*;
use super::trainer::*;
use crate::lead::table::{Switching, Table, Verdict};
use crate::source::history::History;
use crate::source::reach::Reach;
use weightsync_core::protocol::*;
use weightsync_net::https::CallError;

fn canary() -> CanaryPolicy {
    CanaryPolicy { prompt: "p".into(), max_tokens: 1, least_log_prob_milli: -4000, greatest_log_prob_milli: 0 }
}

/// A group with a canary, at version 1.
async fn at_one(rollouts: usize, max_unavailable: u32) -> (Fixture, Member, Vec<Member>) {
    let mut fixture = Fixture::new();
    (fixture.policy.keep, fixture.policy.canary, fixture.policy.max_unavailable) = (2, Some(canary()), max_unavailable);
    let (source, rollouts) = (fixture.source(), fixture.rollouts(rollouts));
    let mut members = vec![&source];
    members.extend(&rollouts);
    fixture.form(&members, Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    // A publish ends when enough replicas confirm: one that is slower confirms a moment later.
    for rollout in &rollouts {
        rollout.until_installed(1).await;
    }
    fixture.current = source.state().installed;
    (fixture, source, rollouts)
}

/// A controller has the group go on from the version that is current, informed of what was refused.
async fn form_again(fixture: &mut Fixture, source: &Member, rollouts: &[Member], refused: Version) {
    (fixture.returned, fixture.refused) = (Some(Returned { to: 1, from: refused, pinned: false }), vec![refused]);
    let mut members = vec![source];
    members.extend(rollouts);
    fixture.form(&members, Some(source)).await;
}

fn refuse(rollout: &Member, versions: &[Version]) {
    rollout.engine.set(|inside| inside.refuses = versions.to_vec());
}

fn serves(member: &Member, seed: u8) -> bool {
    let (layout, bytes) = weights(seed);
    member.engine.serves() == Some(served(&layout, &bytes))
}

#[tokio::test(flavor = "multi_thread")]
async fn version_all_refuse_fails_and_previous_is_restored() {
    let (mut fixture, source, rollouts) = at_one(2, 0).await;
    for rollout in &rollouts {
        refuse(rollout, &[2]);
    }
    let error = publish(&source, 2, TestSource::of(2)).outcome().await.unwrap_err();
    assert_eq!((error.code, error.retryable), (PublishErrorCode::VersionRefused, false), "{}", error.message);
    for said in ["on 2 of 2 replicas", "actors/r-0", "actors/r-1", "token 1 of 1 is no number"] {
        assert!(error.message.contains(said), "{}", error.message);
    }
    for rollout in &rollouts {
        let state = rollout.until_installed(1).await;
        assert!(serves(rollout, 1) && rollout.rollout().ready().is_ok());
        let [refused] = state.refused.as_slice() else { panic!("{:?}", state.refused) };
        assert_eq!(refused.held.version, 2);
        assert!(!state.keeps().any(|held| held.version == 2), "what is refused is not kept");
    }
    let error = publish(&source, 2, TestSource::of(7)).outcome().await.unwrap_err();
    assert_eq!(error.code, PublishErrorCode::VersionRefused, "other weights under the number: {}", error.message);

    form_again(&mut fixture, &source, &rollouts, 2).await;
    let result = publish(&source, 3, TestSource::of(3)).outcome().await.unwrap();
    assert_eq!(result.installed.len(), 2);
    assert!(rollouts.iter().all(|rollout| serves(rollout, 3) && rollout.state().refused.is_empty()));
}

#[tokio::test(flavor = "multi_thread")]
async fn new_source_learns_refused_versions_from_its_group() {
    let (mut fixture, mut source, rollouts) = at_one(1, 0).await;
    source.kill();
    let successor = fixture.source();
    form_again(&mut fixture, &successor, &rollouts, 2).await;
    let error = publish(&successor, 2, TestSource::of(2)).outcome().await.unwrap_err();
    assert_eq!((error.code, error.retryable), (PublishErrorCode::VersionRefused, false), "{}", error.message);
    assert_eq!(publish(&successor, 3, TestSource::of(3)).outcome().await.unwrap().installed.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn lone_refusing_replica_is_named_and_does_not_serve() {
    let (_fixture, source, rollouts) = at_one(3, 0).await;
    refuse(&rollouts[0], &[2]);
    let result = publish(&source, 2, TestSource::of(2)).outcome().await.unwrap();
    assert_eq!(result.installed.len(), 2);
    let [(member, why)] = result.behind.as_slice() else { panic!("{:?}", result.behind) };
    assert_eq!(*member, rollouts[0].name);
    assert!(why.contains("the canary refuses what it answers"), "{why}");
    assert!(rollouts[1..].iter().all(|rollout| serves(rollout, 2) && rollout.rollout().ready().is_ok()));
    let why = rollouts[0].rollout().ready().unwrap_err();
    assert!(why.contains("the canary refuses"), "{why}");
    // It is asked again with each feeding, and passes once its engine answers as the others do.
    refuse(&rollouts[0], &[]);
    let state = rollouts[0].until_installed(2).await;
    assert!(state.refused.is_empty() && rollouts[0].rollout().ready().is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_version_reaches_no_more_than_may_be_out() {
    let (_fixture, source, rollouts) = at_one(3, 1).await;
    for rollout in &rollouts {
        refuse(rollout, &[2]);
    }
    let error = publish(&source, 2, TestSource::of(2)).outcome().await.unwrap_err();
    assert_eq!(error.code, PublishErrorCode::VersionRefused, "{}", error.message);
    let asked = rollouts.iter().filter(|rollout| !rollout.state().refused.is_empty()).count();
    assert_eq!(asked, 1);
    for rollout in &rollouts {
        rollout.until_installed(1).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn held_rollout_that_keeps_the_version_rolls_back_alone() {
    let (mut fixture, mut source, rollouts) = at_one(1, 0).await;
    let rollout = &rollouts[0];
    refuse(rollout, &[1, 2]);
    publish(&source, 2, TestSource::of(2)).outcome().await.unwrap_err();
    source.kill();
    rollout.until("held", |state| state.phase == MemberPhase::Dirty).await;
    refuse(rollout, &[2]);
    fixture.returned = Some(Returned { to: 1, from: 2, pinned: false });
    fixture.form(&[rollout], Some(rollout)).await;
    rollout.until_installed(1).await;
    assert!(serves(rollout, 1) && rollout.rollout().ready().is_ok());
    assert_eq!(rollout.engine.get(|inside| inside.put_back), 0, "it did not have to wait for its start-up weights");
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_that_cannot_be_asked_says_what_it_lacks() {
    let mut fixture = Fixture::new();
    fixture.policy.canary = Some(canary());
    let rollout = fixture.rollout("actors/r-0");
    rollout.engine.set(|inside| inside.mute = true);
    let refused = async |fixture: &mut Fixture| {
        fixture.epoch += 1;
        let prepared = fixture.ask(&rollout, &fixture.prepare_request(&[&rollout], &rollout)).await;
        match prepared {
            Ok(_) => None,
            Err(CallError::Refused { refusal, .. }) => Some((refusal.code, refusal.message)),
            Err(error) => panic!("{error}"),
        }
    };
    let (code, message) = refused(&mut fixture).await.unwrap();
    assert_eq!(code, RefusalCode::CanaryUnavailable);
    assert!(message.contains("gives no log-probs; start it with them"), "{message}");
    fixture.policy.canary = None;
    assert_eq!(refused(&mut fixture).await, None);
    (fixture.policy.canary, fixture.policy.pause) = (Some(canary()), PausePolicy::External);
    rollout.engine.set(|inside| inside.mute = false);
    let (code, message) = refused(&mut fixture).await.unwrap();
    assert!(code == RefusalCode::CanaryUnavailable && message.contains("update.pause"), "{message}");
    fixture.policy.pause = PausePolicy::Keep;
    assert_eq!(refused(&mut fixture).await, None);
}

fn name(number: usize) -> MemberName {
    MemberName(format!("actors/r-{number}"))
}

/// A table of members that were asked to switch: `r` refused, `f` failed otherwise, `i` installed, `w` still at it.
fn table(steps: &str, min_ready: u32) -> Table {
    let members: Vec<MemberName> = (0..steps.len()).map(name).collect();
    let mut table = Table::new(&members, min_ready);
    table.reported(&members);
    for (member, step) in members.iter().zip(steps.chars()) {
        let (step, refused) = match step {
            'r' => (InstallStep::Failed, true),
            'f' => (InstallStep::Failed, false),
            'i' => (InstallStep::Installed, false),
            _ => (InstallStep::Installing, false),
        };
        let epoch = EpochId { weightsync: "w".into(), created: 1, term: 0, epoch: 1 };
        let update = UpdateId { epoch, version: 2, attempt: 1 };
        let reason = Some("measured".to_owned());
        table.observe(
            member,
            &UpdateStatus {
                update,
                sequence: 1,
                step,
                bytes: 1,
                reason,
                dirty: refused,
                refused,
                repeats: refused,
                fenced: false,
                steps_ms: Vec::new(),
                checksum: None,
                mixed: Vec::new(),
                notes: Vec::new(),
            },
        );
    }
    table
}

#[test]
fn majority_that_refuses_decides_for_all_without_a_wait() {
    let failed = |steps: &str, min_ready| match table(steps, min_ready).after_activate() {
        Verdict::Fail(failure) => Some((failure.code, failure.again)),
        _ => None,
    };
    let refused = Some((PublishErrorCode::VersionRefused, false));
    for steps in ["r", "rri", "rrw", "rrf", "rff"] {
        assert_eq!(failed(steps, 1), refused, "{steps}");
    }
    for steps in ["ri", "rii", "rw", "rrwi", "iii"] {
        assert_eq!(failed(steps, 1), None, "{steps}");
    }
    // Fewer than needed took it, and it is not for the canary to say that no one should.
    assert_eq!(failed("rii", 3), Some((PublishErrorCode::NotEnoughReplicas, true)));
}

#[test]
fn a_refused_version_is_refused_also_where_some_were_not_heard() {
    let mut reach = Reach::default();
    reach.needed(1);
    reach.heard(Switching { installed: vec![name(0)], failed: vec![name(1)], unheard: vec![name(2)] });
    let error = |code| PublishError { code, message: "m".into(), retryable: false, phase: None, member: None };
    assert_eq!(reach.judge(2, error(PublishErrorCode::VersionRefused)).code, PublishErrorCode::VersionRefused);
    assert_eq!(reach.judge(2, error(PublishErrorCode::NotEnoughReplicas)).code, PublishErrorCode::OutcomeUnknown);
}

#[test]
fn refused_number_is_never_published_again_higher_one_is() {
    let held = HeldVersion { version: 1, manifest: "m".into() };
    let mut history = History::default();
    history.reached(held.clone());
    history.refused(2);
    let error = history.admit(2, Some(&held)).unwrap_err();
    assert_eq!((error.code, error.retryable), (PublishErrorCode::VersionRefused, false));
    assert!(history.admit(3, Some(&held)).is_ok());
}

//! Messages about groups, over real connections: who may send them, and which are too late.

use std::collections::HashSet;

use super::fixture::*;
use super::trainer::*;
use weightsync_core::protocol::*;
use weightsync_core::weights::DigestAlgorithm;
use weightsync_net::https::CallError;

fn code<T: std::fmt::Debug>(answer: Result<T, CallError>) -> RefusalCode {
    match answer {
        Err(CallError::Refused { refusal, .. }) => refusal.code,
        other => panic!("{other:?}"),
    }
}

/// Story F09.
#[tokio::test(flavor = "multi_thread")]
async fn an_older_epoch_and_a_fenced_one_are_refused() {
    let mut fixture = Fixture::new();
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    let members = [&source, &rollout];
    fixture.form(&members, None).await;
    let old = fixture.prepare_request(&members, &rollout);
    fixture.form(&members, None).await;
    assert_eq!(code(fixture.ask(&rollout, &old).await), RefusalCode::StaleEpoch);
    fixture.fence(&members).await;
    assert_eq!(rollout.state().epoch, None);
    let fenced = fixture.prepare_request(&members, &rollout);
    assert_eq!(code(fixture.ask(&rollout, &fenced).await), RefusalCode::StaleEpoch);
    fixture.form(&members, None).await;
    assert_eq!(rollout.state().epoch, Some(fixture.id()));
}

#[tokio::test(flavor = "multi_thread")]
async fn path_of_each_call_is_its_own_and_served() {
    let mut fixture = Fixture::new();
    let rollout = fixture.rollout("actors/r-0");
    let MemberAddress { control, incarnation, .. } = &rollout.address;
    let served = async |path| match fixture.client.post_json::<_, ()>(control, &incarnation.pod_uid, path, &(), SOON).await {
        Ok(()) | Err(CallError::Refused { .. }) => true,
        Err(error) => error.to_string().contains("HTTP 405"),
    };
    let all = [PATHS_OF_AGENT, PATHS_OF_CONTROLLER, &[EVENTS_PATH]].concat();
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
    for path in PATHS_OF_AGENT {
        assert!(served(path).await, "{path}");
    }
    assert!(!served("/v1/none").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn prepare_before_a_fence_says_why_the_last_epoch_ended() {
    let mut fixture = Fixture::new();
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    let members = [&source, &rollout];
    fixture.form(&members, None).await;
    fixture.form(&members, None).await;
    assert_eq!(source.core.why_over(), "epoch 2 takes its place: because of the test");
    // From an earlier controller, which does not say why.
    fixture.epoch += 1;
    let prepare = PrepareRequest { why: String::new(), ..fixture.prepare_request(&members, &source) };
    fixture.ask(&source, &prepare).await.unwrap();
    assert_eq!(source.core.why_over(), "epoch 3 takes its place");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_was_never_prepared_here_is_refused() {
    let mut fixture = Fixture::new();
    let rollout = fixture.rollout("actors/r-0");
    fixture.epoch = 4;
    let commit = fixture.commit_request(&[&rollout], None);
    assert_eq!(code(fixture.ask(&rollout, &commit).await), RefusalCode::WrongPhase);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_cannot_be_reached_fails_the_commit_by_name() {
    let mut fixture = Fixture::new();
    let (source, first, mut second) = (fixture.source(), fixture.rollout("actors/r-0"), fixture.rollout("actors/r-1"));
    fixture.epoch = 1;
    let members = [&source, &first, &second];
    for member in members {
        let request = fixture.prepare_request(&members, member);
        fixture.ask(member, &request).await.unwrap();
    }
    let commit = fixture.commit_request(&members, None);
    fixture.ask(&first, &commit).await.unwrap();
    second.kill();
    let refused = fixture.ask(&source, &commit).await;
    let Err(CallError::Refused { refusal, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!(refusal.code, RefusalCode::PeerUnreachable);
    assert!(refusal.message.contains("actors/r-1"), "{}", refusal.message);
    assert_eq!(source.state().phase, MemberPhase::Prepared);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_released_rollout_is_ready_and_forgets_its_group() {
    let mut fixture = Fixture::new();
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &rollout], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    rollout.engine.restart();
    let release = ReleaseRequest { id: fixture.id(), reason: "the object was deleted".into() };
    fixture.ask(&rollout, &release).await.unwrap();
    let state = rollout.until("released", |state| state.epoch.is_none()).await;
    assert!(state.reason.is_some_and(|reason| reason.contains("deleted")));
    // It started again: it is asked once more before its pod serves.
    rollout.until("asked again", |state| state.engine_restarts == 1).await;
    assert_eq!(rollout.rollout().ready(), Ok(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_roster_says_who_serves_what() {
    let mut fixture = Fixture::new();
    let (source, rollouts) = (fixture.source(), fixture.rollouts(2));
    fixture.form(&[&source, &rollouts[0], &rollouts[1]], Some(&source)).await;
    publish(&source, 4, TestSource::of(4)).outcome().await.unwrap();
    let mut roster = source.roster.clone();
    let all_ready = |view: &RosterView| {
        view.version == Some(4)
            && view.replicas.len() == 2
            && view.replicas.iter().all(|replica| replica.state == "ready" && replica.version == Some(4))
    };
    let seen = tokio::time::timeout(std::time::Duration::from_secs(10), roster.wait_for(all_ready)).await;
    assert!(seen.is_ok(), "{:?}", source.roster.borrow());
}

/// A router would have no replica to send requests to.
#[tokio::test(flavor = "multi_thread")]
async fn roster_keeps_serving_replicas_while_a_group_forms() {
    let mut fixture = Fixture::new();
    let (source, first, second) = (fixture.source(), fixture.rollout("actors/r-0"), fixture.rollout("actors/r-1"));
    fixture.form(&[&source, &first], Some(&source)).await;
    publish(&source, 4, TestSource::of(4)).outcome().await.unwrap();
    let name = first.name.clone();
    let serves = move |view: &RosterView| {
        view.replicas.iter().any(|one| one.name == name && (one.state.as_str(), one.version) == ("ready", Some(4)))
    };
    let mut roster = source.roster.clone();
    assert!(serves(&roster.borrow_and_update()));
    let mut seen = roster.clone();
    let watched = tokio::spawn(async move {
        let mut views = Vec::new();
        while seen.changed().await.is_ok() {
            views.push(seen.borrow_and_update().clone());
            if views.last().is_some_and(|view| view.replicas.len() == 2) {
                break;
            }
        }
        views
    });
    fixture.form(&[&source, &first, &second], Some(&source)).await;
    let views = tokio::time::timeout(std::time::Duration::from_secs(10), watched).await.expect("both are shown").unwrap();
    assert!(views.iter().all(&serves), "{views:#?}");
    // A group that ends without another one has no members.
    let release = ReleaseRequest { id: fixture.id(), reason: "the object was deleted".into() };
    fixture.ask(&source, &release).await.unwrap();
    let empty = tokio::time::timeout(std::time::Duration::from_secs(10), roster.wait_for(|view| view.replicas.is_empty())).await;
    assert!(empty.is_ok(), "{:?}", source.roster.borrow());
}

#[tokio::test(flavor = "multi_thread")]
async fn roster_of_a_source_follows_what_counts_without_it() {
    let mut fixture = Fixture::new();
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &rollout], Some(&source)).await;
    publish(&source, 4, TestSource::of(4)).outcome().await.unwrap();
    let held = |version| HeldVersion { version, manifest: "m".into() };
    // An answer that the controller gave before it heard of the publish.
    source.core.learn_later(Some(&held(3)));
    assert_eq!(source.core.current().map(|current| current.version), Some(4));
    source.core.learn_later(Some(&held(5)));
    let mut roster = source.roster.clone();
    let seen = tokio::time::timeout(std::time::Duration::from_secs(10), roster.wait_for(|view| view.version == Some(5))).await;
    assert!(seen.is_ok(), "{:?}", source.roster.borrow());
}

/// lightseekorg/tokenspeed#546, vllm-project/vllm#31943: the two sides cut the stream differently (a packed flag, a bucket size from local
/// memory), and one reads what the other did not write.
/// Story F59.
#[tokio::test(flavor = "multi_thread")]
async fn side_with_other_buckets_is_refused_before_a_byte_moves() {
    let mut fixture = Fixture::new();
    let (source, rollout) = (fixture.source(), fixture.rollout("actors/r-0"));
    fixture.form(&[&source, &rollout], None).await;
    let (layout, _) = weights(1);
    let tensors: Vec<_> = layout.tensors().cloned().collect();
    let other = weightsync_core::weights::Layout::new("model", tensors, layout.bucket_bytes * 2).unwrap();
    let update = UpdateId { epoch: fixture.id(), version: 1, attempt: 1 };
    let mut begin = BeginRequest {
        update,
        layout: layout.clone(),
        layout_digest: other.digest(),
        algorithm: DigestAlgorithm::default(),
        feeding: false,
        manual: false,
        manifest_digest: None,
        statement: None,
    };
    assert_eq!(code(fixture.ask_as(&source, &rollout, &begin).await), RefusalCode::LayoutMismatch);
    assert_eq!(rollout.engine.get(|inside| inside.installs), 0);
    begin.layout_digest = layout.digest();
    let status = fixture.ask_as(&source, &rollout, &begin).await.unwrap();
    assert_eq!(status.step, InstallStep::Receiving);
    // A second begin of the attempt with another cut changes nothing.
    let changed = BeginRequest { layout_digest: other.digest(), layout: other, ..begin };
    assert_eq!(code(fixture.ask_as(&source, &rollout, &changed).await), RefusalCode::LayoutMismatch);
}

#[tokio::test(flavor = "multi_thread")]
async fn member_that_poses_as_controller_or_leader_is_refused() {
    let mut fixture = Fixture::new();
    let (source, rollout, other) = (fixture.source(), fixture.rollout("actors/r-0"), fixture.rollout("actors/r-1"));
    let members = [&source, &rollout, &other];
    let id = fixture.form(&members, None).await;
    let next = EpochId { epoch: id.epoch + 1, ..id.clone() };
    let prepare = PrepareRequest { id: next.clone(), ..fixture.prepare_request(&members, &rollout) };
    let commit = CommitRequest { id: next.clone(), ..fixture.commit_request(&members, None) };
    let reason = String::from("mine now");
    // Not even by the one that leads its updates.
    for from in [&source, &other] {
        let answers = [
            fixture.ask_as(from, &rollout, &prepare).await.map(drop),
            fixture.ask_as(from, &rollout, &commit).await.map(drop),
            fixture.ask_as(from, &rollout, &FenceRequest { id: next.clone(), reason: reason.clone() }).await.map(drop),
            fixture.ask_as(from, &rollout, &ReleaseRequest { id: next.clone(), reason: reason.clone() }).await.map(drop),
            fixture.ask_as(from, &rollout, &AssignmentChanged).await,
        ];
        for answer in answers {
            assert_eq!(code(answer), RefusalCode::Forbidden);
        }
    }
    let (layout, _) = weights(1);
    let begin = BeginRequest {
        update: UpdateId { epoch: id.clone(), version: 1, attempt: 1 },
        layout_digest: layout.digest(),
        layout,
        algorithm: DigestAlgorithm::default(),
        feeding: false,
        manual: false,
        manifest_digest: None,
        statement: None,
    };
    assert_eq!(code(fixture.ask_as(&other, &rollout, &begin).await), RefusalCode::Forbidden);
    let state = rollout.core.events().state();
    assert_eq!((state.epoch.as_ref(), state.phase), (Some(&id), MemberPhase::Ready), "nothing of it was done");
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn roster_after_a_publish_agrees_with_its_result() {
    let mut fixture = Fixture::new();
    let (source, rollouts) = (fixture.source(), fixture.rollouts(3));
    fixture.policy.min_ready = 3;
    fixture.form(&[&source, &rollouts[0], &rollouts[1], &rollouts[2]], Some(&source)).await;
    for version in 1..=10 {
        let result = publish(&source, version, TestSource::of(1)).outcome().await.unwrap();
        assert_eq!(result.installed.len(), 3, "{result:?}");
        let shown = source.roster.borrow().clone();
        assert_eq!(shown.version, Some(version));
        assert!(shown.replicas.iter().all(|replica| (replica.version, replica.state.as_str()) == (Some(version), "ready")), "{shown:?}");
    }
}

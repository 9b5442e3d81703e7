//! Messages about groups, over real connections: who may send them, and which are too late.

use super::bed::*;
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

#[tokio::test(flavor = "multi_thread")]
async fn f09_an_older_epoch_and_a_fenced_one_are_refused() {
    let mut bed = Bed::new();
    let (source, rollout) = (bed.source(), bed.rollout("actors/r-0"));
    let members = [&source, &rollout];
    bed.form(&members, None).await;
    let old = bed.prepare_request(&members, &rollout);
    bed.form(&members, None).await;
    assert_eq!(code(bed.post::<_, PrepareResponse>(&rollout, "/v1/epoch/prepare", &old).await), RefusalCode::StaleEpoch);
    bed.fence(&members).await;
    assert_eq!(rollout.state().epoch, None);
    let fenced = bed.prepare_request(&members, &rollout);
    assert_eq!(code(bed.post::<_, PrepareResponse>(&rollout, "/v1/epoch/prepare", &fenced).await), RefusalCode::StaleEpoch);
    bed.form(&members, None).await;
    assert_eq!(rollout.state().epoch, Some(bed.id()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prepare_that_comes_before_any_fence_says_why_the_epoch_before_is_over() {
    let mut bed = Bed::new();
    let (source, rollout) = (bed.source(), bed.rollout("actors/r-0"));
    let members = [&source, &rollout];
    bed.form(&members, None).await;
    bed.form(&members, None).await;
    assert_eq!(source.core.why_over(), "epoch 2 takes its place: because of the test");
    // From an earlier controller, which does not say why.
    bed.epoch += 1;
    let prepare = PrepareRequest { why: String::new(), ..bed.prepare_request(&members, &source) };
    let _: PrepareResponse = bed.post(&source, "/v1/epoch/prepare", &prepare).await.unwrap();
    assert_eq!(source.core.why_over(), "epoch 3 takes its place");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_was_never_prepared_here_is_refused() {
    let mut bed = Bed::new();
    let rollout = bed.rollout("actors/r-0");
    bed.epoch = 4;
    let commit = bed.commit_request(&[&rollout], None);
    assert_eq!(code(bed.post::<_, MemberState>(&rollout, "/v1/epoch/commit", &commit).await), RefusalCode::WrongPhase);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_cannot_be_reached_fails_the_commit_by_name() {
    let mut bed = Bed::new();
    let (source, first, mut second) = (bed.source(), bed.rollout("actors/r-0"), bed.rollout("actors/r-1"));
    bed.epoch = 1;
    let members = [&source, &first, &second];
    for member in members {
        let request = bed.prepare_request(&members, member);
        let _: PrepareResponse = bed.post(member, "/v1/epoch/prepare", &request).await.unwrap();
    }
    let commit = bed.commit_request(&members, None);
    let _: MemberState = bed.post(&first, "/v1/epoch/commit", &commit).await.unwrap();
    second.kill();
    let refused = bed.post::<_, MemberState>(&source, "/v1/epoch/commit", &commit).await;
    let Err(CallError::Refused { refusal, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!(refusal.code, RefusalCode::PeerUnreachable);
    assert!(refusal.message.contains("actors/r-1"), "{}", refusal.message);
    assert_eq!(source.state().phase, MemberPhase::Prepared);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_released_rollout_is_ready_and_forgets_its_group() {
    let mut bed = Bed::new();
    let (source, rollout) = (bed.source(), bed.rollout("actors/r-0"));
    bed.form(&[&source, &rollout], Some(&source)).await;
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
    rollout.engine.restart();
    let release = ReleaseRequest { id: bed.id(), reason: "the object was deleted".into() };
    let _: MemberState = bed.post(&rollout, "/v1/release", &release).await.unwrap();
    let state = rollout.until("released", |state| state.epoch.is_none()).await;
    assert!(state.reason.is_some_and(|reason| reason.contains("deleted")));
    // It started anew: it is asked once more before its pod serves.
    rollout.until("asked again", |state| state.engine_restarts == 1).await;
    assert_eq!(rollout.rollout().ready(), Ok(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_roster_says_who_serves_what() {
    let mut bed = Bed::new();
    let (source, rollouts) = (bed.source(), bed.rollouts(2));
    bed.form(&[&source, &rollouts[0], &rollouts[1]], Some(&source)).await;
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

#[tokio::test(flavor = "multi_thread")]
async fn roster_of_a_source_follows_what_counts_without_it() {
    let mut bed = Bed::new();
    let (source, rollout) = (bed.source(), bed.rollout("actors/r-0"));
    bed.form(&[&source, &rollout], Some(&source)).await;
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
#[tokio::test(flavor = "multi_thread")]
async fn f59_a_side_that_cuts_the_stream_differently_is_refused_before_a_byte_moves() {
    let mut bed = Bed::new();
    let (source, rollout) = (bed.source(), bed.rollout("actors/r-0"));
    bed.form(&[&source, &rollout], None).await;
    let (layout, _) = weights(1);
    let tensors: Vec<_> = layout.tensors().cloned().collect();
    let other = weightsync_core::weights::Layout::new("model", tensors, layout.bucket_bytes * 2).unwrap();
    let update = UpdateId { epoch: bed.id(), version: 1, attempt: 1 };
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
    assert_eq!(code(bed.post_as::<_, UpdateStatus>(&source, &rollout, "/v1/update/begin", &begin).await), RefusalCode::LayoutMismatch);
    assert_eq!(rollout.engine.get(|inside| inside.installs), 0);
    begin.layout_digest = layout.digest();
    let status: UpdateStatus = bed.post_as(&source, &rollout, "/v1/update/begin", &begin).await.unwrap();
    assert_eq!(status.step, InstallStep::Receiving);
    // A second begin of the attempt with another cut changes nothing.
    let changed = BeginRequest { layout_digest: other.digest(), layout: other, ..begin };
    assert_eq!(code(bed.post_as::<_, UpdateStatus>(&source, &rollout, "/v1/update/begin", &changed).await), RefusalCode::LayoutMismatch);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_plays_the_controller_or_the_leader_of_its_group_is_refused() {
    let mut bed = Bed::new();
    let (source, rollout, other) = (bed.source(), bed.rollout("actors/r-0"), bed.rollout("actors/r-1"));
    let members = [&source, &rollout, &other];
    let id = bed.form(&members, None).await;
    let next = EpochId { epoch: id.epoch + 1, ..id.clone() };
    let prepare = PrepareRequest { id: next.clone(), ..bed.prepare_request(&members, &rollout) };
    let commit = CommitRequest { id: next.clone(), ..bed.commit_request(&members, None) };
    let reason = String::from("mine now");
    // Not even by the one that leads its updates.
    for from in [&source, &other] {
        let answers = [
            bed.post_as::<_, serde_json::Value>(from, &rollout, "/v1/epoch/prepare", &prepare).await,
            bed.post_as(from, &rollout, "/v1/epoch/commit", &commit).await,
            bed.post_as(from, &rollout, "/v1/epoch/fence", &FenceRequest { id: next.clone(), reason: reason.clone() }).await,
            bed.post_as(from, &rollout, "/v1/release", &ReleaseRequest { id: next.clone(), reason: reason.clone() }).await,
            bed.post_as(from, &rollout, "/v1/announce", &()).await,
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
    assert_eq!(code(bed.post_as::<_, UpdateStatus>(&other, &rollout, "/v1/update/begin", &begin).await), RefusalCode::Forbidden);
    let state = rollout.core.events().state();
    assert_eq!((state.epoch.as_ref(), state.phase), (Some(&id), MemberPhase::Ready), "nothing of it was done");
    publish(&source, 1, TestSource::of(1)).outcome().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn who_reads_the_roster_behind_a_publish_reads_what_the_publish_said() {
    let mut bed = Bed::new();
    let (source, rollouts) = (bed.source(), bed.rollouts(3));
    bed.policy.min_ready = 3;
    bed.form(&[&source, &rollouts[0], &rollouts[1], &rollouts[2]], Some(&source)).await;
    for version in 1..=10 {
        let result = publish(&source, version, TestSource::of(1)).outcome().await.unwrap();
        assert_eq!(result.installed.len(), 3, "{result:?}");
        let shown = source.roster.borrow().clone();
        assert_eq!(shown.version, Some(version));
        assert!(shown.replicas.iter().all(|replica| (replica.version, replica.state.as_str()) == (Some(version), "ready")), "{shown:?}");
    }
}

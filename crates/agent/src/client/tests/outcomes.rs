//! Every publish hears one outcome, anyone who dies, waits or forgets.

use tokio::time::Instant;

use super::*;
use crate::enrollment::NotEnrolled;
use crate::version_source::SourceError;
use weightsync_core::protocol::{MemberName, PublishError, PublishErrorCode, Rejection, UpdatePhase};
use weightsync_net::https::CallError;

fn publish_with(version: u64, new_queue: QueuePolicy, new_timeout_ms: u64) -> ClientRequest {
    let mut request = publish(version);
    if let ClientRequest::Publish { queue, timeout_ms, .. } = &mut request {
        (*queue, *timeout_ms) = (new_queue, new_timeout_ms);
    }
    request
}

async fn error(raw: &mut Raw) -> PublishError {
    loop {
        match raw.hear().await {
            Some(ClientReply::Error { error }) => return error,
            Some(ClientReply::Accepted { .. } | ClientReply::Ring { .. }) => {}
            other => panic!("{other:?} instead of an error"),
        }
    }
}

#[tokio::test]
async fn progress_staging_and_the_result_reach_the_trainer_in_order() {
    let agent = agent();
    let mut raw = agent.greeted().await;
    raw.ask(&publish(2)).await;
    assert!(matches!(raw.hear().await, Some(ClientReply::Accepted { version: 2 })));
    let mut job = agent.job().await;
    job.reporter.progress(UpdatePhase::Transfer, 4096);
    let total_bytes = job.source.layout().total_bytes;
    let phase = UpdatePhase::Transfer;
    assert_eq!(raw.hear().await, Some(ClientReply::Progress { version: 2, attempt: 1, phase, bytes: 4096, total_bytes }));
    job.reporter.begins(2);
    job.reporter.progress(phase, 4096);
    assert_eq!(raw.hear().await, Some(ClientReply::Progress { version: 2, attempt: 2, phase, bytes: 4096, total_bytes }));
    let staging = tokio::spawn(async move {
        job.reporter.staged(Instant::now() + LIMIT).await.unwrap();
        job.reporter.done(PublishResult { behind: vec![(MemberName("actors/b".into()), "dead".into())], ..result(2) });
    });
    assert_eq!(raw.hear().await, Some(ClientReply::Staged { version: 2 }));
    assert!(!staging.is_finished());
    raw.ask(&ClientRequest::Activate { version: 2 }).await;
    assert_eq!(raw.hear().await, Some(ClientReply::Released { version: 2 }));
    assert!(matches!(raw.hear().await, Some(ClientReply::Done { result }) if result.behind.len() == 1));
}

#[tokio::test]
async fn a_dropped_publish_is_a_failed_one() {
    let agent = agent();
    let mut raw = agent.greeted().await;
    raw.ask(&publish(2)).await;
    drop(agent.job().await);
    let error = error(&mut raw).await;
    assert!(error.retryable && error.code == PublishErrorCode::Internal, "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn publish_without_an_end_is_ended_by_the_connection() {
    let agent = agent();
    let mut raw = agent.greeted().await;
    raw.ask(&publish_with(2, QueuePolicy::Wait, 3_000)).await;
    let job = agent.job().await;
    job.reporter.progress(UpdatePhase::Verify, 1);
    assert!(matches!(raw.hear().await, Some(ClientReply::Accepted { .. })));
    assert!(matches!(raw.hear().await, Some(ClientReply::Progress { .. })));
    let error = error(&mut raw).await;
    assert_eq!((error.code, error.phase), (PublishErrorCode::Timeout, Some(UpdatePhase::Verify)));
    assert!(job.cancel.is_cancelled(), "anyone who leads it would keep the turn of all that come after it");
    // The connection is free for the next one, whatever became of the job.
    raw.ask(&publish(3)).await;
    assert_eq!(agent.job().await.version, 3);
    drop(job);
}

#[tokio::test(start_paused = true)]
async fn a_publish_whose_turn_never_comes_says_so_at_its_deadline() {
    let agent = agent();
    let mut first = agent.greeted().await;
    first.ask(&publish(2)).await;
    let _running = agent.job().await;
    let mut second = agent.greeted().await;
    second.ask(&publish_with(3, QueuePolicy::Wait, 2_000)).await;
    let error = error(&mut second).await;
    assert_eq!(error.code, PublishErrorCode::Timeout);
    assert!(error.message.contains("earlier publish"), "{}", error.message);
}

#[tokio::test(start_paused = true)]
async fn publish_without_an_earlier_one_does_not_name_one() {
    let agent = agent();
    let mut raw = agent.greeted().await;
    agent.queue.not_enrolled(NotEnrolled::Asking { controller: "weightsync.ns.svc:8443".into() });
    let unreachable = CallError::Unreachable { address: "weightsync.ns.svc:8443".into(), cause: "Connection refused".into() };
    let rejection = Rejection { message: "no object claims this pod".into(), retryable: true };
    let rejected = CallError::Rejected { address: "weightsync.ns.svc:8443".into(), rejection };
    for (version, cause, words) in [
        (2, None, ["weightsync.ns.svc:8443 has not answered yet", "publish again"]),
        (3, Some(unreachable), ["weightsync.ns.svc:8443 cannot be reached: Connection refused", "check that the controller runs"]),
        (4, Some(rejected), ["no object claims this pod", "have a WeightSync select this pod"]),
    ] {
        if let Some(cause) = cause {
            agent.queue.not_enrolled(cause.into());
        }
        raw.ask(&publish_with(version, QueuePolicy::Wait, 2_000)).await;
        let error = error(&mut raw).await;
        assert!(error.retryable && error.code == PublishErrorCode::NotEnoughReplicas, "{error:?}");
        assert!(error.message.contains("not enrolled") && !error.message.contains("earlier"), "{}", error.message);
        for word in words {
            assert!(error.message.contains(word), "{word}: {}", error.message);
        }
    }
    // Enrolled, and busy: the earlier one is named.
    agent.queue.enrolled();
    raw.ask(&publish(5)).await;
    let _running = agent.job().await;
    let mut second = agent.greeted().await;
    second.ask(&publish_with(6, QueuePolicy::Wait, 2_000)).await;
    let error = error(&mut second).await;
    assert!(error.message.contains("an earlier publish, of version 5,"), "{}", error.message);
}

#[tokio::test]
async fn latest_replaces_what_waits_and_not_what_runs() {
    let agent = agent();
    let mut running = agent.greeted().await;
    running.ask(&publish(2)).await;
    let job = agent.job().await;
    let mut waiting = agent.greeted().await;
    waiting.ask(&publish(3)).await;
    assert!(matches!(waiting.hear().await, Some(ClientReply::Accepted { .. })));
    let mut latest = agent.greeted().await;
    latest.ask(&publish_with(4, QueuePolicy::Latest, 20_000)).await;
    let superseded = error(&mut waiting).await;
    assert_eq!((superseded.code, superseded.retryable), (PublishErrorCode::Superseded, false));
    assert!(!job.cancel.is_cancelled());
    assert_eq!(agent.job().await.version, 4);
}

#[tokio::test]
async fn publishes_that_wait_have_their_turn_in_order() {
    let agent = agent();
    let mut clients = Vec::new();
    for version in [2, 3, 4] {
        let mut raw = agent.greeted().await;
        raw.ask(&publish(version)).await;
        assert_eq!(raw.hear().await, Some(ClientReply::Accepted { version }));
        clients.push(raw);
    }
    for version in [2, 3, 4] {
        assert_eq!(agent.job().await.version, version);
    }
}

#[tokio::test]
async fn trainer_death_ends_publish_only_before_its_release() {
    let agent = agent();
    let mut raw = agent.greeted().await;
    raw.ask(&publish(2)).await;
    let mut job = agent.job().await;
    drop(raw);
    tokio::time::timeout(LIMIT, job.cancel.cancelled()).await.unwrap();
    assert!(matches!(job.source.next(LIMIT).await, Err(SourceError::Gone { .. })));

    let mut raw = agent.greeted().await;
    raw.ask(&publish(3)).await;
    let mut job = agent.job().await;
    job.source.released().await;
    drop(raw);
    // Its connection has ended when the staging finds no one to wait for.
    let gone = tokio::time::timeout(LIMIT, job.reporter.staged(Instant::now() + LIMIT)).await.unwrap();
    assert!(gone.is_err());
    assert!(!job.cancel.is_cancelled());
}

#[tokio::test]
async fn giving_up_ends_what_waits_at_once_and_tells_what_runs() {
    let agent = agent();
    let mut running = agent.greeted().await;
    running.ask(&publish(2)).await;
    let mut job = agent.job().await;
    let mut waiting = agent.greeted().await;
    waiting.ask(&publish(3)).await;
    let cancel = ClientRequest::Cancel { reason: "the step was skipped".into() };
    waiting.ask(&cancel).await;
    assert_eq!(error(&mut waiting).await.code, PublishErrorCode::Cancelled);
    running.ask(&cancel).await;
    let given_up = SourceError::Cancelled { reason: "the step was skipped".into() };
    assert_eq!(job.source.next(LIMIT).await.unwrap_err(), given_up);
    assert!(job.cancel.is_cancelled());
    job.reporter.failed(given_up.publish_error(None));
    assert_eq!(error(&mut running).await.code, PublishErrorCode::Cancelled);
}

#[tokio::test]
async fn watched_roster_is_sent_again_when_it_changes() {
    let agent = agent();
    let mut raw = agent.greeted().await;
    raw.ask(&ClientRequest::Roster { watch: true }).await;
    assert!(matches!(raw.hear().await, Some(ClientReply::Roster { roster }) if roster.epoch == Some(3)));
    agent.roster.send_modify(|roster| roster.epoch = Some(4));
    assert!(matches!(raw.hear().await, Some(ClientReply::Roster { roster }) if roster.epoch == Some(4)));
}

#[tokio::test]
async fn stopping_server_closes_connections_and_frees_its_name() {
    let agent = agent();
    let mut raw = agent.greeted().await;
    raw.ask(&publish(2)).await;
    assert!(matches!(raw.hear().await, Some(ClientReply::Accepted { .. })));
    let socket = agent.socket.clone();
    drop(agent);
    assert_eq!(raw.hear().await, None);
    let freed = async {
        while socket.listen().is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LIMIT, freed).await.expect("the name is free again");
}

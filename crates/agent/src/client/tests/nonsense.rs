//! Clients that do what they must not: each hears why, in bounded time, and harms no one else.

use super::*;
use crate::client::Shared;
use crate::version_source::SourceError;
use weightsync_core::protocol::{PublishError, PublishErrorCode};

/// The agent's last words before it closes.
async fn last_words(raw: &mut Raw) -> PublishError {
    let mut words = None;
    while let Some(reply) = raw.hear().await {
        if let ClientReply::Error { error } = reply {
            words = Some(error);
        }
    }
    words.expect("a reason before the close")
}

#[tokio::test]
async fn a_first_line_that_is_not_a_good_hello_is_answered_and_closed() {
    let long = "x".repeat(10_000);
    for (line, code, word) in [
        (r#"{"op":"hello","protocol":99,"client":"new"}"#, PublishErrorCode::NotAllowed, "protocol 99"),
        (r#"{"op":"roster","watch":false}"#, PublishErrorCode::Invalid, "must be hello"),
        (r#"{"op":"dance"}"#, PublishErrorCode::Invalid, "dance"),
        ("GET / HTTP/1.1", PublishErrorCode::Invalid, "cannot be understood"),
        ("[[[[[[", PublishErrorCode::Invalid, "cannot be understood"),
        (long.as_str(), PublishErrorCode::Invalid, "too long"),
    ] {
        let agent = agent();
        let mut raw = agent.raw();
        raw.say(line).await;
        let words = last_words(&mut raw).await;
        assert_eq!(words.code, code, "{words:?}");
        assert!(words.message.contains(word), "{words:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_never_says_hello_is_closed() {
    let agent = agent();
    let mut raw = agent.raw();
    assert!(last_words(&mut raw).await.message.contains("no hello"));
}

#[tokio::test]
async fn bytes_that_are_no_text_are_answered_and_closed() {
    let agent = agent();
    let mut raw = agent.greeted().await;
    raw.0.write_all(&[0xff, 0xfe, b'\n']).await.unwrap();
    assert_eq!(last_words(&mut raw).await.code, PublishErrorCode::Invalid);
}

#[tokio::test]
async fn malformed_publish_is_refused_and_connection_lives() {
    let agent = agent();
    let mut raw = agent.greeted().await;
    let tensor = |name: &str, shape: &[u64]| TensorSpec::new(name.into(), Dtype::F32, shape.into());
    for (tensors, timeout_ms, word) in [
        (vec![tensor("a", &[1]), tensor("a", &[1])], 1000, "appears twice"),
        (vec![tensor("a", &[u64::MAX, 2])], 1000, "64 bits"),
        (vec![], 1000, "at least one tensor"),
        (vec![tensor("a", &[1])], 0, "timeout"),
    ] {
        let (queue, activation) = (QueuePolicy::Wait, Activation::Auto);
        raw.ask(&ClientRequest::Publish { version: 2, tensors, queue, activation, repeatable: true, timeout_ms, gpu: None }).await;
        let Some(ClientReply::Error { error }) = raw.hear().await else { panic!("taken, though: {word}") };
        assert_eq!(error.code, PublishErrorCode::Invalid);
        assert!(error.message.contains(word), "{error:?}");
    }
    raw.ask(&publish(2)).await;
    assert!(matches!(raw.hear().await, Some(ClientReply::Accepted { version: 2 })));
}

#[tokio::test]
async fn nonsense_in_a_publish_ends_it_and_the_leader_hears_who_left() {
    for (line, word) in [
        (r#"{"op":"filled","attempt":1,"sequence":0,"slot":7}"#, "slot 7"),
        (r#"{"op":"filled","attempt":1,"sequence":3,"slot":0}"#, "bucket 0 was due"),
        (r#"{"op":"filled","attempt":2,"sequence":0,"slot":0}"#, "attempt 2"),
        (r#"{"op":"end","attempt":1}"#, "0 of 9"),
        (r#"{"op":"activate","version":9}"#, "version 9"),
        (r#"{"op":"hello","protocol":1,"client":"again"}"#, "hello came twice"),
        (r#"{"op":"filled","attempt":1,"sequence":-1,"slot":0}"#, "cannot be understood"),
    ] {
        let agent = agent();
        let mut raw = agent.greeted().await;
        raw.ask(&publish(2)).await;
        let mut job = agent.job().await;
        let leader = tokio::spawn(async move { (job.source.next(LIMIT).await.unwrap_err(), job.cancel) });
        while !matches!(raw.hear().await, Some(ClientReply::Ring { .. })) {}
        raw.say(line).await;
        let words = last_words(&mut raw).await;
        assert!(words.code == PublishErrorCode::Invalid && words.message.contains(word), "{words:?}");
        let (error, cancel) = leader.await.unwrap();
        assert!(matches!(error, SourceError::Gone { .. }), "{error:?}");
        assert!(cancel.is_cancelled());
    }
}

#[tokio::test]
async fn two_publishes_on_one_connection_at_once_are_refused() {
    let agent = agent();
    let mut raw = agent.greeted().await;
    raw.ask(&publish(2)).await;
    raw.ask(&publish(3)).await;
    assert!(last_words(&mut raw).await.message.contains("still runs"));
}

#[test]
fn users_other_than_the_agents_and_root_are_refused() {
    let (_, roster) = watch::channel(RosterView { epoch: None, version: None, replicas: Vec::new() });
    let (agent, gpu, gpu_rings, queue) = ("a".into(), super::super::no_source_gpu(), Arc::default(), Arc::default());
    let (uids, external) = (Some(vec![0, 1000]), Arc::default());
    let shared = Shared { agent, slots: 2, bucket_bytes: 0, gpu, gpu_rings, uids, queue, roster, external, engines: None };
    assert!(shared.admit(0).is_ok() && shared.admit(1000).is_ok());
    let refusal = shared.admit(1001).unwrap_err().to_string();
    assert!(refusal.contains("0, 1000") && refusal.contains("1001"), "{refusal}");
}

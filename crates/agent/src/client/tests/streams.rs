//! Bytes from a trainer to anyone who leads the update.

use super::*;
use crate::client::trainer::TrainerClient;
use crate::version_source::SourceError;
use weightsync_core::weights::{Bucket, Layout};

/// What the trainer writes: every byte depends on its place, so one at a wrong place is seen.
fn content(layout: &Layout, offset: u64, bytes: u64) -> Vec<u8> {
    let mut stream = vec![0; usize::try_from(bytes).unwrap()];
    for part in layout.parts(offset, bytes) {
        let start = usize::try_from(part.in_range).unwrap();
        for (at, byte) in stream[start..start + usize::try_from(part.bytes).unwrap()].iter_mut().enumerate() {
            *byte = u8::try_from((part.in_tensor + at as u64) * 31 % 251).unwrap() ^ u8::try_from(part.index).unwrap();
        }
    }
    stream
}

#[allow(clippy::unnecessary_wraps)] // the signature is that of `Fill`
fn fill(layout: &Layout, bucket: Bucket, into: &mut [u8]) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    into.copy_from_slice(&content(layout, bucket.offset, bucket.bytes));
    Ok(())
}

async fn all(job: &mut PublishJob) -> Vec<u8> {
    let mut stream = Vec::new();
    while let Some((bucket, bytes)) = job.source.next(LIMIT).await.unwrap() {
        assert_eq!((bucket.offset, bucket.bytes), (stream.len() as u64, bytes.len()));
        stream.extend_from_slice(bytes.host().unwrap());
    }
    stream
}

fn expected(job: &PublishJob) -> Vec<u8> {
    let layout = job.source.layout();
    content(layout, 0, layout.total_bytes)
}

/// A trainer on a thread of its own that publishes these versions, one after the other, over one connection.
fn trainer(agent: &Agent, versions: Vec<u64>) -> tokio::task::JoinHandle<Vec<ClientReply>> {
    let socket = agent.socket.clone();
    tokio::task::spawn_blocking(move || {
        let mut client = TrainerClient::connect(&socket, "test").unwrap();
        let mut heard = Vec::new();
        for version in versions {
            let done = client.publish(&publish(version), &mut fill, &mut |reply| heard.push(reply.clone())).unwrap();
            assert_eq!(done.version, version);
        }
        heard
    })
}

#[tokio::test]
async fn stream_arrives_byte_for_byte_and_ring_serves_again() {
    let agent = agent();
    let heard = trainer(&agent, vec![2, 3]);
    for version in [2, 3] {
        let mut job = agent.job().await;
        assert_eq!(job.version, version);
        assert_eq!(job.source.layout().bucket_count(), 9);
        let stream = all(&mut job).await;
        assert!(stream == expected(&job));
        job.source.released().await;
        drop(job.source);
        job.reporter.done(result(version));
    }
    let heard = heard.await.unwrap();
    let rings = heard.iter().filter_map(|reply| match reply {
        ClientReply::Ring { memfd, slots, slot_bytes, .. } => Some((*memfd, *slots, *slot_bytes)),
        _ => None,
    });
    assert_eq!(rings.collect::<Vec<_>>(), [(true, 2, 4096), (false, 2, 4096)], "one memory for both publishes");
    assert_eq!(heard.iter().filter(|reply| matches!(reply, ClientReply::Released { .. })).count(), 2);
}

#[tokio::test]
async fn attempt_repeats_from_byte_zero_while_a_bucket_is_read() {
    let agent = agent();
    let heard = trainer(&agent, vec![2]);
    let mut job = agent.job().await;
    let (_, kept) = job.source.next(LIMIT).await.unwrap().unwrap();
    let kept = kept.host().unwrap().clone();
    job.source.next(LIMIT).await.unwrap().unwrap();
    job.source.next(LIMIT).await.unwrap().unwrap();
    job.source.restart("a member died").await.unwrap();
    let stream = all(&mut job).await;
    assert!(stream == expected(&job));
    assert!(kept[..] == stream[..kept.len()], "the bucket that was held was not written over");
    job.source.restart("another one died").await.unwrap();
    drop(kept);
    let stream = all(&mut job).await;
    assert!(stream == expected(&job));
    job.reporter.done(result(2));
    let heard = heard.await.unwrap();
    let again = heard.iter().filter_map(|reply| match reply {
        ClientReply::Again { attempt, reason } => Some((*attempt, reason.as_str())),
        _ => None,
    });
    assert_eq!(again.collect::<Vec<_>>(), [(2, "a member died"), (3, "another one died")]);
}

#[tokio::test]
async fn released_or_read_once_source_is_not_repeated() {
    let agent = agent();
    let heard = trainer(&agent, vec![2]);
    let mut job = agent.job().await;
    assert!(job.source.repeatable());
    all(&mut job).await;
    job.source.released().await;
    assert!(!job.source.repeatable());
    assert!(matches!(job.source.restart("late").await, Err(SourceError::NotRepeatable { .. })));
    job.reporter.done(result(2));
    heard.await.unwrap();

    let mut raw = agent.greeted().await;
    let ClientRequest::Publish { version, tensors, queue, activation, timeout_ms, .. } = publish(3) else { unreachable!() };
    raw.ask(&ClientRequest::Publish { version, tensors, queue, activation, repeatable: false, timeout_ms, gpu: None }).await;
    let mut job = agent.job().await;
    assert!(!job.source.repeatable());
    let error = job.source.restart("a member died").await.unwrap_err();
    assert!(error.to_string().contains("a member died"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn trainer_is_silent_only_when_it_writes_nothing() {
    let agent = agent();
    let mut raw = agent.greeted().await;
    let mut request = publish(2);
    if let ClientRequest::Publish { timeout_ms, .. } = &mut request {
        *timeout_ms = 600_000;
    }
    raw.ask(&request).await;
    let mut job = agent.job().await;
    let silence = Duration::from_secs(60);
    assert_eq!(job.source.next(silence).await.unwrap_err(), SourceError::Silent { silence });
    raw.ask(&ClientRequest::Filled { attempt: 1, sequence: 0, slot: 0, event: false }).await;
    assert_eq!(job.source.next(silence).await.unwrap().unwrap().0.sequence, 0);
}

#[tokio::test]
async fn a_checkpoint_is_published_by_its_path_and_a_bad_one_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let header = br#"{"b":{"dtype":"F32","shape":[2,1024],"data_offsets":[0,8192]}}"#;
    let data: Vec<u8> = (0..8192_u32).map(|at| u8::try_from(at % 253).unwrap()).collect();
    let file = [&(header.len() as u64).to_le_bytes()[..], header, &data].concat();
    std::fs::write(directory.path().join("model.safetensors"), file).unwrap();
    let agent = agent();
    let mut raw = agent.greeted().await;
    let ask = |path: &std::path::Path| ClientRequest::PublishCheckpoint {
        version: 2,
        path: path.display().to_string(),
        queue: QueuePolicy::Wait,
        activation: Activation::Auto,
        timeout_ms: 20_000,
    };
    raw.ask(&ask(&directory.path().join("missing"))).await;
    assert!(matches!(raw.hear().await, Some(ClientReply::Accepted { .. })));
    let Some(ClientReply::Error { error }) = raw.hear().await else { panic!("no error") };
    assert!(error.message.contains("missing"), "{}", error.message);
    raw.ask(&ask(directory.path())).await;
    let mut job = agent.job().await;
    assert!(all(&mut job).await == data);
    job.source.restart("once more").await.unwrap();
    assert!(all(&mut job).await == data);
    job.source.released().await;
    job.reporter.done(result(2));
    assert!(matches!(raw.hear().await, Some(ClientReply::Accepted { .. })));
    assert!(matches!(raw.hear().await, Some(ClientReply::Released { version: 2 })));
    assert!(matches!(raw.hear().await, Some(ClientReply::Done { .. })));
}

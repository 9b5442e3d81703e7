//! A trainer for the fixture: weights that are known, a source that reads them, and publishing them.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::fixture::{Member, SOON};
use crate::publish_job::{PublishJob, Report, reporting};
use crate::version_source::{SourceError, VersionSource};
use weightsync_core::protocol::*;
use weightsync_core::weights::{Bucket, Dtype, Layout, TensorSpec, digest_hex, tensor_digest};
use weightsync_transport::Payload;

/// Weights that differ for each seed: three tensors, one larger than a bucket.
pub fn weights(seed: u8) -> (Layout, Vec<u8>) {
    let spec = |name: &str, dtype, shape: &[u64]| TensorSpec::new(name.into(), dtype, shape.to_vec());
    let tensors = vec![
        spec("embed", Dtype::F32, &[1000]),
        spec("layer.0.w", Dtype::BF16, &[300, 700]),
        spec("scalar", Dtype::F32, &[]),
        spec("head", Dtype::U8, &[7001]),
    ];
    let layout = Layout::new("model", tensors, 64 << 10).unwrap();
    let mut bytes = vec![0; usize::try_from(layout.total_bytes).unwrap()];
    for entry in &layout.entries {
        let start = usize::try_from(entry.offset).unwrap();
        for (index, byte) in bytes[start..].iter_mut().take(usize::try_from(entry.bytes).unwrap()).enumerate() {
            *byte = u8::try_from((index * 31 + usize::from(seed) * 7) % 251).unwrap();
        }
    }
    (layout, bytes)
}

/// What an engine serves that loaded these weights.
pub fn served(layout: &Layout, bytes: &[u8]) -> String {
    let mut tensors: Vec<String> = layout
        .entries
        .iter()
        .map(|entry| {
            let range = usize::try_from(entry.offset).unwrap()..usize::try_from(entry.end()).unwrap();
            format!("{}={}", entry.tensor.name, digest_hex(tensor_digest(&bytes[range])))
        })
        .collect();
    tensors.sort();
    tensors.join(" ")
}

/// A trainer's bytes. `gate` holds a permit for each bucket that may be read; none lets all pass.
pub struct TestSource {
    pub layout: Layout,
    pub bytes: Bytes,
    pub next: u32,
    pub repeatable: bool,
    pub gate: Option<Arc<Semaphore>>,
    pub restarts: Arc<std::sync::atomic::AtomicU32>,
    /// Whether its tensors may change.
    pub released: Arc<std::sync::atomic::AtomicBool>,
}

impl TestSource {
    pub fn of(seed: u8) -> Self {
        Self::laid_out(weights(seed))
    }

    /// The same without its last tensor.
    pub fn without_last(seed: u8) -> Self {
        let (layout, bytes) = weights(seed);
        let mut tensors: Vec<_> = layout.tensors().cloned().collect();
        tensors.pop();
        let layout = Layout::new("model", tensors, 64 << 10).unwrap();
        let length = usize::try_from(layout.total_bytes).unwrap();
        Self::laid_out((layout, bytes[..length].to_vec()))
    }

    fn laid_out((layout, bytes): (Layout, Vec<u8>)) -> Self {
        Self { layout, bytes: bytes.into(), next: 0, repeatable: true, gate: None, restarts: Arc::default(), released: Arc::default() }
    }
}

#[async_trait]
impl VersionSource for TestSource {
    fn layout(&self) -> &Layout {
        &self.layout
    }
    fn repeatable(&self) -> bool {
        self.repeatable
    }
    async fn next(&mut self, _silence: Duration) -> Result<Option<(Bucket, Payload)>, SourceError> {
        let Some(bucket) = self.layout.bucket(self.next) else { return Ok(None) };
        if let Some(gate) = &self.gate {
            gate.acquire().await.unwrap().forget();
        }
        self.next += 1;
        let range = usize::try_from(bucket.offset).unwrap()..usize::try_from(bucket.offset + bucket.bytes).unwrap();
        Ok(Some((bucket, self.bytes.slice(range).into())))
    }
    async fn restart(&mut self, reason: &str) -> Result<(), SourceError> {
        if !self.repeatable {
            return Err(SourceError::NotRepeatable { reason: reason.into() });
        }
        self.restarts.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        self.next = 0;
        Ok(())
    }
    async fn released(&mut self) {
        self.released.store(true, std::sync::atomic::Ordering::SeqCst);
    }
}

/// A publish that runs.
pub struct Publishing(tokio::task::JoinHandle<Result<PublishResult, PublishError>>);

impl Publishing {
    pub async fn outcome(self) -> Result<PublishResult, PublishError> {
        tokio::time::timeout(SOON, self.0).await.expect("a publish ends").unwrap()
    }
}

/// Starts a publish.
pub fn publish(source: &Member, version: Version, bytes: TestSource) -> Publishing {
    publish_as(source, version, bytes, Activation::Auto, Duration::from_secs(15))
}

pub fn publish_as(source: &Member, version: Version, bytes: TestSource, activation: Activation, limit: Duration) -> Publishing {
    let (reporter, mut reports) = reporting();
    let job = PublishJob {
        version,
        activation,
        deadline: Instant::now() + limit,
        cancel: CancellationToken::new(),
        source: Box::new(bytes),
        reporter,
    };
    source.queue.push(job, QueuePolicy::Wait);
    Publishing(tokio::spawn(async move {
        loop {
            match reports.next().await {
                Some(Report::Done(result)) => return Ok(result),
                Some(Report::Failed(error)) => return Err(error),
                Some(Report::Staged) => reports.activate(),
                Some(Report::Progress(_)) => {}
                None => panic!("a publish ended without an outcome"),
            }
        }
    }))
}

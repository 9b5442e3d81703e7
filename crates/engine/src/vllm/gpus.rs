//! vLLM with our own back end, whose workers copy buckets from memory on their own GPUs that the agent's workers allocated.
//!
//! Decides the message to each worker: the place of the bucket on *its* GPU, by handle and offset, and the gsum64 of each of its tensors. A
//! worker copies the bucket, sums its copy, and only then confirms it; from then on the place may be used again. vLLM's own layerwise
//! loading, which keeps tensors until a layer is complete, works on the copy. The calls are in [`super::session`].

use std::sync::Arc;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

use super::session::{CONNECT, OTHERWISE, Session, init};
use crate::EngineError;
use crate::device::{DeviceBucket, Released};
use crate::feed::{Feed, FeedJob, pieces};
use crate::http::{EngineHttp, Until};
use crate::workers::hello::Rules;
use weightsync_core::weights::Layout;

pub(super) struct Gpus {
    session: Session,
    layout: Arc<Layout>,
    reported: u32,
}

impl Gpus {
    /// Makes every worker connect.
    pub(super) async fn open(http: Arc<EngineHttp>, job: &FeedJob<'_>, ranks: u32, until: Until) -> Result<Self, EngineError> {
        let job = job.job;
        let (listening, token) = init(&http, ranks, until).await?;
        let rules = Rules { token: token.clone(), draft: job.layout.has_draft(), otherwise: OTHERWISE, silence: job.silence };
        let workers = listening.on_gpus(&rules, until.at_most(job.silence.min(CONNECT))).await?;
        Ok(Self { session: Session::new(http, workers, token, job.terms.timeout), layout: job.layout.clone(), reported: 0 })
    }

    /// The line for a worker on that GPU.
    fn line(&self, bucket: &DeviceBucket, gpu: &str) -> Result<String, EngineError> {
        let (sequence, place) = (bucket.bucket.sequence, bucket.on(gpu)?);
        let pieces = pieces(&self.layout, bucket);
        if pieces.len() != bucket.sums.len() {
            return Err(self.session.workers.error(format!(
                "bucket {sequence} has {} tensors and {} sums",
                pieces.len(),
                bucket.sums.len()
            )));
        }
        let tensors = pieces.iter().zip(&bucket.sums);
        let tensors = tensors
            .map(|(piece, sum)| json!([piece.name, piece.dtype.name(), piece.shape, piece.offset, piece.bytes, format!("{sum:016x}")]));
        let memory = json!({"handle": STANDARD.encode(place.handle.0), "bytes": place.allocation_bytes, "offset": place.offset});
        let line = json!({
            "event": "bucket", "sequence": sequence, "copy": true, "draft": false, "memory": memory,
            "bytes": bucket.bucket.bytes, "tensors": tensors.collect::<Vec<_>>(),
        });
        Ok(format!("{line}\n"))
    }
}

#[async_trait]
impl Feed for Gpus {
    async fn bucket(&mut self, bucket: &DeviceBucket, until: Until) -> Result<Released, EngineError> {
        let lines = self.session.workers.gpus().map(|gpu| self.line(bucket, gpu)).collect::<Result<Vec<_>, _>>()?;
        if self.session.number() == 0 {
            self.session.end_what_was_left(until).await?;
            self.session.start("/start_weight_update", until).await?;
        }
        self.session.workers.watching(until, self.session.workers.tell_each(lines)).await?;
        self.session.workers.watching(until, self.session.workers.taken(self.reported)).await?;
        self.reported = bucket.bucket.sequence.saturating_add(1);
        Ok(Released::Now)
    }

    fn touched(&self) -> bool {
        self.session.number() > 0
    }

    async fn close(&mut self, until: Until) -> Result<(), EngineError> {
        self.session.workers.no_more(self.reported, until).await?;
        self.session.finish(self.reported, until).await?;
        self.session.forget_encoded(until).await
    }

    async fn fail(&mut self, _: &str, until: Until) {
        self.session.fail(until).await;
    }
}

//! The part of feeding buckets that differs from engine to engine: one feed for each install.
//!
//! A feed decides messages and which reply counts as success. It never decides the meaning of a failure for the replica ([`super::adapter`]
//! does), and it never waits without the given deadline.

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;

use super::checkpoint_engine::{Call, ParameterServer};
use super::device::{DeviceBucket, DeviceRoute, Released};
use super::http::Until;
use super::{DeviceJob, EngineError};
use weightsync_core::weights::Layout;
use weightsync_torch::Piece;

#[async_trait]
pub(super) trait Feed: Send {
    /// One bucket of whole tensors.
    async fn bucket(&mut self, bucket: &DeviceBucket, until: Until) -> Result<Released, EngineError>;

    /// Whether the engine may have begun to write into its weights.
    fn touched(&self) -> bool;

    /// The engine's last step: post-processing, and the release of our memory.
    async fn close(&mut self, until: Until) -> Result<(), EngineError>;

    /// Ends it early and releases all waiting callers.
    async fn fail(&mut self, reason: &str, until: Until);
}

pub(super) struct FeedJob<'a> {
    pub(super) job: &'a DeviceJob,
    pub(super) route: &'a DeviceRoute,
    /// UUIDs of the GPUs of the buckets: those of the route, or, if the server does not report its own, those of the first bucket.
    pub(super) gpus: Vec<String>,
}

/// The route by checkpoint-engine into a server whose call has its own form of success.
pub(super) struct CheckpointEngine {
    server: ParameterServer,
    layout: Arc<Layout>,
}

impl CheckpointEngine {
    /// Binds, and makes the engine's call with the addresses.
    pub(super) async fn open(
        url: &str,
        job: &FeedJob<'_>,
        call: impl FnOnce(serde_json::Map<String, serde_json::Value>) -> Call,
    ) -> Result<Self, EngineError> {
        let FeedJob { job, gpus, .. } = job;
        let (mut server, handles) = ParameterServer::bind(url, gpus, &job.sockets, &job.sockets_in_engine).await?;
        server.call(call(handles));
        Ok(Self { server, layout: job.layout.clone() })
    }
}

#[async_trait]
impl Feed for CheckpointEngine {
    async fn bucket(&mut self, bucket: &DeviceBucket, until: Until) -> Result<Released, EngineError> {
        self.server.bucket(bucket, &pieces(&self.layout, bucket), until).await?;
        Ok(Released::Now)
    }

    fn touched(&self) -> bool {
        self.server.touched()
    }

    async fn close(&mut self, until: Until) -> Result<(), EngineError> {
        self.server.close(until).await
    }

    async fn fail(&mut self, reason: &str, until: Until) {
        self.server.fail(reason, until).await;
    }
}

/// The tensors of a bucket. None is empty or split: the adapter checked that.
pub(super) fn pieces<'a>(layout: &'a Arc<Layout>, bucket: &DeviceBucket) -> Vec<Piece<'a>> {
    let parts = layout.parts(bucket.bucket.offset, bucket.bucket.bytes);
    let piece = |part: weightsync_core::weights::EntryPart<'a>| Piece {
        name: &part.entry.tensor.name,
        dtype: part.entry.tensor.dtype,
        shape: &part.entry.tensor.shape,
        offset: part.in_range,
        bytes: part.bytes,
    };
    parts.map(piece).collect()
}

/// Whether the model at `served` is quantised; `None` if its `config.json` cannot be read from here.
pub(super) fn is_quantised(served: Option<&Path>) -> Option<bool> {
    let config = std::fs::read(served?.join("config.json")).ok()?;
    let config: serde_json::Value = serde_json::from_slice(&config).ok()?;
    Some(config.get("quantization_config").is_some_and(|quantised| !quantised.is_null()))
}

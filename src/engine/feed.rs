//! What the part of a server that differs from engine to engine does with buckets: one feed an install.
//!
//! A feed decides messages and which reply counts as success. It never decides what a failure means for the replica ([`super::adapter`]
//! does), and it never waits without the deadline that it is given.

use std::sync::Arc;

use async_trait::async_trait;

use super::device::{DeviceBucket, DeviceRoute, Released};
use super::http::Until;
use super::{DeviceJob, EngineError};
use crate::torch::Piece;
use crate::weights::Layout;

/// One engine that takes buckets.
#[async_trait]
pub(super) trait Feed: Send {
    /// One bucket, whole tensors.
    async fn bucket(&mut self, bucket: &DeviceBucket, until: Until) -> Result<Released, EngineError>;

    /// The engine's last step: post-processing, and letting go of our memory.
    async fn close(&mut self, until: Until) -> Result<(), EngineError>;

    /// Ends it early and frees whoever waits for us.
    async fn fail(&mut self, reason: &str, until: Until);
}

/// What a feed is made of.
pub(super) struct FeedJob<'a> {
    pub(super) job: &'a DeviceJob,
    pub(super) route: &'a DeviceRoute,
}

/// The tensors of a bucket; none of them empty, none torn (the adapter checked).
pub(super) fn pieces<'a>(layout: &'a Arc<Layout>, bucket: &DeviceBucket) -> Vec<Piece<'a>> {
    let parts = layout.parts(bucket.bucket.offset, bucket.bucket.bytes);
    let piece = |part: crate::weights::EntryPart<'a>| Piece {
        name: &part.entry.tensor.name,
        dtype: part.entry.tensor.dtype,
        shape: &part.entry.tensor.shape,
        offset: part.in_range,
        bytes: part.bytes,
    };
    parts.map(piece).collect()
}

/// The error for something that torch has no form for; the version cannot go this way.
pub(super) fn no_form(error: &crate::torch::TorchError) -> EngineError {
    EngineError::Unsupported {
        what: error.to_string(),
        next_step: "publish tensors of plain element types, or feed this engine from a directory".into(),
    }
}

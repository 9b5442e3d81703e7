//! What the part of a server that differs from engine to engine does with buckets in shared memory: one feed an install.
//!
//! A feed decides messages and which reply counts as success. It never decides what a failure means for the replica ([`super::adapter`]
//! does), and it never waits without the deadline that it is given.

use std::time::Duration;

use async_trait::async_trait;

use super::EngineError;
use super::host::{HostBucket, HostDigest};
use super::http::Until;

/// The workers of one engine, connected.
#[async_trait]
pub(super) trait HostFeed: Send {
    /// A digest that all workers can compute.
    fn digest(&self) -> HostDigest;

    async fn bucket(&mut self, bucket: &HostBucket, until: Until) -> Result<(), EngineError>;

    /// Has the engine load, from the first bucket on; returns when it is doing so. It is paused and marked.
    async fn load(&mut self, until: Until) -> Result<(), EngineError>;

    /// Waits until every worker took more than so many buckets: how many.
    async fn taken(&mut self, more_than: u32, until: Until) -> Result<u32, EngineError>;

    /// Says that no bucket follows, and waits until every worker has checked all; each that is checked extends the wait by `silence`.
    async fn end(&mut self, silence: Duration, until: Until) -> Result<(), EngineError>;

    /// The end of the load and the engine's last step.
    async fn close(&mut self, until: Until) -> Result<(), EngineError>;

    /// Ends it early and releases all waiting callers.
    async fn fail(&mut self, reason: &str, until: Until);
}

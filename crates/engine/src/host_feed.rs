//! The part of feeding shared memory that differs from engine to engine: one feed for each install.
//!
//! A feed decides messages and which reply counts as success. It never decides the meaning of a failure for the replica ([`super::adapter`]
//! does), and it never waits without the given deadline.

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

    /// Makes the engine load, from the first bucket on; returns once it does. The engine is paused and marked.
    async fn load(&mut self, until: Until) -> Result<(), EngineError>;

    /// Waits until every worker took more than so many buckets. Returns the number.
    async fn taken(&mut self, more_than: u32, until: Until) -> Result<u32, EngineError>;

    /// Announces that no bucket follows, and waits until every worker has checked all. Each checked bucket extends the wait by `silence`.
    async fn end(&mut self, silence: Duration, until: Until) -> Result<(), EngineError>;

    /// The end of the load and the engine's last step.
    async fn close(&mut self, until: Until) -> Result<(), EngineError>;

    /// Ends it early and releases all waiting callers.
    async fn fail(&mut self, reason: &str, until: Until);
}

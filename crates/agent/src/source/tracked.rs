//! A trainer's bytes over all attempts of one publish.
//!
//! Decides what another attempt reads: first the buckets that were kept, then those that the trainer has not written yet; all of them from
//! the trainer where nothing was kept. Nothing is read from a source after it was released.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::retain::Keeper;
use crate::version_source::{SourceError, VersionSource};
use weightsync_core::weights::{Bucket, Layout};
use weightsync_transport::Payload;

/// Longest wait for the copy of a bucket that was read last.
pub(super) const LAST_COPY: Duration = Duration::from_secs(1);

/// A source that knows how far it was read.
pub(super) struct Tracked {
    source: Box<dyn VersionSource>,
    released: bool,
    /// Buckets given in this attempt.
    given: u32,
    /// Buckets taken from the source since its start.
    read: u32,
    kept: Option<Arc<Keeper>>,
}

impl Tracked {
    pub(super) fn new(source: Box<dyn VersionSource>) -> Self {
        Self { source, released: false, given: 0, read: 0, kept: None }
    }

    /// Gets ready for another attempt: goes on after what was kept, or starts again. False: what was kept is of no use any more.
    pub(super) async fn again(&mut self, kept: Option<&Arc<Keeper>>, reason: &str) -> Result<bool, SourceError> {
        if let Some(kept) = kept.filter(|_| self.source.holds())
            && kept.rewind(self.given, LAST_COPY).await
        {
            (self.kept, self.given) = (Some(kept.clone()), 0);
            return Ok(true);
        }
        self.restart(reason).await?;
        Ok(false)
    }
}

#[async_trait]
impl VersionSource for Tracked {
    fn layout(&self) -> &Layout {
        self.source.layout()
    }

    fn lay_out(&mut self) {
        self.source.lay_out();
    }

    fn repeatable(&self) -> bool {
        self.source.repeatable() && !self.released
    }

    async fn next(&mut self, silence: Duration) -> Result<Option<(Bucket, Payload)>, SourceError> {
        if self.given < self.read {
            let bucket = self.layout().bucket(self.given);
            let bytes = self.kept.as_ref().and_then(|kept| kept.bucket(self.given));
            let (Some(bucket), Some(bytes)) = (bucket, bytes) else {
                return Err(SourceError::Nonsense { what: "the copy of what was read lacks a bucket".into() });
            };
            self.given += 1;
            return Ok(Some((bucket, bytes.into())));
        }
        let next = self.source.next(silence).await?;
        if next.is_some() {
            self.read += 1;
            self.given += 1;
        }
        Ok(next)
    }

    async fn restart(&mut self, reason: &str) -> Result<(), SourceError> {
        if !self.repeatable() {
            return Err(SourceError::NotRepeatable { reason: reason.to_owned() });
        }
        self.source.restart(reason).await?;
        (self.given, self.read, self.kept) = (0, 0, None);
        Ok(())
    }

    async fn released(&mut self) {
        if !std::mem::replace(&mut self.released, true) {
            self.source.released().await;
        }
    }

    fn another(&self) -> Option<Box<dyn VersionSource>> {
        self.source.another()
    }
}

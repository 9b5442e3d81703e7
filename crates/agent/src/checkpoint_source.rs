//! A safetensors checkpoint as a source of buckets, for an object that names a directory and for `publishCheckpoint`.
//!
//! Reads one bucket ahead, off the async threads. It refuses a checkpoint that was written to while it was read: it is not known then to
//! which step its bytes belong.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::version_source::{SourceError, VersionSource};
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_core::weights::{Bucket, Layout, LayoutError, TensorSpec};
use weightsync_transport::Payload;

pub struct CheckpointSource {
    checkpoint: Arc<Checkpoint>,
    layout: Arc<Layout>,
    next: u32,
    ahead: Option<JoinHandle<Result<Bytes, SourceError>>>,
    on_release: Option<Box<dyn FnOnce() + Send + Sync>>,
    lay_out: Option<Box<LayOut>>,
}

/// Lays tensors out as the group that stands wants it.
type LayOut = dyn Fn(Vec<TensorSpec>) -> Result<Layout, LayoutError> + Send + Sync;

impl CheckpointSource {
    /// Opens a file or a directory, reads its headers and lays its tensors out.
    pub async fn open(
        path: PathBuf,
        lay_out: impl FnOnce(Vec<TensorSpec>) -> Result<Layout, LayoutError> + Send,
        deadline: Instant,
    ) -> Result<Self, SourceError> {
        let shown = path.display().to_string();
        let opened = tokio::task::spawn_blocking(move || Checkpoint::open(&path));
        let opened = tokio::time::timeout_at(deadline, opened).await.map_err(|_| stuck(format!("{shown} was not opened in time")))?;
        let checkpoint = opened.map_err(|error| stuck(error.to_string()))?.map_err(bad)?;
        let layout = lay_out(checkpoint.specs()).map_err(bad)?;
        if layout.entries.is_empty() {
            return Err(SourceError::BadCheckpoint { what: format!("{shown} holds no tensor") });
        }
        Ok(Self { checkpoint: Arc::new(checkpoint), layout: Arc::new(layout), next: 0, ahead: None, on_release: None, lay_out: None })
    }

    /// Lays the tensors out by this once more, when a group stands.
    #[must_use]
    pub fn laid_out_by(mut self, lay_out: impl Fn(Vec<TensorSpec>) -> Result<Layout, LayoutError> + Send + Sync + 'static) -> Self {
        self.lay_out = Some(Box::new(lay_out));
        self
    }

    #[must_use]
    pub fn on_release(mut self, then: impl FnOnce() + Send + Sync + 'static) -> Self {
        self.on_release = Some(Box::new(then));
        self
    }

    fn read(&self, sequence: u32) -> Option<JoinHandle<Result<Bytes, SourceError>>> {
        let bucket = self.layout.bucket(sequence)?;
        let (checkpoint, layout) = (Arc::clone(&self.checkpoint), Arc::clone(&self.layout));
        Some(tokio::task::spawn_blocking(move || {
            let length = usize::try_from(bucket.bytes).map_err(bad)?;
            let mut bytes = vec![0; length];
            checkpoint.read_stream(&layout, bucket.offset, &mut bytes).map_err(bad)?;
            Ok(Bytes::from(bytes))
        }))
    }
}

#[async_trait]
impl VersionSource for CheckpointSource {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn lay_out(&mut self) {
        let Some(lay_out) = self.lay_out.as_ref().filter(|_| self.next == 0 && self.ahead.is_none()) else { return };
        match lay_out(self.checkpoint.specs()) {
            Ok(layout) => self.layout = Arc::new(layout),
            // It was laid out before from the same tensors: that stays.
            Err(error) => tracing::warn!(%error, "a checkpoint cannot be laid out again"),
        }
    }

    fn repeatable(&self) -> bool {
        true
    }

    async fn next(&mut self, silence: Duration) -> Result<Option<(Bucket, Payload)>, SourceError> {
        let Some(bucket) = self.layout.bucket(self.next) else {
            let checkpoint = Arc::clone(&self.checkpoint);
            let checked = tokio::task::spawn_blocking(move || checkpoint.check_unchanged().map_err(bad));
            return in_time(silence, checked).await.map(|()| None);
        };
        if self.ahead.is_none() {
            self.ahead = self.read(self.next);
        }
        // Taken only when it ended: a caller that drops this wait and calls again finds the same read.
        let Some(reading) = self.ahead.as_mut() else { return Ok(None) };
        let bytes = in_time(silence, reading).await;
        self.ahead = None;
        let bytes = bytes?;
        self.next += 1;
        self.ahead = self.read(self.next);
        Ok(Some((bucket, bytes.into())))
    }

    async fn restart(&mut self, _reason: &str) -> Result<(), SourceError> {
        self.next = 0;
        self.ahead = None;
        Ok(())
    }

    async fn released(&mut self) {
        if let Some(then) = self.on_release.take() {
            then();
        }
    }

    fn another(&self) -> Option<Box<dyn VersionSource>> {
        let (checkpoint, layout) = (Arc::clone(&self.checkpoint), Arc::clone(&self.layout));
        Some(Box::new(Self { checkpoint, layout, next: 0, ahead: None, on_release: None, lay_out: None }))
    }
}

async fn in_time<T>(
    silence: Duration,
    reading: impl Future<Output = Result<Result<T, SourceError>, tokio::task::JoinError>>,
) -> Result<T, SourceError> {
    let read = tokio::time::timeout(silence, reading).await.map_err(|_| stuck(format!("no byte for {silence:?}")))?;
    read.map_err(|error| stuck(error.to_string()))?
}

fn bad(error: impl std::fmt::Display) -> SourceError {
    SourceError::BadCheckpoint { what: error.to_string() }
}

fn stuck(cause: String) -> SourceError {
    SourceError::Io { what: "reading the checkpoint".into(), cause }
}

//! Copies of buckets that lie on a GPU, taken into host memory while later ones are on the wire.
//!
//! They are handed on in the order of the buckets, whatever becomes of whoever sends: what was copied serves the next attempt. The memory of
//! a bucket is held until its copy ended, so the sender may be slowed down by it, never a copy be wrong.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::stream::Keep;
use crate::transport::DevicePayload;
use crate::transport::nccl::Staging;
use crate::worker::WorkerError;

type Copying = JoinHandle<Result<Bytes, WorkerError>>;

/// Copies under way.
pub(super) struct Keeping {
    staging: Option<Staging>,
    silence: Duration,
    copies: mpsc::UnboundedSender<Copying>,
    kept: JoinHandle<Result<(), WorkerError>>,
}

impl Keeping {
    /// Copies go to `keep`.
    pub(super) fn new(keep: Arc<dyn Keep>, staging: Option<Staging>, silence: Duration) -> Self {
        let (copies, mut begun) = mpsc::unbounded_channel::<Copying>();
        let kept = tokio::spawn(async move {
            while let Some(copying) = begun.recv().await {
                keep.take(copying.await.unwrap_or_else(|ended| Err(WorkerError::Gone { cause: format!("copying ended early: {ended}") }))?);
            }
            Ok(())
        });
        Self { staging, silence, copies, kept }
    }

    /// Begins to copy the next bucket.
    pub(super) fn copy(&self, device: DevicePayload) {
        let (staging, silence) = (self.staging.clone(), self.silence);
        let copying = tokio::spawn(async move { device.to_host(staging.as_ref(), silence).await });
        // A task that ended says why in `settled`.
        let _ = self.copies.send(copying);
    }

    /// Waits until all copies were handed on.
    pub(super) async fn settled(self) -> Result<(), WorkerError> {
        drop(self.copies);
        self.kept.await.unwrap_or_else(|ended| Err(WorkerError::Gone { cause: format!("copying ended early: {ended}") }))
    }
}

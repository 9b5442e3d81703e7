//! Copies of buckets that lie on a GPU, taken into host memory while later ones are on the wire.
//!
//! One after the other, in the order of the buckets. They go on whatever becomes of anyone who sends: what was copied serves the next attempt. The
//! memory of a bucket is held until its copy ended, so the sender may be slowed down by it, never a copy be wrong.

use async_trait::async_trait;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use weightsync_gpu::worker::WorkerError;
use weightsync_transport::DevicePayload;
use weightsync_transport::nccl::Staging;

/// Takes a copy of each bucket that is sent, in order; gives back what is to be sent, so that the source's own memory is free at once.
#[async_trait]
pub trait Keep: Send + Sync {
    /// Keeps the bucket; the same bytes, perhaps in other memory.
    fn keep(&self, bytes: Bytes) -> Bytes;

    /// Keeps these very bytes, which no one else will write to.
    fn take(&self, bytes: Bytes);

    /// No more buckets of this attempt will come.
    fn give_up(&self);

    /// Waits until so many buckets of this attempt were kept, at most `limit`: a copy may still be under way when all was sent. False when it
    /// is not whole.
    async fn whole(&self, buckets: u32, limit: Duration) -> bool;
}

/// Copies under way. What is dropped goes on copying.
pub(super) struct Keeping {
    to_copy: mpsc::UnboundedSender<DevicePayload>,
    kept: JoinHandle<Result<(), WorkerError>>,
}

impl Keeping {
    pub(super) fn new(keep: Arc<dyn Keep>, staging: Option<Staging>, silence: Duration) -> Self {
        let (to_copy, mut waiting) = mpsc::unbounded_channel::<DevicePayload>();
        let kept = tokio::spawn(async move {
            while let Some(device) = waiting.recv().await {
                match device.to_host(staging.as_ref(), silence).await {
                    Ok(bytes) => keep.take(bytes),
                    Err(error) => {
                        tracing::warn!(%error, "the copy of a bucket failed: this version is not kept");
                        keep.give_up();
                        return Err(error);
                    }
                }
            }
            Ok(())
        });
        Self { to_copy, kept }
    }

    pub(super) fn copy(&self, device: DevicePayload) {
        // A task that ended says why in `settled`.
        let _ = self.to_copy.send(device);
    }

    /// Waits until all copies were handed on.
    pub(super) async fn settled(self) -> Result<(), WorkerError> {
        drop(self.to_copy);
        self.kept.await.unwrap_or_else(|ended| Err(WorkerError::Gone { cause: format!("copying ended early: {ended}") }))
    }
}

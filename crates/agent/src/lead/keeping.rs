//! Copies of buckets that lie on a GPU, taken into host memory while later ones are on the wire.
//!
//! One after the other, in the order of the buckets. They go on whatever becomes of anyone who sends: what was copied serves the next attempt. The
//! memory of a bucket is held until its copy ended, so the sender may be slowed down by it, never a copy be wrong.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::stream::Keep;
use weightsync_gpu::worker::WorkerError;
use weightsync_transport::DevicePayload;
use weightsync_transport::nccl::Staging;

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

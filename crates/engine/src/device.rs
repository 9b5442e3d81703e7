//! Feeding an engine from GPU memory: buckets on the engine's own GPUs, passed one by one while others still arrive.
//!
//! The second route into an engine, in addition to a directory ([`super::Engine::install`]), under the same rules. The engine is marked
//! before the first bucket; from then on it may hold a mixture. It runs again only after every tensor was passed once and the engine
//! confirmed its last step. The adapters decide which server may be fed like this, from what is proven for it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::{EngineError, InstallError, InstallReport, InstallTerms, Left};
use weightsync_core::protocol::worker::IpcHandle;
use weightsync_core::protocol::{EngineChecksum, HeldVersion};
use weightsync_core::weights::{Bucket, Layout};

/// How a server can be fed from GPU memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceRoute {
    /// Name of the route, for status and logs: `checkpoint-engine`, `update_weights`.
    pub name: &'static str,
    /// UUIDs (`GPU-...`) of the GPUs of the server's worker ranks, in the order of ranks. Each must receive every bucket. Empty if the
    /// server does not report them: then they are the GPUs of this agent.
    pub gpus: Vec<String>,
    /// Whether the engine answers no request from the first bucket to the end. If not, running requests are ended before and after, as the
    /// pause policy requires.
    pub gated: bool,
    /// Why a faster route of this server is not used, if there is one.
    pub why_not_faster: Option<String>,
}

/// A version that will come as buckets in GPU memory.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct DeviceJob {
    pub terms: InstallTerms,
    /// Its tensors and buckets; cut between tensors.
    pub layout: Arc<Layout>,
    /// Longest time of one bucket, and of the engine's last step.
    pub silence: Duration,
    /// Directory for sockets, shared with the engine's process; created if it is missing.
    pub sockets: PathBuf,
    /// The same directory as the engine sees it.
    pub sockets_in_engine: PathBuf,
}

/// A bucket in the memory of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevicePlace {
    /// UUID of the GPU (`GPU-...`).
    pub gpu: String,
    /// The allocation that contains it, for other processes.
    pub handle: IpcHandle,
    /// Length of that allocation in bytes.
    pub allocation_bytes: u64,
    /// First byte of the bucket in the allocation; a multiple of 64.
    pub offset: u64,
    /// An event of the same worker. An engine that reads after its response records it after the read.
    pub event: Option<IpcHandle>,
}

/// One complete, checked bucket on every GPU of a replica. Its bytes do not change until it is released.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceBucket {
    /// The bucket in the layout.
    pub bucket: Bucket,
    /// Its places.
    pub places: Vec<DevicePlace>,
    /// gsum64 of each of its tensors with bytes, in the order of the layout: of the bytes that arrived, or were read.
    pub sums: Vec<u64>,
}

impl DeviceBucket {
    /// Its place on the GPU of one of an engine's workers, by UUID; an error if it has none there.
    pub(super) fn on(&self, gpu: &str) -> Result<&DevicePlace, EngineError> {
        self.places.iter().find(|place| place.gpu == gpu).ok_or_else(|| EngineError::Unsupported {
            what: format!("bucket {} does not lie on {gpu}, where a worker of the engine is", self.bucket.sequence),
            next_step: "give this agent a GPU worker on every GPU of the engine".into(),
        })
    }
}

/// When the memory of a bucket may be used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// Now: the engine has read it.
    Now,
    /// When the events of its places have passed.
    AfterEvents,
}

/// An install in progress. Dropping it abandons it: the engine's state is then as after [`abandon`](Self::abandon).
#[async_trait]
pub trait DeviceInstall: Send {
    /// Whether the engine answers no request from the first bucket on. Such a pause may take seconds: [`open`](Self::open) is then called
    /// before bytes travel.
    fn holds(&self) -> bool {
        false
    }

    /// Pauses and marks the engine, which otherwise happens with the first bucket. After an error the install has ended, and its weights
    /// are unchanged.
    async fn open(&mut self) -> Result<(), InstallError> {
        Ok(())
    }

    /// Passes one bucket, in the order of the layout. Returns when the engine accepted it. The first call pauses and marks the engine.
    /// After an error the install has ended, and the engine's state in the error is final.
    async fn bucket(&mut self, bucket: DeviceBucket) -> Result<Released, InstallError>;

    /// All was handed over: the engine takes its last step, stays as paused as it is, and computes checksums of its own. None where it offers
    /// none, or none that prove anything. [`finish`](Self::finish) follows. Errors as of [`bucket`](Self::bucket).
    async fn seal(&mut self) -> Result<Option<EngineChecksum>, InstallError> {
        Ok(None)
    }

    /// All buckets were passed and match the manifest: the engine takes its last step and runs. Errors as in [`super::Engine::install`].
    async fn finish(self: Box<Self>, version: HeldVersion) -> Result<InstallReport, InstallError>;

    /// Abandons it; returns the engine's state.
    async fn abandon(self: Box<Self>, reason: &str) -> Left;
}

//! Feeding an engine from GPU memory: buckets that lie on the engine's own GPUs, handed over one by one while others still arrive.
//!
//! The second route into an engine, in addition to a directory ([`super::Engine::install`]), under the same rules: from the first bucket on
//! the engine may hold a mixture, it is marked before that, and it runs again only after every tensor was handed over once and the engine
//! confirmed its last step. Decides nothing about who may be fed so; the adapters say that, from what is proven for a server.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::{EngineError, InstallError, InstallReport, InstallTerms, Left};
use weightsync_core::protocol::HeldVersion;
use weightsync_core::protocol::worker::IpcHandle;
use weightsync_core::weights::{Bucket, Layout};

/// How a server can be fed from GPU memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceRoute {
    /// Name of the way, for status and logs: `checkpoint-engine`, `update_weights`.
    pub name: &'static str,
    /// UUIDs (`GPU-...`) of the GPUs of the server's worker ranks, in the order of ranks. Each must be given every bucket.
    /// Empty where the server does not name them: they are those that this agent was given then.
    pub gpus: Vec<String>,
    /// Whether the engine answers no request from the first bucket to the end. Where it does not, requests that were running are ended
    /// before and after as the pause policy says.
    pub gated: bool,
    /// Why a faster way of this server is not used, where there is one.
    pub why_not_faster: Option<String>,
}

/// A version that will come as buckets in GPU memory.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct DeviceJob {
    pub terms: InstallTerms,
    /// Its tensors and buckets; cut between tensors.
    pub layout: Arc<Layout>,
    /// One bucket, and the engine's last step, must not take longer.
    pub silence: Duration,
    /// Directory for sockets, shared with the engine's process; made when it is not there.
    pub sockets: PathBuf,
    /// The same directory as the engine sees it.
    pub sockets_in_engine: PathBuf,
}

/// A bucket in the memory of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevicePlace {
    /// UUID of the GPU (`GPU-...`).
    pub gpu: String,
    /// The allocation that it lies in, for other processes.
    pub handle: IpcHandle,
    /// Length of that allocation in bytes.
    pub allocation_bytes: u64,
    /// First byte of the bucket in the allocation; a multiple of 64.
    pub offset: u64,
    /// An event of the same worker. An engine that reads after its response records it when it has read.
    pub event: Option<IpcHandle>,
}

/// One bucket that arrived whole and was checked, on every GPU of a replica. Its bytes stay as they are until it is released.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceBucket {
    /// Which bucket of the layout.
    pub bucket: Bucket,
    /// Where it lies.
    pub places: Vec<DevicePlace>,
    /// gsum64 of each of its tensors that has bytes, in the order of the layout: of the bytes that arrived, or were read.
    pub sums: Vec<u64>,
}

impl DeviceBucket {
    /// Where it lies on the GPU of one of an engine's workers, by its UUID; an error when it does not lie there.
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

/// An install that is under way. Dropping it is giving it up: the engine is then held as after [`abandon`](Self::abandon).
#[async_trait]
pub trait DeviceInstall: Send {
    /// Whether the engine answers no request from the first bucket on. Such a pause may take seconds: [`open`](Self::open) is called before bytes
    /// travel then.
    fn holds(&self) -> bool {
        false
    }

    /// Pauses and marks the engine, as the first bucket does otherwise. After an error the install has ended, and its weights are
    /// untouched.
    async fn open(&mut self) -> Result<(), InstallError> {
        Ok(())
    }

    /// Hands one bucket over, in the order of the layout. Returns when the engine took it. The first call pauses and marks the engine.
    /// After an error the install has ended, and the engine's state in the error is final.
    async fn bucket(&mut self, bucket: DeviceBucket) -> Result<Released, InstallError>;

    /// All was handed over and is what the manifest says: the engine takes its last step and runs. Errors as of [`super::Engine::install`].
    async fn finish(self: Box<Self>, version: HeldVersion) -> Result<InstallReport, InstallError>;

    /// Gives it up: what the engine is left with.
    async fn abandon(self: Box<Self>, reason: &str) -> Left;
}

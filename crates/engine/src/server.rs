//! The HTTP interface of an engine, call by call: the part that differs from engine to engine.
//!
//! A server file decides paths, bodies and which reply counts as success. It never decides the order of calls or the meaning of a failure
//! for the replica: [`super::adapter`] does that, once for all engines.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;

use super::canary::LogProbs;
use super::checksums::Checksums;
use super::descriptor::EngineDescriptor;
use super::device::DeviceRoute;
use super::draft::{DraftWay, untaken};
use super::feed::{Feed, FeedJob};
use super::fit::{self, Fit};
use super::group::GroupServer;
use super::host::HostJob;
use super::host_feed::HostFeed;
use super::http::Until;
use super::{EngineError, Holding};
use weightsync_core::protocol::{CanaryPolicy, EngineFacts, KvCachePolicy, PausePolicy};
use weightsync_core::weights::{IgnoredTensors, TensorSpec};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Sleeps {
    /// Its weights are off the GPU now, or discarded.
    pub(super) now: bool,
    /// Number of times that it fell asleep; 0 if it does not count.
    pub(super) times: u64,
}

#[async_trait]
pub(super) trait Server: Send + Sync + 'static {
    fn descriptor(&self) -> &'static EngineDescriptor;

    fn kind(&self) -> &'static str {
        self.descriptor().kind
    }

    fn url(&self) -> &str;

    fn takes_directories(&self) -> Result<(), EngineError> {
        Ok(())
    }

    /// Its properties; refuses a server that lacks something that an install needs.
    async fn facts(&self, until: Until) -> Result<EngineFacts, EngineError>;

    /// Whether the HTTP front answers; works while the engine core loads.
    async fn front(&self, until: Until) -> Result<(), EngineError>;

    /// Text that is constant for one start of the server and differs after a restart, if the server reports such a text.
    async fn fingerprint(&self, until: Until) -> Result<String, EngineError>;

    /// Its sleeps since its start; zero for a server that does not report them.
    async fn sleeps(&self, _until: Until) -> Result<Sleeps, EngineError> {
        Ok(Sleeps::default())
    }

    /// The version field, through the engine core if there is one: a response proves that the core works.
    async fn holding(&self, until: Until) -> Result<Holding, EngineError>;

    /// Writes the version field.
    async fn write(&self, holding: &Holding, until: Until) -> Result<(), EngineError>;

    /// Pauses as the policy requires ([`PausePolicy::External`]: as `Keep`), so that the cache can be emptied later if that is required.
    async fn pause(&self, pause: PausePolicy, kv_cache: KvCachePolicy, until: Until) -> Result<(), EngineError>;

    /// The same for an engine that may hold half an update. Its weights are useless, so it may discard them.
    async fn pause_mixture(&self, pause: PausePolicy, kv_cache: KvCachePolicy, until: Until) -> Result<(), EngineError> {
        self.pause(pause, kv_cache, until).await
    }

    async fn is_paused(&self, until: Until) -> Result<bool, EngineError>;

    async fn unpause(&self, until: Until) -> Result<(), EngineError>;

    /// Whether tensors replace all tensors of the checkpoint at `served`, which this process sees.
    fn fits(&self, served: &Path, tensors: &[TensorSpec], ignored: &IgnoredTensors) -> Result<Fit, EngineError> {
        fit::check(served, tensors, ignored)
    }

    /// Bytes of the tensors at `served`, or why [`fits`](Self::fits) cannot compare with them.
    fn readable(&self, served: &Path) -> Result<u64, String> {
        fit::readable(served)
    }

    /// Whether it could load all tensors of a draft model by that route.
    async fn takes_draft(&self, way: DraftWay, _draft: Vec<TensorSpec>, _until: Until) -> Result<(), EngineError> {
        Err(untaken(self.kind(), way))
    }

    /// Prepares the files of a load, if the engine reads from a place of its own; before anything is paused or changed. `from` is a
    /// directory as this process sees it. Returns the place of the files, if it is another one.
    async fn stage(&self, _from: &Path, _until: Until) -> Result<Option<PathBuf>, EngineError> {
        Ok(None)
    }

    /// Loads all weights from a directory as the engine sees it, or the staged ones; returns when the engine confirmed it.
    async fn load(&self, directory: &Path, until: Until) -> Result<(), EngineError>;

    /// Clears the remains of a failed load in the engine, so that the next load starts clean.
    async fn clear_failed_load(&self, until: Until) -> Result<(), EngineError>;

    /// Empties KV and prefix cache, even parts in use.
    async fn reset_cache(&self, until: Until) -> Result<(), EngineError>;

    /// Generates one token; `Ok` also for a server that generates no text.
    async fn generate(&self, until: Until) -> Result<(), EngineError>;

    /// Sends the canary's question: the log-probs of the generated tokens. [`EngineError::Unsupported`] if the server gives none.
    async fn log_probs(&self, canary: &CanaryPolicy, until: Until) -> Result<LogProbs, EngineError>;

    /// Ends all its requests; it stays paused.
    async fn abort_all(&self, until: Until) -> Result<(), EngineError>;

    /// Its start-up checkpoint, as it reports it.
    async fn startup_checkpoint(&self, until: Until) -> Result<String, EngineError>;

    /// How it can be fed from GPU memory under these policies; `served` is its start-up checkpoint, if that can be read from here. Refuses
    /// what is not proven for this server and model, with the reason.
    async fn device_route(
        &self,
        _pause: PausePolicy,
        _kv_cache: KvCachePolicy,
        _served: Option<&Path>,
        _until: Until,
    ) -> Result<DeviceRoute, EngineError> {
        Err(no_device_route(self.kind()))
    }

    /// Its group calls; `None` for a kind that joins no groups.
    fn groups(&self) -> Option<Arc<dyn GroupServer>> {
        None
    }

    /// Opens a feed. The server is paused (if the route is gated) and marked. None of its weights has changed yet, and an error here does
    /// not change that.
    async fn open_feed(&self, _job: FeedJob<'_>, _until: Until) -> Result<Box<dyn Feed>, EngineError> {
        Err(no_device_route(self.kind()))
    }

    /// Its own checksums of the weights that it holds; none where it offers none that can be compared, or where they would take too long for
    /// `bytes` of weights. It answers nothing else meanwhile.
    async fn checksums(&self, _bytes: u64, _until: Until) -> Result<Option<Checksums>, EngineError> {
        Ok(None)
    }

    /// Whether its workers read weights from shared host memory: the name of the route.
    async fn host_route(&self, _until: Until) -> Result<&'static str, EngineError> {
        Err(no_host_route(self.kind()))
    }

    /// Makes the workers connect. Nothing of the server has changed yet, and an error here does not change that.
    async fn open_host_feed(&self, _job: &HostJob, _until: Until) -> Result<Box<dyn HostFeed>, EngineError> {
        Err(no_host_route(self.kind()))
    }
}

/// The refusal of a server whose workers do not read shared memory.
pub(super) fn no_host_route(kind: &str) -> EngineError {
    EngineError::Unsupported {
        what: format!("the workers of {kind} do not read weights from shared memory as it was started"),
        next_step: "it is fed from a directory".into(),
    }
}

/// The refusal of a server that takes weights from directories only.
pub(super) fn no_device_route(kind: &str) -> EngineError {
    EngineError::Unsupported {
        what: format!("{kind} cannot be fed from GPU memory as it was started"),
        next_step: "it is fed from a directory".into(),
    }
}

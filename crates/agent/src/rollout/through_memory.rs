//! Has an engine whose workers read shared memory take a version that lies in files: the files themselves are what it shares.
//!
//! No path is needed that both can see, no byte is copied, and the workers check every tensor's digest while the engine still serves. The
//! version stays where it is, to feed others and an engine that starts again. Decides only how a version is reported; the order of calls is the
//! adapter's.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::spawn_blocking;

use super::switch::terms;
use super::{Rollout, Version};
use weightsync_core::protocol::{HeldVersion, UpdatePolicy};
use weightsync_core::weights::Layout;
use weightsync_engine::{EngineError, HostJob, HostMemory, InstallError, InstallReport, Left};

/// Longest time to ask a server which ways it has.
const ASK: Duration = Duration::from_secs(5);

impl Rollout {
    /// The name of the way by shared memory, where this start of the engine has it.
    pub(super) async fn memory_route(&self) -> Option<&'static str> {
        match self.engine.host_route(ASK).await {
            Ok(route) => Some(route),
            Err(EngineError::Unsupported { .. }) => None,
            Err(error) => {
                tracing::warn!(%error, "the engine cannot be asked whether its workers read shared memory");
                None
            }
        }
    }

    pub(super) fn host_job(version: HeldVersion, layout: Arc<Layout>, memory: HostMemory, policy: &UpdatePolicy) -> HostJob {
        HostJob { terms: terms(version, policy), layout, memory: Arc::new(memory), silence: Duration::from_millis(policy.silence_ms) }
    }

    pub(super) async fn install_through_memory(
        &self,
        version: &Arc<Version>,
        policy: &UpdatePolicy,
    ) -> Result<InstallReport, InstallError> {
        let cannot = |left, what: String| InstallError {
            step: "start",
            left,
            source: EngineError::Unsupported { what, next_step: "it is fed from a directory".into() },
        };
        let memory = version.memory().map_err(|what| cannot(Left::AsBefore, what))?;
        let job = Self::host_job(version.held.clone(), version.layout.clone(), memory, policy);
        let mut install = self.engine.begin_host(&job).await?;
        let digest = install.digest();
        let cut = Arc::new(Layout::clone(&version.layout).cut_between_tensors());
        for bucket in cut.buckets() {
            let version = version.clone();
            let reported = spawn_blocking(move || version.host_bucket(&bucket, digest)).await;
            match reported.unwrap_or_else(|ended| Err(ended.to_string())) {
                Ok(bucket) => install.bucket(bucket).await?,
                Err(what) => {
                    let left = install.abandon(&what).await;
                    return Err(cannot(left, what));
                }
            }
        }
        install.finish(version.held.clone()).await
    }
}

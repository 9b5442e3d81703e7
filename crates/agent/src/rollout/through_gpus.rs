//! Has an engine that loads no directory take a version that lies in one: through the memory of its GPUs, by this agent's own workers.
//!
//! For what comes over connections (groups without GPUs between members, joiners that are fed, a kept copy after a restart of the engine).
//! Decides only whether there are workers and room; the order of calls is the adapter's.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::switch::terms;
use super::{Rollout, Version};
use crate::gpu::Gpus;
use crate::hand_over::feed_checkpoint;
use weightsync_core::protocol::{HeldVersion, UpdatePolicy};
use weightsync_core::weights::Layout;
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_engine::{DeviceJob, EngineError, InstallError, InstallReport, Left};
use weightsync_gpu::worker::Ring;

/// Buckets that are under way on each GPU.
const SLOTS: u32 = 2;
/// Length of a bucket of several tensors, in bytes.
const BUCKET: u64 = 256 << 20;
/// Below the agent's directory, there are sockets for the engine: short, because the path of a socket is.
const SOCKETS: &str = "s";

impl Rollout {
    /// The GPUs of its engine, for an engine that takes weights from there.
    pub fn set_gpus(&self, gpus: Arc<Gpus>) {
        // An endpoint has its GPUs from the start, and no others later.
        let _first = self.gpus.set(gpus);
    }

    /// Whether a version in a directory can be brought into the engine, one way or the other; else why not.
    pub(super) fn takes_files(&self) -> Result<(), EngineError> {
        self.engine.takes_directories().or_else(|error| {
            let workers = self.gpus.get().is_some_and(|gpus| !gpus.workers().is_empty());
            if workers { Ok(()) } else { Err(error) }
        })
    }

    pub(super) fn device_job(&self, version: HeldVersion, layout: Arc<Layout>, policy: &UpdatePolicy) -> DeviceJob {
        let sockets: PathBuf = self.dir.path().join(SOCKETS);
        DeviceJob {
            terms: terms(version, policy),
            layout,
            silence: Duration::from_millis(policy.silence_ms),
            sockets_in_engine: self.in_engine(&sockets),
            sockets,
        }
    }

    /// Has the engine take the files of a version through its GPUs.
    pub(super) async fn install_through_gpus(&self, version: &Version, policy: &UpdatePolicy) -> Result<InstallReport, InstallError> {
        let cannot = |what: String| {
            let next_step = "give this agent the engine's GPUs, with room for two buckets".into();
            InstallError::before_start(EngineError::Unsupported { what, next_step })
        };
        let directory = version.dir().path().to_owned();
        let opened = tokio::task::spawn_blocking(move || Checkpoint::open(&directory)).await;
        let checkpoint = opened.map_err(|ended| cannot(ended.to_string()))?.map_err(|error| cannot(error.to_string()))?;
        let layout = Layout::new("model", checkpoint.specs(), BUCKET).map_err(|error| cannot(error.to_string()))?.cut_between_tensors();
        let job = self.device_job(version.held.clone(), Arc::new(layout), policy);
        let rings = self.rings(&job).await.map_err(cannot)?;
        let fed = feed_checkpoint(self.engine.as_ref(), &job, version.held.clone(), Arc::new(checkpoint), &rings, false).await;
        fed.map(|(report, _)| report).map_err(|error| error.into_install(Left::AsBefore))
    }

    /// A small ring on each of the engine's GPUs; freed after the install.
    async fn rings(&self, job: &DeviceJob) -> Result<Vec<Ring>, String> {
        let slot_bytes = job.layout.largest_bucket().max(64).next_multiple_of(4096);
        let workers = self.gpus.get().map(|gpus| gpus.workers()).unwrap_or_default();
        if workers.is_empty() {
            return Err("there is no GPU worker next to the engine".into());
        }
        let mut rings = Vec::with_capacity(workers.len());
        for worker in workers {
            rings.push(worker.ring(SLOTS, slot_bytes, job.silence).await.map_err(|error| error.to_string())?);
        }
        Ok(rings)
    }
}

//! The workers of the test engine: they read shared memory, check digests, and keep views until the end of a load, as vLLM's do.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use async_trait::async_trait;

use super::engine::{Fault, TestEngine};
use weightsync_core::protocol::HeldVersion;
use weightsync_core::weights::{digest_hex, tensor_digest};
use weightsync_engine::{
    EngineError, EngineStart, HostBucket, HostDigest, HostInstall, HostJob, HostMemory, HostTensor, InstallError, InstallReport, Left,
};

/// One install.
pub struct Workers {
    engine: TestEngine,
    start: u32,
    held: HeldVersion,
    memory: Arc<HostMemory>,
    digest: HostDigest,
    reported: Vec<HostBucket>,
    taken: u32,
    loading: bool,
    copied: Vec<String>,
    views: Vec<HostTensor>,
    over: bool,
}

impl Workers {
    pub fn begin(engine: &TestEngine, job: &HostJob, digest: HostDigest) -> Self {
        let held = job.terms.version.clone();
        let start = engine.get(|inside| inside.start);
        engine.set(|inside| inside.shared.push(job.memory.bytes));
        let (reported, copied, views) = (Vec::new(), Vec::new(), Vec::new());
        let memory = job.memory.clone();
        Self { engine: engine.clone(), start, held, memory, digest, reported, taken: 0, loading: false, copied, views, over: false }
    }

    fn read(&self, tensor: &HostTensor) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(tensor.bytes).unwrap()];
        File::from(self.memory.file.try_clone().unwrap()).read_exact_at(&mut bytes, tensor.offset).unwrap();
        bytes
    }

    fn named(&self, tensor: &HostTensor) -> String {
        format!("{}={}", tensor.spec.name, digest_hex(tensor_digest(&self.read(tensor))))
    }

    fn fail(&mut self, what: &str) -> InstallError {
        self.over = true;
        let source = EngineError::BadReply { url: "http://engine".into(), what: what.into() };
        InstallError { step: "load", left: if self.loading { Left::Mixture } else { Left::AsBefore }, source }
    }

    async fn load(&mut self) -> Result<(), InstallError> {
        if !self.loading {
            self.loading = true;
            self.engine.set(|inside| {
                inside.paused = true;
                inside.half = Some(self.held.clone());
                inside.serves = None;
                inside.installs += 1;
            });
        }
        if self.engine.get(|inside| inside.fault) == Fault::FailsInLoad {
            return Err(self.fail("out of memory"));
        }
        let slow = self.engine.get(|inside| inside.slow);
        tokio::time::sleep(slow).await;
        for bucket in std::mem::take(&mut self.reported) {
            for tensor in &bucket.tensors {
                if bucket.copy {
                    self.copied.push(self.named(tensor));
                } else {
                    self.views.push(tensor.clone());
                }
            }
            self.taken = bucket.sequence + 1;
        }
        Ok(())
    }
}

#[async_trait]
impl HostInstall for Workers {
    fn digest(&self) -> HostDigest {
        self.digest
    }

    async fn bucket(&mut self, bucket: HostBucket) -> Result<(), InstallError> {
        let wrong = bucket.tensors.iter().any(|tensor| self.digest.of(&self.read(tensor)) != tensor.digest);
        if wrong {
            return Err(self.fail("a digest differs"));
        }
        self.reported.push(bucket);
        Ok(())
    }

    async fn taken(&mut self, more_than: u32) -> Result<u32, InstallError> {
        self.load().await?;
        assert!(self.taken > more_than, "{} were taken, and more are waited for although none was informed", self.taken);
        Ok(self.taken)
    }

    async fn finish(mut self: Box<Self>, version: HeldVersion) -> Result<InstallReport, InstallError> {
        self.load().await?;
        let views = std::mem::take(&mut self.views);
        let mut tensors = std::mem::take(&mut self.copied);
        tensors.extend(views.iter().map(|tensor| self.named(tensor)));
        tensors.sort();
        self.over = true;
        self.engine.set(|inside| {
            inside.serves = Some(tensors.join(" "));
            inside.holding = Some(version);
            inside.half = None;
            inside.paused = false;
        });
        Ok(InstallReport { start: EngineStart(self.start.to_string()), steps_ms: vec![("load".into(), 1)], owes_answer: false })
    }

    async fn abandon(mut self: Box<Self>, _reason: &str) -> Left {
        self.over = true;
        if self.loading { Left::Mixture } else { Left::AsBefore }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        assert!(
            self.over || std::thread::panicking() || self.engine.get(|inside| inside.fault) != Fault::None,
            "neither ended nor given up"
        );
    }
}

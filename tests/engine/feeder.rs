//! Feeds an engine a checkpoint through a ring of shared memory of any size, as an agent does: places are used again as soon as they are free.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use weightsync_core::protocol::{HeldVersion, KvCachePolicy, PausePolicy};
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_core::weights::{Bucket, Layout};
use weightsync_engine::{Engine, HostBucket, HostInstall, HostJob, HostMemory, HostTensor, InstallError, InstallReport, InstallTerms};

/// How much memory is shared.
#[derive(Debug, Clone, Copy)]
pub enum Ring {
    /// Room for the longest tensor, one tensor at a time.
    OneTensor,
    /// So many rooms, each for the longest tensor, one tensor in each.
    Tensors(u64),
    /// A place for every byte.
    WholeModel,
}

/// One install.
pub struct Feeder {
    checkpoint: Checkpoint,
    cut: Layout,
    memory: File,
    slot: u64,
    slots: u64,
    whole: bool,
    install: Box<dyn HostInstall>,
    held: HeldVersion,
    reported: u32,
    taken: u32,
}

/// Number and name of a version.
pub fn held(version: u64, name: &str) -> HeldVersion {
    HeldVersion { version, manifest: blake3::hash(name.as_bytes()).to_hex().to_string() }
}

impl Feeder {
    pub async fn begin(
        engine: &Arc<dyn Engine>,
        directory: &Path,
        version: u64,
        ring: Ring,
        within: Duration,
    ) -> Result<Self, InstallError> {
        let name = directory.display().to_string();
        Self::begin_with(engine, Checkpoint::open(directory).unwrap(), held(version, &name), ring, within).await
    }

    /// The same with a checkpoint that was opened, which may have a draft model after the model.
    pub async fn begin_with(
        engine: &Arc<dyn Engine>,
        checkpoint: Checkpoint,
        held: HeldVersion,
        ring: Ring,
        within: Duration,
    ) -> Result<Self, InstallError> {
        // Buckets of one tensor each.
        let layout = Layout::new("model", checkpoint.specs(), 64).unwrap();
        let cut = layout.clone().cut_between_tensors();
        let slot = cut.largest_bucket();
        let (slots, whole) = match ring {
            Ring::OneTensor => (1, false),
            Ring::Tensors(slots) => (slots, false),
            Ring::WholeModel => (1, true),
        };
        let bytes = if whole { cut.total_bytes } else { slots * slot };
        let memory = tempfile::tempfile().unwrap();
        memory.set_len(bytes).unwrap();
        let job = HostJob {
            terms: InstallTerms {
                version: held.clone(),
                pause: PausePolicy::Keep,
                kv_cache: KvCachePolicy::Reset,
                canary: None,
                timeout: 2 * within,
                cancel: CancellationToken::new(),
            },
            layout: Arc::new(layout),
            memory: Arc::new(HostMemory::of(&memory, bytes).unwrap()),
            silence: within,
        };
        let install = engine.begin_host(&job).await?;
        Ok(Self { checkpoint, cut, memory, slot, slots, whole, install, held, reported: 0, taken: 0 })
    }

    /// Describes so many buckets more, or all; waits for room.
    pub async fn tell(&mut self, count: usize) -> Result<(), InstallError> {
        let buckets: Vec<Bucket> = self.cut.buckets().skip(self.reported as usize).take(count).collect();
        for bucket in buckets {
            let place = if self.whole { bucket.offset } else { u64::from(self.reported) % self.slots * self.slot };
            while !self.whole && u64::from(self.reported - self.taken) >= self.slots {
                self.taken = self.install.taken(self.taken).await?;
            }
            let reported = self.write(&bucket, place);
            self.install.bucket(reported).await?;
            self.reported += 1;
        }
        Ok(())
    }

    /// Describes the next bucket with another digest than its bytes have.
    pub async fn lie(&mut self) -> Result<(), InstallError> {
        let bucket = self.cut.buckets().nth(self.reported as usize).unwrap();
        let mut reported = self.write(&bucket, if self.whole { bucket.offset } else { 0 });
        let digest = &mut reported.tensors[0].digest;
        let last = if digest.ends_with('0') { "1" } else { "0" };
        digest.replace_range(digest.len() - 1.., last);
        self.install.bucket(reported).await?;
        self.reported += 1;
        Ok(())
    }

    fn write(&self, bucket: &Bucket, place: u64) -> HostBucket {
        let mut bytes = vec![0; usize::try_from(bucket.bytes).unwrap()];
        self.checkpoint.read_stream(&self.cut, bucket.offset, &mut bytes).unwrap();
        self.memory.write_all_at(&bytes, place).unwrap();
        let tensors = self.cut.parts(bucket.offset, bucket.bytes).map(|part| {
            let first = usize::try_from(part.in_range).unwrap();
            let digest = self.install.digest().of(&bytes[first..first + usize::try_from(part.bytes).unwrap()]);
            HostTensor { spec: part.entry.tensor.clone(), offset: place + part.in_range, bytes: part.bytes, digest }
        });
        HostBucket { sequence: self.reported, copy: !self.whole, tensors: tensors.collect() }
    }

    pub async fn finish(self) -> Result<InstallReport, InstallError> {
        self.install.finish(self.held).await
    }

    /// All of it.
    pub async fn feed(
        engine: &Arc<dyn Engine>,
        directory: &Path,
        version: u64,
        ring: Ring,
        within: Duration,
    ) -> Result<InstallReport, InstallError> {
        let mut feeder = Self::begin(engine, directory, version, ring, within).await?;
        feeder.tell(usize::MAX).await?;
        feeder.finish().await
    }
}

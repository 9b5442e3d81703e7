//! GPU memory as simulated engines see it, and a feeder that writes a checkpoint into a ring there and passes it on.
#![allow(clippy::cast_possible_truncation)]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use super::support::{Bench, SOON, held};
use crate::{
    DeviceBucket, DeviceInstall, DeviceJob, DevicePlace, Engine, EngineConfig, InstallError, InstallReport, InstallTerms, Released, connect,
};
use weightsync_core::protocol::worker::Opaque;
use weightsync_core::protocol::{KvCachePolicy, PausePolicy};
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_core::weights::{Bucket, Layout, gsum64};
use weightsync_testkit::simulator::{Faults, SimulatorOptions};

/// Length of a bucket that holds one or two of the tests' tensors.
const BUCKET: u64 = 128;

pub(super) const GPUS: [&str; 2] = ["GPU-fa4e0000-0000-4000-8000-000000000000", "GPU-fa4e0000-0000-4000-8000-000000000001"];

/// Memory of GPUs in files, with a ring of two slots on each.
pub(super) struct Gpus {
    folder: TempDir,
    rings: Vec<File>,
    slot_bytes: u64,
}

impl Gpus {
    pub(super) fn new(count: usize) -> Self {
        let folder = TempDir::new().unwrap();
        let open = |number: usize| {
            let path = folder.path().join(format!("gpu{number}-1-1"));
            let file = OpenOptions::new().create_new(true).read(true).write(true).open(path).unwrap();
            file.set_len(2 * 512).unwrap();
            file
        };
        let rings = (0..count).map(open).collect();
        Self { folder, rings, slot_bytes: 512 }
    }

    pub(super) fn path(&self) -> PathBuf {
        self.folder.path().to_owned()
    }

    pub(super) fn places(&self, slot: u64) -> Vec<DevicePlace> {
        let place = |number: usize| {
            let mut handle = [0; 64];
            let text = format!("fakegpu:memory:gpu{number}-1-1:{}", 2 * self.slot_bytes);
            handle[..text.len()].copy_from_slice(text.as_bytes());
            DevicePlace {
                gpu: GPUS[number].to_owned(),
                handle: Opaque(handle),
                allocation_bytes: 2 * self.slot_bytes,
                offset: slot * self.slot_bytes,
                event: None,
            }
        };
        (0..self.rings.len()).map(place).collect()
    }

    fn fill(&self, slot: u64, bytes: &[u8]) {
        for ring in &self.rings {
            ring.write_all_at(bytes, slot * self.slot_bytes).unwrap();
        }
    }
}

/// A version whose buckets go through a ring.
pub(super) struct Version<'a> {
    gpus: &'a Gpus,
    checkpoint: Checkpoint,
    pub(super) layout: Arc<Layout>,
}

impl<'a> Version<'a> {
    pub(super) fn open(gpus: &'a Gpus, directory: &Path) -> Self {
        let checkpoint = Checkpoint::open(directory).unwrap();
        let layout = Layout::new("model", checkpoint.specs(), BUCKET).unwrap().cut_between_tensors();
        assert!(layout.bucket_count() > 2, "the ring goes round");
        Self { gpus, checkpoint, layout: Arc::new(layout) }
    }

    pub(super) fn bucket(&self, bucket: Bucket) -> DeviceBucket {
        let (mut bytes, mut sums) = (vec![0xee; bucket.bytes as usize], Vec::new());
        for part in self.layout.parts(bucket.offset, bucket.bytes) {
            let into = &mut bytes[part.in_range as usize..][..part.bytes as usize];
            self.checkpoint.read_tensor(part.index, part.in_tensor, into).unwrap();
            sums.push(gsum64(into));
        }
        let slot = u64::from(bucket.sequence) % 2;
        self.gpus.fill(slot, &bytes);
        DeviceBucket { bucket, places: self.gpus.places(slot), sums }
    }

    /// Passes everything; each slot is overwritten as soon as it is released.
    pub(super) async fn feed(&self, engine: &dyn Engine, job: &DeviceJob) -> Result<InstallReport, InstallError> {
        let mut install = engine.begin_device(job).await?;
        for bucket in self.layout.buckets() {
            let released = install.bucket(self.bucket(bucket)).await?;
            assert_eq!(released, Released::Now);
            self.gpus.fill(u64::from(bucket.sequence) % 2, &[0xdd; 512]);
        }
        install.finish(held(job.terms.version.version)).await
    }

    pub(super) async fn feed_some(&self, engine: &dyn Engine, job: &DeviceJob, count: usize) -> Box<dyn DeviceInstall> {
        let mut install = engine.begin_device(job).await.unwrap();
        for bucket in self.layout.buckets().take(count) {
            install.bucket(self.bucket(bucket)).await.unwrap();
        }
        install
    }
}

/// A simulator on GPUs, and an adapter that sees its process with this command line (`None`: it does not see it).
pub(super) struct GpuBench {
    pub(super) bench: Bench,
    pub(super) gpus: Gpus,
    pub(super) engine: Arc<dyn Engine>,
    pub(super) processes: TempDir,
}

impl GpuBench {
    pub(super) async fn start(kind: &'static str, ranks: usize, words: Option<&[&str]>, more: impl FnOnce(&mut SimulatorOptions)) -> Self {
        let gpus = Gpus::new(ranks);
        let bench = Bench::start_with(kind, Faults::default(), |options| {
            options.gpu_memory = Some(gpus.path());
            options.world_size = ranks as u32;
            more(options);
        })
        .await;
        let config = json!({"architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16"});
        std::fs::write(bench.directory(1).join("config.json"), config.to_string()).unwrap();
        let processes = TempDir::new().unwrap();
        if let Some(words) = words {
            let process = processes.path().join("77");
            std::fs::create_dir(&process).unwrap();
            let port = bench.simulator.address().port().to_string();
            let program: &[&str] = match kind {
                "fastdeploy" => &["python", "-m", "fastdeploy.entrypoints.openai.api_server", "--port", &port],
                _ => &["lmdeploy", "serve", "api_server", "/model", "--server-port", &port],
            };
            let line: Vec<&str> = program.iter().chain(words).copied().collect();
            std::fs::write(process.join("cmdline"), line.join("\0")).unwrap();
            std::fs::write(process.join("stat"), format!("77 (a ) b) S {} 4242 0", "0 ".repeat(18).trim())).unwrap();
        }
        let engine = Self::adapter(&bench, &processes, None);
        Self { bench, gpus, engine, processes }
    }

    pub(super) fn adapter(bench: &Bench, processes: &TempDir, record: Option<PathBuf>) -> Arc<dyn Engine> {
        let config = EngineConfig {
            kind: bench.kind().to_owned(),
            url: bench.simulator.url(),
            api_key: None,
            served_model: Some(bench.directory(1)),
            record,
            owner: format!("test.{}", bench.simulator.address().port()),
            processes: processes.path().to_owned(),
            unproven_routes: false,
        };
        connect(config).unwrap()
    }

    pub(super) fn version(&self, version: u64) -> Version<'_> {
        Version::open(&self.gpus, &self.bench.directory(version))
    }

    pub(super) fn job(&self, version: u64) -> DeviceJob {
        DeviceJob {
            terms: InstallTerms {
                version: InstallTerms::mark(version, None),
                // If the server can be fed awake, that route is used.
                pause: if self.engine.kind() == "lmdeploy" { PausePolicy::AbortAwake } else { PausePolicy::Abort },
                kv_cache: KvCachePolicy::Reset,
                canary: None,
                timeout: SOON,
                cancel: CancellationToken::new(),
            },
            layout: self.version(version).layout,
            // A test of a silent engine sets its own.
            silence: SOON,
            sockets: self.bench.folder.path().join("s"),
            sockets_in_engine: self.bench.folder.path().join("s"),
        }
    }

    pub(super) async fn install(&self, version: u64) -> Result<InstallReport, InstallError> {
        self.version(version).feed(self.engine.as_ref(), &self.job(version)).await
    }

    /// With another deadline, for silence too.
    pub(super) async fn install_by(&self, version: u64, deadline: Duration) -> Result<InstallReport, InstallError> {
        let mut job = self.job(version);
        (job.terms.timeout, job.silence) = (deadline, deadline);
        self.version(version).feed(self.engine.as_ref(), &job).await
    }

    pub(super) async fn asleep(&self) -> bool {
        self.bench.get("/is_sleeping").await["is_sleeping"] == json!(true)
    }
}

//! `weightsync-dev feed`: loads a checkpoint into one engine on this machine: through the memory of its GPUs, shared memory, or the
//! directory itself. No group, no trainer, no agent.
//!
//! For hosts without a cluster, and to measure the routes of one engine and the time of each step.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use weightsync_agent::command::Output;
use weightsync_agent::hand_over::{MemoryFeed, feed_checkpoint, feed_memory};
use weightsync_core::protocol::{HeldVersion, KvCachePolicy, PausePolicy};
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_core::weights::{DigestAlgorithm, Layout, Manifest, TensorHasher};
use weightsync_engine::{ApiKey, DeviceJob, Engine, EngineConfig, EngineError, InstallJob, InstallTerms, connect};
use weightsync_gpu::worker::{Ring, Worker, WorkerStart};

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Pause {
    /// They wait.
    Keep,
    /// They end by themselves first.
    Drain,
    /// They are ended.
    Abort,
    /// They are aborted; an LMDeploy that can be fed awake answers others meanwhile.
    AbortAwake,
    /// The caller pauses the engine.
    External,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Way {
    /// The first of the other routes that the engine supports.
    Auto,
    /// The memory of its GPUs.
    Device,
    /// Memory that this process shares with the engine's workers.
    Memory,
    /// The checkpoint's directory, which the engine must see under the same path.
    Directory,
}

#[derive(Debug, Args)]
#[command(disable_version_flag = true)]
pub struct FeedArgs {
    /// Checkpoint to hand over: a directory with safetensors files.
    #[arg(value_name = "DIR")]
    pub checkpoint: PathBuf,
    /// Kind of the engine.
    #[arg(long)]
    pub engine: String,
    /// Its address.
    #[arg(long, value_name = "http://HOST:PORT")]
    pub url: String,
    /// The model directory that it was started with.
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Environment variable that holds its API key.
    #[arg(long, value_name = "VARIABLE")]
    pub api_key_env: Option<String>,
    /// UUID of the GPU of its next worker rank, given once for each. Optional if the engine reports them or one GPU is visible.
    #[arg(long = "gpu", value_name = "UUID")]
    pub gpus: Vec<String>,
    /// Route into the engine.
    #[arg(long, value_enum, default_value_t = Way::Auto)]
    pub way: Way,
    /// Most shared memory, in MiB, and at least twice the longest tensor. Default: the size of the checkpoint.
    #[arg(long, value_name = "MIB")]
    pub memory_mib: Option<u64>,
    /// Length of a bucket, in MiB.
    #[arg(long, default_value_t = 256)]
    pub bucket_mib: u64,
    /// Buckets on each GPU.
    #[arg(long, default_value_t = 4)]
    pub slots: u32,
    /// Copy the whole checkpoint to the GPU before the engine is paused, to measure the engine alone.
    #[arg(long)]
    pub preload: bool,
    /// Number of the version.
    #[arg(long = "version", value_name = "N", default_value_t = 1)]
    pub number: u64,
    /// Number of repetitions, each with the next version number.
    #[arg(long, default_value_t = 1)]
    pub repeat: u64,
    /// What happens to running requests.
    #[arg(long, value_enum, default_value_t = Pause::Abort)]
    pub pause: Pause,
    /// Keep caches.
    #[arg(long)]
    pub keep_cache: bool,
    /// Longest time, in seconds.
    #[arg(long, default_value_t = 600)]
    pub timeout: u64,
    /// Directory for sockets that the engine's process sees under the same path.
    #[arg(long, value_name = "DIR")]
    pub sockets: Option<PathBuf>,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

impl FeedArgs {
    /// Runs it; exit code 1 if the engine does not hold the last version at the end.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        weightsync_agent::command::block_on(self.feed())
    }

    async fn feed(self) -> anyhow::Result<ExitCode> {
        let api_key = match &self.api_key_env {
            Some(name) => Some(ApiKey::from_env(name)?.with_context(|| format!("the environment variable {name} is not set"))?),
            None => None,
        };
        let within = Duration::from_secs(self.timeout);
        let sockets = self.sockets.clone().unwrap_or_else(|| std::env::temp_dir().join(format!("weightsync-feed-{}", std::process::id())));
        let engine = connect(EngineConfig {
            kind: self.engine.clone(),
            url: self.url.clone(),
            api_key,
            served_model: self.model.clone(),
            record: None,
            owner: "test".into(),
            processes: "/proc".into(),
            unproven_routes: weightsync_agent::command::unproven_routes(),
        })?;
        engine.probe(within).await?;
        let (pause, kv_cache) = self.policies();
        let way = self.choose(engine.as_ref(), within).await?;
        if way != Way::Device {
            return self.through_host(engine.as_ref(), way, within).await;
        }
        let route = engine.device_route(pause, kv_cache, within).await?;
        let checkpoint = Arc::new(Checkpoint::open(&self.checkpoint)?);
        let layout = Arc::new(Layout::new("model", checkpoint.specs(), self.bucket_mib << 20)?.cut_between_tensors());
        let wanted = if route.gpus.is_empty() { self.gpus.clone() } else { route.gpus.clone() };
        let rings = self.rings(&wanted, &layout, within).await?;
        let digests = digests(&checkpoint, &layout)?;
        for version in self.number..self.number.saturating_add(self.repeat) {
            let job = DeviceJob {
                terms: InstallTerms {
                    version: InstallTerms::mark(version, None),
                    pause,
                    kv_cache,
                    canary: None,
                    timeout: within,
                    cancel: CancellationToken::new(),
                },
                layout: layout.clone(),
                silence: within,
                sockets: sockets.clone(),
                sockets_in_engine: sockets.clone(),
            };
            let manifest = Manifest::new(version, Layout::clone(&layout), DigestAlgorithm::Xxh3_128, &digests)?;
            let held = HeldVersion { version, manifest: manifest.digest() };
            let fed = feed_checkpoint(engine.as_ref(), &job, held.clone(), checkpoint.clone(), &rings, self.preload).await;
            let (report, took) = fed.with_context(|| format!("version {version} is not installed"))?;
            if report.owes_answer {
                let answered = engine.see_owed_answer(&held, within).await;
                answered.with_context(|| format!("version {version} is installed, and the engine does not compute with it"))?;
            }
            self.show(version, &layout, &route, &report.steps_ms, took);
        }
        let _gone = std::fs::remove_dir(&sockets);
        Ok(ExitCode::SUCCESS)
    }

    /// The chosen route.
    async fn choose(&self, engine: &dyn Engine, within: Duration) -> anyhow::Result<Way> {
        if self.way != Way::Auto {
            return Ok(self.way);
        }
        let (pause, kv_cache) = self.policies();
        let unless = |error| match error {
            error @ EngineError::Unsupported { .. } => Ok(error),
            error => Err(error),
        };
        let Err(device) = engine.device_route(pause, kv_cache, within).await.map_err(unless) else { return Ok(Way::Device) };
        let Err(memory) = engine.host_route(within).await.map_err(unless) else { return Ok(Way::Memory) };
        let (device, memory) = (device?, memory?);
        match engine.takes_directories() {
            Ok(()) => Ok(Way::Directory),
            Err(directory) => bail!("{directory}; by GPU memory: {device}; by shared memory: {memory}"),
        }
    }

    /// By shared memory or a directory.
    async fn through_host(&self, engine: &dyn Engine, way: Way, within: Duration) -> anyhow::Result<ExitCode> {
        let checkpoint = Arc::new(Checkpoint::open(&self.checkpoint)?);
        let layout = Arc::new(Layout::new("model", checkpoint.specs(), self.bucket_mib << 20)?.cut_between_tensors());
        let digests = digests(&checkpoint, &layout)?;
        let directory = self.checkpoint.canonicalize()?;
        let (pause, kv_cache) = self.policies();
        for version in self.number..self.number.saturating_add(self.repeat) {
            let manifest = Manifest::new(version, Layout::clone(&layout), DigestAlgorithm::Xxh3_128, &digests)?;
            let version = HeldVersion { version, manifest: manifest.digest() };
            let number = version.version;
            let (name, memory, report, took) = if way == Way::Memory {
                let memory = self.memory_mib.map(|mib| mib << 20);
                let feed = MemoryFeed { version, layout: layout.clone(), memory, pause, kv_cache, timeout: within };
                let fed = feed_memory(engine, &feed, checkpoint.clone()).await;
                let (report, memory, took) = fed.with_context(|| format!("version {number} is not installed"))?;
                ("shared memory", memory, report, took)
            } else {
                let cancel = CancellationToken::new();
                let (directory, local_directory) = (directory.clone(), directory.clone());
                let terms = InstallTerms { version, pause, kv_cache, canary: None, timeout: within, cancel };
                let job = InstallJob { terms, directory, local_directory };
                let begun = Instant::now();
                let report = engine.install(&job).await.with_context(|| format!("version {number} is not installed"))?;
                ("directory", layout.total_bytes, report, begun.elapsed())
            };
            self.show_host(number, &layout, (name, memory), &report.steps_ms, took);
        }
        Ok(ExitCode::SUCCESS)
    }

    fn show_host(&self, version: u64, layout: &Layout, (way, memory): (&str, u64), steps: &[(String, u64)], took: Duration) {
        let ms = took.as_secs_f64() * 1e3;
        if self.output == Output::Json {
            let steps: serde_json::Map<_, _> = steps.iter().map(|(step, ms)| (step.clone(), json!(ms))).collect();
            let buckets = layout.bucket_count();
            let bytes = layout.total_bytes;
            println!(
                "{}",
                json!({"version": version, "route": way, "bytes": bytes, "buckets": buckets, "memory": memory, "ms": ms, "stepsMs": steps})
            );
            return;
        }
        let steps: Vec<_> = steps.iter().map(|(step, ms)| format!("{step} {ms}")).collect();
        println!("version {version}: {} bytes by {way} of {memory} bytes in {ms:.1} ms ({} ms)", layout.total_bytes, steps.join(", "));
    }

    fn policies(&self) -> (PausePolicy, KvCachePolicy) {
        let pause = match self.pause {
            Pause::Keep => PausePolicy::Keep,
            Pause::Drain => PausePolicy::Drain,
            Pause::Abort => PausePolicy::Abort,
            Pause::AbortAwake => PausePolicy::AbortAwake,
            Pause::External => PausePolicy::External,
        };
        (pause, if self.keep_cache { KvCachePolicy::Keep } else { KvCachePolicy::Reset })
    }

    /// A worker with a ring on each GPU.
    async fn rings(&self, wanted: &[String], layout: &Layout, within: Duration) -> anyhow::Result<Vec<Ring>> {
        let slots = if self.preload { layout.bucket_count().max(1) } else { self.slots.max(1) };
        let slot_bytes = layout.largest_bucket().max(64).next_multiple_of(64);
        let names: Vec<Option<&str>> = if wanted.is_empty() { vec![None] } else { wanted.iter().map(|gpu| Some(gpu.as_str())).collect() };
        let mut rings = Vec::new();
        for gpu in names {
            let worker = Worker::start(&WorkerStart::own(gpu.unwrap_or("gpu"))?)?;
            let (_, facts, _) = worker.open(gpu, None, within).await?;
            if let Some(why) = facts.refused {
                bail!("{} cannot be used: {why}", facts.uuid);
            }
            rings.push(worker.ring(slots, slot_bytes, within).await?);
        }
        Ok(rings)
    }

    fn show(&self, version: u64, layout: &Layout, route: &weightsync_engine::DeviceRoute, steps: &[(String, u64)], took: Duration) {
        let ms = took.as_secs_f64() * 1e3;
        match self.output {
            Output::Json => {
                let steps: serde_json::Map<_, _> = steps.iter().map(|(step, ms)| (step.clone(), json!(ms))).collect();
                let line = json!({
                    "version": version, "route": route.name, "whyNotFaster": route.why_not_faster, "gpus": route.gpus, "bytes": layout.total_bytes,
                    "buckets": layout.bucket_count(), "preloaded": self.preload, "ms": ms, "stepsMs": steps,
                });
                println!("{line}");
            }
            Output::Human => {
                let steps: Vec<_> = steps.iter().map(|(step, ms)| format!("{step} {ms}")).collect();
                println!("version {version}: {} bytes by {} in {ms:.1} ms ({} ms)", layout.total_bytes, route.name, steps.join(", "));
                if let Some(why) = &route.why_not_faster {
                    println!("  not faster because: {why}");
                }
            }
        }
    }
}

fn digests(checkpoint: &Checkpoint, layout: &Arc<Layout>) -> anyhow::Result<Vec<u128>> {
    let mut hasher = TensorHasher::new(layout.clone(), DigestAlgorithm::Xxh3_128);
    for bucket in layout.buckets() {
        let mut bytes = vec![0; usize::try_from(bucket.bytes)?];
        for part in layout.parts(bucket.offset, bucket.bytes) {
            let start = usize::try_from(part.in_range)?;
            let into = bytes.get_mut(start..start + usize::try_from(part.bytes)?).context("a bucket is shorter than its parts")?;
            checkpoint.read_tensor(part.index, part.in_tensor, into)?;
        }
        hasher.update(&bytes)?;
    }
    Ok(hasher.finish()?)
}

//! Groups that a simulated engine joins: one worker process a rank, on the GPU that the rank says it has, over the stand-in driver's NCCL.
//!
//! Decides nothing about endpoints (that is [`torch`]'s, [`sglang`]'s, [`lmdeploy`]'s and [`vllm`]'s business), only what joining, receiving
//! and leaving a group mean for one rank: a communicator that is made late or at once, a broadcast that waits as long as the engine's own
//! time-out says, a destroy that comes back when every other rank has left too, aborted, or died (measured: LMDeploy 0.18 on H200).

mod handles;
pub(super) mod lmdeploy;
mod member;
pub(super) mod sglang;
pub(super) mod torch;
pub(super) mod vllm;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;

pub(super) use member::Member;

use super::front::Front;
use super::memory::GpuMemory;
use super::tensors::Taken;
use weightsync_core::weights::Dtype;
use weightsync_gpu::worker::{Worker, WorkerStart};
use weightsync_torch::dtype_name;

/// As good as for ever, and can be added to a time.
const FOR_EVER: Duration = Duration::from_secs(31_536_000);
/// A worker process that does not start within this long will not.
const START: Duration = Duration::from_secs(60);

/// What the ranks of a simulated engine need to join groups.
#[derive(Debug, Clone)]
pub struct GroupOptions {
    /// The program whose `worker` command is a rank: `weightsync` itself.
    pub program: PathBuf,
    /// Added to its environment: where the stand-in driver is.
    pub environment: Vec<(OsString, OsString)>,
    /// NCCL's library, where it is not to be looked for.
    pub nccl: Option<PathBuf>,
    /// torch's `default_pg_timeout`: how long a store that cannot be reached is tried, and after how long in a broadcast torch's watchdog ends
    /// the engine's process. vLLM's own groups know no such time.
    pub patience: Duration,
    /// Version of torch (2.14 is `(2, 14)`). From 2.15 on `nccl` is nccl2, whose weight groups do nothing and say nothing; `nccl-legacy` is
    /// known from 2.14 on.
    pub torch: (u32, u32),
}

impl GroupOptions {
    /// As the engine is released: SGLang 0.5.23 has torch 2.14, LMDeploy 0.18 torch 2.12, vLLM its own NCCL.
    pub fn new(engine: &str, program: PathBuf) -> Self {
        let torch = if engine == "lmdeploy" { (2, 12) } else { (2, 14) };
        Self { program, environment: Vec::new(), nccl: None, patience: Duration::from_secs(1800), torch }
    }
}

/// Why a step of a group did not go to its end.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The engine continues and responds with this.
    Raised(String),
    /// The rank's process is gone, or torch's watchdog ended it, and the engine with it.
    Dead(String),
}

impl Trouble {
    /// What the engine would say.
    pub(super) fn text(&self) -> &str {
        match self {
            Self::Raised(text) | Self::Dead(text) => text,
        }
    }
}

/// The ranks of an engine. Their processes are started when they are first needed and live as long as the engine.
pub(super) struct Ranks {
    options: Option<GroupOptions>,
    gpus: Vec<String>,
    memory: GpuMemory,
    workers: Mutex<Vec<Option<Worker>>>,
    groups: std::sync::atomic::AtomicU64,
}

impl Ranks {
    pub(super) fn new(options: Option<GroupOptions>, gpus: Vec<String>, memory: GpuMemory) -> Arc<Self> {
        let workers = Mutex::new(vec![None; gpus.len()]);
        Arc::new(Self { options, gpus, memory, workers, groups: std::sync::atomic::AtomicU64::new(1) })
    }

    pub(super) fn count(&self) -> usize {
        self.gpus.len()
    }

    fn options(&self) -> Result<&GroupOptions, Trouble> {
        let none = || Trouble::Raised("CUDA error: no CUDA-capable device is detected".to_owned());
        self.options.as_ref().ok_or_else(none)
    }

    /// A number that no group of these ranks had before.
    fn number(&self) -> u64 {
        self.groups.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
    }

    async fn worker(&self, rank: usize) -> Result<Worker, Trouble> {
        let options = self.options()?;
        let mut workers = self.workers.lock().await;
        let none = || Trouble::Raised(format!("there is no rank {rank}"));
        let slot = workers.get_mut(rank).ok_or_else(none)?;
        if let Some(worker) = slot {
            return match worker.cause() {
                None => Ok(worker.clone()),
                Some(cause) => Err(Trouble::Dead(cause)),
            };
        }
        let label = format!("simulated rank {rank}");
        let (program, environment) = (options.program.clone(), options.environment.clone());
        let start = WorkerStart { environment, ..WorkerStart::new(program, &["worker"], label) };
        let raised = |error: weightsync_gpu::worker::WorkerError| Trouble::Raised(error.to_string());
        let worker = Worker::start(&start).map_err(raised)?;
        let gpu = self.gpus.get(rank).map(String::as_str);
        let (_, _, nccl) = worker.open(gpu, options.nccl.as_deref(), START).await.map_err(raised)?;
        nccl.map_err(Trouble::Raised)?;
        *slot = Some(worker.clone());
        Ok(worker)
    }
}

#[derive(Debug, Clone)]
pub(super) struct Announced {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: u64,
}

/// Three lists of a message, which Python zips: the shortest ends them. What torch does not know, it says when it looks it up.
pub(super) fn announced(body: &serde_json::Value, dtypes: &str) -> Result<Vec<Announced>, String> {
    let list = |name: &str| body.get(name).and_then(serde_json::Value::as_array).cloned().unwrap_or_default();
    let (names, dtypes, shapes) = (list("names"), list(dtypes), list("shapes"));
    let item = |((name, dtype), shape): ((serde_json::Value, serde_json::Value), serde_json::Value)| {
        let name = name.as_str().unwrap_or_default().to_owned();
        let dtype = dtype.as_str().unwrap_or_default();
        let known = Dtype::ALL.into_iter().find(|known| dtype_name(*known) == Some(dtype));
        let dtype = known.ok_or_else(|| format!("module 'torch' has no attribute '{dtype}'"))?;
        let shape: Option<Vec<u64>> = shape.as_array().and_then(|sizes| sizes.iter().map(serde_json::Value::as_u64).collect());
        let shape = shape.ok_or("empty(): argument 'size' must be tuple of ints")?;
        let bytes = dtype.tensor_bytes(&shape).map_err(|_| "numel: integer multiplication overflow".to_owned())?;
        Ok(Announced { name, dtype, shape, bytes })
    };
    names.into_iter().zip(dtypes).zip(shapes).map(item).collect()
}

/// What all ranks took of one tensor, as one: where a rank got other bytes than the first, that shows in what the engine serves.
pub(super) fn merged(ranks: Vec<Vec<Taken>>) -> Vec<Taken> {
    let mut ranks = ranks.into_iter();
    let mut first = ranks.next().unwrap_or_default();
    for other in ranks {
        for (mine, theirs) in first.iter_mut().zip(other) {
            if mine.digest != theirs.digest {
                mine.digest = mine.digest.rotate_left(1) ^ theirs.digest;
            }
        }
    }
    first
}

/// Runs what an engine goes on with also when its caller has hung up. It ends with the server, and a server that ended never answers.
pub(super) async fn detached<T: Send + 'static>(front: &Front, work: impl Future<Output = T> + Send + 'static) -> T {
    let crash = front.crash.clone();
    let running = tokio::spawn(async move {
        tokio::select! {
            biased;
            () = crash.cancelled() => None,
            done = work => Some(done),
        }
    });
    match running.await {
        Ok(Some(done)) => done,
        _ => std::future::pending().await,
    }
}

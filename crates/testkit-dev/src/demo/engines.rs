//! The engines of the demo: how each kind is started, and how a real one's checkpoints are made.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};

use super::{DemoArgs, DemoEngine};

/// Makes a random Qwen3 checkpoint with the environment's own torch; the script also serves the tests.
const MAKE_CHECKPOINT: &str = include_str!("../../../../tests/engine/make_checkpoint.py");

/// Importing torch on a busy machine takes most of it.
const MAKE_DEADLINE: Duration = Duration::from_secs(180);

/// Makes checkpoints for real servers, one for each seed, as `FOLDER/SEED`.
pub async fn make_checkpoints(venv: &Path, folder: &Path, seeds: &[u64]) -> anyhow::Result<()> {
    let python = venv.join("bin/python");
    let mut command = Command::new(&python);
    command.arg("-c").arg(MAKE_CHECKPOINT).arg(folder).arg("--seed").args(seeds.iter().map(u64::to_string));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let child = command.spawn().with_context(|| format!("{} cannot be started", python.display()))?;
    let done = tokio::time::timeout(MAKE_DEADLINE, child.wait_with_output()).await.context("making checkpoints took too long")??;
    if !done.status.success() {
        bail!("no checkpoint was made: {}", String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(())
}

/// A model directory of one FastDeploy server's own, whose snapshot it writes and its agent replaces.
pub fn make_snapshot(checkpoint: &Path, own: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(own).with_context(|| format!("{} cannot be made", own.display()))?;
    for (from, to) in [("model.safetensors", "model_state.tp0.0.pdparams"), ("config.json", "config.json")] {
        let from = checkpoint.join(from);
        std::fs::copy(&from, own.join(to)).with_context(|| format!("{} cannot be copied", from.display()))?;
    }
    Ok(())
}

/// Command and environment of one rollout's engine, on that GPU if it has one.
pub fn command(args: &DemoArgs, program: &Path, model: &Path, port: u16, gpu: Option<&String>) -> (Vec<String>, BTreeMap<String, String>) {
    let (model, port) = (model.to_string_lossy().into_owned(), port.to_string());
    if args.engine != DemoEngine::Vllm {
        let program = program.to_string_lossy().into_owned();
        // LMDeploy that is given no name serves under the path of its model.
        let name = if args.engine == DemoEngine::SimulatedLmdeploy { model.as_str() } else { "model" };
        let words = ["simulate-engine", "--engine", args.engine.kind(), "--port", &port, "--model", &model, "--served-model-name", name];
        let gpu = gpu.into_iter().flat_map(|gpu| ["--gpu".to_owned(), gpu.clone()]);
        return (std::iter::once(program).chain(words.map(str::to_owned)).chain(gpu).collect(), BTreeMap::new());
    }
    let vllm = venv(args).join("bin/vllm").to_string_lossy().into_owned();
    let words = ["serve", &model, "--served-model-name", "m", "--host", "127.0.0.1", "--port", &port];
    let limits = ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"];
    // One process less to start: the worker lives in the engine's own.
    let memory = ["--num-gpu-blocks-override", "128", "--enable-prefix-caching", "--distributed-executor-backend", "uni"];
    // What a CPU server needs (vLLM 0.32): development routes, `uni` allowed, no C++ compiled for the first log-probs, a small cache, no
    // threads pinned, nothing asked of the internet.
    let environment = [
        ("VLLM_SERVER_DEV_MODE", "1"),
        ("VLLM_TARGET_DEVICE", "cpu"),
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        ("TORCHDYNAMO_DISABLE", "1"),
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("OMP_NUM_THREADS", "1"),
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("DO_NOT_TRACK", "1"),
    ];
    let environment = environment.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    let backend = ["--weight-transfer-config", r#"{"backend": "weightsync"}"#];
    let backend = backend.into_iter().filter(|_| has_backend(venv(args)));
    let words = words.into_iter().chain(limits).chain(memory).chain(backend).map(str::to_owned);
    (std::iter::once(vllm).chain(words).collect(), environment)
}

/// Whether WeightSync's package is installed in vLLM's environment.
fn has_backend(venv: &Path) -> bool {
    let folders = |path: &Path| std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_ours = |path: PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with("weightsync-") && name.ends_with(".dist-info")
    };
    folders(&venv.join("lib")).any(|python| folders(&python.join("site-packages")).any(is_ours))
}

/// The virtual environment that `--python` names: its folder, or its interpreter.
pub fn venv(args: &DemoArgs) -> &Path {
    let given = args.python.as_deref().unwrap_or(Path::new("."));
    if given.is_dir() { given } else { given.parent().and_then(Path::parent).unwrap_or(given) }
}

/// A server that no update ever reached, to compare with; ended with its children when dropped.
pub struct Fresh {
    child: Child,
    log: PathBuf,
}

impl Fresh {
    /// Starts it; its output goes to `log`.
    pub fn start(command: &[String], environment: &BTreeMap<String, String>, log: PathBuf) -> anyhow::Result<Self> {
        let (program, words) = command.split_first().context("no command")?;
        let out = File::create(&log).with_context(|| format!("{} cannot be written", log.display()))?;
        let mut command = Command::new(program);
        command.args(words).envs(environment).stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let child = command.process_group(0).kill_on_drop(true).spawn().with_context(|| format!("{program} cannot be started"))?;
        Ok(Self { child, log })
    }

    /// An error when it ended.
    pub fn alive(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait()? {
            Some(status) => bail!("a fresh server ended ({status}): {}", self.log.display()),
            None => Ok(()),
        }
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        // Not reaped elsewhere, so the pid is still its own.
        if let Some(group) = self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

//! The engines of the demo: how each kind is started, and how a real one's checkpoints are made.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::process::Command;

use super::{DemoArgs, DemoEngine};

/// Makes a random Qwen3 checkpoint with the environment's own torch; the script also serves the tests.
const MAKE_CHECKPOINT: &str = include_str!("../../../tests/engine/make_checkpoint.py");

/// Importing torch on a busy machine takes most of it.
const MAKE_DEADLINE: Duration = Duration::from_secs(180);

/// Makes a checkpoint for a real server.
pub async fn make_checkpoint(venv: &Path, folder: &Path, seed: u64) -> anyhow::Result<()> {
    let python = venv.join("bin/python");
    let mut command = Command::new(&python);
    command.arg("-c").arg(MAKE_CHECKPOINT).arg(folder).args(["--seed", &seed.to_string()]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let child = command.spawn().with_context(|| format!("{} cannot be started", python.display()))?;
    let done = tokio::time::timeout(MAKE_DEADLINE, child.wait_with_output()).await.context("making a checkpoint took too long")??;
    if !done.status.success() {
        bail!("no checkpoint was made: {}", String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(())
}

/// Command and environment of one engine.
pub fn command(args: &DemoArgs, program: &Path, folder: &Path, port: u16) -> (Vec<String>, BTreeMap<String, String>) {
    let (model, port) = (folder.join("v0").to_string_lossy().into_owned(), port.to_string());
    if args.engine != DemoEngine::Vllm {
        let kind = if args.engine == DemoEngine::SimulatedSglang { "sglang" } else { "vllm" };
        let program = program.to_string_lossy().into_owned();
        let words = ["simulate-engine", "--engine", kind, "--port", &port, "--model", &model];
        return (std::iter::once(program).chain(words.map(str::to_owned)).collect(), BTreeMap::new());
    }
    let venv = args.python.as_deref().unwrap_or(Path::new("."));
    let vllm = venv.join("bin/vllm").to_string_lossy().into_owned();
    let words =
        ["serve", &model, "--served-model-name", "m", "--host", "127.0.0.1", "--port", &port, "--dtype", "bfloat16", "--enforce-eager"];
    let limits = ["--max-model-len", "512", "--max-num-seqs", "4", "--enable-prefix-caching"];
    // What a CPU server needs (vLLM 0.32): development routes, a small cache, no threads pinned, nothing asked of the internet.
    let environment = [
        ("VLLM_SERVER_DEV_MODE", "1"),
        ("VLLM_TARGET_DEVICE", "cpu"),
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("OMP_NUM_THREADS", "1"),
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("DO_NOT_TRACK", "1"),
    ];
    let environment = environment.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    (std::iter::once(vllm).chain(words.into_iter().chain(limits).map(str::to_owned)).collect(), environment)
}

//! One rank of an engine's weight group: a Python process that runs the engine's own code. `tests/gpu/engine_ranks.py`.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::Settings;

/// Imports of torch and of an engine's files.
const START: Duration = Duration::from_secs(120);

/// Where a rank stands in its engine.
pub struct LocalRank<'a> {
    /// As `engine_ranks.py` calls it.
    pub engine: &'a str,
    /// None: on the processor, over gloo.
    pub gpu: Option<usize>,
    pub rank: usize,
    pub size: usize,
    /// A file of this engine by which its ranks meet; made by them.
    pub meet: &'a Path,
}

/// A process; killed when it is dropped.
pub struct Rank {
    name: String,
    _child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

/// What it says of one request.
#[derive(Debug, Deserialize)]
pub struct Answer {
    ok: bool,
    pub message: String,
    #[serde(default)]
    pub seconds: f64,
    /// Bytes that were received and compared, and how many of them are wrong.
    #[serde(default)]
    pub bytes: u64,
    #[serde(default)]
    pub wrong: u64,
}

impl Rank {
    /// Starts one; it is ready with [`ready`](Self::ready).
    pub fn start(settings: &Settings, local: &LocalRank) -> Result<Self> {
        let gpu = local.gpu.map_or_else(|| "-1".to_owned(), |gpu| gpu.to_string());
        let mut command = Command::new(&settings.python);
        command.arg(&settings.engine_ranks).arg(local.engine).arg(format!("--gpu={gpu}"));
        command.args(["--tp-rank", &local.rank.to_string(), "--tp-size", &local.size.to_string()]);
        command.arg("--meet").arg(local.meet).arg("--code").arg(settings.engine_code.as_deref().unwrap_or(Path::new(".")));
        // SGLang's server sets these for its workers (`srt/entrypoints/engine.py`); the others leave NCCL its own choice.
        let sglangs = ["NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"].into_iter().filter(|_| local.engine == "sglang");
        for name in sglangs.filter(|name| std::env::var_os(name).is_none()) {
            command.env(name, "0");
        }
        command.env("PYTHONDONTWRITEBYTECODE", "1").stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().context("python cannot be started")?;
        let (input, output) = (child.stdin.take().context("no input")?, child.stdout.take().context("no output")?);
        let name = format!("{} rank {}", local.engine, local.rank);
        Ok(Self { name, _child: child, input, output: BufReader::new(output).lines() })
    }

    /// Waits until it has its engine's code; gives what it says of itself.
    pub async fn ready(&mut self) -> Result<String> {
        Ok(self.answer("start", START).await?.message)
    }

    /// Asks for one thing. A refusal is an error, and so is no answer in time.
    pub async fn ask(&mut self, what: &str, mut ask: Value, within: Duration) -> Result<Answer> {
        ask["do"] = what.into();
        self.input.write_all(format!("{ask}\n").as_bytes()).await.with_context(|| self.name.clone())?;
        self.answer(what, within).await
    }

    async fn answer(&mut self, what: &str, within: Duration) -> Result<Answer> {
        let line = timeout(within, self.output.next_line()).await;
        let line = line.with_context(|| format!("{}: no answer to {what} within {within:?}", self.name))??;
        let answer: Answer = serde_json::from_str(&line.with_context(|| format!("{} ended at {what}", self.name))?)?;
        if !answer.ok {
            bail!("{} refuses {what}: {}", self.name, answer.message);
        }
        Ok(answer)
    }
}

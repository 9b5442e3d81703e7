//! `weightsync-dev demo`: the whole product on one host, with a rollout killed in the middle of an update.
//!
//! Makes checkpoints, starts a source and rollouts as processes, publishes versions, kills one rollout while it holds between 20 and 80 %
//! of an update's bytes, and lets it come back. It trusts no report: it reads what each engine serves and compares that with what was
//! published (real servers: their completions with each other's and with a fresh server's). Exits 0 only if all agree.

mod engines;
mod gpus;
mod kill;
mod model;
mod show;
mod space;
mod story;
mod verify;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use clap::{Args, ValueEnum};

use self::space::{Free, Need};
use weightsync_agent::command::Output;
use weightsync_net::logs::{self, LogFormat};

#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Number of rollouts. Default: 3, or 2 real vLLM servers (0.9 GB of memory each).
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..=16))]
    replicas: Option<u32>,
    /// Size of the model in MiB; the real vLLM uses its own small model.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(8..=8192))]
    megabytes: u32,
    /// Seed of the weights, the killed rollout and the moment of the kill; the same seed repeats a run.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Flip one byte of what one engine loads: the demo must detect it and fail.
    #[arg(long)]
    corrupt: bool,
    /// What happens to the rollout in the middle of an update.
    #[arg(long, value_enum, default_value_t)]
    fault: DemoFault,
    /// Which engines serve: simulators that come with this program, or real vLLM servers.
    #[arg(long, value_enum, default_value_t)]
    engine: DemoEngine,
    /// Virtual environment with vLLM (its folder, or its bin/python), for `--engine vllm`.
    #[arg(long, value_name = "VENV", required_if_eq("engine", "vllm"))]
    python: Option<PathBuf>,
    /// How bytes travel between members without GPUs.
    #[arg(long, value_enum, default_value_t, conflicts_with = "gpu")]
    transport: DemoTransport,
    /// Move the bytes between N GPUs with NCCL (all GPUs when N is not given): the source on the first, a replica on each other one.
    /// WEIGHTSYNC_NCCL names NCCL's library if the right one is not found.
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "0", conflicts_with = "replicas", value_parser = clap::value_parser!(u32).range(0..=17))]
    gpu: Option<u32>,
    /// Serve the web page on 127.0.0.1 at this port (without a port: a free one), and keep the group at the end until Ctrl-C.
    #[arg(long, value_name = "PORT", num_args = 0..=1, default_missing_value = "0")]
    ui: Option<u16>,
    /// Keep the folder with checkpoints and logs.
    #[arg(long)]
    keep: bool,
    /// Output format of the outcome.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
    /// Log filter, e.g. `weightsync=debug`; logs go to standard error.
    #[arg(long, env = "WEIGHTSYNC_LOG", default_value = "error")]
    log: String,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum DemoEngine {
    /// Simulators that keep vLLM's rules and compute what they serve from the bytes they load.
    #[default]
    Simulated,
    /// Simulators that keep SGLang's rules.
    SimulatedSglang,
    /// Simulators that keep LMDeploy's rules. They take weights from GPU memory alone: `--gpu`, on the stand-in driver.
    SimulatedLmdeploy,
    /// Simulators that keep FastDeploy's rules.
    SimulatedFastdeploy,
    /// Real vLLM servers on CPU.
    Vllm,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum DemoTransport {
    /// A chain of connections.
    #[default]
    Tcp,
    /// Reads through NIXL, over TCP where this host has no RDMA device. WEIGHTSYNC_NIXL names NIXL's library if it is not found.
    Gdr,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum DemoFault {
    /// Its processes are killed (SIGKILL): every connection closes.
    #[default]
    Kill,
    /// Its processes are frozen (SIGSTOP): every connection stays, and no message is sent any more.
    Freeze,
}

impl DemoEngine {
    fn kind(self) -> &'static str {
        match self {
            Self::Simulated | Self::Vllm => "vllm",
            Self::SimulatedSglang => "sglang",
            Self::SimulatedLmdeploy => "lmdeploy",
            Self::SimulatedFastdeploy => "fastdeploy",
        }
    }

    /// What the demo starts, for someone who reads it for the first time.
    fn described(self) -> &'static str {
        match self {
            Self::Simulated => "simulated vLLM servers on this host",
            Self::SimulatedSglang => "simulated SGLang servers on this host",
            Self::SimulatedLmdeploy => "simulated LMDeploy servers on this host",
            Self::SimulatedFastdeploy => "simulated FastDeploy servers on this host",
            Self::Vllm => "real vLLM servers on this host",
        }
    }
}

impl DemoFault {
    fn done(self) -> &'static str {
        match self {
            Self::Kill => "killed (SIGKILL)",
            Self::Freeze => "frozen (SIGSTOP)",
        }
    }
}

impl DemoArgs {
    fn rollouts(&self) -> u32 {
        self.replicas.unwrap_or(if self.engine == DemoEngine::Vllm { 2 } else { 3 })
    }

    pub fn run(self) -> anyhow::Result<ExitCode> {
        if self.corrupt && self.engine == DemoEngine::Vllm {
            bail!("--corrupt needs simulated engines: a real vLLM loads what it is given");
        }
        if self.gpu.is_some() && self.engine == DemoEngine::Vllm {
            bail!("--gpu needs simulated engines: the demo starts vLLM on processors");
        }
        if self.engine == DemoEngine::SimulatedLmdeploy && (self.gpu.is_none() || std::env::var_os("FAKEGPU_DIR").is_none()) {
            bail!("simulated LMDeploy servers read weights in the memory of the stand-in GPU driver: set FAKEGPU_DIR, and give --gpu");
        }
        let need = Need { replicas: self.rollouts(), megabytes: self.megabytes, real: self.engine == DemoEngine::Vllm };
        if let Some(lack) = space::lack(need, Free::read()) {
            bail!("{lack}");
        }
        logs::init(LogFormat::Human, &self.log)?;
        weightsync_agent::command::block_on(story::tell(self))
    }
}

//! `weightsync doctor`: what this machine has for moving weights, what each transport would use, and why a better one is not used.
//!
//! A worker process checks GPUs, driver and NCCL, so a driver that hangs or crashes is one more finding. The command changes nothing, makes
//! no context on any GPU, and works on a machine without any of these. It exits with 0 whenever it could make a report, unless a transport
//! is required.

mod advice;
mod facts;
mod found;
mod gdr;
mod host;
mod peer;
mod show;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};

use self::facts::{Facts, Report};
use self::found::{Found, Gpus};
use self::host::Host;
use super::Output;
use weightsync_agent::surroundings::Surroundings;
use weightsync_core::plan::{Neighbour, sharing};
use weightsync_core::protocol::worker::{FabricFacts, UcxSettings, WorkerAnswer};
use weightsync_gpu::worker::{Worker, WorkerError, WorkerStart};

/// A transport that is better than TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Required {
    Nccl,
    Gdr,
}

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// NCCL's library (libnccl.so.2). Default: searched in environment, Python packages and system.
    #[arg(long, value_name = "FILE", env = "WEIGHTSYNC_NCCL")]
    nccl: Option<PathBuf>,
    /// File of NIXL's C interface (libnixl_capi.so). Default: searched in Python packages and system.
    #[arg(long, value_name = "FILE", env = "WEIGHTSYNC_NIXL")]
    nixl: Option<PathBuf>,
    /// Exit with 1 if this transport cannot be used here.
    #[arg(long, value_enum)]
    require: Option<Required>,
    /// Port of the engine in the same pod: checks whether its GPU memory can be shared.
    #[arg(long, value_name = "PORT")]
    engine_port: Option<u16>,
    /// Longest wait for the driver, in seconds. Right after it was loaded, it needs several seconds for eight GPUs.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=600))]
    timeout: u64,
    /// Measure the path to another host instead, where `weightsync doctor --listen` runs: HOST:PORT.
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["nccl", "engine_port"])]
    peer: Option<String>,
    /// Listen on this port (0: a free one) for `weightsync doctor --peer` until interrupted. Every client may send bytes, which are checked
    /// and not kept.
    #[arg(long, value_name = "PORT", conflicts_with_all = ["nccl", "engine_port", "peer"])]
    listen: Option<u16>,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl DoctorArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        if let Some(port) = self.listen {
            return super::block_on(peer::listen(port));
        }
        if let Some(address) = &self.peer {
            return super::block_on(peer::ask(address, self.output));
        }
        let (gpus, nixl) = super::block_on(async {
            let within = Duration::from_secs(self.timeout);
            Ok(tokio::join!(ask_worker(self.nccl.as_deref(), within), open_nixl(self.nixl.as_deref(), within)))
        })?;
        let around = Surroundings::of_this_process();
        let engine = self.engine_port.map_or(Neighbour::Unknown, |port| around.listener(port));
        let found = gpus.driver.get().map(|_| gpus.gpus.clone()).map_err(str::to_owned);
        let shared = sharing(&around.facts(found, engine)).gpus;
        let root = Path::new("/");
        let report = Report::new(Facts { gpus, nixl, host: Host::read(root), shared }, root);
        match self.output {
            Output::Human => print!("{}", show::render(&report)),
            Output::Json => println!("{}", serde_json::to_string(&report).context("the report has no JSON")?),
        }
        let met = match self.require {
            None => true,
            Some(Required::Nccl) => report.usable("nccl"),
            Some(Required::Gdr) => report.usable("gdr"),
        };
        Ok(if met { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// The worker's findings, or how it failed.
async fn ask_worker(nccl: Option<&Path>, within: Duration) -> Gpus {
    let asked = async {
        let worker = Worker::start(&WorkerStart::own("doctor")?)?;
        worker.devices(nccl, within).await
    };
    match asked.await {
        Ok(WorkerAnswer::Devices { gpus, links, nccl }) => Gpus { driver: Found::driver_of(&gpus), gpus, links, nccl: nccl.into() },
        Ok(_) => Gpus::nothing(&"the worker answered with something else"),
        // Only the cause, without the context that this program added.
        Err(WorkerError::Fault { fault, .. }) => Gpus::nothing(&fault),
        Err(error) => Gpus::nothing(&error),
    }
}

/// NIXL with its backend UCX, opened in a separate worker. Over TCP, so that no device is touched and the limit of locked memory has no
/// effect.
async fn open_nixl(library: Option<&Path>, within: Duration) -> Found<FabricFacts> {
    let ucx = UcxSettings { tls: vec!["tcp".to_owned(), "self".to_owned()], devices: Vec::new() };
    let asked = async {
        let worker = Worker::start(&WorkerStart::own("doctor")?.with_ucx(&ucx)?)?;
        worker.open_fabric(library, "doctor", &ucx, within).await
    };
    match asked.await {
        Ok(facts) => Found::Found(facts),
        Err(WorkerError::Fault { fault, .. }) => Found::Missing(fault.to_string()),
        Err(error) => Found::Missing(error.to_string()),
    }
}

//! `weightsync worker`: the child process that has one GPU. Started by the agent, with one end of a socket pair as its standard input;
//! hidden, because no one else has anything to say to it.

use std::os::fd::AsFd;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;

/// Arguments of `weightsync worker`.
#[derive(Debug, Args)]
pub struct WorkerArgs {}

impl WorkerArgs {
    /// Serves until the agent's end of the socket closes.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let Self {} = self;
        let socket = std::io::stdin().as_fd().try_clone_to_owned().context("standard input cannot be used")?;
        if rustix::net::sockopt::socket_domain(&socket).ok() != Some(rustix::net::AddressFamily::UNIX) {
            bail!("a worker is started by an agent, which gives it a socket as standard input");
        }
        weightsync_gpu::worker::serve(socket).context("the worker cannot start")?;
        Ok(ExitCode::SUCCESS)
    }
}

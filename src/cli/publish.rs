//! `weightsync publish`: publishes a safetensors checkpoint as a version, through the same socket as a training process.
//!
//! Reads the files itself and hands the bytes over in shared memory, so the agent needs no volume with them; with `--on-agent` the agent
//! reads them. Decides the output and the exit code of an outcome; it never decides about versions.

mod lines;
mod show;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};

use super::Output;
use show::Progress;
use weightsync_agent::client::trainer::{TrainerClient, TrainerError};
use weightsync_agent::client::{SocketError, SocketName};
use weightsync_core::protocol::{Activation, ClientRequest, PublishError, PublishErrorCode, PublishResult, QueuePolicy, Version};
use weightsync_core::weights::safetensors::Checkpoint;

/// Exit code when the same command may succeed later (`EX_TEMPFAIL` of sysexits.h).
const RETRYABLE: u8 = 75;

#[derive(Debug, Args)]
#[command(disable_version_flag = true)]
pub struct PublishArgs {
    /// Directory with model.safetensors, or shards and their index; or one safetensors file.
    checkpoint: PathBuf,
    /// Number of the version; higher than all published before.
    #[arg(long = "version", value_name = "N")]
    number: Version,
    /// The agent's socket (`@weightsync/POD_UID`). Default: that of the only agent that listens here.
    #[arg(long, env = "WEIGHTSYNC_SOCKET")]
    socket: Option<SocketName>,
    /// Checkpoint of the draft model for speculative decoding; both are one version.
    #[arg(long, value_name = "DIR", conflicts_with = "on_agent")]
    draft: Option<PathBuf>,
    /// Let the agent read the checkpoint; it must see the same path.
    #[arg(long)]
    on_agent: bool,
    /// What to do while another publish runs.
    #[arg(long, value_enum, default_value_t = Queue::Wait)]
    queue: Queue,
    /// Longest time of the publish, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=604_800))]
    timeout: u64,
    /// Output format of the result.
    #[arg(long, short, value_enum, default_value_t)]
    output: Output,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Queue {
    /// Wait in the queue.
    Wait,
    /// Replace waiting publishes; the running one ends first.
    Latest,
}

impl PublishArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let progress = match self.output {
            Output::Human => Progress::visible(self.number),
            Output::Json => Progress::hidden(),
        };
        let outcome = self.publish(&progress);
        progress.clear();
        match self.output {
            Output::Human => match &outcome {
                Ok(result) => print!("{}", show::result(result)),
                Err(error) => eprintln!("error: {}", show::error(&failure(error))),
            },
            Output::Json => {
                let object = match &outcome {
                    Ok(result) => serde_json::to_string(result),
                    Err(error) => serde_json::to_string(&serde_json::json!({ "error": failure(error) })),
                };
                println!("{}", object.context("the outcome cannot be written as JSON")?);
            }
        }
        Ok(match outcome {
            Ok(_) => ExitCode::SUCCESS,
            Err(error) if failure(&error).retryable => ExitCode::from(RETRYABLE),
            Err(_) => ExitCode::FAILURE,
        })
    }

    fn publish(&self, progress: &Progress) -> Result<PublishResult, TrainerError> {
        let version = self.number;
        let activation = Activation::Auto;
        let timeout_ms = Duration::from_secs(self.timeout).as_millis().try_into().unwrap_or(u64::MAX);
        let queue = match self.queue {
            Queue::Wait => QueuePolicy::Wait,
            Queue::Latest => QueuePolicy::Latest,
        };
        let mut seen = |reply: &_| progress.heard(reply);
        if self.on_agent {
            let path = std::path::absolute(&self.checkpoint).unwrap_or_else(|_| self.checkpoint.clone()).display().to_string();
            let request = ClientRequest::PublishCheckpoint { version, path, queue, activation, timeout_ms };
            return self.connect()?.publish(
                &request,
                &mut |_, _, _| Err("the agent requested bytes that it should read itself".into()),
                &mut seen,
            );
        }
        // Read before the agent is contacted: a bad checkpoint is the likelier mistake.
        let open = |path: &PathBuf| Checkpoint::open(path).map_err(|error| TrainerError::Source(error.into()));
        let mut checkpoint = open(&self.checkpoint)?;
        if let Some(draft) = &self.draft {
            checkpoint = checkpoint.with_draft(open(draft)?);
        }
        let request =
            ClientRequest::Publish { version, tensors: checkpoint.specs(), queue, activation, repeatable: true, timeout_ms, gpu: None };
        let mut fill = |layout: &weightsync_core::weights::Layout, bucket: weightsync_core::weights::Bucket, into: &mut [u8]| {
            checkpoint.read_stream(layout, bucket.offset, into)?;
            if bucket.offset + bucket.bytes == layout.total_bytes {
                checkpoint.check_unchanged()?;
            }
            Ok(())
        };
        self.connect()?.publish(&request, &mut fill, &mut seen)
    }

    fn connect(&self) -> Result<TrainerClient, TrainerError> {
        let socket = if let Some(socket) = &self.socket {
            socket.clone()
        } else {
            let table = std::fs::read_to_string("/proc/net/unix").map_err(|_| SocketError::NoAgent)?;
            SocketName::discover(&table)?
        };
        TrainerClient::connect(&socket, concat!("weightsync publish ", env!("CARGO_PKG_VERSION")))
    }
}

/// Converts every failure into one of the protocol.
fn failure(error: &TrainerError) -> PublishError {
    let (code, retryable) = match error {
        TrainerError::Failed(error) => return error.clone(),
        TrainerError::Socket(SocketError::NoAgent) | TrainerError::AgentLost { .. } => (PublishErrorCode::AgentLost, true),
        TrainerError::Socket(_) => (PublishErrorCode::AgentLost, false),
        TrainerError::Nonsense(_) => (PublishErrorCode::Internal, false),
        TrainerError::Source(_) => (PublishErrorCode::BadCheckpoint, false),
    };
    PublishError { code, message: error.to_string(), retryable, phase: None, member: None }
}

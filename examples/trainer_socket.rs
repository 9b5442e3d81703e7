//! A source agent with the trainer's socket and nothing behind it: takes publishes, checks nothing but bytes, prints one JSON object for
//! each. The Python client's tests run against it, so that both sides of the protocol are the real ones; it is no agent to run anywhere.
//!
//! `--write DIR` writes each version as `DIR/VERSION.safetensors`. The other options let things go wrong on purpose, once each.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use tokio_util::sync::CancellationToken;
use weightsync::agent::client::{ClientServer, ClientServerConfig, PublishQueue, SocketName};
use weightsync::agent::publish_job::PublishJob;
use weightsync::protocol::{Activation, MemberName, PublishError, PublishErrorCode, PublishResult, RosterReplica, RosterView, UpdatePhase};
use weightsync::weights::{Layout, bucket_digest, digest_hex};

#[derive(Parser)]
struct Args {
    /// Where to listen.
    #[arg(long)]
    socket: SocketName,
    /// Bytes of a bucket; 0 chooses by size.
    #[arg(long, default_value_t = 0)]
    bucket_bytes: u64,
    /// Slots of the ring.
    #[arg(long, default_value_t = 4)]
    slots: u32,
    /// Writes versions here.
    #[arg(long)]
    write: Option<PathBuf>,
    /// Asks for the stream again after this many buckets of the first attempt.
    #[arg(long)]
    again_after: Option<usize>,
    /// Dies without a word after this many buckets.
    #[arg(long)]
    die_after: Option<usize>,
    /// Fails with this code after all bytes.
    #[arg(long, value_parser = |word: &str| serde_json::from_value::<PublishErrorCode>(word.into()))]
    fail: Option<PublishErrorCode>,
    /// Takes nothing more, for ever, after this many buckets.
    #[arg(long)]
    stall_after: Option<usize>,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let queue = Arc::new(PublishQueue::default());
    let (roster, seen) = tokio::sync::watch::channel(view(None));
    let config = ClientServerConfig { slots: args.slots, bucket_bytes: args.bucket_bytes, ..ClientServerConfig::at(args.socket.clone()) };
    let server = ClientServer::bind(config, Arc::clone(&queue), seen)?;
    tokio::spawn(server.run(CancellationToken::new()));
    println!(r#"{{"listening":true}}"#);
    let mut highest = None;
    loop {
        let job = queue.take().await;
        let version = job.version;
        if highest.is_some_and(|highest| version <= highest) {
            let message = format!("version {version} is not higher than {}", highest.unwrap_or_default());
            job.reporter.failed(error(PublishErrorCode::VersionNotHigher, message));
        } else if take(job, &args).await? {
            highest = Some(version);
            roster.send_replace(view(highest));
        }
    }
}

/// Takes one version; tells whether it went well.
async fn take(mut job: PublishJob, args: &Args) -> anyhow::Result<bool> {
    let layout = job.source.layout().clone();
    let (mut stream, mut buckets, mut attempts) = (Vec::new(), 0, 1);
    loop {
        let next = tokio::select! {
            next = job.source.next(Duration::from_secs(30)) => next,
            () = job.cancel.cancelled() => Err(weightsync::agent::version_source::SourceError::Cancelled { reason: "by its trainer".into() }),
        };
        match next {
            Ok(Some((_, bytes))) => stream.extend_from_slice(&bytes),
            Ok(None) => break,
            Err(error) => {
                println!("{}", serde_json::json!({ "version": job.version, "failed": error.to_string() }));
                job.reporter.failed(error.publish_error(None));
                return Ok(false);
            }
        }
        buckets += 1;
        job.reporter.progress(UpdatePhase::Transfer, stream.len() as u64);
        if args.die_after == Some(buckets) {
            std::process::exit(9);
        }
        if args.stall_after == Some(buckets) {
            job.cancel.cancelled().await;
        }
        if args.again_after == Some(buckets) {
            job.source.restart("a replica died").await?;
            stream.clear();
            attempts += 1;
        }
    }
    job.source.released().await;
    if let Some(code) = args.fail {
        job.reporter.failed(error(code, "as asked".into()));
        return Ok(false);
    }
    if job.activation == Activation::Manual
        && let Err(why) = job.reporter.staged(job.deadline).await
    {
        println!("{}", serde_json::json!({ "version": job.version, "failed": why.to_string() }));
        job.reporter.failed(error(PublishErrorCode::Timeout, why.to_string()));
        return Ok(false);
    }
    if let Some(directory) = &args.write {
        std::fs::write(directory.join(format!("{}.safetensors", job.version)), safetensors(&layout, &stream)?)?;
    }
    let digests: serde_json::Map<_, _> = layout
        .entries
        .iter()
        .map(|entry| Ok((entry.tensor.name.clone(), digest_hex(bucket_digest(bytes_of(&stream, entry.offset, entry.bytes)?)).into())))
        .collect::<anyhow::Result<_>>()?;
    println!("{}", serde_json::json!({ "version": job.version, "attempts": attempts, "buckets": buckets, "digests": digests }));
    job.reporter.done(PublishResult {
        version: job.version,
        epoch: 1,
        attempts,
        bytes: layout.total_bytes,
        manifest: layout.digest(),
        installed: vec![MemberName("actors/a".into())],
        behind: vec![(MemberName("actors/b".into()), "engine does not answer".into())],
        phases_ms: vec![("transfer".into(), 1)],
    });
    Ok(true)
}

fn bytes_of(stream: &[u8], offset: u64, bytes: u64) -> anyhow::Result<&[u8]> {
    let start = usize::try_from(offset)?;
    stream.get(start..start + usize::try_from(bytes)?).context("the stream is shorter than its layout")
}

/// A safetensors file of the whole version.
fn safetensors(layout: &Layout, stream: &[u8]) -> anyhow::Result<Vec<u8>> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for entry in &layout.entries {
        let start = data.len();
        data.extend_from_slice(bytes_of(stream, entry.offset, entry.bytes)?);
        let tensor = serde_json::json!({ "dtype": entry.tensor.dtype, "shape": entry.tensor.shape, "data_offsets": [start, data.len()] });
        header.insert(entry.tensor.name.clone(), tensor);
    }
    let header = serde_json::to_vec(&header)?;
    Ok([&(header.len() as u64).to_le_bytes()[..], &header, &data].concat())
}

fn view(version: Option<u64>) -> RosterView {
    let replica = |name: &str, state: &str, version, rank_offset| RosterReplica {
        name: MemberName(name.into()),
        url: Some(format!("http://{name}:8000")),
        state: state.into(),
        version,
        rank_offset,
        size: 1,
    };
    let replicas = vec![replica("actors/a", "ready", version, 1), replica("actors/b", "out", None, 2)];
    RosterView { epoch: Some(1), version, replicas }
}

fn error(code: PublishErrorCode, message: String) -> PublishError {
    PublishError { code, message, retryable: false, phase: None, member: None }
}

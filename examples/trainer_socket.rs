//! A source agent with the trainer's socket and nothing behind it: takes publishes, checks nothing but bytes, prints one JSON object for
//! each. The Python client's tests run against it, so that both sides of the protocol are the real ones; it is no agent to run anywhere.
//!
//! `--write DIR` writes each version as `DIR/VERSION.safetensors`. The other options let things go wrong on purpose, once each.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use clap::Parser;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use weightsync::agent::client::memfd::SharedMemory;
use weightsync::agent::client::{ClientServer, ClientServerConfig, PublishQueue, SocketName, SourceWorker};
use weightsync::agent::publish_job::PublishJob;
use weightsync::plan::RingWish;
use weightsync::protocol::{Activation, MemberName, PublishError, PublishErrorCode, PublishResult, RosterReplica, RosterView, UpdatePhase};
use weightsync::transport::Payload;
use weightsync::weights::{Layout, bucket_digest, digest_hex};
use weightsync::worker::{Copy, Worker, WorkerStart};

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
    /// Has a GPU worker on this GPU, and sends from there.
    #[arg(long, requires = "worker")]
    gpu: Option<String>,
    /// The program whose `worker` it starts.
    #[arg(long)]
    worker: Option<PathBuf>,
    /// Kills the worker after this many buckets of the first attempt, starts another, and asks for the stream again.
    #[arg(long, requires = "gpu")]
    kill_worker_after: Option<usize>,
}

/// A step of a worker that takes longer hangs.
const STEP: Duration = Duration::from_secs(20);

/// The GPU worker, and who is told of it.
struct Gpu {
    uuid: String,
    program: PathBuf,
    source: watch::Sender<Result<SourceWorker, String>>,
}

impl Gpu {
    /// Starts a worker.
    async fn start(&self) -> anyhow::Result<()> {
        let arguments = vec!["worker".into()];
        let start = WorkerStart { program: self.program.clone(), arguments, environment: Vec::new(), label: self.uuid.clone() };
        let worker = Worker::start(&start)?;
        let (_, facts, _) = worker.open(Some(&self.uuid), None, STEP).await?;
        let room = (facts.free_bytes, facts.memory_bytes);
        let wish = RingWish { slots: Some(2), slot_bytes: None };
        self.source.send_replace(Ok(SourceWorker { worker, gpu: facts.uuid, wish, room }));
        Ok(())
    }

    fn kill(&self) {
        if let Ok(source) = self.source.borrow().as_ref() {
            source.worker.kill("a test");
        }
    }
}

/// The bytes of a bucket, wherever they lie.
async fn bytes_of_payload(payload: Payload) -> anyhow::Result<Bytes> {
    let device = match payload {
        Payload::Host(bytes) => return Ok(bytes),
        Payload::Device(device) => device,
    };
    let length = usize::try_from(device.bytes)?;
    let memory = SharedMemory::create("trainer-socket", length)?;
    let host = device.worker.map_host(memory.fd(), device.bytes, STEP).await?;
    let (from, to) = (device.memory.at(device.offset), host.at(0));
    device.worker.copy(Copy { from, to, bytes: device.bytes, after: device.after.clone(), then: None }, STEP).await?;
    Ok(Bytes::copy_from_slice(memory.bytes(0..length).context("the mapping is too short")?))
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let queue = Arc::new(PublishQueue::default());
    let (roster, seen) = watch::channel(view(None));
    let (source, seen_gpu) = watch::channel(Err("this agent has no GPU worker".to_owned()));
    let program = args.worker.clone().unwrap_or_default();
    let gpu = args.gpu.clone().map(|uuid| Gpu { uuid, program, source });
    if let Some(gpu) = &gpu {
        gpu.start().await?;
    }
    let at = ClientServerConfig::at(args.socket.clone());
    let config = ClientServerConfig { slots: args.slots, bucket_bytes: args.bucket_bytes, gpu: seen_gpu, ..at };
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
        } else if take(job, &args, gpu.as_ref()).await? {
            highest = Some(version);
            roster.send_replace(view(highest));
        }
    }
}

/// Takes one version; tells whether it went well.
async fn take(mut job: PublishJob, args: &Args, gpu: Option<&Gpu>) -> anyhow::Result<bool> {
    let layout = job.source.layout().clone();
    let (mut stream, mut buckets, mut attempts) = (Vec::new(), 0, 1);
    let (mut on_gpu, mut behind_events) = (0, 0);
    loop {
        let next = tokio::select! {
            next = job.source.next(Duration::from_secs(30)) => next,
            () = job.cancel.cancelled() => Err(weightsync::agent::version_source::SourceError::Cancelled { reason: "by its trainer".into() }),
        };
        match next {
            Ok(Some((_, payload))) => {
                if let Payload::Device(payload) = &payload {
                    on_gpu += 1;
                    behind_events += usize::from(payload.after.is_some());
                }
                stream.extend_from_slice(&bytes_of_payload(payload).await?);
            }
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
        if let Some(gpu) = gpu.filter(|_| attempts == 1 && args.kill_worker_after == Some(buckets)) {
            gpu.kill();
            gpu.start().await?;
            job.source.restart("the GPU worker died").await?;
            stream.clear();
            attempts += 1;
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
    println!(
        "{}",
        serde_json::json!({ "version": job.version, "attempts": attempts, "buckets": buckets, "digests": digests, "onGpu": on_gpu, "behindEvents": behind_events })
    );
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

//! A source agent with the trainer's socket and nothing else but, on request, a GPU worker or two: takes publishes, checks only the bytes,
//! and prints one JSON object for each. The Python client's tests run against it, so that both sides of the protocol are the real ones; it
//! is no agent for real use.
//!
//! `--write DIR` writes each version as `DIR/VERSION.safetensors`. The other options inject faults, once each.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use clap::Parser;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use weightsync_agent::client::memfd::SharedMemory;
use weightsync_agent::client::{ClientServer, ClientServerConfig, PublishQueue, SocketName, SourceWorker};
use weightsync_agent::publish_job::PublishJob;
use weightsync_core::plan::RingWish;
use weightsync_core::protocol::worker::{GpuFacts, Part};
use weightsync_core::protocol::{
    Activation, MemberName, PublishError, PublishErrorCode, PublishResult, RosterReplica, RosterView, UpdatePhase,
};
use weightsync_core::weights::{Layout, bucket_digest, digest_hex};
use weightsync_gpu::worker::{Broadcast, Copy, Ring, Worker, WorkerStart};
use weightsync_transport::{DeviceMemory, DevicePayload, Payload};

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
    /// Has a second worker on this GPU, and brings each bucket there by NCCL before it reads it.
    #[arg(long, requires = "gpu")]
    receiver: Option<String>,
    /// Reads no byte on the host: digests on both GPUs are compared, and that is all.
    #[arg(long, requires = "receiver", conflicts_with = "write")]
    discard: bool,
    /// Kills the worker after this many buckets of the first attempt, starts another, and asks for the stream again.
    #[arg(long, requires = "gpu")]
    kill_worker_after: Option<usize>,
}

/// A step of a worker that takes longer hangs.
const STEP: Duration = Duration::from_secs(20);

/// The GPU worker, and who hears of it.
struct Gpu {
    uuid: String,
    program: PathBuf,
    slot_bytes: Option<u64>,
    source: watch::Sender<Result<SourceWorker, String>>,
    receiver: Option<(String, tokio::sync::Mutex<Option<Receiver>>)>,
}

/// The worker on another GPU, joined with the source's.
struct Receiver {
    source: Worker,
    worker: Worker,
    ring: Ring,
}

/// Number of the group of both.
const GROUP: u64 = 1;

impl Receiver {
    async fn join(source: Worker, worker: Worker, slot_bytes: u64) -> anyhow::Result<Self> {
        let id = source.unique_id(STEP).await?;
        let ring = worker.ring(2, slot_bytes, STEP).await?;
        tokio::try_join!(source.join(GROUP, id, 0, 2, STEP), worker.join(GROUP, id, 1, 2, STEP))?;
        Ok(Self { source, worker, ring })
    }

    /// Brings a bucket over; both digests must agree.
    async fn bring(&self, device: &DevicePayload) -> anyhow::Result<DevicePayload> {
        let slot = self.ring.take(STEP).await?;
        let part = Part { offset: 0, bytes: device.bytes, first_word: 0 };
        let broadcast = |at, after| Broadcast { group: GROUP, root: 0, at, bytes: device.bytes, parts: vec![part], after };
        let sent = self.source.broadcast_now(broadcast(device.memory.at(device.offset), device.after.clone()), STEP);
        let came = self.worker.broadcast_now(broadcast(slot.at(0), None), STEP);
        let (sent, came) = tokio::try_join!(sent, came)?;
        anyhow::ensure!(sent.sums == came.sums, "a bucket has one digest where it left and another where it came");
        let memory = DeviceMemory::Slot(slot);
        Ok(DevicePayload { worker: self.worker.clone(), memory, offset: 0, bytes: device.bytes, after: None, lent: None })
    }
}

impl Gpu {
    async fn worker(&self, uuid: &str) -> anyhow::Result<(Worker, GpuFacts)> {
        let worker = Worker::start(&WorkerStart::new(&self.program, &["worker"], uuid))?;
        let (_, facts, _) = worker.open(Some(uuid), None, STEP).await?;
        Ok((worker, facts))
    }

    /// Starts the source's worker.
    async fn start(&self) -> anyhow::Result<()> {
        let (worker, facts) = self.worker(&self.uuid).await?;
        let room = (facts.free_bytes, facts.memory_bytes);
        let wish = RingWish { slots: Some(2), slot_bytes: self.slot_bytes };
        drop(self.source.send_replace(Ok(SourceWorker { worker, gpu: facts.uuid, wish, room, retain: 0 })));
        Ok(())
    }

    /// The bucket on the receiver's GPU, where there is a receiver.
    async fn bring(&self, device: DevicePayload, layout: &Layout) -> anyhow::Result<DevicePayload> {
        let Some((uuid, joined)) = &self.receiver else { return Ok(device) };
        let mut joined = joined.lock().await;
        let receiver = match joined.take().filter(|joined| joined.source.is(&device.worker)) {
            Some(receiver) => receiver,
            None => Receiver::join(device.worker.clone(), self.worker(uuid).await?.0, layout.largest_bucket().next_multiple_of(64)).await?,
        };
        let brought = receiver.bring(&device).await;
        *joined = Some(receiver);
        brought
    }

    fn kill(&self) {
        if let Ok(source) = self.source.borrow().as_ref() {
            source.worker.kill("a test");
        }
    }
}

/// The bytes of a bucket on a GPU.
async fn fetch(device: DevicePayload) -> anyhow::Result<Bytes> {
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
    let slot_bytes = (args.bucket_bytes > 0).then_some(args.bucket_bytes);
    let receiver = args.receiver.clone().map(|uuid| (uuid, tokio::sync::Mutex::default()));
    let gpu = args.gpu.clone().map(|uuid| Gpu { uuid, program, slot_bytes, source, receiver });
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

/// Takes one version; returns whether it succeeded.
async fn take(mut job: PublishJob, args: &Args, gpu: Option<&Gpu>) -> anyhow::Result<bool> {
    let layout = job.source.layout().clone();
    let (mut stream, mut buckets, mut attempts) = (Vec::new(), 0, 1);
    let (mut on_gpu, mut behind_events, mut received) = (0, 0, 0);
    loop {
        let next = tokio::select! {
            next = job.source.next(Duration::from_secs(30)) => next,
            () = job.cancel.cancelled() => Err(weightsync_agent::version_source::SourceError::Cancelled { reason: "by its trainer".into() }),
        };
        match next {
            Ok(Some((_, Payload::Host(bytes)))) => {
                received += bytes.len() as u64;
                stream.extend_from_slice(&bytes);
            }
            Ok(Some((_, Payload::Device(device)))) => {
                on_gpu += 1;
                behind_events += usize::from(device.after.is_some());
                received += device.bytes;
                let device = match gpu {
                    Some(gpu) => gpu.bring(device, &layout).await?,
                    None => device,
                };
                if !args.discard {
                    stream.extend_from_slice(&fetch(device).await?);
                }
            }
            Ok(None) => break,
            Err(error) => {
                println!("{}", serde_json::json!({ "version": job.version, "failed": error.to_string() }));
                job.reporter.failed(error.publish_error(None));
                return Ok(false);
            }
        }
        buckets += 1;
        job.reporter.progress(UpdatePhase::Transfer, received);
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
    let digested = layout.entries.iter().filter(|_| !args.discard);
    let digests: serde_json::Map<_, _> = digested
        .map(|entry| {
            Ok((entry.tensor.full_name().into_owned(), digest_hex(bucket_digest(bytes_of(&stream, entry.offset, entry.bytes)?)).into()))
        })
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
        mixed: Vec::new(),
        notes: Vec::new(),
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
        header.insert(entry.tensor.full_name().into_owned(), tensor);
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
        proven_by: None,
        rank_offset,
        size: 1,
        mixed: Vec::new(),
    };
    let replicas = vec![replica("actors/a", "ready", version, 1), replica("actors/b", "out", None, 2)];
    RosterView { epoch: Some(1), version, replicas }
}

fn error(code: PublishErrorCode, message: String) -> PublishError {
    PublishError { code, message, retryable: false, phase: None, member: None }
}

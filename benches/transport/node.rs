//! The processes of a measurement: a member that stores what it receives, and a leader that sends one stream.

use std::io::Read;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use bytes::Bytes;
use clap::Args;
use weightsync_core::protocol::{BucketHeader, DataHello, EpochId, MemberName, Refusal, RefusalCode, UpdateId};
use weightsync_core::weights::bucket_digest;
use weightsync_net::identity::PeerIdentity;
use weightsync_transport::tcp::{TcpOptions, TcpTransport};
use weightsync_transport::{Admission, BucketStore, Fault, Transport, digest};

use crate::processes::processor;
use crate::tls;

/// Default length of a bucket.
pub const BUCKET: usize = 32 << 20;

#[derive(Args)]
pub struct MemberSettings {
    /// Where to listen.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    #[command(flatten)]
    tuning: Tuning,
}

#[derive(Args)]
pub struct LeaderSettings {
    /// Members in chain order.
    #[arg(long, value_delimiter = ',')]
    chain: Vec<String>,
    /// Bytes to send.
    #[arg(long)]
    bytes: u64,
    /// Length of a bucket in bytes.
    #[arg(long, default_value_t = BUCKET)]
    bucket: usize,
    /// Hash before the clock starts, not while sending.
    #[arg(long)]
    digests_beforehand: bool,
    #[command(flatten)]
    tuning: Tuning,
}

/// What is worth trying on another machine.
#[derive(Args)]
struct Tuning {
    /// Size of a receive buffer in KiB.
    #[arg(long)]
    receive_kib: Option<usize>,
    /// Connections of a hop, at most; the machine's own number by default.
    #[arg(long)]
    lanes: Option<usize>,
    /// Folder of an authority: a member takes streams inside TLS as well, and a leader sends inside TLS.
    #[arg(long)]
    authority: Option<PathBuf>,
}

impl Tuning {
    fn options(&self) -> Result<TcpOptions> {
        let mut options = TcpOptions::default();
        if let Some(kib) = self.receive_kib {
            options.receive_buffer = kib << 10;
        }
        if let Some(lanes) = self.lanes {
            options.lanes = lanes;
        }
        options.tls = self.authority.as_deref().map(tls::settings).transpose()?;
        Ok(options)
    }
}

/// Memory for the newest part of the stream, written before, so that no page is new to the kernel.
struct Memory(Mutex<Vec<u8>>);

const REGION: usize = 256 << 20;

impl BucketStore for Memory {
    fn write(&self, offset: u64, part: &[u8]) -> Result<(), Refusal> {
        let mut memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let region = memory.len() as u64;
        let start = usize::try_from(offset % region.max(1)).unwrap_or(0);
        let length = part.len().min(memory.len().saturating_sub(start));
        let (first, second) = part.split_at_checked(length).unwrap_or((part, &[]));
        if let Some(place) = memory.get_mut(start..start + first.len()) {
            place.copy_from_slice(first);
        }
        if let Some(place) = memory.get_mut(..second.len()) {
            place.copy_from_slice(second);
        }
        Ok(())
    }

    fn complete(&self, _: &BucketHeader, _: u128) -> Result<(), Refusal> {
        Ok(())
    }

    fn end(&self) -> Result<(), Refusal> {
        Ok(())
    }

    fn broken(&self, fault: Fault<'_>, cause: &str) {
        eprintln!("stream broke: {fault:?}: {cause}");
    }
}

struct Anybody(Arc<Memory>);

impl Admission for Anybody {
    fn admit(&self, _: &DataHello, _: Option<&PeerIdentity>) -> Result<Arc<dyn BucketStore>, Refusal> {
        Ok(self.0.clone())
    }
}

struct NoOne;

impl Admission for NoOne {
    fn admit(&self, _: &DataHello, _: Option<&PeerIdentity>) -> Result<Arc<dyn BucketStore>, Refusal> {
        Err(Refusal { code: RefusalCode::WrongPhase, message: "a leader receives nothing".to_owned() })
    }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}

pub fn member(settings: &MemberSettings) -> Result<()> {
    let runtime = runtime()?;
    let memory = Arc::new(Memory(Mutex::new(vec![1; REGION])));
    let transport = runtime.block_on(TcpTransport::bind(settings.listen, Arc::new(Anybody(memory)), settings.tuning.options()?))?;
    println!("{}", transport.address());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// As many different buckets as a ring has slots.
pub fn slots(bucket: usize) -> Vec<Bytes> {
    let slot = |slot: u8| (0..bucket).map(|place| place.to_le_bytes()[1] ^ slot).collect::<Vec<_>>();
    (0..4).map(|number| Bytes::from(slot(number))).collect()
}

pub fn leader(settings: &LeaderSettings) -> Result<()> {
    let names = settings.chain.iter().enumerate().map(|(number, address)| (MemberName(format!("bench/{number}")), address.clone()));
    let mut members = names.collect::<Vec<_>>().into_iter();
    let (to, first) = members.next().ok_or_else(|| anyhow!("a chain has at least one member"))?;
    let epoch = EpochId { weightsync: "bench".to_owned(), created: 1, term: 1, epoch: 1 };
    let hello = DataHello {
        update: UpdateId { epoch, version: 1, attempt: 1 },
        from: MemberName("bench/leader".to_owned()),
        to,
        secret: String::new(),
        rest: members.collect(),
        tls: settings.tuning.authority.is_some(),
        silence_ms: 10_000,
        probe: false,
        preflight: false,
        carried: None,
    };
    let slots = slots(settings.bucket);
    let known: Vec<Option<u128>> = slots.iter().map(|slot| settings.digests_beforehand.then(|| bucket_digest(slot))).collect();
    let (seconds, taken) = runtime()?.block_on(async {
        let transport = TcpTransport::bind("127.0.0.1:0".parse()?, Arc::new(NoOne), settings.tuning.options()?).await?;
        let (start, before) = (Instant::now(), processor("self")?);
        let mut sink = transport.open(hello, &first).await?;
        let (mut offset, mut sequence) = (0, 0);
        for (slot, known) in slots.iter().zip(&known).cycle() {
            let bytes = (settings.bytes - offset).min(slot.len() as u64);
            if bytes == 0 {
                break;
            }
            let data = slot.slice(..usize::try_from(bytes)?);
            let digest = match known {
                Some(known) if data.len() == slot.len() => *known,
                _ => digest(data.clone()).await?,
            };
            sink.send(BucketHeader { sequence, flags: 0, offset, bytes }, data.into(), digest).await?;
            offset += bytes;
            sequence += 1;
        }
        sink.finish().await.context("the chain did not confirm")?;
        Ok::<_, anyhow::Error>((start.elapsed().as_secs_f64(), processor("self")? - before))
    })?;
    println!("{seconds} {taken}");
    Ok(())
}

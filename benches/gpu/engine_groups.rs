//! Groups whose other ranks run the engines' own code: joined, fed and left as `delivery: Engine` does it, every byte compared there.
//!
//! Rank 0 takes the steps of the source's agent: a store of ours with the communicator's id under both keys (vLLM: the id itself), the
//! communicator with the first bucket (vLLM: at once, proven by an all-reduce), broadcasts as [`Layout::wire`] cuts them; at the end
//! it aborts and closes the store, and only then are the engines asked to leave. Rounds follow each other in the same processes.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use futures::future::try_join_all;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use weightsync_core::protocol::TransportPolicy;
use weightsync_core::protocol::worker::{NcclId, Opaque, Proof};
use weightsync_core::weights::{Dtype, Layout, TensorSpec, WireBucket};
use weightsync_gpu::worker::Broadcast;
use weightsync_torch::dtype_name;
use weightsync_torch::store::{Server, nccl_id_keys};

use crate::engine_rank::{LocalRank, Rank};
use crate::fleet::{self, AMPLE, Member};
use crate::{Settings, pattern};

/// Whose code the other ranks run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Engine {
    Sglang,
    Lmdeploy,
    Vllm,
}

/// What is sent in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sent {
    /// Tensors of one element type in one broadcast: what we do.
    Together,
    /// A broadcast for each tensor, which the engines offer too.
    Each,
    Nothing,
}

/// How a round ends for rank 0, before the engines are asked to leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    Aborted,
    /// SIGKILL, and another worker in its place.
    Killed,
}

const ROUNDS: [(Sent, Ending); 6] = [
    (Sent::Together, Ending::Aborted),
    (Sent::Each, Ending::Aborted),
    (Sent::Together, Ending::Aborted),
    (Sent::Nothing, Ending::Aborted),
    (Sent::Together, Ending::Killed),
    (Sent::Together, Ending::Aborted),
];

/// Length of a bucket of several tensors. One tensor is longer.
const BUCKET: u64 = 8 << 20;
/// As in `crates/engine/src/vllm/group.rs`: what one request carries is one broadcast.
const NEVER_CUT: u64 = 1 << 40;

pub async fn run(settings: &Settings) -> Result<()> {
    ensure!(settings.engine_code.is_some(), "--engine-code is missing: where the archive of tests/gpu/engine_code.sh was unpacked");
    if settings.rehearse {
        println!("# a rehearsal: rank 0 is torch over gloo, and leaves the group where a worker aborts or is killed");
    }
    let mut failed = Vec::new();
    for engine in &settings.engines {
        if let Err(error) = one(settings, *engine).await {
            println!("engine groups: {engine:?}: FAILED: {error:#}");
            failed.push(*engine);
        }
    }
    ensure!(failed.is_empty(), "{failed:?}");
    Ok(())
}

async fn one(settings: &Settings, engine: Engine) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut members = Members::start(settings, engine, folder.path()).await?;
    for (round, (sent, ending)) in ROUNDS.into_iter().enumerate() {
        let what = format!("{engine:?}, round {}, {sent:?}, {ending:?}", round + 1);
        members.round(round, sent, ending).await.with_context(|| what.clone())?;
    }
    println!("engine groups: {engine:?}: {} rounds, every byte right", ROUNDS.len());
    Ok(())
}

/// Rank 0.
enum First {
    Ours(Box<Member>),
    /// In a rehearsal.
    Torch(Box<Rank>),
}

struct Members {
    settings: Settings,
    engine: Engine,
    first: First,
    /// The ranks of each engine server.
    servers: Vec<Vec<Rank>>,
    sent: u64,
}

/// One round's group.
struct Group {
    name: String,
    number: u64,
    id: NcclId,
    store: Option<Server>,
    stands: bool,
}

impl Members {
    /// With three GPUs next to the first: a server of two ranks and one of one.
    async fn start(settings: &Settings, engine: Engine, folder: &std::path::Path) -> Result<Self> {
        let longest = layout(settings, engine, Sent::Together)?.largest_bucket().next_multiple_of(1 << 20) >> 20;
        let name = format!("{engine:?}").to_lowercase();
        // What the source's agent starts its worker with next to such engines, under what was asked for here.
        let policy = TransportPolicy::default().with_engines([name.as_str()]);
        let defaults = policy.defaults.iter().filter(|(name, _)| std::env::var_os(name).is_none());
        let environment = defaults.map(|(name, value)| format!("{name}={value}")).chain(settings.environment.iter().cloned()).collect();
        let settings = Settings { mib: longest, slots: 2, environment, ..settings.clone() };
        let (first, ranks) = if settings.rehearse {
            ensure!(engine != Engine::Vllm, "vLLM's group is NCCL's own: it cannot be rehearsed");
            let local = LocalRank { engine: "torch", gpu: None, rank: 0, size: 1, meet: &folder.join("first") };
            let mut first = Rank::start(&settings, &local)?;
            first.ready().await?;
            (First::Torch(Box::new(first)), 3)
        } else {
            let gpus = fleet::gpus(&settings).await?;
            (First::Ours(Box::new(Member::start(&settings, &gpus[0]).await?)), gpus.len() - 1)
        };
        let sizes = if ranks > 2 { vec![ranks - 1, 1] } else { vec![ranks] };
        let (mut servers, mut next) = (Vec::new(), 1);
        for (server, size) in sizes.into_iter().enumerate() {
            let meet = folder.join(format!("server-{server}"));
            let local = |rank| LocalRank { engine: &name, gpu: (!settings.rehearse).then_some(next + rank), rank, size, meet: &meet };
            servers.push((0..size).map(|rank| Rank::start(&settings, &local(rank))).collect::<Result<Vec<_>>>()?);
            next += size;
        }
        for said in try_join_all(servers.iter_mut().flatten().map(Rank::ready)).await? {
            println!("# {said}");
        }
        Ok(Self { settings, engine, first, servers, sent: 0 })
    }

    fn world(&self) -> usize {
        1 + self.servers.iter().map(Vec::len).sum::<usize>()
    }

    async fn round(&mut self, round: usize, sent: Sent, ending: Ending) -> Result<()> {
        let begun = Instant::now();
        let mut group = self.form(round, sent).await?;
        let formed = begun.elapsed();
        let (mut broadcasts, mut bytes) = (0, 0);
        if sent != Sent::Nothing {
            let layout = layout(&self.settings, self.engine, sent)?;
            for bucket in layout.buckets() {
                for wire in layout.wire(&bucket)? {
                    let what =
                        format!("bucket {}: {} tensors of {:?}, {} bytes", bucket.sequence, wire.tensors.len(), wire.dtype, wire.bytes);
                    broadcasts += self.send(&mut group, &layout, &wire, sent).await.context(what)?;
                    bytes += wire.bytes;
                }
            }
        }
        let begun = Instant::now();
        let left = self.end(group, ending).await?;
        println!(
            "engine groups: {:?} round {}: joined in {formed:.1?}; {sent:?}: {broadcasts} broadcasts, {bytes} bytes right on each of {} ranks; \
             {ending:?} and left in {:.1?} (the engine's own call {left:.1?})",
            self.engine,
            round + 1,
            self.world() - 1,
            begun.elapsed()
        );
        Ok(())
    }

    /// Has all ranks join; where the communicator is made by that, rank 0 as well.
    async fn form(&mut self, round: usize, sent: Sent) -> Result<Group> {
        let id = match &self.first {
            First::Ours(member) => member.worker.unique_id(AMPLE).await?,
            First::Torch(_) => Opaque([0; 128]),
        };
        let name = format!("weights-{round}");
        let mut group = Group { name, number: fleet::next_group(), id, store: None, stands: false };
        let mut ask = json!({ "group_name": group.name, "world_size": self.world() });
        if self.engine == Engine::Vllm {
            ask["nccl_unique_id_b64"] = id.to_base64().into();
            ask["packed"] = (sent != Sent::Each).into();
            ask["packed_buffer_size_bytes"] = NEVER_CUT.into();
            ask["packed_num_buffers"] = 2.into();
        } else {
            let store =
                Server::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), |from| from.is_loopback(), &CancellationToken::new()).await?;
            for key in nccl_id_keys(&group.name) {
                store.set(&key, &id.0)?;
            }
            ask["master_address"] = store.address().ip().to_string().into();
            ask["master_port"] = store.address().port().into();
            group.store = Some(store);
        }
        let world = self.world();
        let mut offset = 1;
        let mut joins = Vec::new();
        for server in &mut self.servers {
            let mut ask = ask.clone();
            ask["rank_offset"] = offset.into();
            offset += server.len();
            joins.extend(server.iter_mut().map(|rank| rank.ask("join", ask.clone(), AMPLE)));
        }
        let joins = try_join_all(joins);
        match &mut self.first {
            First::Ours(member) if self.engine == Engine::Vllm => {
                let place = (0, u32::try_from(world)?);
                let made = async { anyhow::Ok(member.worker.join_as(group.number, id, place, Proof::AllReduce, AMPLE).await?) };
                tokio::try_join!(joins, made)?;
                group.stands = true;
            }
            First::Ours(_) => drop(joins.await?),
            First::Torch(first) => drop(tokio::try_join!(joins, first.ask("join", ask, AMPLE))?),
        }
        if let Some(store) = &group.store {
            store.wait_for_clients(world - 1, AMPLE).await?;
        }
        Ok(group)
    }

    /// One request of an engine: its ranks enter while rank 0 broadcasts. Gives how many broadcasts that were.
    async fn send(&mut self, group: &mut Group, layout: &Layout, wire: &WireBucket, sent: Sent) -> Result<usize> {
        self.sent += 1;
        let bucket = self.sent;
        let entries: Vec<_> = wire.tensors.iter().map(|at| &layout.entries[*at]).collect();
        let dtype = dtype_name(wire.dtype).context("no name")?;
        let ask = json!({
            "group_name": group.name,
            "names": entries.iter().map(|entry| &entry.tensor.name).collect::<Vec<_>>(),
            "dtypes": vec![dtype; entries.len()],
            "shapes": entries.iter().map(|entry| &entry.tensor.shape).collect::<Vec<_>>(),
            "load_format": if sent == Sent::Each { Value::Null } else { "flattened_bucket".into() },
            "bucket": bucket,
        });
        let lengths = if sent == Sent::Each { entries.iter().map(|entry| entry.bytes).collect() } else { vec![wire.bytes] };
        let world = u32::try_from(self.world())?;
        let received = try_join_all(self.servers.iter_mut().flatten().map(|rank| rank.ask("receive", ask.clone(), AMPLE)));
        let (number, id) = (group.number, group.id);
        let (stands, count) = (std::mem::replace(&mut group.stands, true), lengths.len());
        let first = &mut self.first;
        let sending = async {
            match first {
                First::Ours(member) => {
                    let slot = member.ring.take(AMPLE).await?;
                    member.fill(&slot, &pattern::bytes(bucket, usize::try_from(wire.bytes)?)).await?;
                    if !stands {
                        member.worker.join_as(number, id, (0, world), Proof::Nothing, AMPLE).await?;
                    }
                    let mut from = 0;
                    let enter = |bytes: &u64| {
                        let broadcast =
                            Broadcast { group: number, root: 0, at: slot.at(from), bytes: *bytes, parts: Vec::new(), after: None };
                        from += bytes;
                        member.worker.broadcast_now(broadcast, AMPLE)
                    };
                    let entered: Vec<_> = lengths.iter().map(enter).collect();
                    try_join_all(entered).await?;
                }
                First::Torch(first) => drop(first.ask("receive", json!({ "bucket": bucket, "lengths": lengths }), AMPLE).await?),
            }
            anyhow::Ok(())
        };
        let (answers, ()) = tokio::try_join!(received, sending)?;
        for answer in answers {
            ensure!(answer.wrong == 0, "{} of {} bytes are wrong", answer.wrong, answer.bytes);
            ensure!(answer.bytes == wire.bytes, "{} bytes were compared, {} were sent", answer.bytes, wire.bytes);
        }
        Ok(count)
    }

    /// Rank 0 first, then the engines. Gives how long the slowest engine took.
    async fn end(&mut self, group: Group, ending: Ending) -> Result<Duration> {
        let leave = json!({ "group_name": group.name });
        match &mut self.first {
            First::Ours(member) if ending == Ending::Aborted => member.worker.abort(group.number, AMPLE).await?,
            First::Ours(member) => {
                member.worker.kill("the round ends so");
                tokio::time::timeout(AMPLE, member.worker.ended()).await?;
            }
            First::Torch(first) => drop(first.ask("leave", leave.clone(), AMPLE).await?),
        }
        if let Some(store) = group.store {
            store.close().await;
        }
        let left = try_join_all(self.servers.iter_mut().flatten().map(|rank| rank.ask("leave", leave.clone(), AMPLE))).await?;
        if let (First::Ours(member), Ending::Killed) = (&mut self.first, ending) {
            let gpu = member.gpu.clone();
            **member = Member::start(&self.settings, &gpu).await?;
        }
        let slowest = left.iter().map(|answer| answer.seconds).fold(0.0, f64::max);
        Ok(Duration::from_secs_f64(slowest))
    }
}

/// Tensors of the types that weights have, of odd and even lengths, scalars among them, cut as for engines.
fn layout(settings: &Settings, engine: Engine, sent: Sent) -> Result<Layout> {
    use Dtype as D;
    let mut dtypes = vec![D::BF16, D::F8_E4M3, D::F32, D::U8, D::I64, D::F16, D::BOOL, D::F64, D::I8, D::I32];
    if engine == Engine::Vllm && sent == Sent::Each {
        // It knows no number of NCCL's for it.
        dtypes.retain(|dtype| *dtype != D::BOOL);
    }
    if settings.rehearse {
        // Gloo sends none.
        dtypes.retain(|dtype| *dtype != D::F8_E4M3);
    }
    let shapes: [&[u64]; 6] = [&[], &[1], &[7], &[129, 3], &[64, 1000], &[1021, 1023]];
    let mut tensors = Vec::new();
    for (number, shape) in shapes.into_iter().enumerate() {
        for dtype in &dtypes {
            let name = format!("model.layers.{number}.{dtype:?}");
            tensors.push(TensorSpec::new(name, *dtype, shape.to_vec()));
        }
    }
    tensors.push(TensorSpec::new("model.embed".into(), D::BF16, vec![4099, 4093]));
    let layout = Layout::new("model", tensors, BUCKET)?.cut_between_tensors();
    if layout.bucket_count() < 4 {
        bail!("too few buckets");
    }
    Ok(layout)
}

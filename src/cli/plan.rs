//! `weightsync plan -f FILE`: the members of a group and the cost of an update, without a cluster.
//!
//! Reads a `WeightSync` and pods (from the file, or as the workloads in the file would create them), runs the same plan as the controller,
//! and prints ranks, offsets, order, bytes, buckets, memory and minimum times. It changes nothing and makes no connection.

mod expand;
mod file;
mod table;
#[cfg(test)]
mod tests;
mod units;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use serde::Serialize;

use self::file::Manifests;
use self::units::{parse_bytes, parse_rate};
use super::Output;
use crate::api::{Problem, WeightSync, WeightSyncSpec, validate};
use weightsync_agent::client::ClientServerConfig;
use weightsync_core::plan::{
    Bandwidth, CONTEXT_ESTIMATE, Claim, Explanation, GpuRing, GpuRoom, ModelFacts, NoRing, Plan, PlanInput, PodFacts, PoolSpec, RingChoice,
    RingWish, TrainerSpec, USUAL_LOAD, WeightSyncRef, explain, gpu_ring, part_of, plan, roster, show_rate,
};
use weightsync_core::protocol::{Role, Roster, TransportPolicy, TransportWish};
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_core::weights::{Layout, default_bucket_bytes};
use weightsync_transport::tcp::TcpOptions;

#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Files or folders with a WeightSync and with pods or workloads, `-` for standard input. `kubectl get ws,pods -o yaml` makes one.
    #[arg(short, long, required = true)]
    filename: Vec<PathBuf>,
    /// Safetensors checkpoint, for the bytes and tensors of the model.
    #[arg(long, conflicts_with = "size")]
    checkpoint: Option<PathBuf>,
    /// Size of the model, such as `16GB`, if there is no checkpoint.
    #[arg(long, value_parser = parse_bytes)]
    size: Option<u64>,
    /// Free memory of the fullest GPU while engines and trainer run, such as `20GB`. The plan then assumes NCCL for `transport.type: Auto`, and
    /// shows whether its buckets fit.
    #[arg(long, value_parser = parse_bytes)]
    gpu_free: Option<u64>,
    /// Link speeds for the minimum times, such as `25Gbit`. An object from a cluster adds the slowest edge that its preflight measured.
    #[arg(long, value_parser = parse_rate, default_values = ["10Gbit", "25Gbit", "100Gbit"])]
    bandwidth: Vec<Bandwidth>,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// The report on one object.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    weightsync: WeightSyncRef,
    /// Violated rules of the spec; if there are any, nothing is planned.
    problems: Vec<String>,
    plan: Plan,
    explanation: Explanation,
    /// The ring on each GPU, and how it was chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu_ring: Option<String>,
}

impl Report {
    fn is_fine(&self) -> bool {
        self.problems.is_empty() && self.plan.refusal.is_none()
    }
}

#[derive(Debug, Serialize)]
struct Reports {
    plans: Vec<Report>,
}

impl PlanArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let mut manifests = Manifests::default();
        manifests.read(&self.filename)?;
        if manifests.objects.is_empty() {
            bail!("no WeightSync in {}", self.filename.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "));
        }
        let plans = self.reports(&manifests)?;
        let fine = plans.iter().all(Report::is_fine);
        match self.output {
            Output::Human => print!("{}", plans.iter().map(table::render).collect::<Vec<_>>().join("\n")),
            Output::Json => println!("{}", serde_json::to_string_pretty(&Reports { plans })?),
        }
        Ok(if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    fn reports(&self, manifests: &Manifests) -> anyhow::Result<Vec<Report>> {
        let parties: Vec<Party> = manifests.objects.iter().enumerate().map(Party::new).collect();
        let mut reports = Vec::new();
        for (party, object) in parties.iter().zip(&manifests.objects) {
            let mut problems: Vec<String> = object
                .unknown
                .iter()
                .map(|field| format!("{field}: no such field"))
                .chain(party.problems.iter().map(Problem::to_string))
                .collect();
            let pods: Vec<PodFacts> = manifests.pods(&party.reference.namespace);
            let claims = claims(party, &parties, &pods);
            let input =
                PlanInput { weightsync: party.reference.clone(), trainer: party.trainer.clone(), pools: party.pools.clone(), pods, claims };
            let plan = if problems.is_empty() { plan(&input) } else { Plan::default() };
            let roster = roster(&plan.candidates);
            let ring = match self.gpu_ring(&object.object.spec.update_policy(1).transport) {
                Some(Err(too_little)) => {
                    problems.push(too_little.to_string());
                    None
                }
                Some(Ok(choice)) => Some(choice),
                None => None,
            };
            let model = self.model(&object.object.spec, ring.as_ref().map(|choice| choice.ring))?;
            let mut links = self.bandwidth.clone();
            links.extend(slowest_measured(&roster, &object.object));
            reports.push(Report {
                gpu_ring: ring.map(|choice| choice.why),
                weightsync: party.reference.clone(),
                problems,
                explanation: explain(&roster, model, &links),
                plan,
            });
        }
        Ok(reports)
    }

    /// The ring that the controller would choose; `None` if buckets do not travel between GPUs.
    fn gpu_ring(&self, transport: &TransportPolicy) -> Option<Result<RingChoice, NoRing>> {
        // Whether pods have GPUs is known only when they run. Unless the object or the user specifies it, the plan assumes none.
        let between_gpus = match transport.wish {
            TransportWish::Nccl => true,
            TransportWish::Auto => self.gpu_free.is_some(),
            TransportWish::Tcp | TransportWish::Gdr => false,
        };
        // A worker measures free memory after its own context was created.
        let room = |free: u64| GpuRoom { gpu: "the tightest GPU".to_owned(), free: free.saturating_sub(CONTEXT_ESTIMATE), total: free };
        let rooms: Vec<GpuRoom> = self.gpu_free.map(room).into_iter().collect();
        between_gpus.then(|| gpu_ring(RingWish::of(transport.slots, transport.slot_bytes), USUAL_LOAD, &rooms))
    }

    fn model(&self, spec: &WeightSyncSpec, ring: Option<GpuRing>) -> anyhow::Result<Option<ModelFacts>> {
        let policy = spec.update_policy(1);
        let options = TcpOptions::default();
        let facts = |tensors, bytes, bucket_bytes| ModelFacts {
            tensors,
            bytes,
            bucket_bytes,
            ring_buckets: u64::from(ClientServerConfig::SLOTS),
            receive_bytes: (options.receive_buffer * options.receive_buffers) as u64,
            retain_bytes: policy.retain_bytes,
            keep: u64::from(policy.keep),
            gpu_ring: ring,
        };
        if let Some(path) = &self.checkpoint {
            let checkpoint = Checkpoint::open(path).with_context(|| format!("{} cannot be read", path.display()))?;
            let layout = Layout::new("model", checkpoint.specs(), policy.bucket_bytes).context("the checkpoint cannot be laid out")?;
            return Ok(Some(facts(Some(layout.entries.len() as u64), layout.total_bytes, layout.bucket_bytes)));
        }
        Ok(self.size.map(|bytes| {
            let bucket_bytes = if policy.bucket_bytes == 0 { default_bucket_bytes(bytes) } else { policy.bucket_bytes };
            facts(None, bytes, bucket_bytes)
        }))
    }
}

/// An object of the files, ready to be planned.
struct Party {
    reference: WeightSyncRef,
    trainer: TrainerSpec,
    pools: Vec<PoolSpec>,
    problems: Vec<Problem>,
}

impl Party {
    fn new((position, read): (usize, &file::Read)) -> Self {
        let object: &WeightSync = &read.object;
        let mut reference = object.plan_ref();
        reference.namespace.clone_from(&read.namespace);
        if reference.uid.is_empty() {
            // Not created yet: assume creation in the order of the files.
            reference.uid = format!("{}/{}", reference.namespace, reference.name);
            reference.created = if reference.created == 0 { (1 << 50) + position as u64 } else { reference.created };
        }
        Self { reference, trainer: object.spec.trainer.to_plan(), pools: object.spec.plan_pools(), problems: validate(&object.spec) }
    }
}

/// The slowest edge of the planned chain, where the pre-flight of a cluster measured them: a chain is as fast as that one.
fn slowest_measured(roster: &Roster, object: &WeightSync) -> Option<Bandwidth> {
    let preflight = object.status.as_ref()?.preflight.as_ref()?;
    let source = roster.members.iter().find(|member| member.role == Role::Source)?;
    let senders = std::iter::once(&source.name).chain(&roster.chain);
    let rates = senders.zip(&roster.chain).filter_map(|(from, to)| {
        let edge = preflight.edges.iter().find(|edge| edge.from == from.0 && edge.to == to.0)?;
        let bytes_per_second = u64::try_from(edge.bytes_per_second?).ok().filter(|rate| *rate > 0)?;
        let rate = show_rate(bytes_per_second);
        Some(Bandwidth { name: format!("{rate}, measured from {from} to {to} over {}", preflight.transport), bytes_per_second })
    });
    rates.min_by_key(|edge| edge.bytes_per_second)
}

/// Pods that other objects of the files claim.
fn claims(mine: &Party, all: &[Party], pods: &[PodFacts]) -> Vec<Claim> {
    let others = all.iter().filter(|other| other.reference != mine.reference && other.reference.namespace == mine.reference.namespace);
    let of_one = |other: &Party| {
        let claimed = pods.iter().filter(|pod| part_of(&other.trainer, &other.pools, &pod.labels).is_some());
        claimed.map(|pod| Claim { pod_uid: pod.uid.clone(), by: other.reference.clone() }).collect::<Vec<_>>()
    };
    others.flat_map(of_one).collect()
}

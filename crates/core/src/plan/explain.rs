//! The cost of a plan before anything runs: bytes, buckets, extra memory of each member, and the least time over given links.
//!
//! Integer arithmetic only, rounded so that a need is never understated. A floor is a time that no implementation can beat; it is no
//! promise.

use serde::{Deserialize, Serialize};

use super::gpu_memory::{GpuNeed, GpuRing};
use crate::protocol::{MemberName, Role, Roster, RosterMember};

/// Sizes of a model and of the memory that agents use for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelFacts {
    /// Tensors of a version, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensors: Option<u64>,
    /// Bytes of a version.
    pub bytes: u64,
    /// Bytes of a bucket.
    pub bucket_bytes: u64,
    /// Buckets in the ring that source agent and trainer share.
    pub ring_buckets: u64,
    /// Bytes that a rollout agent may have received and not stored yet.
    pub receive_bytes: u64,
    /// Bytes that a source may keep to retry and to feed joiners.
    pub retain_bytes: u64,
    /// The ring on each GPU, if buckets travel between GPUs: then no host memory holds bytes in flight.
    pub keep: u64,
    /// The ring on each GPU, where buckets travel between GPUs: then no host memory holds bytes on their way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_ring: Option<GpuRing>,
}

impl ModelFacts {
    /// Buckets of a version.
    pub fn buckets(&self) -> u64 {
        self.bytes.div_ceil(self.bucket_bytes.max(1))
    }

    /// Whole versions that fit into so many bytes.
    fn copies_in(&self, limit: u64) -> u64 {
        limit.checked_div(self.bytes).unwrap_or(0)
    }
}

/// Rate of one link, with the name that the user gave it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Bandwidth {
    /// The rate as the user wrote it.
    pub name: String,
    /// Bytes a second.
    pub bytes_per_second: u64,
}

/// Extra memory of a member's agent at its peak, in the middle of an update.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemberMemory {
    /// Bytes in flight: the ring of a source, the receive buffers of a rollout.
    pub in_flight: u64,
    /// Source: copies to retry, to feed joiners and to go back: the kept ones and the one that arrives, within the limit.
    pub retained: u64,
    /// Whether the kept copies are pinned: registered with the driver, so that a GPU can copy from and to them.
    pub pinned: bool,
    /// Rollout: version directories: the one that serves, the one that arrives, and earlier ones that are kept. With a ring on the GPU,
    /// only if the engine loads from files.
    pub versions: u64,
    /// Memory of each of its GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuNeed>,
}

impl MemberMemory {
    /// All host memory.
    pub fn total(&self) -> u64 {
        self.in_flight.saturating_add(self.retained).saturating_add(self.versions)
    }
}

/// One line of an explanation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExplainedMember {
    /// The member.
    #[serde(flatten)]
    pub member: RosterMember,
    /// Place in the chain from 1; `None` for a source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hop: Option<usize>,
    /// Memory of its agent, if the model's size is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemberMemory>,
}

/// Least time for one update over one kind of link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FloorTime {
    /// The link.
    pub bandwidth: Bandwidth,
    /// Time over the chain in µs: each byte crosses each link once, and all links work at the same time. So the number of replicas does not
    /// matter.
    pub chain_us: u64,
    /// For comparison: one copy after the other from the source to each replica. In µs.
    pub one_by_one_us: u64,
}

/// What a plan costs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// Ranks of the group.
    pub world_size: u32,
    /// Members by rank.
    pub members: Vec<ExplainedMember>,
    /// Order in which bytes travel.
    pub chain: Vec<MemberName>,
    /// Sizes, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelFacts>,
    /// Buckets of a version, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buckets: Option<u64>,
    /// Floors, one a link; empty without a model.
    pub floors: Vec<FloorTime>,
}

/// Explains a roster.
pub fn explain(roster: &Roster, model: Option<ModelFacts>, links: &[Bandwidth]) -> Explanation {
    let members = roster
        .members
        .iter()
        .map(|member| ExplainedMember {
            member: member.clone(),
            hop: roster.chain.iter().position(|name| name == &member.name).map(|position| position + 1),
            memory: model.map(|model| memory(member.role, &model)),
        })
        .collect();
    let floors = model.map_or_else(Vec::new, |model| links.iter().map(|link| floor(roster, &model, link)).collect());
    Explanation {
        world_size: roster.world_size,
        members,
        chain: roster.chain.clone(),
        model,
        buckets: model.map(|model| model.buckets()),
        floors,
    }
}

fn memory(role: Role, model: &ModelFacts) -> MemberMemory {
    let gpu = model.gpu_ring.as_ref().map(GpuNeed::of);
    match role {
        Role::Source => {
            let ring = model.bucket_bytes.saturating_mul(model.ring_buckets.min(model.buckets()));
            // While a version arrives, there is one copy more than are kept.
            let copies = model.copies_in(model.retain_bytes).min(model.keep.saturating_add(1));
            let retained = model.bytes.saturating_mul(copies);
            let in_flight = if gpu.is_some() { 0 } else { ring };
            MemberMemory { in_flight, retained, pinned: gpu.is_some() && retained > 0, versions: 0, gpu }
        }
        Role::Rollout => {
            let in_flight = if gpu.is_some() { 0 } else { model.receive_bytes.min(model.bytes) };
            let earlier = model.copies_in(model.retain_bytes).min(model.keep.saturating_sub(1));
            let versions = model.bytes.saturating_mul(earlier.saturating_add(2));
            MemberMemory { in_flight, versions, gpu, ..MemberMemory::default() }
        }
    }
}

fn floor(roster: &Roster, model: &ModelFacts, link: &Bandwidth) -> FloorTime {
    let micros = |bytes: u128| {
        let micros = (bytes * 1_000_000).div_ceil(u128::from(link.bytes_per_second.max(1)));
        u64::try_from(micros).unwrap_or(u64::MAX)
    };
    let copies = roster.chain.len() as u128;
    let bytes = u128::from(model.bytes);
    FloorTime {
        bandwidth: link.clone(),
        chain_us: if copies == 0 { 0 } else { micros(bytes) },
        one_by_one_us: micros(bytes.saturating_mul(copies).min(u128::MAX / 1_000_000)),
    }
}

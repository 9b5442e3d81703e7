//! Which pods form a group, in which order, with which ranks.
//!
//! Pure: takes pods, specs and engine facts; returns candidates, a roster and reasons. It never waits, calls or guesses: it reports what it
//! cannot decide.
//!
//! The steps of a plan, one file each:
//!
//! 1. [`selector`](Selector): the pods that a part of the spec selects; only pods whose label [`ROLE_LABEL`] consents take part.
//! 2. `trainer`: the first pod in order is the source, or the reason why there is none.
//! 3. `replicas`: pods become replicas: one pod, one of several ports in a pod, or a group of pods with a head.
//! 4. `order`: replicas are put in the order that their pool asks for.
//! 5. [`roster()`]: offsets `0, 1, 1 + size, ...` without gaps, and the chain in which bytes travel.
//!
//! Three more questions are answered here: [`explain()`] (bytes, buckets, memory, time), [`gpu_ring()`] (the ring of buckets on each GPU,
//! and whether it fits) and [`sharing()`] (whether agent and engine can share a GPU's memory).

use serde::{Deserialize, Serialize};

use crate::protocol::{MemberName, PodRef, Role};

mod compute;
mod edges;
mod engine_groups;
mod explain;
mod gpu_memory;
mod input;
mod order;
mod outcome;
mod rank_plan;
mod replicas;
mod roster;
mod selector;
mod sharing;
mod trainer;
mod units;

#[cfg(test)]
mod tests;

pub use compute::{Part, part_of, plan};
pub use edges::{Edges, Next, SLOW_PART, arrange, show_rate};
pub use engine_groups::{Joiner, MOST_RANKS, engine_groups};
pub use explain::{Bandwidth, ExplainedMember, Explanation, FloorTime, MemberMemory, ModelFacts, explain};
pub use gpu_memory::{
    CONTEXT_ESTIMATE, GpuNeed, GpuRing, GpuRoom, NCCL_ESTIMATE, NoRing, RingChoice, RingLoad, RingWish, USUAL_LOAD, gpu_ring,
    slots_with_copies,
};
pub use input::{Claim, GroupSpec, Order, PlanInput, PodFacts, PodPhase, PoolSpec, TrainerSpec, WeightSyncRef};
pub use outcome::{LeftOut, LeftOutCode, Plan, PlanRefusal};
pub use rank_plan::{RankPlan, rank_plan};
pub use roster::{chain, roster};
pub use selector::{Operator, Requirement, Selector};
pub use sharing::{Neighbour, NoSharing, ProcessView, Sharing, SharingFacts, expandable_segments, sharing};
pub use units::{show_bytes, show_free};

/// Label by which a pod consents to take part: `trainer` or `rollout`.
pub const ROLE_LABEL: &str = "weightsync.dev/role";

/// Value of [`ROLE_LABEL`] on trainer pods.
pub const ROLE_TRAINER: &str = "trainer";

/// Value of [`ROLE_LABEL`] on rollout pods.
pub const ROLE_ROLLOUT: &str = "rollout";

/// Most ranks of one group. A plan with more is refused, so no sum of sizes can overflow.
pub const MAX_WORLD_SIZE: u32 = 1 << 20;

/// A member that could take part, in the order of the plan. Only [`Roster`](crate::protocol::Roster) assigns ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Candidate {
    /// Stable name.
    pub name: MemberName,
    /// Source or rollout.
    pub role: Role,
    /// Its ranks: by the spec, until the engine reported its size; then both agree.
    pub size: u32,
    /// Its pods, head first.
    pub pods: Vec<PodRef>,
    /// Port of its engine in the head pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
}

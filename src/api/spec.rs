//! What a user asks for: the trainer, the rollouts, and how they are found, ordered and measured.
//!
//! A field is here only when something reads it. Rules over several fields are CEL with a message that says what to change; `validate`
//! repeats them in code.

// Printer columns repeat the names of their arguments; the lint takes that for a mistake.
#![allow(clippy::duplicated_attributes)]

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::canary::Canary;
use super::policy::{Agent, Health, Membership, Readiness, Transport, Update};
use super::pool::Pool;
use super::{PodSelector, WeightSyncStatus};

/// What is asked for: whose weights go where, and by which rules.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, CustomResource, KubeSchema)]
#[kube(
    group = "weightsync.dev",
    version = "v1alpha1",
    kind = "WeightSync",
    plural = "weightsyncs",
    shortname = "ws",
    category = "weightsync",
    namespaced,
    status = "WeightSyncStatus",
    derive = "PartialEq",
    doc = "Keeps the weights that rollout engines serve equal to the weights that a trainer makes.",
    printcolumn(
        name = "Replicas",
        type_ = "string",
        json_path = ".status.replicas.display",
        description = "Replicas that serve the current version, of all."
    ),
    printcolumn(name = "Epoch", type_ = "integer", json_path = ".status.epoch", description = "Number of the group."),
    printcolumn(
        name = "World",
        type_ = "integer",
        json_path = ".status.worldSize",
        description = "Ranks of the group, the source included."
    ),
    printcolumn(
        name = "Version",
        type_ = "integer",
        json_path = ".status.version",
        description = "The last version that at least minReady replicas serve."
    ),
    printcolumn(name = "Transport", type_ = "string", json_path = ".status.transport.name", description = "How bytes travel."),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status",
        description = "Whether at least minReady replicas serve the current version."
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        description = "Why it is ready or not.",
        priority = 1
    ),
    printcolumn(
        name = "Source",
        type_ = "string",
        json_path = ".status.trainer.pod",
        description = "The trainer's pod that sends.",
        priority = 1
    ),
    printcolumn(
        name = "Suspended",
        type_ = "boolean",
        json_path = ".spec.suspend",
        description = "Whether the object is suspended.",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp", description = "Time since the object was made.")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.agent.launch != 'Ephemeral' || !has(self.update.retain) || self.update.retain.hostMiB == 0")
    .message("an ephemeral container's memory is the trainer's, so nothing can be retained there: remove update.retain or choose another agent.launch"))]
#[x_kube(validation = Rule::new("self.agent.launch == 'Ephemeral' || self.rollouts.all(p, !((has(p.engine.vllm) && has(p.engine.vllm.apiKeySecretRef)) || (has(p.engine.sglang) && has(p.engine.sglang.apiKeySecretRef)) || (has(p.engine.lmdeploy) && has(p.engine.lmdeploy.apiKeySecretRef)) || (has(p.engine.fastdeploy) && has(p.engine.fastdeploy.apiKeySecretRef))))")
    .message("apiKeySecretRef works with agent.launch Ephemeral; an agent that was injected gets the key from the pod's annotation weightsync.dev/api-key-secret, an external agent from its own environment"))]
#[x_kube(validation = Rule::new("self.update.pause in ['Abort', 'AbortAwake', 'External'] || !self.rollouts.exists(p, has(p.engine.lmdeploy))")
    .message("LMDeploy has no pause that lets running requests wait or end: set update.pause to Abort, AbortAwake or External"))]
#[x_kube(validation = Rule::new("self.delivery != 'Engine' || self.update.pause != 'Abort' || !self.rollouts.exists(p, has(p.engine.lmdeploy))")
    .message("an LMDeploy that joins a group answers while it loads: set update.pause to AbortAwake or External, or delivery to Agent"))]
#[x_kube(validation = Rule::new("self.delivery == 'Agent' || !has(self.membership.maxUnavailable)")
    .message("only with delivery Agent does a version lie complete before engines switch: remove membership.maxUnavailable, or set delivery to Agent"))]
#[x_kube(validation = Rule::new("!has(self.canary) || (self.delivery != 'External' && self.update.pause != 'External')")
    .message("an engine that the trainer feeds or pauses by itself is not asked by a canary: remove canary, or set delivery and update.pause to something else than External"))]
#[x_kube(validation = Rule::new("!has(self.canary) || self.membership.keep >= 2")
    .message("a canary needs an earlier version to go back to: set membership.keep to 2 or more"))]
#[x_kube(validation = Rule::new("self.delivery != 'Engine' || !has(self.transport) || !has(self.transport.tcp)")
    .message("delivery Engine moves weights by NCCL only: remove transport.tcp, or set delivery to Agent"))]
#[x_kube(validation = Rule::new("self.delivery == 'Agent' || !has(self.transport) || !has(self.transport.gdr)")
    .message("transport gdr is between agents: remove transport.gdr, or set delivery to Agent"))]
#[x_kube(validation = Rule::new("(self.update.pause == 'Abort' && self.update.kvCache == 'Reset') || !self.rollouts.exists(p, has(p.engine.fastdeploy))")
    .message("FastDeploy's pause ends requests and empties caches, and it runs by itself after an update: set update.pause to Abort and update.kvCache to Reset"))]
pub struct WeightSyncSpec {
    /// Releases every pod and does nothing more until it is false again. Pods go on serving what they have.
    #[serde(default)]
    pub suspend: bool,

    /// The version that the group goes back to, and is held at: one that somebody keeps (`membership.keep`, `status.members[].retained`).
    /// Every replica is taken there, verified, without the trainer; a publish is refused meanwhile (`VersionPinned`). If it is taken away
    /// again, the group stays where it is until a version with a higher number than every one before is published. Where no one keeps the
    /// version, everything stays as it is, with the condition `Degraded` and reason `TargetVersionMissing`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 9_007_199_254_740_991_i64))]
    pub target_version: Option<i64>,

    /// What every engine is asked after a switch, before its replica says that it holds the version. A replica whose engine does not answer
    /// within the range does not serve; when most of those that were asked refuse a version, the group goes back to the one before by itself
    /// (condition `Degraded`, reason `VersionRefused`, `status.refused`). If left out, one token is generated and not judged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<Canary>,

    /// The trainer: an ordered set of pods, of which the first is the source.
    pub trainer: Trainer,

    /// Pools of rollouts, in the order of their ranks.
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub rollouts: Vec<Pool>,

    /// Who joins the group. `Agent`: agents join, and hand over to their engine. `Engine`: the engines' own workers join an NCCL group that
    /// the source's agent leads from a GPU; a source that dies in the middle of a broadcast can leave such an engine stuck for good
    /// (`update.onWedged`), which `Agent` cannot. `External`: the trainer's own data plane moves the weights (`weightsync.Topology` in its
    /// process); epochs, ranks, deadlines, readiness and the proof after an update are WeightSync's. `transport`, `update.retain` and
    /// `update.kvCache` play no part then, and pausing is the trainer's business.
    #[serde(default)]
    pub delivery: Delivery,

    /// How bytes travel. If left out: as `auto`. No default is stored, so that another transport may be given later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,

    /// When an engine counts as unhealthy, and as healthy again.
    #[serde(default)]
    pub health: Health,

    /// When a group is formed, and of whom.
    #[serde(default)]
    pub membership: Membership,

    /// What happens to engines in an update.
    #[serde(default)]
    pub update: Update,

    /// How the agents come into the pods.
    #[serde(default)]
    pub agent: Agent,

    /// When pods count as ready.
    #[serde(default)]
    pub readiness: Readiness,
}

/// Who joins the group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Delivery {
    /// Agents join, and hand over to their engine.
    #[default]
    Agent,
    /// The engines' own workers join; the source's agent is rank 0.
    Engine,
    /// The trainer's own data plane moves the weights; agents watch and prove.
    External,
}

/// The trainer's pods.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Trainer {
    /// Its pods. They carry the label `weightsync.dev/role: trainer`.
    pub selector: PodSelector,

    /// Container that runs the trainer. If left out: the one that the pod's annotation `weightsync.dev/container` names, or else the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63), regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub container: Option<String>,

    /// In which order the pods stand; the first is the source. If left out: by ordinal where every pod has one, and otherwise there must
    /// be exactly one pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<TrainerOrder>,
}

/// Order of the trainer's pods.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.by == 'Label') == has(self.label)")
    .message("order.label must be given when order.by is Label, and only then"))]
#[x_kube(validation = Rule::new("(self.by == 'Explicit') == (has(self.names) && self.names.size() > 0)")
    .message("order.names must be given when order.by is Explicit, and only then"))]
#[x_kube(validation = Rule::new("!has(self.names) || self.names.all(n, self.names.exists_one(m, m == n))")
    .message("order.names must not list a pod twice"))]
#[x_kube(validation = Rule::new("!has(self.firstIndex) || self.by in ['Ordinal', 'Label']")
    .message("order.firstIndex has a meaning only when order.by is Ordinal or Label"))]
pub struct TrainerOrder {
    /// What the order goes by: `Ordinal` (StatefulSet ordinal or Job completion index), `Name`, `Label` (an integer label value) or
    /// `Explicit` (a list of names).
    pub by: TrainerOrderBy,

    /// Label whose value, an integer, gives the order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 317))]
    pub label: Option<String>,

    /// Names of the pods, first to last. They must be stable (StatefulSet, LeaderWorkerSet).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    // 63: pods with stable names carry theirs in a label; and the API server refuses a longer one for what comparing them may cost.
    #[schemars(length(max = 100), inner(length(min = 1, max = 63)))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub names: Vec<String>,

    /// Ordinal or label value of the first pod: 0 if left out. A pod with a higher one never takes its place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub first_index: Option<i32>,
}

/// What the order of the trainer's pods goes by: `Ordinal` (StatefulSet ordinal or Job completion index), `Name`, `Label` (an integer
/// label value) or `Explicit` (a list of names).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TrainerOrderBy {
    Ordinal,
    Name,
    Label,
    Explicit,
}

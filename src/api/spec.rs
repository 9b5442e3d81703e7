//! The spec: the trainer, the rollouts, and how they are found, ordered and measured.
//!
//! Each field is read by some code. Rules over several fields are CEL with a message that says what to change; `validate` repeats them in
//! code.

// Printer columns repeat the names of their arguments; the lint takes that for a mistake.
#![allow(clippy::duplicated_attributes)]

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::canary::Canary;
use super::policy::{Agent, Health, Membership, Readiness, Transport, Update};
use super::pool::Pool;
use super::{PodSelector, WeightSyncStatus};

/// The desired state: which trainer's weights go to which rollouts, and by which rules.
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
        description = "Ready replicas / all replicas. Ready ones serve the current version."
    ),
    printcolumn(name = "Epoch", type_ = "integer", json_path = ".status.epoch", description = "Epoch: the number of the group."),
    printcolumn(
        name = "World",
        type_ = "integer",
        json_path = ".status.worldSize",
        description = "World size: ranks of the group, including the source."
    ),
    printcolumn(
        name = "Version",
        type_ = "integer",
        json_path = ".status.version",
        description = "The last version that at least minReady replicas serve."
    ),
    printcolumn(
        name = "Transport",
        type_ = "string",
        json_path = ".status.transport.name",
        description = "Transport in use: tcp, nccl or gdr."
    ),
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
        description = "Reason of the condition Ready.",
        priority = 1
    ),
    printcolumn(name = "Source", type_ = "string", json_path = ".status.trainer.pod", description = "Pod of the source.", priority = 1),
    printcolumn(
        name = "Suspended",
        type_ = "boolean",
        json_path = ".spec.suspend",
        description = "Whether the object is suspended.",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp", description = "Time since creation.")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.agent.launch != 'Ephemeral' || !has(self.update.retainMiB) || self.update.retainMiB == 0")
    .message("an ephemeral container's memory is the trainer's, so nothing can be retained there: remove update.retainMiB or choose another agent.launch"))]
#[x_kube(validation = Rule::new("self.agent.launch == 'Ephemeral' || self.rollouts.all(p, !has(p.engine.apiKeySecretRef))")
    .message("apiKeySecretRef works with agent.launch Ephemeral; an agent that was injected gets the key from the pod's annotation weightsync.dev/api-key-secret, an external agent from its own environment"))]
#[x_kube(validation = Rule::new("self.delivery == 'Agent' || !has(self.membership.maxUnavailable)")
    .message("membership.maxUnavailable needs delivery Agent, where the whole version arrives before engines switch: remove it, or set delivery to Agent"))]
#[x_kube(validation = Rule::new("!has(self.canary) || (self.delivery != 'External' && self.update.pause != 'External')")
    .message("a canary does not work if the trainer feeds or pauses the engines: remove canary, or change delivery and update.pause from External"))]
#[x_kube(validation = Rule::new("!has(self.canary) || self.membership.keep >= 2")
    .message("a canary needs an earlier version to go back to: set membership.keep to 2 or more"))]
#[x_kube(validation = Rule::new("self.delivery != 'Engine' || self.transport.type in ['Auto', 'NCCL']")
    .message("delivery Engine moves weights by NCCL only: set transport.type to Auto or NCCL, or delivery to Agent"))]
#[x_kube(validation = Rule::new("self.delivery != 'External' || self.transport.type != 'GDR'")
    .message("transport GDR works between agents only: set transport.type to Auto, or delivery to Agent"))]
pub struct WeightSyncSpec {
    /// Whether the object is suspended. `true` releases every pod: pods continue to serve their current weights, and no group is formed
    /// until it is `false` again. Default: `false`.
    #[serde(default)]
    pub suspend: bool,

    /// A kept version that the group goes back to and stays at, such as `41` (`membership.keep`; `status.members[].retained` lists the kept
    /// versions). Every replica is switched to it and verified, with or without the trainer. A publish is refused meanwhile
    /// (`VersionPinned`). After the field is removed, the group stays at this version until a higher number than all before is published.
    /// If no member keeps the version, nothing changes, and the condition `Degraded` has the reason `TargetVersionMissing`. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 9_007_199_254_740_991_i64))]
    pub target_version: Option<i64>,

    /// A test that every engine must pass after a switch, before its replica reports the version: log-probs of a fixed prompt within a
    /// range. A replica outside the range does not serve. When most of the tested replicas refuse a version, the group returns to the
    /// previous one by itself (condition `Degraded`, reason `VersionRefused`, `status.refused`). Default: none; one token is generated and
    /// not judged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<Canary>,

    /// The trainer: an ordered set of pods. The first is the source.
    pub trainer: Trainer,

    /// Pools of rollouts (1 to 16), in the order of their ranks.
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub rollouts: Vec<Pool>,

    /// Which processes join the group and move the bytes. `Agent` (default): agents join, and hand the weights to their engine. `Engine`:
    /// the engines' own workers join an NCCL group that the source's agent leads from a GPU. A source that dies in the middle of a
    /// broadcast can leave such an engine stuck permanently (`update.onWedged`); `Agent` does not have this risk. `External`: the trainer's
    /// own data plane moves the weights (`weightsync.Topology` in its process). WeightSync then provides epochs, ranks, deadlines,
    /// readiness and the proof after an update. The trainer pauses the engines, and `transport`, `update.retainMiB` and `update.kvCache` have
    /// no effect.
    #[serde(default)]
    pub delivery: Delivery,

    /// How bytes travel between members.
    #[serde(default)]
    pub transport: Transport,

    /// When an engine counts as unhealthy, and as healthy again.
    #[serde(default)]
    pub health: Health,

    /// When a group is formed, and which replicas may be in it.
    #[serde(default)]
    pub membership: Membership,

    /// What happens to engines in an update.
    #[serde(default)]
    pub update: Update,

    /// How the agents are put into the pods.
    #[serde(default)]
    pub agent: Agent,

    /// When pods count as ready.
    #[serde(default)]
    pub readiness: Readiness,
}

/// Which processes join the group and move the bytes.
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
    /// Selects its pods. They need the label `weightsync.dev/role: trainer`. The trainer runs in the container that the pod's annotation
    /// `weightsync.dev/container` names, or else in the first one.
    pub selector: PodSelector,

    /// Order of the pods; the first is the source. Default: by ordinal (StatefulSet ordinal or Job completion index) if every pod has one,
    /// from 0; otherwise there must be exactly one pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<Order>,
}

/// Order of pods: exactly one of the fields.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.label) != (has(self.names) && self.names.size() > 0)")
    .message("an order goes by a label or by names: give exactly one of order.label and order.names"))]
#[x_kube(validation = Rule::new("!has(self.names) || self.names.all(n, self.names.exists_one(m, m == n))")
    .message("order.names must not list a pod twice"))]
pub struct Order {
    /// Key of the label whose value gives the order, such as `example.com/rank`. Rollouts: integers by value, other values after them. The
    /// values of a trainer's pods must be integers, and the source has 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 317))]
    pub label: Option<String>,

    /// Names of the pods (of the heads, if a replica has several pods), first to last; at most 100. They must be stable (StatefulSet,
    /// LeaderWorkerSet).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    // 63: pods with stable names carry theirs in a label; and the API server refuses a longer one for what comparing them may cost.
    #[schemars(length(max = 100), inner(length(min = 1, max = 63)))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub names: Vec<String>,
}

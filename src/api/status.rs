//! The observed state. Only the controller writes it, by server-side apply.
//!
//! Numbers of the agents' protocol are unsigned. A Kubernetes schema has signed numbers only, so larger ones become the largest signed
//! number.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::KubeSchema;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// Most members that status lists; the counts include the rest.
pub const MAX_MEMBERS: usize = 64;

/// Annotation of an object that requests a new measurement of all its edges, with any new value.
pub const PREFLIGHT_ANNOTATION: &str = "weightsync.dev/preflight";
/// Longest accepted value of that annotation, in characters.
pub const LONGEST_REQUEST: usize = 64;

/// The observed state.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct WeightSyncStatus {
    /// Generation of the spec that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// `Ready`, `Progressing`, `Accepted`, `Degraded`. Their reasons are a closed list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,

    /// Number of the group; only grows. It is written before any agent receives it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,

    /// Term of the leader that wrote the epoch: above the term of every leader before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub term: Option<i64>,

    /// World size: ranks of the group, including the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub world_size: Option<i32>,

    /// How bytes travel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<TransportStatus>,

    /// What the pre-flight of the group found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preflight: Option<PreflightStatus>,

    /// The last version that at least minReady replicas serve.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<i64>,

    /// Digest of that version's manifest (blake3, hex).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub manifest: Option<String>,

    /// The highest version that was ever served or refused, if `version` is an earlier one: the next publish must be higher.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rolled_back_from: Option<i64>,

    /// Versions that most replicas refused by their canary, the highest last; at most 16. They are never delivered again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub refused: Vec<i64>,

    /// The latest update.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_update: Option<LastUpdate>,

    /// Number of replicas, and of those that serve the current version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<ReplicaCount>,

    /// Members: sources first, then rollouts by rank, then those outside the group. At most 64; `replicas` counts all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub members: Vec<MemberStatus>,

    /// The source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trainer: Option<TrainerStatus>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConditionType {
    /// At least minReady replicas serve the current version, and the next one can be published.
    Ready,
    /// A group is being formed, an update runs, or members that lag are fed.
    Progressing,
    /// The spec is valid, and no older object claims the pods.
    Accepted,
    /// Something is wrong; the message names it.
    Degraded,
}

impl ConditionType {
    /// All types, in the order in which status shows them.
    pub const ALL: [Self; 4] = [Self::Ready, Self::Progressing, Self::Accepted, Self::Degraded];

    /// When the condition is true, for documentation.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Ready => "at least `minReady` replicas serve the current version, and the next one can be published",
            Self::Progressing => "a group is being formed, an update runs, or members that lag are fed",
            Self::Accepted => "the spec is valid, and no older object claims the pods",
            Self::Degraded => "something is wrong; the message names it",
        }
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "Ready",
            Self::Progressing => "Progressing",
            Self::Accepted => "Accepted",
            Self::Degraded => "Degraded",
        }
    }
}

/// How bytes travel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TransportStatus {
    /// The transport in use: `tcp`, `nccl` or `gdr`.
    #[schemars(length(max = 32))]
    pub name: String,

    /// Why this transport was chosen.
    #[schemars(length(max = 1024))]
    pub reason: String,
}

/// What the pre-flight of the group found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct PreflightStatus {
    /// `Running` or `Done`.
    #[schemars(length(max = 32))]
    pub state: String,

    /// The transport that was measured.
    #[schemars(length(max = 32))]
    pub transport: String,

    /// Value of the annotation `weightsync.dev/preflight` that requested it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 64))]
    pub request: String,

    /// Edges that were measured for this group; the others were known before.
    pub measured: i32,

    /// Total time of those measurements, in milliseconds.
    pub milliseconds: i64,

    /// Edges of the planned chain, and others that decided its order; slow and broken edges first. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["from".into(), "to".into()]))]
    pub edges: Vec<EdgeStatus>,
}

/// One edge of a chain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EdgeStatus {
    /// The member that sends.
    #[schemars(length(min = 1, max = 384))]
    pub from: String,

    /// The member that receives.
    #[schemars(length(min = 1, max = 384))]
    pub to: String,

    /// Node of the sender; its pod if the node is not known.
    #[schemars(length(max = 253))]
    pub from_node: String,

    /// Node of the receiver; its pod if the node is not known.
    #[schemars(length(max = 253))]
    pub to_node: String,

    /// `Good`, `Slow`, `Broken` or `Unmeasured`.
    pub verdict: EdgeVerdict,

    /// Bytes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<i64>,

    /// The shortest round trip of a call, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_trip_microseconds: Option<i64>,

    /// MTU of the path, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<i32>,

    /// How far the receiver's clock is ahead of the sender's, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_milliseconds: Option<i64>,

    /// Why it is slow, broken or unmeasured.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub message: String,
}

/// Result of measuring an edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum EdgeVerdict {
    Good,
    Slow,
    Broken,
    Unmeasured,
}

impl EdgeVerdict {
    /// Its name as a label of a metric.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Slow => "slow",
            Self::Broken => "broken",
            Self::Unmeasured => "unmeasured",
        }
    }
}

/// Number of replicas.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaCount {
    /// All replicas, present or expected.
    pub total: i32,

    /// Replicas that serve the current version.
    pub ready: i32,

    /// Both, as `ready/total`.
    #[schemars(length(max = 32))]
    pub display: String,
}

impl ReplicaCount {
    pub fn new(ready: u32, total: u32) -> Self {
        let signed = |count: u32| i32::try_from(count).unwrap_or(i32::MAX);
        Self { total: signed(total), ready: signed(ready), display: format!("{ready}/{total}") }
    }
}

/// The latest update.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastUpdate {
    /// Its version.
    pub version: i64,

    /// Attempts, from 1.
    pub attempt: i32,

    /// Its state: `Begin`, `Transfer`, `Verify`, `Staged`, `Activate`, `Done` or `Failed`.
    #[schemars(length(max = 32))]
    pub state: String,

    /// Bytes of the version.
    pub bytes: i64,

    /// Whether it was a feeding: the current version for members that lacked it.
    #[serde(default)]
    pub feeding: bool,

    /// Time of each finished phase.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub phases: Vec<PhaseTime>,

    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub failure: Option<String>,
}

/// Time of one phase.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PhaseTime {
    /// The phase: `begin`, `transfer`, `verify`, `activate`.
    #[schemars(length(min = 1, max = 32))]
    pub name: String,

    /// Its time in milliseconds.
    pub milliseconds: i64,
}

/// One member.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct MemberStatus {
    /// Its name: `trainer/POD`, `POOL/POD`, `POOL/POD:PORT` or `POOL/GROUP`.
    #[schemars(length(min = 1, max = 384))]
    pub name: String,

    /// Names of its pods, head first; at most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(max = 253)))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub pods: Vec<String>,

    /// Its first rank; absent outside a group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank_offset: Option<i32>,

    /// Number of its ranks.
    pub size: i32,

    /// Its state: `Ready`, `Updating`, `Behind` (lacks the current version), `Dirty` (must be fed in full before it serves), `Unknown` (its
    /// engine's version is not known; it does not serve until the version is proven or fed), `Forming`, `Waiting` or `Out`.
    pub state: MemberStateName,

    /// The version that its engine serves, if it was confirmed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<i64>,

    /// What shows that its engine holds the bytes of that version: `Digests` (of every tensor, in the memory or files that the engine loaded
    /// from), `Engine` (the engine's own checksums after the load agree with those of most replicas of its pool), or `Nothing` (only the
    /// engine's responses). Absent if its agent did not switch the engine itself, as after a restart of the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proven_by: Option<ProofName>,

    /// Versions that its agent keeps complete and verified; `targetVersion` can name them. At most 32.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub retained: Vec<i64>,

    /// Latest end of the current pause of its engine by WeightSync.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused_until: Option<Time>,

    /// How the last version came that it received, as it measured it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_transfer: Option<TransferStatus>,

    /// What it reads the memory of others with, where the transport is `gdr`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gdr: Option<GdrStatus>,

    /// Reason of the state, from the closed list.
    #[schemars(length(min = 1, max = 64))]
    pub reason: String,

    /// The cause in words.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub message: String,
}

/// How the bytes of a version came to a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TransferStatus {
    /// The version.
    pub version: i64,

    /// The member that sent it: the one before in the chain, the one whose memory was read, or over NCCL the source.
    #[schemars(length(min = 1, max = 384))]
    pub from: String,

    /// How the bytes travelled: `tcp`, `nccl` or `gdr`. Joiners receive over `tcp`, whatever the group uses.
    #[schemars(length(max = 32))]
    pub transport: String,

    /// Bytes received.
    pub bytes: i64,

    /// Time from the first byte to the last. It includes waits for the sender.
    pub milliseconds: i64,

    /// Bytes a second in that time.
    pub bytes_per_second: i64,
}

/// What a member reads the memory of others with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct GdrStatus {
    /// File of NIXL's library.
    #[schemars(length(max = 512))]
    pub library: String,

    /// Version of NIXL, where the file belongs to a package.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub version: Option<String>,

    /// NIXL's plugin.
    #[schemars(length(max = 64))]
    pub plugin: String,

    /// Transports that the plugin may use, by UCX's names; at most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(max = 64)))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub transports: Vec<String>,

    /// Network devices by the memory that they serve; at most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["memory".into()]))]
    pub devices: Vec<GdrDevices>,
}

/// Network devices that serve the buffers of one GPU, or those in host memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct GdrDevices {
    /// UUID of the GPU, or `host`.
    #[schemars(length(min = 1, max = 64))]
    pub memory: String,

    /// Devices and ports, e.g. `mlx5_0:1`; at most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(max = 64)))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub names: Vec<String>,
}

/// State of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum MemberStateName {
    Ready,
    Updating,
    Behind,
    Dirty,
    Unknown,
    Forming,
    Waiting,
    Out,
}

/// What shows that an engine holds the bytes of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ProofName {
    Digests,
    Engine,
    Nothing,
}

/// The source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TrainerStatus {
    /// Name of its pod.
    #[schemars(length(max = 253))]
    pub pod: String,

    /// UID of its pod.
    #[schemars(length(max = 128))]
    pub uid: String,
}

/// Conditions with the limits that Kubernetes' own types have; the type of `k8s-openapi` carries none.
fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 16,
        "items": {
            "type": "object",
            "description": "One aspect of the object's state.",
            "required": ["lastTransitionTime", "message", "reason", "status", "type"],
            "properties": {
                "lastTransitionTime": {"type": "string", "format": "date-time", "description": "When the status last changed."},
                "message": {"type": "string", "maxLength": 32768, "description": "The cause in words."},
                "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0, "description": "Generation of the spec that this condition describes."},
                "reason": {"type": "string", "minLength": 1, "maxLength": 1024, "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", "description": "Reason of the status, from the closed list."},
                "status": {"type": "string", "enum": ["True", "False", "Unknown"], "description": "Whether the condition holds."},
                "type": {"type": "string", "minLength": 1, "maxLength": 316, "pattern": "^[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?$", "description": "Type of the condition."},
            },
        },
    })
}

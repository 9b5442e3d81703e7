//! The policies of a group: transport, health, membership, updates, agents, readiness. All have defaults that work for a first try.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::KubeSchema;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// How bytes travel between members.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.ncclEnv) || self.ncclEnv.all(n, n in ['NCCL_ALGO', 'NCCL_BUFFSIZE', 'NCCL_CROSS_NIC', 'NCCL_CUMEM_ENABLE', 'NCCL_DEBUG', 'NCCL_DEBUG_SUBSYS', 'NCCL_IB_DISABLE', 'NCCL_IB_GID_INDEX', 'NCCL_IB_HCA', 'NCCL_IB_QPS_PER_CONNECTION', 'NCCL_IB_RETRY_CNT', 'NCCL_IB_SL', 'NCCL_IB_TC', 'NCCL_IB_TIMEOUT', 'NCCL_MAX_NCHANNELS', 'NCCL_MIN_NCHANNELS', 'NCCL_NET_GDR_LEVEL', 'NCCL_NVLS_ENABLE', 'NCCL_P2P_DISABLE', 'NCCL_P2P_LEVEL', 'NCCL_PROTO', 'NCCL_SHM_DISABLE', 'NCCL_SOCKET_FAMILY', 'NCCL_SOCKET_IFNAME'])")
    .message("transport.ncclEnv takes settings of NCCL from a fixed list only, none that loads code or writes files: see the reference"))]
pub struct Transport {
    /// The transport. `Auto` (default): the best one that all members support; `status.transport` shows which one, and why. `TCP`: a chain
    /// of connections between the agents; every member forwards while it receives. `NCCL`: broadcasts between the GPUs of the members.
    /// `GDR`: GPU-direct RDMA; each member reads from the registered memory of the previous member, through NIXL. With `NCCL` and `GDR`,
    /// members that cannot take part are left out, and the bytes are not encrypted.
    #[serde(default, rename = "type")]
    pub kind: TransportType,

    /// Whether TCP connections that carry weights are encrypted. With `false`, members still authenticate to each other over TLS when a
    /// group is formed. Default: `true`; on one host (`weightsync local`) `false`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<bool>,

    /// Length of a bucket, in MiB, such as 16: the unit in which bytes travel and are buffered. Default: chosen by the size of the model,
    /// and on GPUs by their free memory.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "bucketMiB")]
    #[schemars(range(min = 1, max = 1024))]
    pub bucket_mib: Option<i32>,

    /// Environment variables for NCCL in the agents' workers, such as `NCCL_IB_HCA: mlx5_0`. Allowed: `NCCL_ALGO`, `NCCL_BUFFSIZE`,
    /// `NCCL_CROSS_NIC`, `NCCL_CUMEM_ENABLE`, `NCCL_DEBUG`, `NCCL_DEBUG_SUBSYS`, `NCCL_IB_DISABLE`, `NCCL_IB_GID_INDEX`, `NCCL_IB_HCA`,
    /// `NCCL_IB_QPS_PER_CONNECTION`, `NCCL_IB_RETRY_CNT`, `NCCL_IB_SL`, `NCCL_IB_TC`, `NCCL_IB_TIMEOUT`, `NCCL_MAX_NCHANNELS`,
    /// `NCCL_MIN_NCHANNELS`, `NCCL_NET_GDR_LEVEL`, `NCCL_NVLS_ENABLE`, `NCCL_P2P_DISABLE`, `NCCL_P2P_LEVEL`, `NCCL_PROTO`,
    /// `NCCL_SHM_DISABLE`, `NCCL_SOCKET_FAMILY`, `NCCL_SOCKET_IFNAME`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "nccl_env")]
    pub nccl_env: BTreeMap<String, String>,

    /// Whether `NCCL` and `GDR` may use TCP sockets where no RDMA device serves. `false` (default): such a member is refused, with the
    /// cause; over `NCCL` only if its host has an RDMA device. For `GDR`, TCP is slower than the transport `TCP` and without access checks:
    /// for tests only.
    #[serde(default)]
    pub allow_tcp: bool,

    /// Whether the edges of a chain are measured: `Auto` (once for each new pair of nodes, between updates) or `Off`. A rollout with a slow
    /// edge goes to the end of the chain, or is left out while `minReady` others are in the group. A rollout with a broken edge is left
    /// out. Default: `Auto`; on one host (`weightsync local`) `Off`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preflight: Option<Preflight>,
}

/// A transport.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TransportType {
    #[default]
    Auto,
    #[serde(rename = "TCP")]
    Tcp,
    #[serde(rename = "NCCL")]
    Nccl,
    #[serde(rename = "GDR")]
    Gdr,
}

/// Whether edges are measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Preflight {
    #[default]
    Auto,
    Off,
}

/// NCCL settings that an object may set. None of them loads code, reads or writes files, or affects anything outside the group.
pub const NCCL_ENV: [&str; 24] = [
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_CROSS_NIC",
    "NCCL_CUMEM_ENABLE",
    "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_IB_DISABLE",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_HCA",
    "NCCL_IB_QPS_PER_CONNECTION",
    "NCCL_IB_RETRY_CNT",
    "NCCL_IB_SL",
    "NCCL_IB_TC",
    "NCCL_IB_TIMEOUT",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_FAMILY",
    "NCCL_SOCKET_IFNAME",
];

fn nccl_env(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 24,
        "additionalProperties": {"type": "string", "maxLength": 256},
    })
}

/// When an engine counts as unhealthy, and as healthy again. A pause by WeightSync never counts as a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Health {
    /// Time between two probes, in seconds. Default: 2.
    #[serde(default = "two")]
    #[schemars(range(min = 1, max = 300))]
    pub period_seconds: i32,

    /// Longest time of one probe, in seconds. Default: 5.
    #[serde(default = "five")]
    #[schemars(range(min = 1, max = 300))]
    pub timeout_seconds: i32,

    /// Consecutive failures that make an engine unhealthy: its replica leaves the group. One success makes it healthy again. Default: 3.
    #[serde(default = "three")]
    #[schemars(range(min = 1, max = 100))]
    pub failure_threshold: i32,
}

/// When a group is formed, and which replicas may be in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Membership {
    /// Replicas that must confirm a version for it to count: a number, or a share of all replicas such as `50%`, rounded up. Default: 1. A
    /// publish succeeds, and `status.version` moves, when so many replicas serve the version.
    #[serde(default = "one_replica")]
    #[x_kube(validation = Rule::new("string(self).matches('^([1-9][0-9]{0,4}|([1-9][0-9]?|100)%)$')")
        .message("minReady must be a number from 1 to 99999, or a percentage from \"1%\" to \"100%\""))]
    pub min_ready: IntOrString,

    /// Replicas that may be out of service at once because of an update: a number, or a share of all replicas such as `25%`, rounded down,
    /// at least one. Default: none; all replicas switch at once. The others serve their old version until their switch, while the new
    /// version is complete in memory. So the field needs engines that load from files, and does not work with `delivery: Engine` and
    /// `External`. A replica whose switch fails stays out of service: a version that every engine refuses costs that many replicas, and its
    /// publish fails. Once `minReady` replicas serve a version, replicas with an older one are not ready, unless they are about to be
    /// switched: set `minReady` to most of the replicas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("string(self).matches('^([1-9][0-9]{0,4}|([1-9][0-9]?|100)%)$')")
        .message("maxUnavailable must be a number from 1 to 99999, or a percentage from \"1%\" to \"100%\""))]
    pub max_unavailable: Option<IntOrString>,

    /// How far apart versions in service may be, by their numbers. A replica is ready while its version is at most so much older than the
    /// newest version in service. A replica further ahead of `status.version` is not ready until its own version counts (readiness gate and
    /// roster only; a sidecar's probe lets it serve). With 1, a replica that failed to switch serves until the version after the next. With
    /// 0, only one version is in service at any time; set `minReady` to about half then. Default: none; replicas with an older version than
    /// `status.version` are not ready, unless they are about to be switched (`maxUnavailable`). While a group goes back, both versions are
    /// in service until `minReady` replicas were taken back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 9_007_199_254_740_991_i64))]
    pub max_skew: Option<i64>,

    /// Number of versions that agents keep, including the current one, so that `targetVersion` can name an earlier one. Default: 1. The
    /// source and rollouts whose engine loads from files keep what fits into `update.retainMiB` and their pod's memory. The least recently
    /// used version is dropped first.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 16))]
    pub keep: i32,

    /// When a replica outside the group may join it: `Immediate` (default), or with the `NextVersion`.
    #[serde(default)]
    pub join: Join,
}

/// When a replica may join the group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Join {
    #[default]
    Immediate,
    NextVersion,
}

/// What happens to engines in an update.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.silenceSeconds <= self.timeoutSeconds")
    .message("update.silenceSeconds must not be longer than update.timeoutSeconds"))]
pub struct Update {
    /// What happens to running requests during a switch. `Keep` (default): they stop and continue with the new weights. `Drain`: they end
    /// first. `Abort`: they are aborted. `AbortAwake`: as `Abort`, but an LMDeploy that can be fed awake answers requests meanwhile; such
    /// answers may mix both versions, and the time is reported. `External`: the trainer pauses the engines. Not every engine supports every
    /// value.
    #[serde(default)]
    pub pause: Pause,

    /// What happens to the KV and prefix cache after a switch: `Reset` (default), or `Keep` (answers may mix both versions).
    #[serde(default)]
    pub kv_cache: KvCache,

    /// Longest time of an update, in seconds, even if bytes move. It is also the longest time that WeightSync keeps an engine paused.
    /// Default: 600.
    #[serde(default = "ten_minutes")]
    #[schemars(range(min = 1, max = 86_400))]
    pub timeout_seconds: i32,

    /// Longest wait in which no byte moves, in seconds. Then the attempt ends. Raise it if the trainer needs longer to gather one tensor, for
    /// instance of a model that is sharded over many hosts. Default: 10.
    #[serde(default = "ten")]
    #[schemars(range(min = 1, max = 3600))]
    pub silence_seconds: i32,

    /// Host memory for kept versions in each agent, in MiB, such as 65536: of the source to retry and to feed joiners, and of every agent to
    /// go back (`membership.keep`). During an update the source keeps one version more than `membership.keep` if all fit; otherwise it
    /// drops the oldest first. In a rollout, the versions that its engine held before count. A version that does not fit is not kept. 0
    /// keeps nothing: rollouts that hold the version feed joiners. Default: what fits, and nothing in an ephemeral container. In any case
    /// it must fit into the container's limits, its volume, and the available memory of the node.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "retainMiB")]
    #[schemars(range(min = 0, max = 67_108_864))]
    pub retain_mib: Option<i64>,

    /// Digest of tensors where bytes pass through members (the TCP chain, feeding). `Blake3` (default) detects a member that forwards other
    /// bytes than it received. `Xxh3` is faster on few cores and trusts all members. Between GPUs it is always gsum64.
    #[serde(default)]
    pub digest: Digest,

    /// What happens to a pod whose engine is wedged: its HTTP front answers, but it computes nothing (condition `Degraded`, reason
    /// `EngineWedged`). `Report` (default): it is only reported. `RestartPod`: the pod is deleted, so that its owner creates another one.
    #[serde(default)]
    pub on_wedged: OnWedged,
}

/// Digest of tensors where bytes pass through members.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Digest {
    /// Cryptographic: no member can find other bytes with the same digest.
    #[default]
    Blake3,
    /// Fast: trusts all members.
    Xxh3,
}

/// What happens to a pod whose engine is wedged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnWedged {
    /// It is reported only.
    #[default]
    Report,
    /// It is deleted, so that its owner creates another one.
    RestartPod,
}

/// What happens to running requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Pause {
    #[default]
    Keep,
    Drain,
    Abort,
    AbortAwake,
    External,
}

/// What happens to the KV and prefix cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum KvCache {
    Keep,
    #[default]
    Reset,
}

/// How the agents are put into the pods.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Agent {
    /// `Sidecar` (default): a native sidecar, added when the pod is created, by the chart's admission policy or webhook, or by
    /// `kubectl weightsync inject`. `Wrap`: added in the same way, to pods with the annotation `weightsync.dev/inject: wrap`; the container's own command runs
    /// as a child of the agent and shares GPUs and memory with it. `Ephemeral`: the controller adds an ephemeral container to running pods;
    /// for trials, without kept versions, at most 20 launches for one pod. `External`: something else starts `weightsync agent`.
    #[serde(default)]
    pub launch: Launch,
}

/// How the agents are put into the pods.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Launch {
    #[default]
    Sidecar,
    Wrap,
    Ephemeral,
    External,
}

/// When pods count as ready.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Readiness {
    /// Whether pods are ready before the first version: `Serve` (default; they are as ready as their engine) or `Hold` (they wait for the
    /// first version).
    #[serde(default)]
    pub before_first_version: BeforeFirstVersion,
}

/// Whether pods are ready before the first version.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum BeforeFirstVersion {
    #[default]
    Serve,
    Hold,
}

impl Default for Health {
    fn default() -> Self {
        Self { period_seconds: two(), timeout_seconds: five(), failure_threshold: three() }
    }
}

impl Default for Membership {
    fn default() -> Self {
        Self { min_ready: one_replica(), max_unavailable: None, max_skew: None, keep: one(), join: Join::default() }
    }
}

impl Default for Update {
    fn default() -> Self {
        Self {
            pause: Pause::default(),
            kv_cache: KvCache::default(),
            timeout_seconds: ten_minutes(),
            silence_seconds: ten(),
            retain_mib: None,
            digest: Digest::default(),
            on_wedged: OnWedged::default(),
        }
    }
}

fn one() -> i32 {
    1
}

fn two() -> i32 {
    2
}

fn three() -> i32 {
    3
}

fn five() -> i32 {
    5
}

fn ten() -> i32 {
    10
}

fn ten_minutes() -> i32 {
    600
}

fn one_replica() -> IntOrString {
    IntOrString::Int(1)
}

//! The policies of a group: transport, health, membership, updates, agents, readiness. All have defaults that work for a first try.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::KubeSchema;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// How bytes travel: at most one of the transports, and whether edges are measured. Without a transport: the same as `auto: {}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(has(self.auto) ? 1 : 0) + (has(self.tcp) ? 1 : 0) + (has(self.nccl) ? 1 : 0) + (has(self.gdr) ? 1 : 0) + (has(self.preflight) && !has(self.auto) && !has(self.tcp) && !has(self.nccl) && !has(self.gdr) ? 1 : 0) == 1").message("exactly one transport must be given: auto, tcp, nccl or gdr"))]
pub struct Transport {
    /// The best transport that all members support. `status.transport` shows which one, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto: Option<Auto>,

    /// TCP between the agents, as a chain: every member forwards while it receives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp: Option<Tcp>,

    /// NCCL broadcasts between the GPUs of the members; the chain of connections carries only control data. Members without a GPU of their
    /// own are left out. Traffic between GPUs is not encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nccl: Option<Nccl>,

    /// GPU-direct RDMA: each member reads from the registered memory of the previous member, through NIXL. Members without NIXL, or without
    /// an RDMA device, are left out. The reads are not encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gdr: Option<Gdr>,

    /// Whether the edges of a chain are measured: `Auto` (default; once for each new pair of nodes, between updates), or `Off`. A rollout
    /// with a slow edge goes to the end of the chain, or is left out while `minReady` others are in the group. A rollout with a broken edge
    /// is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preflight: Option<Preflight>,
}

/// Whether edges are measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Preflight {
    #[default]
    Auto,
    Off,
}

/// Reads through NIXL, along the chain.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Gdr {
    /// Length of one registered buffer, in MiB. Default: 16.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "bucketMiB")]
    #[schemars(range(min = 1, max = 1024))]
    pub bucket_mib: Option<i32>,

    /// Registered buffers of each member. Default: 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 64))]
    pub buffers: Option<i32>,

    /// Whether reads may go over TCP if a member has no RDMA device. Slower than `tcp`, and without access checks: for tests only. Default:
    /// `false`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_tcp: Option<bool>,
}

/// NCCL broadcasts between GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.env) || self.env.all(n, n in ['NCCL_ALGO', 'NCCL_BUFFSIZE', 'NCCL_CROSS_NIC', 'NCCL_CUMEM_ENABLE', 'NCCL_DEBUG', 'NCCL_DEBUG_SUBSYS', 'NCCL_IB_DISABLE', 'NCCL_IB_GID_INDEX', 'NCCL_IB_HCA', 'NCCL_IB_QPS_PER_CONNECTION', 'NCCL_IB_RETRY_CNT', 'NCCL_IB_SL', 'NCCL_IB_TC', 'NCCL_IB_TIMEOUT', 'NCCL_MAX_NCHANNELS', 'NCCL_MIN_NCHANNELS', 'NCCL_NET_GDR_LEVEL', 'NCCL_NVLS_ENABLE', 'NCCL_P2P_DISABLE', 'NCCL_P2P_LEVEL', 'NCCL_PROTO', 'NCCL_SHM_DISABLE', 'NCCL_SOCKET_FAMILY', 'NCCL_SOCKET_IFNAME'])")
    .message("transport.nccl.env takes settings of NCCL from a fixed list only, none that loads code or writes files: see the reference"))]
pub struct Nccl {
    /// Length of one buffer of the ring on each GPU, in MiB, such as 512. Default: chosen by free memory.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "bucketMiB")]
    #[schemars(range(min = 1, max = 16_384))]
    pub bucket_mib: Option<i32>,

    /// Number of buffers of the ring on each GPU, such as 3. Default: chosen by free memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 64))]
    pub buffers: Option<i32>,

    /// Environment variables for NCCL in the agents' workers, such as `NCCL_IB_HCA: mlx5_0`. Allowed: `NCCL_ALGO`, `NCCL_BUFFSIZE`,
    /// `NCCL_CROSS_NIC`, `NCCL_CUMEM_ENABLE`, `NCCL_DEBUG`, `NCCL_DEBUG_SUBSYS`, `NCCL_IB_DISABLE`, `NCCL_IB_GID_INDEX`, `NCCL_IB_HCA`,
    /// `NCCL_IB_QPS_PER_CONNECTION`, `NCCL_IB_RETRY_CNT`, `NCCL_IB_SL`, `NCCL_IB_TC`, `NCCL_IB_TIMEOUT`, `NCCL_MAX_NCHANNELS`,
    /// `NCCL_MIN_NCHANNELS`, `NCCL_NET_GDR_LEVEL`, `NCCL_NVLS_ENABLE`, `NCCL_P2P_DISABLE`, `NCCL_P2P_LEVEL`, `NCCL_PROTO`,
    /// `NCCL_SHM_DISABLE`, `NCCL_SOCKET_FAMILY`, `NCCL_SOCKET_IFNAME`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "nccl_env")]
    pub env: BTreeMap<String, String>,

    /// Whether broadcasts may pass TCP sockets between hosts although a member has an RDMA device. Without it such a member is refused, with the
    /// cause. Members without an RDMA device are never refused for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_tcp: Option<bool>,
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

/// No settings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Auto {}

/// TCP between the agents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Tcp {
    /// Whether weights are encrypted in transit. With `false`, members still authenticate to each other over TLS when a group is formed.
    /// Default: `true`.
    #[serde(default = "yes")]
    pub tls: bool,

    /// Length of a bucket, in MiB, such as 16. Default: chosen by the size of the model.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "bucketMiB")]
    #[schemars(range(min = 1, max = 1024))]
    pub bucket_mib: Option<i32>,
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

    /// Consecutive failures that make an engine unhealthy: its replica leaves the group. Default: 3.
    #[serde(default = "three")]
    #[schemars(range(min = 1, max = 100))]
    pub failure_threshold: i32,

    /// Consecutive successes that make it healthy again: its replica may join. Default: 1.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 100))]
    pub success_threshold: i32,
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
    /// source and rollouts whose engine loads from files keep what fits into `update.retain` and their pod's memory. The least recently
    /// used version is dropped first.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 16))]
    pub keep: i32,

    /// When a replica outside the group may join it: `Immediate` (default), or with the `NextVersion`.
    #[serde(default)]
    pub join: Join,

    /// Time that a join waits for others, in seconds, so that many new pods need few new groups. Default: 1.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 600))]
    pub debounce_seconds: i32,
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

    /// Longest wait in which no byte moves, in seconds. Then the attempt ends. Default: 10.
    #[serde(default = "ten")]
    #[schemars(range(min = 1, max = 3600))]
    pub silence_seconds: i32,

    /// Memory for kept versions: of the source to retry and to feed joiners, and of every agent to go back (`membership.keep`). Default:
    /// what fits, and nothing in an ephemeral container. In any case it must fit into the container's limits, its volume, and the available
    /// memory of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retain: Option<Retain>,

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

/// Memory for kept versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Retain {
    /// Host memory for kept versions in each agent, in MiB, such as 65536. During an update the source keeps one version more than
    /// `membership.keep` if all fit; otherwise it drops the oldest first. In a rollout, the versions that its engine held before count. A
    /// version that does not fit is not kept. 0 keeps nothing: rollouts that hold the version feed joiners.
    #[serde(rename = "hostMiB")]
    #[schemars(range(min = 0, max = 67_108_864))]
    pub host_mib: i64,
}

/// How the agents are put into the pods.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Agent {
    /// `Sidecar` (default): a native sidecar, added when the pod is created, by the chart's admission policy or `kubectl weightsync
    /// inject`. `Wrap`: added in the same way, to pods with the annotation `weightsync.dev/inject: wrap`; the container's own command runs
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

impl Default for Tcp {
    fn default() -> Self {
        Self { tls: true, bucket_mib: None }
    }
}

impl Default for Health {
    fn default() -> Self {
        Self { period_seconds: two(), timeout_seconds: five(), failure_threshold: three(), success_threshold: one() }
    }
}

impl Default for Membership {
    fn default() -> Self {
        Self {
            min_ready: one_replica(),
            max_unavailable: None,
            max_skew: None,
            keep: one(),
            join: Join::default(),
            debounce_seconds: one(),
        }
    }
}

impl Default for Update {
    fn default() -> Self {
        Self {
            pause: Pause::default(),
            kv_cache: KvCache::default(),
            timeout_seconds: ten_minutes(),
            silence_seconds: ten(),
            retain: None,
            digest: Digest::default(),
            on_wedged: OnWedged::default(),
        }
    }
}

fn yes() -> bool {
    true
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

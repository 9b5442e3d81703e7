//! The rules of a group: transport, health, membership, updates, agents, readiness. All have defaults that suit a first try.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::KubeSchema;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// How bytes travel: at most one of the transports, and whether edges are measured first. Without a transport: as `auto`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(has(self.auto) ? 1 : 0) + (has(self.tcp) ? 1 : 0) + (has(self.nccl) ? 1 : 0) + (has(self.gdr) ? 1 : 0) + (has(self.preflight) && !has(self.auto) && !has(self.tcp) && !has(self.nccl) && !has(self.gdr) ? 1 : 0) == 1").message("exactly one transport must be given: auto, tcp, nccl or gdr"))]
pub struct Transport {
    /// The best one that all members have; status tells which one, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto: Option<Auto>,

    /// TCP between the agents, as a chain: every member forwards while it receives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp: Option<Tcp>,

    /// NCCL broadcasts between the GPUs of the members; the chain of connections only says what comes. Members without a GPU of their own
    /// are left out. What travels between GPUs is not encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nccl: Option<Nccl>,

    /// GPU-direct RDMA: each member reads from the registered memory of the one before it, through NIXL. Members without NIXL, or without an RDMA
    /// device, are left out. What is read is not encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gdr: Option<Gdr>,

    /// Whether the edges of a chain are measured before they carry weights: `Auto` (once for each new pair of nodes, between updates), or `Off`.
    /// A rollout whose edge is slow stands last, or is left out while `minReady` others are there; one whose edge is broken is left out. `Auto`
    /// if left out.
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
    /// Length in MiB of one registered buffer; 16 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "bucketMiB")]
    #[schemars(range(min = 1, max = 1024))]
    pub bucket_mib: Option<i32>,

    /// Registered buffers of each member; 4 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 64))]
    pub buffers: Option<i32>,

    /// Whether reads may go over TCP where a member has no RDMA device. Slower than `tcp`; for tests of a set-up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_tcp: Option<bool>,
}

/// NCCL broadcasts between GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.env) || self.env.all(n, n in ['NCCL_ALGO', 'NCCL_BUFFSIZE', 'NCCL_CROSS_NIC', 'NCCL_CUMEM_ENABLE', 'NCCL_DEBUG', 'NCCL_DEBUG_SUBSYS', 'NCCL_IB_DISABLE', 'NCCL_IB_GID_INDEX', 'NCCL_IB_HCA', 'NCCL_IB_QPS_PER_CONNECTION', 'NCCL_IB_RETRY_CNT', 'NCCL_IB_SL', 'NCCL_IB_TC', 'NCCL_IB_TIMEOUT', 'NCCL_MAX_NCHANNELS', 'NCCL_MIN_NCHANNELS', 'NCCL_NET_GDR_LEVEL', 'NCCL_NVLS_ENABLE', 'NCCL_P2P_DISABLE', 'NCCL_P2P_LEVEL', 'NCCL_PROTO', 'NCCL_SHM_DISABLE', 'NCCL_SOCKET_FAMILY', 'NCCL_SOCKET_IFNAME'])")
    .message("transport.nccl.env takes settings of NCCL from a fixed list only, none that loads code or writes files: see the reference"))]
pub struct Nccl {
    /// Length in MiB of one buffer of the ring on each GPU. Chosen by free memory if left out.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "bucketMiB")]
    #[schemars(range(min = 1, max = 16_384))]
    pub bucket_mib: Option<i32>,

    /// Buffers of the ring on each GPU. Chosen by free memory if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 64))]
    pub buffers: Option<i32>,

    /// Environment of NCCL: `NCCL_ALGO`, `NCCL_BUFFSIZE`, `NCCL_CROSS_NIC`, `NCCL_CUMEM_ENABLE`, `NCCL_DEBUG`, `NCCL_DEBUG_SUBSYS`, `NCCL_IB_DISABLE`, `NCCL_IB_GID_INDEX`, `NCCL_IB_HCA`, `NCCL_IB_QPS_PER_CONNECTION`, `NCCL_IB_RETRY_CNT`, `NCCL_IB_SL`, `NCCL_IB_TC`, `NCCL_IB_TIMEOUT`, `NCCL_MAX_NCHANNELS`, `NCCL_MIN_NCHANNELS`, `NCCL_NET_GDR_LEVEL`, `NCCL_NVLS_ENABLE`, `NCCL_P2P_DISABLE`, `NCCL_P2P_LEVEL`, `NCCL_PROTO`, `NCCL_SHM_DISABLE`, `NCCL_SOCKET_FAMILY`, `NCCL_SOCKET_IFNAME`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "nccl_env")]
    pub env: BTreeMap<String, String>,
}

/// Settings of NCCL that an object may make: none of them loads code, reads or writes files, or reaches beyond the group.
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
    /// Whether weights are encrypted on the way. Without it members still prove themselves to each other, over TLS, before each group.
    #[serde(default = "yes")]
    pub tls: bool,

    /// Length of a bucket in MiB. Chosen by the size of the model if left out.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "bucketMiB")]
    #[schemars(range(min = 1, max = 1024))]
    pub bucket_mib: Option<i32>,
}

/// When an engine counts as unhealthy, and as healthy again. A pause of ours is never ill health.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Health {
    /// Seconds between two probes.
    #[serde(default = "two")]
    #[schemars(range(min = 1, max = 300))]
    pub period_seconds: i32,

    /// Seconds that one probe may take.
    #[serde(default = "five")]
    #[schemars(range(min = 1, max = 300))]
    pub timeout_seconds: i32,

    /// Failures in a row that make an engine unhealthy: its replica leaves the group.
    #[serde(default = "three")]
    #[schemars(range(min = 1, max = 100))]
    pub failure_threshold: i32,

    /// Successes in a row that make it healthy again: its replica may join.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 100))]
    pub success_threshold: i32,
}

/// When a group is formed, and of whom.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Membership {
    /// Replicas that must hold a version for it to count: a number, or a share of all replicas such as `50%`, rounded up.
    #[serde(default = "one_replica")]
    #[x_kube(validation = Rule::new("string(self).matches('^([1-9][0-9]{0,4}|([1-9][0-9]?|100)%)$')")
        .message("minReady must be a number from 1 to 99999, or a percentage from \"1%\" to \"100%\""))]
    pub min_ready: IntOrString,

    /// Replicas that may be out of service at once because of an update: a number, or a share of all replicas such as `25%`, rounded down, at
    /// least one. The others serve what they have until their turn comes, with the new version complete next to them (so it needs engines
    /// that load from files; it is not for `delivery: Engine` and `External`). A replica whose switch fails keeps its place: a version
    /// that no engine takes costs that many replicas, and its publish fails. From the moment that `minReady` replicas serve a version, those
    /// that are behind and not about to be switched are not ready: let `minReady` be most of them. If left out, all switch at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("string(self).matches('^([1-9][0-9]{0,4}|([1-9][0-9]?|100)%)$')")
        .message("maxUnavailable must be a number from 1 to 99999, or a percentage from \"1%\" to \"100%\""))]
    pub max_unavailable: Option<IntOrString>,

    /// How far versions in service may be apart, by their numbers: a replica is ready as long as its version is at most so much older than the
    /// newest version in service, and one that is ahead of the version that counts (`minReady` replicas serve it) by more waits until its own
    /// counts (for the gate and the roster; a sidecar's probe is not informed that moment, and lets it serve).
    /// So 1 lets a replica that failed to switch serve on until the next but one version, and with 0 only one version is in service at
    /// any time: let `minReady` be about half then. If left out, replicas after the version that counts are not ready, unless they are about to be
    /// switched (`maxUnavailable`). While a group goes back, both versions are in service until `minReady` replicas were taken back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 9_007_199_254_740_991_i64))]
    pub max_skew: Option<i64>,

    /// Versions that are kept in the fleet, the current one counted, so that `targetVersion` can name an earlier one. Each agent keeps what
    /// fits into `update.retain` and into its pod's memory (rollouts whose engine loads from files, and the source); the version that was
    /// not used for longest goes first.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 16))]
    pub keep: i32,

    /// When a replica that is not in the group may enter it: `Immediate`, or with the `NextVersion`.
    #[serde(default)]
    pub join: Join,

    /// Seconds that a join waits for others, so that a rollout of many pods makes few groups.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 600))]
    pub debounce_seconds: i32,
}

/// When a replica may enter the group.
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
    /// What happens to running requests while weights are switched: `Keep` (they stop and go on with the new weights), `Drain` (they end
    /// first), `Abort`, `AbortAwake` (as `Abort`; an LMDeploy that can be fed awake answers meanwhile, from a mixture of both versions in a
    /// window that is reported), or `External` (the trainer pauses by itself).
    #[serde(default)]
    pub pause: Pause,

    /// What happens to the KV and prefix cache: `Reset`, or `Keep` (answers may mix both versions).
    #[serde(default)]
    pub kv_cache: KvCache,

    /// Seconds after which an update ends even if bytes move; also the longest that an engine stays paused by us.
    #[serde(default = "ten_minutes")]
    #[schemars(range(min = 1, max = 86_400))]
    pub timeout_seconds: i32,

    /// Seconds without a byte after which a wait ends.
    #[serde(default = "ten")]
    #[schemars(range(min = 1, max = 3600))]
    pub silence_seconds: i32,

    /// What the source keeps to retry and to feed joiners, and every agent to go back (`membership.keep`). If left out: what fits, and nothing
    /// in an ephemeral container. It must fit in any case: into the limits of the container, its volume, and what is available on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retain: Option<Retain>,

    /// How tensors are digested where bytes pass through members (the TCP chain, feeding): `Blake3`, by which a member that passes on other
    /// bytes than it got is found out, or `Xxh3`, which is faster on few cores and trusts all members. Between GPUs it is always gsum64.
    #[serde(default)]
    pub digest: Digest,

    /// What happens to a pod whose engine is wedged: its front answers, and it computes nothing any more (condition `Degraded`, reason
    /// `EngineWedged`). `Report`, or `RestartPod`: the pod is deleted, so that its owner makes another one.
    #[serde(default)]
    pub on_wedged: OnWedged,
}

/// How tensors are digested where bytes pass through members.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Digest {
    /// No member can find other bytes with the same digest.
    #[default]
    Blake3,
    /// All members are trusted.
    Xxh3,
}

/// What happens to a pod whose engine is wedged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnWedged {
    /// It is informed of, and nothing is done.
    #[default]
    Report,
    /// It is deleted.
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

/// What the source keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Retain {
    /// Host memory in MiB for kept versions, in each agent. During an update the source keeps one more than `membership.keep`, where all fit;
    /// else the oldest is dropped first. A rollout counts the versions that its engine held before. A version that does not fit is not
    /// kept. 0 keeps nothing: joiners are fed by rollouts that hold the version.
    #[serde(rename = "hostMiB")]
    #[schemars(range(min = 0, max = 67_108_864))]
    pub host_mib: i64,
}

/// How the agents come into the pods.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Agent {
    /// `Sidecar` (put in when the pod is created, by the chart's admission policy or `kubectl weightsync inject`), `Wrap` (put in the same
    /// way, into pods with the annotation `weightsync.dev/inject: wrap`: the container's own command runs below the agent, with which it
    /// shares GPUs and memory), `Ephemeral` (the controller adds an ephemeral container to running pods: a trial, no retained copy, 20
    /// launches in a pod's life), or `External` (something else starts `weightsync agent`).
    #[serde(default)]
    pub launch: Launch,
}

/// How the agents come into the pods.
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
    /// Whether pods are ready before the first version: `Serve` (as their engine is) or `Hold` (not before they hold it).
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

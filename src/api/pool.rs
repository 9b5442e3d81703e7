//! A pool of rollouts: which pods and engines, what one replica is, how large, and in which order.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::PodSelector;

/// A pool of rollouts with the same engine and settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.replica.pods == 1 || (has(self.engine.vllm) ? self.engine.vllm.ports.size() == 1 : has(self.engine.sglang) ? self.engine.sglang.ports.size() == 1 : has(self.engine.lmdeploy) ? self.engine.lmdeploy.ports.size() == 1 : !has(self.engine.fastdeploy) || self.engine.fastdeploy.ports.size() == 1)")
    .message("a replica of several pods has one engine port, on its head: list one port"))]
pub struct Pool {
    /// Name of the pool, such as `actors`. It is part of its members' names.
    #[schemars(length(min = 1, max = 63), regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    #[x_kube(validation = Rule::new("self != 'trainer'").message("the name trainer is taken by the trainer's own pods: choose another"))]
    pub name: String,

    /// Selects its pods. They need the label `weightsync.dev/role: rollout`.
    pub selector: PodSelector,

    /// Name of the container that runs the engine, such as `vllm`. Default: the container in the pod's annotation
    /// `weightsync.dev/container`, or else the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63), regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub container: Option<String>,

    /// The kind of engine, and its ports.
    pub engine: Engine,

    /// Parallel sizes that the engine was started with. They are compared with the engine's own report; a difference keeps the replica out
    /// (`SizeMismatch`).
    #[serde(default)]
    pub parallelism: Sizes,

    /// Which pods make one replica.
    #[serde(default)]
    pub replica: Replica,

    /// Order in which replicas get their ranks.
    #[serde(default)]
    pub order: PoolOrder,
}

/// The kind of engine: exactly one of the fields.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(has(self.vllm) ? 1 : 0) + (has(self.sglang) ? 1 : 0) + (has(self.lmdeploy) ? 1 : 0) + (has(self.fastdeploy) ? 1 : 0) == 1")
    .message("exactly one engine must be given: vllm, sglang, lmdeploy or fastdeploy"))]
pub struct Engine {
    /// vLLM's OpenAI server. It must be started with `VLLM_SERVER_DEV_MODE=1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vllm: Option<Vllm>,

    /// SGLang's server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sglang: Option<Sglang>,

    /// LMDeploy's server with the PyTorch backend. Its agent must share its GPUs and see its processes; update.pause must be `Abort`,
    /// `AbortAwake` or `External`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lmdeploy: Option<Lmdeploy>,

    /// FastDeploy's OpenAI server, started with `--dynamic-load-weight --load_strategy ipc_snapshot`. Its agent must be able to write into its
    /// model directory; update.pause must be `Abort` and update.kvCache `Reset`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fastdeploy: Option<Fastdeploy>,
}

/// A vLLM server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Vllm {
    /// Ports of engines in the pod; each is a separate replica.
    #[serde(default = "vllm_ports")]
    #[schemars(length(min = 1, max = 16), inner(range(min = 1, max = 65_535)))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub ports: Vec<i32>,

    /// Key of a Secret in the same namespace with the server's API key. Each pod must name it in its annotation
    /// `weightsync.dev/api-key-secret: SECRET/KEY`; otherwise it gets no agent. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_secret_ref: Option<SecretKey>,
}

/// An SGLang server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Sglang {
    /// Ports of engines in the pod; each is a separate replica.
    #[serde(default = "sglang_ports")]
    #[schemars(length(min = 1, max = 16), inner(range(min = 1, max = 65_535)))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub ports: Vec<i32>,

    /// Key of a Secret in the same namespace with the server's API key. Each pod must name it in its annotation
    /// `weightsync.dev/api-key-secret: SECRET/KEY`; otherwise it gets no agent. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_secret_ref: Option<SecretKey>,
}

/// An LMDeploy server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Lmdeploy {
    /// Ports of engines in the pod; each is a separate replica.
    #[serde(default = "lmdeploy_ports")]
    #[schemars(length(min = 1, max = 16), inner(range(min = 1, max = 65_535)))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub ports: Vec<i32>,

    /// Key of a Secret in the same namespace with the server's API key. Each pod must name it in its annotation
    /// `weightsync.dev/api-key-secret: SECRET/KEY`; otherwise it gets no agent. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_secret_ref: Option<SecretKey>,
}

/// A FastDeploy server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Fastdeploy {
    /// Ports of engines in the pod; each is a separate replica.
    #[serde(default = "fastdeploy_ports")]
    #[schemars(length(min = 1, max = 16), inner(range(min = 1, max = 65_535)))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub ports: Vec<i32>,

    /// Key of a Secret in the same namespace with the server's API key. Each pod must name it in its annotation
    /// `weightsync.dev/api-key-secret: SECRET/KEY`; otherwise it gets no agent. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_secret_ref: Option<SecretKey>,
}

/// A key of a Secret in the object's namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SecretKey {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,

    /// Key in the Secret.
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
}

/// Parallel sizes of one replica. Its ranks are tensor x pipeline x data; experts are spread over these ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.tensor * self.data) % self.expert == 0")
    .message("experts are spread over tensor x data ranks: parallelism.expert must divide that product"))]
#[x_kube(validation = Rule::new("self.tensor * self.pipeline * self.data <= 65536")
    .message("tensor x pipeline x data must not be more than 65536 ranks"))]
pub struct Sizes {
    /// Tensor parallel ranks. Default: 1.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 1024))]
    pub tensor: i32,

    /// Pipeline stages. Default: 1.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 1024))]
    pub pipeline: i32,

    /// Data parallel ranks that share one port. Default: 1. Engines with separate ports are separate replicas.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 1024))]
    pub data: i32,

    /// Expert parallel ranks. Default: 1. They add no ranks.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 1024))]
    pub expert: i32,
}

/// What one replica is: a pod (or one of several ports in a pod), or a group of pods.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Replica {
    /// Number of pods of one replica. A group with fewer is left out. Default: 1.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 1024))]
    pub pods: i32,

    /// Key of the label whose value is the same on all pods of a replica. Used with more than one pod. Default: that of LeaderWorkerSet.
    #[serde(default = "lws_group")]
    #[schemars(length(min = 1, max = 317))]
    pub group_label: String,

    /// How to find the head of a replica, the pod where the server listens. Used with more than one pod.
    #[serde(default)]
    pub head: Head,
}

/// The label that identifies the head of a replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Head {
    /// Key of the label. Default: the worker index of LeaderWorkerSet.
    #[serde(default = "lws_worker")]
    #[schemars(length(min = 1, max = 317))]
    pub label: String,

    /// Value of the label on the head. Default: `"0"`.
    #[serde(default = "zero")]
    #[schemars(length(max = 63))]
    pub value: String,
}

/// Order of a pool's replicas.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.by == 'Label') == has(self.label)")
    .message("order.label must be given when order.by is Label, and only then"))]
#[x_kube(validation = Rule::new("(self.by == 'Explicit') == (has(self.names) && self.names.size() > 0)")
    .message("order.names must be given when order.by is Explicit, and only then"))]
#[x_kube(validation = Rule::new("!has(self.names) || self.names.all(n, self.names.exists_one(m, m == n))")
    .message("order.names must not list a pod twice"))]
pub struct PoolOrder {
    /// What the order goes by: `Name`, `Ordinal` (StatefulSet ordinal or Job completion index), `Label` or `Explicit` (a list of names).
    #[serde(default)]
    pub by: OrderBy,

    /// Key of the label whose value gives the order: integers by value, other values after them. Required with `by: Label`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 317))]
    pub label: Option<String>,

    /// Names of the pods (of the heads, if a replica has several pods), first to last. They must be stable (StatefulSet, LeaderWorkerSet).
    /// Required with `by: Explicit`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    // 63: pods with stable names carry theirs in a label; and the API server refuses a longer one for what comparing them may cost.
    #[schemars(length(max = 100), inner(length(min = 1, max = 63)))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub names: Vec<String>,
}

/// What the order of replicas goes by: `Name`, `Ordinal` (StatefulSet ordinal or Job completion index), `Label` or `Explicit` (a list of
/// names).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OrderBy {
    #[default]
    Name,
    Ordinal,
    Label,
    Explicit,
}

/// The fields that all engine kinds have in common.
pub struct EngineServer<'a> {
    /// `vllm`, `sglang`, `lmdeploy`, `fastdeploy`.
    pub kind: &'static str,
    pub ports: &'a [i32],
    pub api_key: Option<&'a SecretKey>,
}

impl Engine {
    /// The engine in the spec; `None` unless exactly one is given.
    pub fn server(&self) -> Option<EngineServer<'_>> {
        fn server<'a>(kind: &'static str, ports: &'a [i32], api_key: Option<&'a SecretKey>) -> EngineServer<'a> {
            EngineServer { kind, ports, api_key }
        }
        let servers = [
            self.vllm.as_ref().map(|vllm| server("vllm", &vllm.ports, vllm.api_key_secret_ref.as_ref())),
            self.sglang.as_ref().map(|sglang| server("sglang", &sglang.ports, sglang.api_key_secret_ref.as_ref())),
            self.lmdeploy.as_ref().map(|lmdeploy| server("lmdeploy", &lmdeploy.ports, lmdeploy.api_key_secret_ref.as_ref())),
            self.fastdeploy.as_ref().map(|fastdeploy| server("fastdeploy", &fastdeploy.ports, fastdeploy.api_key_secret_ref.as_ref())),
        ];
        let mut given = servers.into_iter().flatten();
        let server = given.next()?;
        given.next().is_none().then_some(server)
    }
}

impl Default for Vllm {
    fn default() -> Self {
        Self { ports: vllm_ports(), api_key_secret_ref: None }
    }
}

impl Default for Sglang {
    fn default() -> Self {
        Self { ports: sglang_ports(), api_key_secret_ref: None }
    }
}

impl Default for Lmdeploy {
    fn default() -> Self {
        Self { ports: lmdeploy_ports(), api_key_secret_ref: None }
    }
}

impl Default for Fastdeploy {
    fn default() -> Self {
        Self { ports: fastdeploy_ports(), api_key_secret_ref: None }
    }
}

impl Default for Sizes {
    fn default() -> Self {
        Self { tensor: 1, pipeline: 1, data: 1, expert: 1 }
    }
}

impl Default for Replica {
    fn default() -> Self {
        Self { pods: 1, group_label: lws_group(), head: Head::default() }
    }
}

impl Default for Head {
    fn default() -> Self {
        Self { label: lws_worker(), value: zero() }
    }
}

fn one() -> i32 {
    1
}

fn zero() -> String {
    "0".to_owned()
}

fn vllm_ports() -> Vec<i32> {
    vec![8000]
}

fn sglang_ports() -> Vec<i32> {
    vec![30_000]
}

fn lmdeploy_ports() -> Vec<i32> {
    vec![23_333]
}

fn fastdeploy_ports() -> Vec<i32> {
    vec![8000]
}

fn lws_group() -> String {
    "leaderworkerset.sigs.k8s.io/group-key".to_owned()
}

fn lws_worker() -> String {
    "leaderworkerset.sigs.k8s.io/worker-index".to_owned()
}

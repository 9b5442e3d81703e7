//! A pool of rollouts: which pods and engines, what one replica is, how large, and in which order.

use std::collections::BTreeMap;

use kube::KubeSchema;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::engine_kind::{described, ports_described};
use super::{EngineKind, Order, PodSelector};
use weightsync_core::weights::{IgnoredTensors, LONGEST_PATTERN, MOST_PATTERNS};

/// A pool of rollouts with the same engine and settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.replica.pods == 1 || !has(self.engine.ports) || self.engine.ports.size() <= 1")
    .message("a replica of several pods has one engine port, on its head: list one port"))]
#[x_kube(validation = Rule::new("self.engine.discovery != 'Registered' || (!has(self.engine.ports) && self.replica.pods == 1)")
    .message("engines that register take ports of their own, and a replica is one of them: remove engine.ports and replica.pods"))]
#[x_kube(validation = Rule::new("self.engine.discovery == 'Registered' || !has(self.engine.maxRegistered)")
    .message("engine.maxRegistered is for engines that register: remove it, or set engine.discovery to Registered"))]
pub struct Pool {
    /// Name of the pool, such as `actors`. It is part of its members' names.
    #[schemars(length(min = 1, max = 63), regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    #[x_kube(validation = Rule::new("self != 'trainer'").message("the name trainer is taken by the trainer's own pods: choose another"))]
    pub name: String,

    /// Selects its pods. They need the label `weightsync.dev/role: rollout`. The engine runs in the container that the pod's annotation
    /// `weightsync.dev/container` names, or else in the first one.
    pub selector: PodSelector,

    /// The engine server in each pod.
    pub engine: Engine,

    /// Worker ranks of one replica: tensor x pipeline x data parallel size, such as `8`. Expert parallel ranks do not count, because
    /// experts are spread over these ranks. The number is compared with the engine's own report; a difference keeps the replica out
    /// (`SizeMismatch`). Default: 1.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 65_536))]
    pub ranks: i32,

    /// Which pods make one replica.
    #[serde(default)]
    pub replica: Replica,

    /// Order in which replicas get their ranks. Default: by ordinal (StatefulSet ordinal or Job completion index) if every pod of the pool
    /// has one, else by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<Order>,
}

/// An engine server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Engine {
    /// The kind of engine; the schema's description lists what each needs.
    #[schemars(description = described())]
    pub kind: EngineKind,

    /// Ports of engines in the pod; each is a separate replica. Default: the default port of the engine's kind.
    #[schemars(description = ports_described())]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(range(min = 1, max = 65_535)))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub ports: Vec<i32>,

    /// How the agent finds the engines of its pod. `Ports`: one engine at each of `ports`. `Registered`: the process of each engine calls
    /// `weightsync.register_engine(port)` when its server starts, such as a Ray actor that takes a free port. Its replica exists while that
    /// process lives. Such an engine is fed through host memory. Default: `Ports`.
    #[serde(default)]
    pub discovery: Discovery,

    /// At most so many registered engines of one pod take part; further ones are named in status. A pod says by itself how many engines it
    /// has, and each counts for `membership.minReady`. Only for `discovery: Registered`. Default: as many as
    /// have GPUs for their `ranks`, of those that the pod asks for; 16 where it asks for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16))]
    pub max_registered: Option<i32>,

    /// How tensors of a version are compared with those that the server loaded when it was started.
    #[serde(default, skip_serializing_if = "EngineTensors::is_default")]
    pub tensors: EngineTensors,

    /// Key of a Secret in the same namespace with the server's API key. Only for `agent.launch: Ephemeral`. Each pod must name it in its
    /// annotation `weightsync.dev/api-key-secret: SECRET/KEY`; otherwise it gets no agent. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_secret_ref: Option<SecretKey>,
}

/// How tensors of a version are compared with those that the server loaded when it was started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EngineTensors {
    /// Names of tensors that the server's loader skips, such as `*.inv_freq`: a version may lack them or bring them. `*` stands for any
    /// characters. A tensor that the server does use keeps its old value where a version lacks it, and the result of the publish names it.
    /// Tables of rotary embeddings, tied heads and layers that predict further tokens need no pattern. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MOST_PATTERNS), inner(length(min = 1, max = LONGEST_PATTERN), regex(pattern = "^[!-~]*[A-Za-z0-9][!-~]*$")))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub ignore: Vec<String>,
}

impl EngineTensors {
    fn is_default(&self) -> bool {
        self.ignore.is_empty()
    }
}

/// How the agent finds the engines of its pod.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Discovery {
    /// At the ports of the spec.
    #[default]
    Ports,
    /// Each engine registers with the agent of its pod.
    Registered,
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

    /// Labels of the head of a replica: the pod where the server listens. Used with more than one pod. Default:
    /// `{leaderworkerset.sigs.k8s.io/worker-index: "0"}`.
    #[serde(default = "lws_leader")]
    #[schemars(schema_with = "head_labels")]
    pub head_labels: BTreeMap<String, String>,
}

impl Engine {
    /// Tensors that a version is not compared by, in the agents' protocol.
    pub fn ignored(&self) -> IgnoredTensors {
        IgnoredTensors::new(self.tensors.ignore.clone())
    }

    /// Its ports: those of the spec, or the default port of its kind. Empty if its engines register.
    pub fn ports(&self) -> Vec<i32> {
        if self.discovery == Discovery::Registered {
            return Vec::new();
        }
        if self.ports.is_empty() { vec![self.kind.port()] } else { self.ports.clone() }
    }
}

impl Default for Replica {
    fn default() -> Self {
        Self { pods: 1, group_label: lws_group(), head_labels: lws_leader() }
    }
}

fn one() -> i32 {
    1
}

fn lws_group() -> String {
    "leaderworkerset.sigs.k8s.io/group-key".to_owned()
}

fn lws_leader() -> BTreeMap<String, String> {
    BTreeMap::from([("leaderworkerset.sigs.k8s.io/worker-index".to_owned(), "0".to_owned())])
}

fn head_labels(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "minProperties": 1,
        "maxProperties": 16,
        "additionalProperties": {"type": "string", "maxLength": 63},
    })
}

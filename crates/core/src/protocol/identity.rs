//! How an agent obtains its certificate and makes itself known to the coordinator of its object.
//!
//! An agent announces itself whenever no coordinator is attached to its event stream (every 1 s, jittered), so a restarted
//! controller knows all agents within two seconds and needs no list of its own.

use serde::{Deserialize, Serialize};

use super::{HeldVersion, Incarnation, Protocols, Returned, Role, TransportPolicy, Version};
use crate::weights::IgnoredTensors;

/// Asks the controller for a certificate, over TLS with the server's certificate checked.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EnrollRequest {
    /// Projected service-account token (audience `weightsync.dev`) or a single-use token bound to the pod's UID. Secret.
    pub token: String,
    /// Namespace of the pod; `local` on one host.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Incarnation of the caller; must agree with the pod that the token proves.
    pub incarnation: Incarnation,
    /// PEM of a certificate signing request; its key never leaves the agent's memory.
    pub csr_pem: String,
}

/// Answer to [`EnrollRequest`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EnrollResponse {
    /// PEM of the agent's certificate. DNS name `POD_UID.agent.weightsync.internal`, URI names `weightsync://UID/source/POD_UID` or `weightsync://UID/rollout/POD_UID`.
    pub certificate_pem: String,
    /// PEM of the CA that signs all members of all groups of this operator.
    pub ca_pem: String,
    /// UID of the `WeightSync` that claims the pod.
    pub weightsync: String,
    /// Ask for a new certificate after this many ms.
    pub renew_after_ms: u64,
    /// The object's assignment for this agent.
    pub assignment: Assignment,
}

/// An object's assignment for one agent. An agent starts without any configuration of engines, and gets it here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Assignment {
    /// Source or rollout.
    pub role: Role,
    /// Engines in the pod, one endpoint each; empty for a source. The agent runs an endpoint (own control server, own announcement,
    /// own [`Incarnation::instance`]) for each of them.
    #[serde(default)]
    pub engines: Vec<EngineAssignment>,
    /// Whether `engines` are those that registered with the agent; the agent reports them ([`RegisteredEngines`]).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub registered: bool,
    /// Whether the pod is ready before its engine got a first version (`readiness.beforeFirstVersion`).
    pub serve_before_first_version: bool,
    /// The version that every rollout should hold; `None` before the first. Without it, a pod that starts late would count as one that may
    /// serve before the first version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<HeldVersion>,
    /// Set once at least `minReady` replicas serve the version to which the group went back. From then on, no other replica with an
    /// abandoned version is ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub returned: Option<Returned>,
    /// The newest version in service, if the object limits the difference between versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub newest: Option<Version>,
    /// Whether the object is suspended: its pods are released and serve their current weights, whatever `current` is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub suspended: bool,
    /// The required transport, so that GPU workers start with the settings of later groups. If they got it only with a group, they would
    /// start twice; after the loss of a source that costs most of a second.
    #[serde(default)]
    pub transport: TransportPolicy,
    /// For a source: why no group can take a publish; `None` while one can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hindrance: Option<Hindrance>,
    /// Tensors that its engines' loader skips: a version is not compared by them (`engine.tensors.ignore`).
    #[serde(default, skip_serializing_if = "IgnoredTensors::is_empty")]
    pub ignored: IgnoredTensors,
}

/// Why no group can take a publish.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hindrance {
    /// The members that are out, each with its cause, as text.
    pub message: String,
    /// Whether the obstacle remains until a person changes the object, its pods or their images.
    pub permanent: bool,
}

/// One engine server of an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EngineAssignment {
    /// `vllm`, `sglang`, `lmdeploy`, `fastdeploy`.
    pub kind: String,
    /// Port on the pod's loopback.
    pub port: u16,
}

/// Most engines that register with one agent.
pub const MOST_ENGINES: usize = 16;

/// The engines that are registered with an agent now. The agent sends it when they change, and every 10 s.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RegisteredEngines {
    /// Namespace of the pod.
    pub namespace: String,
    /// Incarnation of the agent's process.
    pub incarnation: Incarnation,
    /// Their ports, in ascending order; at most [`MOST_ENGINES`].
    pub ports: Vec<u16>,
}

/// Response to [`Announcement`]: the current assignment. A [`Rejection`] that is not retryable means that no object claims the pod any
/// more: the agent releases its engine and forgets its group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AnnounceResponse {
    /// The object's assignment for this agent.
    pub assignment: Assignment,
}

/// One endpoint says to the controller, over mutual TLS: "I am here, attach to my events".
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub struct Announcement {
    pub namespace: String,
    pub pod: String,
    pub incarnation: Incarnation,
    pub role: Role,
    /// Port of the engine of this endpoint; none for a source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine_port: Option<u16>,
    /// Address of its control server (`IP:PORT`), bound before it is announced.
    pub control_address: String,
    pub program: String,
    #[serde(default = "Protocols::unsaid")]
    pub speaks: Protocols,
    /// Whether a coordinator reads its events. If so, the agent only requests its assignment, and the reader need not reconnect.
    #[serde(default)]
    pub attached: bool,
}

/// Answer of an announcement or enrolment that cannot be served now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rejection {
    /// The problem, as text.
    pub message: String,
    /// Whether a later request may succeed.
    pub retryable: bool,
}

//! How an agent obtains its certificate and makes itself known to the coordinator of its object.
//!
//! An agent announces itself whenever no coordinator is attached to its event stream (every 1 s, jittered), so a restarted
//! controller knows all agents within two seconds and needs no list of its own.

use serde::{Deserialize, Serialize};

use super::{HeldVersion, Incarnation, Protocols, Returned, Role, TransportPolicy, Version};

/// `POST /v1/agents/enroll` at the controller, over TLS with the server's certificate checked; asks for a certificate.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EnrollRequest {
    /// Projected service-account token (audience `weightsync.dev`) or a single-use token bound to the pod's UID. Secret.
    pub token: String,
    /// Namespace of the pod; `local` on one host.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Who asks; must agree with what the token proves.
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
    /// What the object wants of this agent.
    pub assignment: Assignment,
}

/// What an object wants of one agent. An agent starts without any configuration of engines: this is where it comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Assignment {
    /// Source or rollout.
    pub role: Role,
    /// Engines in the pod, one endpoint each; empty for a source. The agent runs an endpoint (own control server, own announcement,
    /// own [`Incarnation::instance`]) for each of them.
    #[serde(default)]
    pub engines: Vec<EngineAssignment>,
    /// Whether the pod is ready before its engine got a first version (`readiness.beforeFirstVersion`).
    pub serve_before_first_version: bool,
    /// The version that every rollout should hold; none before the first. Without it, a pod that starts late would pass for one that may
    /// serve before the first version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<HeldVersion>,
    /// Set once at least `minReady` replicas serve the version that the group went back to: from then on no other replica is ready with a
    /// version that was left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub returned: Option<Returned>,
    /// The newest version in service, where the object limits how far versions may be apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub newest: Option<Version>,
    /// Whether the object is suspended: its pods are released and serve what they have, whatever `current` says.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub suspended: bool,
    /// The required transport, so that GPU workers start with the settings that groups will need: received only when a group forms, they
    /// are started twice, which is most of a second after the loss of a source.
    #[serde(default)]
    pub transport: TransportPolicy,
    /// Why no group can take what is published; for a source, and none while one can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hindrance: Option<Hindrance>,
}

/// Why no group can take what a trainer publishes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hindrance {
    /// The members that are out, each with its cause, as text.
    pub message: String,
    /// Whether it stays so until a person changes the object, its pods or their images.
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

/// Answer to [`Announcement`]: the assignment as it is now. A [`Rejection`] that is not retryable means: no object claims the pod any
/// more; the agent releases its engine and forgets its group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AnnounceResponse {
    /// What the object wants of this agent.
    pub assignment: Assignment,
}

/// One endpoint's `POST /v1/agents/announce` at the controller, mutual TLS: "I am here, attach to my events".
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
    /// Whether a coordinator reads its events: then it only requests its assignment, and the reader need not reconnect.
    #[serde(default)]
    pub attached: bool,
}

/// Answer of an announcement or enrolment that cannot be served now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rejection {
    /// What is wrong, as text.
    pub message: String,
    /// Whether asking again later may succeed.
    pub retryable: bool,
}

//! Messages between the coordinator (in the controller, or `weightsync local`) and an agent, over mutual TLS.
//!
//! The stream of events has one JSON object a line: first a [`AgentEvent::Snapshot`], then changes, and a [`AgentEvent::Heartbeat`] each
//! second. So a reader can distinguish a dead agent (connection closed) from a silent one (no line). The snapshot repeats every fact:
//! nothing is only pushed once.

use serde::{Deserialize, Serialize};

use super::{
    EpochId, FabricReport, GpuReport, GroupFacts, Incarnation, MemberFabric, MemberName, MixedWindow, PreflightReport, ProvenBy, Received,
    RefusedVersion, Role, Roster, Statement, TransportChoice, UpdatePolicy, UpdateView, Version,
};

/// Longest line of an event stream, in bytes: a snapshot with all its statements, or an update with two thousand members. Readers end a
/// stream with a longer line, so that no agent can exhaust the controller's memory.
pub const LONGEST_EVENT: usize = 256 << 10;

/// Longest answer to a call between the controller and agents, in bytes.
pub const LONGEST_ANSWER: usize = 1 << 20;

/// First phase of a group: every member fences its earlier epoch and opens its listeners.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PrepareRequest {
    /// The group's identity.
    pub id: EpochId,
    /// Name of the receiver in the roster.
    pub member: MemberName,
    /// The expected incarnation of `member`: an agent of another one refuses.
    pub roster: Roster,
    /// Rules of updates.
    pub policy: UpdatePolicy,
    /// Why there is a new epoch, as text. The prepare may be the first message about it, and clients that wait in the old epoch need the
    /// cause. Empty from a controller that does not send it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// Deadline for the response, in ms.
    pub deadline_ms: u64,
}

impl PrepareRequest {
    /// Why the previous epoch ended, as text.
    pub fn ends_others_because(&self) -> String {
        let place = format!("epoch {} takes its place", self.id.epoch);
        if self.why.is_empty() { place } else { format!("{place}: {}", self.why) }
    }
}

/// Answer to [`PrepareRequest`] (HTTP 200).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub struct PrepareResponse {
    pub incarnation: Incarnation,
    /// Address of its bound data listener (`IP:PORT`).
    pub data_address: String,
    #[serde(default)]
    pub gpus: GpuReport,
    #[serde(default)]
    pub fabric: FabricReport,
    pub state: MemberState,
}

/// The addresses of a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemberAddress {
    /// Which member.
    pub member: MemberName,
    /// Its incarnation; certificates name its pod.
    pub incarnation: Incarnation,
    /// Control server (`IP:PORT`).
    pub control: String,
    /// Data listener (`IP:PORT`).
    pub data: String,
    /// URL of its engine, for routers; none for a source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine_url: Option<String>,
}

/// Second phase: members learn each other's addresses, connect, and move one element over the real transport.
///
/// It is sent in waves, each after the responses to the previous one: rollouts, then the feeder if it is a rollout, then the source. So the
/// leader commits last and finds every other member committed. The leader proves the chain with a probe, and a rollout must not wait for
/// the probe before it responds.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CommitRequest {
    /// The group's identity; must be the prepared one.
    pub id: EpochId,
    /// All members.
    pub addresses: Vec<MemberAddress>,
    /// The version that every rollout should hold: the last one that reached `minReady`; none before the first. The feeder delivers exactly
    /// this one to members that lack it, and they are not ready before; a source refuses to publish a number that is not higher.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<HeldVersion>,
    /// Set when `current` is not the highest version that the group ever held, or is held by the spec: see [`Returned`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub returned: Option<Returned>,
    /// Versions that the group refused by its canary, the highest last: their numbers are never published again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<Version>,
    /// The feeder of members that lack the current version: the source, or a rollout that holds it. `None`: no member retains it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub feeder: Option<MemberName>,
    /// How bytes travel.
    #[serde(default)]
    pub transport: TransportChoice,
    /// Random bytes (base64) that data connections of this epoch must show. Secret.
    pub secret: String,
    /// Deadline for the response, in ms.
    pub deadline_ms: u64,
}

/// A group that went back to an earlier version, goes back to it, or is held at one.
///
/// A replica with a version above `to` and up to `from` is fed `to`; a number up to `from` is never published again, because it named other
/// weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Returned {
    /// The version that every rollout should hold.
    pub to: Version,
    /// The highest version that the group ever held; `to` itself when it is only held there.
    pub from: Version,
    /// Whether `spec.targetVersion` holds the group at `to`: nothing is published meanwhile.
    pub pinned: bool,
}

impl Returned {
    /// Whether the group went back from that version.
    pub fn left(&self, version: Version) -> bool {
        self.to < version && version <= self.from
    }
}

/// Ends an epoch: the receiver aborts everything of it or of an older one, and refuses it from now on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FenceRequest {
    /// The newest identity that is fenced.
    pub id: EpochId,
    /// Why, for status and logs.
    pub reason: String,
}

/// Requests that a member leaves: it resumes its engine if that is safe, becomes ready, and forgets its group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReleaseRequest {
    /// The newest identity that ended.
    pub id: EpochId,
    /// Why, for logs.
    pub reason: String,
}

/// Response of an agent that refuses a request (HTTP 409 or 422).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Refusal {
    /// The cause as a code.
    pub code: RefusalCode,
    /// The cause as text, with the next step if there is one.
    pub message: String,
}

/// Why an agent refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum RefusalCode {
    /// The message carries a fenced or older epoch.
    StaleEpoch,
    /// The message is for another pod or another incarnation of it.
    WrongIncarnation,
    /// The agent is in no group, or not in the phase that the message needs.
    WrongPhase,
    /// The engine cannot be reached or refuses.
    EngineRefused,
    /// The engine does not support what the object requires.
    Unsupported,
    /// The engine cannot answer the object's canary.
    CanaryUnavailable,
    SizeMismatch,
    /// Too little memory or disk.
    OutOfSpace,
    LayoutMismatch,
    VersionNotHigher,
    Timeout,
    PeerUnreachable,
    /// The sender's certificate does not allow the request: none, or one of another object.
    Forbidden,
    Invalid,
    Internal,
}

/// A version and the digest of its manifest (blake3, hex).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldVersion {
    /// Its number.
    pub version: Version,
    /// Digest of its manifest.
    pub manifest: String,
}

impl HeldVersion {
    /// Whether this is the wanted version. A controller that knows only its number gives no manifest.
    pub fn is(&self, wanted: &Self) -> bool {
        self.version == wanted.version && (wanted.manifest.is_empty() || self.manifest == wanted.manifest)
    }
}

/// What an engine adapter found out about its server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EngineFacts {
    /// `vllm`, `sglang`, `lmdeploy`, `fastdeploy`.
    pub kind: String,
    /// Version the server reports, or `unknown`.
    pub server_version: String,
    /// Worker ranks of the replica, read from the server.
    pub size: u32,
    /// URL of the server.
    pub url: String,
    /// Route of the weights into the engine, e.g. `reload_weights from a directory`.
    pub delivery: String,
    /// How an answer reports its version: `token`, `request` or `none`.
    pub answer_version: String,
    /// Why versions cannot be compared with its start-up checkpoint; `None` if they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unchecked: Option<String>,
    /// Bytes of the tensors of its start-up checkpoint, where that can be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_bytes: Option<u64>,
    /// Its ability to join a group by itself; `None` before an object required that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<GroupFacts>,
}

impl EngineFacts {
    /// That the tensors of a first version are compared with nothing, and why; none where they are compared.
    pub fn nothing_compared(&self) -> Option<String> {
        self.unchecked.as_ref().map(|why| format!("the names and shapes of a first version are compared with nothing: {why}"))
    }
}

/// Phase of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum MemberPhase {
    /// In no group.
    Idle,
    /// Listens, fenced what it had.
    Prepared,
    /// In a committed epoch.
    Ready,
    /// In an update.
    Updating,
    /// An install began and did not end well: must be fed in full, never serves.
    Dirty,
    /// The last change of the engine ended without proof: its version, or whether it runs, is not known. It does not serve before it is
    /// proven or fed.
    Unknown,
    /// Its engine does not respond.
    EngineDown,
}

impl MemberPhase {
    /// Whether its engine must be proven or fed before it serves.
    pub fn must_not_serve(self) -> bool {
        matches!(self, Self::Dirty | Self::Unknown)
    }
}

/// The full state of an agent; the answer to [`StateRequest`](super::StateRequest) and the first event of each stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub struct MemberState {
    /// Which member it is; none before the first prepare.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<MemberName>,
    pub incarnation: Incarnation,
    pub role: Role,
    pub phase: MemberPhase,
    /// The epoch that it prepared or committed; none after a fence or a release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<EpochId>,
    /// [`Roster::digest`] of that epoch's roster: a restarted controller compares it before it takes a running group over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roster_digest: Option<String>,
    /// How bytes travel in that epoch; none before it was committed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<TransportChoice>,
    /// Complete and verified, kept to retry or to feed others (delivered).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retained: Option<HeldVersion>,
    /// Earlier versions that are kept complete and verified as well, the last used first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<HeldVersion>,
    /// The rollback of its epoch; a controller that takes over a running group reads it from here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub returned: Option<Returned>,
    /// Confirmed by the engine's present start (installed); for a source, the last version that reached `minReady`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub installed: Option<HeldVersion>,
    /// What shows that its engine holds the bytes of `installed`. None for a source, and for an engine that this agent did not switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proven_by: Option<ProvenBy>,
    /// Versions that its canary refused since it last accepted one as high, the highest last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<RefusedVersion>,
    /// Statements of sources about the versions above. A claim about a version counts for others only with such a statement.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub statements: Vec<Statement>,
    /// Its engine, if it has one that responds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineFacts>,
    /// Restarts of the engine that this incarnation of the agent detected.
    #[serde(default)]
    pub engine_restarts: u32,
    /// Whether the engine passed its probes (source: true).
    pub healthy: bool,
    /// Whether the engine's HTTP front answers while the engine computes nothing: it does not recover by itself.
    #[serde(default)]
    pub wedged: bool,
    /// Latest end of the engine's pause by WeightSync, in ms since 1970; `None` if it is not paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused_until: Option<u64>,
    /// When its engine answered requests while a version was loaded, the oldest first; the last few.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mixed: Vec<MixedWindow>,
    /// The preflight result of its epoch, if it is the leader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preflight: Option<Box<PreflightReport>>,
    /// How the last version came that this agent received; none before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub received: Option<Received>,
    /// What it reads with in its epoch; none where bytes do not travel by reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<Box<MemberFabric>>,
    /// Why it is dirty, unknown, unhealthy or idle, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl MemberState {
    /// All versions that it keeps complete and verified.
    pub fn keeps(&self) -> impl Iterator<Item = &HeldVersion> {
        self.retained.iter().chain(&self.earlier)
    }
}

/// One line of the event stream.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase", rename_all_fields = "camelCase")]
#[allow(missing_docs)]
pub enum AgentEvent {
    /// All facts; first line, and again whenever any of them changes.
    Snapshot { state: Box<MemberState> },
    /// No change; proves that the agent runs. Each second.
    Heartbeat,
    /// A leader's view of an update, from begin to end.
    Update { update: UpdateView },
    /// The sender cannot reach or lost a peer of its epoch.
    PeerLost { id: EpochId, peer: MemberName, cause: String },
}

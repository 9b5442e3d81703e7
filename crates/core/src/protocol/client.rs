//! Messages between a trainer's client and the source agent next to it: one JSON object a line over an abstract unix stream
//! socket (`\0weightsync/POD_UID`), with the ring's memfd passed once by SCM_RIGHTS next to [`ClientReply::Ring`], or the handle of a ring in
//! GPU memory in it ([`GpuRing`]).
//!
//! The client writes the stream of the layout into the ring, a bucket a slot, and says so; the agent says when a slot is free again.
//! Order of a publish: `publish` -> `accepted` -> `ring` -> (`filled` / `free`)* -> `end` -> `released` -> `done` or `error`. `again` may
//! come after `ring` until `released`: the attempt failed, nothing was retained, and the client is to write the stream from its first
//! byte once more. `filled` and `end` carry the attempt, so what was under way when `again` was sent is not taken for the new attempt.
//!
//! While a publish runs, a line leaves the agent at least once a second (`alive` when nothing else does): a client that hears nothing
//! for ten seconds knows that its agent is lost. A second publish on a connection whose publish runs is refused: use a second connection.

use serde::{Deserialize, Serialize};

use super::{GpuOffer, GpuRing, MemberName, MixedWindow, ReplicaReport, RosterView, Topology, UpdatePhase, Version};
use crate::weights::{Layout, TensorSpec};

/// Number of this protocol; a client of another number is refused with both numbers.
pub const CLIENT_PROTOCOL: u32 = 1;

/// What a client says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "camelCase", rename_all_fields = "camelCase")]
#[allow(missing_docs)]
pub enum ClientRequest {
    Hello {
        /// [`CLIENT_PROTOCOL`].
        protocol: u32,
        /// Program and version, for logs.
        client: String,
    },
    /// Starts an update from tensors that the client will write.
    Publish {
        /// Number of the version; higher than every one published before.
        version: Version,
        /// Tensors in the order in which they will be written.
        tensors: Vec<TensorSpec>,
        queue: QueuePolicy,
        activation: Activation,
        /// Whether the client can write the stream again after a failed attempt.
        repeatable: bool,
        /// The whole publish ends after this long, in ms.
        timeout_ms: u64,
        /// The GPUs of its tensors, where they lie on some.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        gpu: Option<GpuOffer>,
    },
    /// Starts an update from a safetensors checkpoint that the agent can read.
    PublishCheckpoint {
        version: Version,
        /// Directory or file, as the agent sees it.
        path: String,
        queue: QueuePolicy,
        activation: Activation,
        timeout_ms: u64,
    },
    /// A slot holds the bucket of that sequence.
    Filled {
        attempt: u32,
        /// Sequence of the bucket; each attempt counts from 0 without a gap.
        sequence: u32,
        slot: u32,
        /// Whether its bytes are there when the slot's event fires. False: they are there now.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        event: bool,
    },
    /// The ring in GPU memory was opened, and its check was written.
    Opened {
        /// [`GpuRing::ring`].
        ring: u64,
        /// For each slot the 64 bytes of the `CUipcEventHandle` (base64) that is recorded after each filling of it; none when events
        /// cannot be shared: the trainer then waits for its copies itself.
        events: Vec<String>,
    },
    Unopened {
        ring: u64,
        reason: String,
    },
    /// The ring in GPU memory is not open here any more; nothing is under way to it. Said by itself before a connection is closed, too.
    Closed {
        ring: u64,
    },
    /// All buckets were filled.
    End {
        attempt: u32,
    },
    /// Switches a staged version (`activation: manual`).
    Activate {
        version: Version,
    },
    Cancel {
        reason: String,
    },
    /// Asks for the roster; with `watch`, for every change too.
    Roster {
        watch: bool,
    },
    /// Asks for every epoch from now on, the present one first (`delivery: External`).
    WatchEpochs,
    /// Begins a version that the trainer's own data plane brings to the replicas of an epoch.
    External {
        /// The epoch, as it was informed on this connection.
        epoch: u64,
        /// Number of the version: higher than the current one, or the current one once more for replicas that lack it.
        version: Version,
        /// What identifies its weights, where the trainer has something: the same number with another one is refused.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        digest: Option<String>,
        /// What engines will report as their weight version, where the data plane writes one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        engine_version: Option<String>,
        timeout_ms: u64,
    },
    Report(ReplicaReport),
    /// All that will be reported was; who was not reported failed.
    Conclude,
    /// The trainer's group of that epoch does not work: another epoch is wanted.
    Broken {
        epoch: u64,
        reason: String,
    },
}

/// What a second publish does while one runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum QueuePolicy {
    /// Waits its turn.
    #[default]
    Wait,
    /// Replaces one that waits; the running one ends first.
    Latest,
}

/// When engines switch to a delivered version.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Activation {
    /// As soon as it is delivered.
    #[default]
    Auto,
    /// When the trainer says so.
    Manual,
}

/// What the agent answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "camelCase", rename_all_fields = "camelCase")]
#[allow(missing_docs)]
pub enum ClientReply {
    Welcome {
        protocol: u32,
        /// The agent's program and version.
        agent: String,
        /// Last version published through this agent, if any.
        version: Option<Version>,
    },
    /// The publish stands in line (a checkpoint: is being opened). The ring may be announced before this is said.
    Accepted {
        version: Version,
    },
    /// Nothing new; proves that the agent lives.
    Alive,
    /// The publish has its turn and the ring is ready, all slots free.
    Ring {
        /// True when a memfd comes with this line; false when the one of the last publish on this connection is used again.
        memfd: bool,
        layout: Layout,
        slots: u32,
        /// Bytes from one slot to the next.
        slot_bytes: u64,
        /// Attempt, from 1.
        attempt: u32,
        /// First byte of each bucket in the stream. Empty: buckets begin at multiples of the layout's bucket length.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        cuts: Vec<u64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        gpu: Option<GpuRing>,
        /// Why the ring lies in host memory, though the trainer has tensors on GPUs.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        host_because: Option<String>,
    },
    /// The ring in GPU memory is proven: buckets may be written.
    Ready {
        /// [`GpuRing::ring`].
        ring: u64,
        /// Whether `filled` may name the slot's event. False: the trainer waits for its copies before it says `filled`.
        events: bool,
    },
    /// The ring in GPU memory is given up: to be closed, and answered by `closed`. Freed here only then.
    Close {
        ring: u64,
    },
    /// A slot may be written again.
    Free {
        slot: u32,
    },
    /// Write the stream once more, from the first bucket.
    Again {
        /// Attempt, from 2.
        attempt: u32,
        reason: String,
    },
    /// The client's tensors may change: all bytes are retained or delivered.
    Released {
        version: Version,
    },
    /// How far the update is; at most ten a second.
    Progress {
        version: Version,
        /// Attempt, from 1; 0 where the agent does not say.
        #[serde(default)]
        attempt: u32,
        phase: UpdatePhase,
        /// Bytes that the slowest member received.
        bytes: u64,
        total_bytes: u64,
    },
    /// Delivered everywhere it will be; waits for `activate`.
    Staged {
        version: Version,
    },
    /// At least `minReady` replicas serve the version.
    Done {
        result: PublishResult,
    },
    /// The publish, or the request before it, failed.
    Error {
        error: PublishError,
    },
    Roster {
        roster: RosterView,
    },
    /// An epoch was committed; the bound socket of its rendezvous comes next to this line.
    Epoch {
        topology: Topology,
    },
    /// The epoch is over or of no use any more: whatever the trainer runs in it is to be aborted.
    Fenced {
        epoch: u64,
        reason: String,
    },
    /// Every engine is marked: bytes may move.
    Open {
        version: Version,
    },
}

/// A publish that reached `minReady`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub struct PublishResult {
    pub version: Version,
    /// The epoch in which it was installed.
    pub epoch: u64,
    pub attempts: u32,
    pub bytes: u64,
    /// blake3 (hex) of its manifest.
    pub manifest: String,
    pub installed: Vec<MemberName>,
    /// Replicas that do not, with the reason.
    pub behind: Vec<(MemberName, String)>,
    /// Wall time of each phase in ms.
    pub phases_ms: Vec<(String, u64)>,
    /// Replicas whose engine answered requests while this version was loaded, and when: drop those answers. Replicas that paused are absent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mixed: Vec<(MemberName, Vec<MixedWindow>)>,
}

/// A publish that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub struct PublishError {
    pub code: PublishErrorCode,
    /// What failed, for a person, with the next step.
    pub message: String,
    /// Whether the same call may succeed later.
    pub retryable: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<UpdatePhase>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<MemberName>,
}

/// What failed in a publish.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum PublishErrorCode {
    /// Fewer replicas than `minReady` could take it.
    NotEnoughReplicas,
    VersionNotHigher,
    /// A failed number was used again with another manifest.
    ManifestChanged,
    /// The canary refused it (`spec.canary`): what engines answer with these weights is not what the object expects.
    VersionRefused,
    /// `spec.targetVersion` holds the group at a version: nothing is published until it is cleared.
    VersionPinned,
    Timeout,
    /// Engines were asked to switch, as many as make the version count, and what came of it was not heard: it may be the current one. The same
    /// number with the same weights may be published again, or a higher one; the roster says what replicas serve.
    OutcomeUnknown,
    /// Another publish replaced it (`queue: latest`).
    Superseded,
    /// The client gave it up or went away.
    Cancelled,
    Invalid,
    /// This process may not speak to this agent, or not in this protocol.
    NotAllowed,
    BadCheckpoint,
    /// Too little memory.
    OutOfSpace,
    /// The epoch that a trainer with its own data plane named is over.
    Fenced,
    /// No agent listens, or it went away in the middle. Said by a client, never by an agent.
    AgentLost,
    Internal,
}

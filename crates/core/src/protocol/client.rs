//! Messages between a trainer's client and the source agent in its pod: one JSON object a line over an abstract unix stream socket
//! (`\0weightsync/POD_UID`). The ring's memfd is passed once by SCM_RIGHTS with [`ClientReply::Ring`]; for a ring in GPU memory, the reply
//! contains its handle ([`GpuRing`]).
//!
//! The client writes the stream of the layout into the ring, one bucket in each slot, and reports each; the agent reports free slots. Order
//! of a publish: `publish` -> `accepted` -> `ring` -> (`filled` / `free`)* -> `end` -> `released` -> `done` or `error`. `again` may come
//! after `ring` until `released`: the attempt failed, nothing was retained, and the client must write the stream again from its first byte.
//! `filled` and `end` carry the attempt, so messages that were in flight when `again` was sent do not count for the new attempt.
//!
//! While a publish runs, the agent sends a line at least once a second (`alive` if nothing else): a client that receives nothing for ten
//! seconds treats its agent as lost. A second publish on a connection whose publish runs is refused: use a second connection.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{GpuOffer, GpuRing, MemberName, MixedWindow, ReplicaReport, RosterView, Topology, UpdatePhase, Version};
use crate::weights::{Layout, TensorSpec};

/// Number of this protocol; a client of another number is refused with both numbers.
pub const CLIENT_PROTOCOL: u32 = 1;

/// An API key of an engine. Its text is in messages of the local socket only, never in logs or errors.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EngineKey(pub String);

impl fmt::Debug for EngineKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EngineKey(...)")
    }
}

/// Requests of a client.
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
        /// Longest time of the whole publish, in ms.
        timeout_ms: u64,
        /// The GPUs of its tensors, if any.
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
        /// Whether its bytes are complete when the slot's event fires. False: they are complete now.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        event: bool,
    },
    /// The ring in GPU memory was opened, and its check was written.
    Opened {
        /// [`GpuRing::ring`].
        ring: u64,
        /// For each slot the 64 bytes of the `CUipcEventHandle` (base64) that is recorded after each filling of it; empty if events cannot
        /// be shared: the trainer then waits for its copies itself.
        events: Vec<String>,
    },
    Unopened {
        ring: u64,
        reason: String,
    },
    /// The client closed the ring in GPU memory; no copies to it are in flight. Also sent before a connection is closed.
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
    /// Registers an engine of this pod, for as long as the connection lasts. For agents of rollouts only.
    Register {
        /// Port of its server.
        port: u16,
        /// Address of its server: loopback, or the pod's own. Default: the agent's `--engine-host`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        address: Option<IpAddr>,
        /// Key that its server asks of its clients. Default: none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        api_key: Option<EngineKey>,
    },
    /// Requests the roster; with `watch`, every change too.
    Roster {
        watch: bool,
    },
    /// Subscribes to epochs, the present one first (`delivery: External`).
    WatchEpochs,
    /// Begins a version that the trainer's own data plane delivers to the replicas of an epoch.
    External {
        /// The epoch, as received on this connection.
        epoch: u64,
        /// Number of the version: higher than the current one, or the current one again for replicas that lack it.
        version: Version,
        /// Identifies its weights, if the trainer gives it: the same number with another digest is refused.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        digest: Option<String>,
        /// The weight version that engines will report, if the data plane writes one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        engine_version: Option<String>,
        timeout_ms: u64,
    },
    Report(ReplicaReport),
    /// All reports were sent; a replica without a report failed.
    Conclude,
    /// The trainer's group of that epoch does not work: request another epoch.
    Broken {
        epoch: u64,
        reason: String,
    },
}

/// What a second publish does while one runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum QueuePolicy {
    /// It waits in the queue.
    #[default]
    Wait,
    /// It replaces a waiting publish; the running one ends first.
    Latest,
}

/// When engines switch to a delivered version.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Activation {
    /// As soon as it is delivered.
    #[default]
    Auto,
    /// When the trainer requests it.
    Manual,
}

/// Replies of the agent.
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
    /// The publish is queued (a checkpoint: is being opened). The ring may be announced before this reply.
    Accepted {
        version: Version,
    },
    /// The engine is registered until the connection ends.
    Registered {
        /// Its port.
        port: u16,
    },
    /// No change; proves that the agent runs.
    Alive,
    /// The publish starts, and the ring is ready with all slots free.
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
        /// Why the ring is in host memory although the trainer has tensors on GPUs.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        host_because: Option<String>,
    },
    /// The ring in GPU memory is proven: buckets may be written.
    Ready {
        /// [`GpuRing::ring`].
        ring: u64,
        /// Whether `filled` may name the slot's event. False: the trainer waits for its copies before it sends `filled`.
        events: bool,
    },
    /// The agent gives up the ring in GPU memory: the client must close it and reply `closed`. Only then the agent frees it.
    Close {
        ring: u64,
    },
    /// A slot may be written again.
    Free {
        slot: u32,
    },
    /// Write the stream again from the first bucket.
    Again {
        /// Attempt, from 2.
        attempt: u32,
        reason: String,
    },
    /// The client's tensors may change: all bytes are retained or delivered.
    Released {
        version: Version,
    },
    /// Progress of the update; at most ten a second.
    Progress {
        version: Version,
        /// Attempt, from 1; 0 if the agent does not report it.
        #[serde(default)]
        attempt: u32,
        phase: UpdatePhase,
        /// Bytes that the slowest member received.
        bytes: u64,
        total_bytes: u64,
    },
    /// Delivered to all members of the attempt; waits for `activate`.
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
    /// An epoch was committed; the bound socket of its rendezvous is passed with this line.
    Epoch {
        topology: Topology,
    },
    /// The epoch ended or is of no use any more: abort everything that runs in it.
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
    /// Replicas whose engine's checkpoint does not quite agree with the tensors of this version, and how: tensors that lose precision, or names
    /// that were compared with nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<(MemberName, Vec<String>)>,
}

/// A publish that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub struct PublishError {
    pub code: PublishErrorCode,
    /// What failed, as text, with the next step.
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
    /// The canary refused it (`spec.canary`): answers of engines with these weights are outside the range.
    VersionRefused,
    /// `spec.targetVersion` holds the group at a version: nothing is published until it is cleared.
    VersionPinned,
    Timeout,
    /// The order to switch was sent to enough engines for the version to count, and their results did not arrive: it may be the current
    /// one. The same number with the same weights may be published again, or a higher one; the roster shows what replicas serve.
    OutcomeUnknown,
    /// Another publish replaced it (`queue: latest`).
    Superseded,
    /// The client cancelled it or disconnected.
    Cancelled,
    Invalid,
    /// This process may not use this agent, or uses another protocol.
    NotAllowed,
    BadCheckpoint,
    /// Too little memory.
    OutOfSpace,
    /// The epoch in a request of a trainer with its own data plane has ended.
    Fenced,
    /// No agent listens, or it disappeared during the request. Made by a client, never by an agent.
    AgentLost,
    Internal,
}

//! Messages of `delivery: External`: the user's own data plane moves the bytes; epochs, ranks, deadlines, gating and proof are ours.
//!
//! Between trainer and agent, on the trainer's socket: `watchEpochs` -> (`epoch` / `fenced`)*, and in an epoch for each version `external`
//! -> `open` -> `report`* -> `conclude` -> `done` or `error`. After `error` the epoch is unusable: `fenced` follows, and then the next
//! `epoch`. `broken` ends an epoch without a version. A bound, listening socket is passed by SCM_RIGHTS with each `epoch`. The trainer's
//! rendezvous uses that socket, so no other process can take the port in between (F21).
//!
//! Between leader and rollout agents, over mutual TLS: [`ExternalBegin`] and [`ExternalEnd`]; status and abort as for any update.

use serde::{Deserialize, Serialize};

use super::{EpochId, HeldVersion, MemberName, Statement, UpdateId, Version};

/// A committed epoch, as a trainer with its own data plane receives it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Topology {
    /// Number of the epoch.
    pub epoch: u64,
    /// Name of the group, never used by another group: it contains the object's UID and the epoch (F27).
    pub group: String,
    /// All ranks: the trainer's rank 0, and those of the replicas.
    pub world_size: u32,
    /// Address of the trainer's pod, on which the rendezvous listens.
    pub address: String,
    /// Port of the socket that is passed with this message.
    pub port: u16,
    /// Longest time of an update or of forming the trainer's group, in ms.
    pub timeout_ms: u64,
    /// Replicas that must hold a version for it to count.
    pub min_ready: u32,
    /// Last version that reached `minReady`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<Version>,
    /// Replicas by rank offset.
    pub replicas: Vec<TopologyReplica>,
}

/// A replica of a [`Topology`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub struct TopologyReplica {
    pub name: MemberName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    pub rank_offset: u32,
    /// Ranks.
    pub size: u32,
    /// Version that its engine serves completely; `None` if it serves none, or may hold half an update.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<Version>,
}

/// A trainer's report on one replica after a transfer by its own data plane.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaReport {
    /// The replica.
    pub replica: MemberName,
    /// Whether the transfer to it succeeded.
    pub ok: bool,
    /// The cause of a failure, as text.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// Opens an update by the user's data plane at a rollout: its engine is marked, and not trusted until the update is proven.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExternalBegin {
    /// The attempt.
    pub update: UpdateId,
    /// The version, with a substitute for its manifest: no agent sees the bytes.
    pub held: HeldVersion,
    /// Longest time of the update, in ms.
    pub timeout_ms: u64,
    /// The source's statement about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub statement: Option<Box<Statement>>,
}

/// Ends an update by the user's data plane at a rollout.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExternalEnd {
    /// The attempt.
    pub update: UpdateId,
    /// Its outcome.
    pub outcome: ExternalOutcome,
}

/// The outcome of an update by the user's data plane at one rollout, as the trainer reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum ExternalOutcome {
    /// The transfer succeeded. The agent now proves what can be proven; only then is the version installed.
    Delivered {
        /// The weight version that the engine must report, if the trainer gave one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        engine_version: Option<String>,
    },
    /// It failed, and may have left half an update.
    Failed {
        /// The cause as text.
        reason: String,
    },
    /// It never began: no byte was moved.
    Untouched {
        /// The cause as text.
        reason: String,
    },
}

/// The substitute for the manifest of a version that no agent sees. It is equal for the same object, number and `digest` (the trainer's
/// identification of the weights, if any). 64 hex digits, like any manifest's.
pub fn external_manifest(id: &EpochId, version: Version, digest: Option<&str>) -> String {
    let mut hasher = blake3::Hasher::new();
    for text in ["external", &id.weightsync, &version.to_string(), digest.unwrap_or_default()] {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

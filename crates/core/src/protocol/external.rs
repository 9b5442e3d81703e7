//! Messages of `delivery: External`: the user's own data plane moves the bytes; epochs, ranks, deadlines, gating and proof are ours.
//!
//! Between trainer and agent, on the trainer's socket: `watchEpochs` -> (`epoch` / `fenced`)*, and in an epoch for each version `external`
//! -> `open` -> `report`* -> `conclude` -> `done` or `error`. After `error` the epoch is of no use any more: `fenced` follows, and then the
//! next `epoch`. `broken` gives an epoch up without a version. A bound, listening socket is passed by SCM_RIGHTS with each `epoch`. The
//! trainer's rendezvous uses that socket, so no other process can take the port in between (F21).
//!
//! Between leader and rollout agents, over mutual TLS: `POST /v1/update/external/begin | end`; the rest as for any update
//! (`status`, `abort`).

use serde::{Deserialize, Serialize};

use super::{EpochId, HeldVersion, MemberName, Statement, UpdateId, Version};

/// A committed epoch, as a trainer with its own data plane receives it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Topology {
    /// Number of the epoch.
    pub epoch: u64,
    /// A name for the group that no other group ever has: it carries the object's UID and the epoch (F27).
    pub group: String,
    /// Ranks in all: the trainer's rank 0, and those of the replicas.
    pub world_size: u32,
    /// Address of the trainer's pod: where the rendezvous listens.
    pub address: String,
    /// Port of the socket that is passed with this message.
    pub port: u16,
    /// An update, or the forming of the trainer's group, may take this long, in ms.
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
    /// Version that its engine serves, complete; none when it serves none, or may hold half an update.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<Version>,
}

/// What a trainer says of one replica when its own data plane brought a version there, or did not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaReport {
    /// Which replica.
    pub replica: MemberName,
    /// Whether the data plane finished there.
    pub ok: bool,
    /// Why not, as text.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// Opens an update by the user's data plane at a rollout: its engine is marked, and not trusted until the update was proven.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExternalBegin {
    /// Which attempt.
    pub update: UpdateId,
    /// The version, and what stands for its manifest: no agent sees the bytes.
    pub held: HeldVersion,
    /// The update ends after this long, in ms.
    pub timeout_ms: u64,
    /// What the source signed about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub statement: Option<Box<Statement>>,
}

/// Ends an update by the user's data plane at a rollout.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExternalEnd {
    /// Which attempt.
    pub update: UpdateId,
    /// How it ended.
    pub outcome: ExternalOutcome,
}

/// How an update by the user's data plane ended at one rollout, by the trainer's word.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum ExternalOutcome {
    /// The data plane finished: the agent proves now what can be proven, and only then is it installed.
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

/// What stands for the manifest of a version that no agent sees: equal for the same object, number and `digest` (what the trainer says that
/// identifies the weights, if anything). 64 hex digits, like any manifest's.
pub fn external_manifest(id: &EpochId, version: Version, digest: Option<&str>) -> String {
    let mut hasher = blake3::Hasher::new();
    for text in ["external", &id.weightsync, &version.to_string(), digest.unwrap_or_default()] {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

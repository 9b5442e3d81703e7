//! Messages of a leader (the source, or the feeder of joiners) to rollout agents, over mutual TLS.
//!
//! Begin, finish, activate and abort return at once, with the [`UpdateStatus`] after them. Progress is read by
//! [`StatusRequest`](super::StatusRequest), a long poll. So no call is long, and moving bytes are visible as progress. Any refusal is a
//! [`super::Refusal`] with HTTP 409 or 422.

use serde::{Deserialize, Serialize};

use super::{EngineChecksum, EpochId, InstallStep, ProvenBy, Statement, Version};
use crate::weights::{DigestAlgorithm, Layout};

/// Names one attempt to bring one version to members.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UpdateId {
    /// The group in which it runs.
    pub epoch: EpochId,
    /// The version.
    pub version: Version,
    /// Attempt, from 1; unique for a version across all epochs.
    pub attempt: u32,
}

/// Opens an update at a rollout. The rollout compares the layout digest, checks memory and asks its engine, before a byte moves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub struct BeginRequest {
    pub update: UpdateId,
    pub layout: Layout,
    /// blake3 (hex) of the layout as the leader computed it.
    pub layout_digest: String,
    #[serde(default)]
    pub algorithm: DigestAlgorithm,
    /// True if this brings an already installed version to a member that lacks it.
    pub feeding: bool,
    /// True if only the trainer starts the switch of the engine.
    #[serde(default)]
    pub manual: bool,
    /// blake3 (hex) of the manifest, if the leader knows it before the stream (a retry, feeding). A rollout that holds exactly these bytes
    /// reports `Delivered` or `Installed` at once and leaves the chain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest_digest: Option<String>,
    /// The source's statement about that manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub statement: Option<Box<Statement>>,
}

/// Ends the stream, with the digests that became known during it. The rollout now checks digests and coverage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FinishRequest {
    /// The attempt.
    pub update: UpdateId,
    /// Digest (hex) of every tensor by the algorithm in the begin, in layout order.
    pub tensor_digests: Vec<String>,
    /// blake3 (hex) of the manifest.
    pub manifest_digest: String,
    /// The source's statement about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub statement: Option<Box<Statement>>,
    /// Whether an engine that received by itself is asked for its own checksums ([`UpdateStatus::checksum`]).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub check: bool,
}

/// Switches the engine to a delivered version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ActivateRequest {
    /// The attempt.
    pub update: UpdateId,
    /// Whether most replicas of its pool reported the same [`UpdateStatus::checksum`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub agreed: bool,
}

/// Cancels an attempt. Has no effect if the attempt is unknown or has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AbortRequest {
    /// The attempt.
    pub update: UpdateId,
    /// Why, for logs.
    pub reason: String,
}

/// A rollout's progress in an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UpdateStatus {
    /// The attempt; the latest one that it received.
    pub update: UpdateId,
    /// Grows with every change; pass it as `after` to wait for the next one.
    pub sequence: u64,
    /// Its step.
    pub step: InstallStep,
    /// Bytes received and checked.
    pub bytes: u64,
    /// Why it failed, with the name of a tensor at fault (never its contents).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether a failed install changed the engine.
    pub dirty: bool,
    /// Whether it failed because the engine loaded the version and its canary refused it.
    #[serde(default)]
    pub refused: bool,
    /// Whether the same weights would fail here again: the engine read and refused them.
    #[serde(default)]
    pub repeats: bool,
    /// Whether it ended because its epoch did: another member may be at fault, and this one is not.
    #[serde(default)]
    pub fenced: bool,
    /// Times of finished steps in ms, e.g. `receive`, `verify`, `pause`, `load`, `check`, `resume`.
    pub steps_ms: Vec<(String, u64)>,
    /// The engine's own checksums, where they were asked for and it has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checksum: Option<EngineChecksum>,
    /// When its engine answered requests while it loaded this version, over all attempts, the oldest first. Empty for an engine that was
    /// paused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mixed: Vec<MixedWindow>,
    /// What the comparison of its tensors with the engine's checkpoint found and did not refuse, or why there was nothing to compare with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A time in which an engine served while its weights were a mixture of two versions. An answer that was in progress at any moment of it
/// belongs to no version. The clock is that of the engine's agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MixedWindow {
    /// The version that was loaded.
    pub version: Version,
    /// Before the first byte, in ms since 1970.
    pub begin_ms: u64,
    /// After the last byte, in ms since 1970; `None` while the engine may still serve a mixture.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_ms: Option<u64>,
}

/// One line of `GET /v1/roster` on an agent's status port (plain HTTP, watchable with `?watch=true`): for routers and trainers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RosterView {
    /// The epoch; `None` if it is in no group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
    /// Last version that reached `minReady`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<Version>,
    /// Replicas by rank offset.
    pub replicas: Vec<RosterReplica>,
}

/// One replica in [`RosterView`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub struct RosterReplica {
    pub name: super::MemberName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// `ready`, `updating`, `dirty`, `unknown`, `behind` or `out`.
    pub state: String,
    /// Version that its engine serves, as far as it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<Version>,
    /// What shows that its engine holds the bytes of that version, if its agent reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proven_by: Option<ProvenBy>,
    pub rank_offset: u32,
    /// Ranks.
    pub size: u32,
    /// When its engine answered requests while it loaded a version: the last few windows, the oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mixed: Vec<MixedWindow>,
}

//! Messages of a leader (the source, or the feeder of joiners) to rollout agents, over mutual TLS.
//!
//! `POST /v1/update/begin | finish | activate | abort` are answered at once; what follows is read by
//! `GET /v1/update/status?after=N` (a long poll of at most 1 s), so no call is long and bytes moving are seen as progress.
//! Each of the four answers the [`UpdateStatus`] after it. Any refusal is a [`super::Refusal`] with HTTP 409 or 422.

use serde::{Deserialize, Serialize};

use super::{EpochId, InstallStep, Statement, Version};
use crate::weights::{DigestAlgorithm, Layout};

/// Names one attempt to bring one version to members.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UpdateId {
    /// The group it runs in.
    pub epoch: EpochId,
    /// The version.
    pub version: Version,
    /// Attempt, from 1; no two attempts of one version share it, whatever their epoch.
    pub attempt: u32,
}

/// Opens an update at a rollout. It compares the layout digest, checks memory and asks its engine, before a byte moves.
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
    /// True when an already installed version is brought to a member that lacks it.
    pub feeding: bool,
    /// True when the engine is switched by the trainer's word only, whenever that comes.
    #[serde(default)]
    pub manual: bool,
    /// blake3 (hex) of the manifest, where the leader knows it before the stream (a retry, feeding): a rollout that holds these very
    /// bytes says `Delivered` or `Installed` at once and leaves the chain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest_digest: Option<String>,
    /// What a source signed about that manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub statement: Option<Box<Statement>>,
}

/// Ends the stream: digests that became known while it was sent. The rollout now checks digests and coverage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FinishRequest {
    /// Which attempt.
    pub update: UpdateId,
    /// Digest (hex) of every tensor by the algorithm of the begin, in layout order.
    pub tensor_digests: Vec<String>,
    /// blake3 (hex) of the manifest.
    pub manifest_digest: String,
    /// What a source signed about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub statement: Option<Box<Statement>>,
}

/// Switches the engine to a delivered version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ActivateRequest {
    /// Which attempt.
    pub update: UpdateId,
}

/// Gives an attempt up. Harmless when the attempt is unknown or over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AbortRequest {
    /// Which attempt.
    pub update: UpdateId,
    /// Why, for logs.
    pub reason: String,
}

/// Where a rollout stands in an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UpdateStatus {
    /// Which attempt; the last one it heard of.
    pub update: UpdateId,
    /// Grows with every change; pass it as `after` to wait for the next one.
    pub sequence: u64,
    /// Its step.
    pub step: InstallStep,
    /// Bytes received and checked.
    pub bytes: u64,
    /// Why it failed, with the tensor's name where one is at fault (never its contents).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether the engine was touched by a failed install.
    pub dirty: bool,
    /// Whether it failed because the engine loaded the version and the canary refused what it answers.
    #[serde(default)]
    pub refused: bool,
    /// Whether the same weights would fail here again: the engine read and refused them.
    #[serde(default)]
    pub repeats: bool,
    /// Times of finished steps in ms, e.g. `receive`, `verify`, `pause`, `load`, `check`, `resume`.
    pub steps_ms: Vec<(String, u64)>,
    /// When its engine answered requests while this version was loaded, over all attempts, the oldest first. Empty for an engine that was
    /// paused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mixed: Vec<MixedWindow>,
}

/// A time in which an engine served while its weights were a mixture of two versions. An answer that was under way at any moment of it is
/// of no version. The clock is that of the engine's agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MixedWindow {
    /// The version that was loaded.
    pub version: Version,
    /// Before the first byte, in ms since 1970.
    pub begin_ms: u64,
    /// After the last byte, in ms since 1970; none while the engine may serve a mixture still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_ms: Option<u64>,
}

/// One line of `GET /v1/roster` on an agent's status port (plain HTTP, watchable with `?watch=true`): for routers and trainers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RosterView {
    /// The epoch; none when in no group.
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
    /// Version that its engine serves, as far as known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<Version>,
    pub rank_offset: u32,
    /// Ranks.
    pub size: u32,
    /// When its engine answered requests while a version was loaded, the oldest first; the last few.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mixed: Vec<MixedWindow>,
}

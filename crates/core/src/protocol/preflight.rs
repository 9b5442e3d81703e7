//! What is measured between members before a chain carries weights: the pre-flight.
//!
//! The agent that leads asks the sender of each edge (`POST /v1/preflight/edge`). The sender moves bytes over the data path of the epoch, whose
//! digests the receiver checks as it checks those of an update. Values only; [`crate::plan::arrange`] decides what they mean.

use serde::{Deserialize, Serialize};

use super::{EpochId, MemberName};

/// Most edges that a report carries, and that status lists.
pub const MOST_EDGES: usize = 64;

/// Most bytes of one stream of a measurement.
pub const LONGEST_MEASUREMENT: u64 = 64 << 20;

/// Whether edges are measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Preflight {
    /// Once for each new pair of nodes, between updates.
    #[default]
    Auto,
    /// Never.
    Off,
}

impl Preflight {
    /// Whether it is the default.
    pub fn is_auto(&self) -> bool {
        *self == Self::Auto
    }
}

/// Asks the sender of an edge to measure it. From the agent that leads the epoch only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EdgeRequest {
    /// The committed epoch.
    pub id: EpochId,
    /// Who receives.
    pub to: MemberName,
    /// Answer within this long.
    pub deadline_ms: u64,
}

/// Answer to `GET /v1/preflight/clock`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClockAnswer {
    /// The clock of the host, in ms since 1970.
    pub now_ms: i64,
}

/// What a stream over an edge showed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "camelCase", rename_all_fields = "camelCase")]
#[allow(missing_docs)]
pub enum EdgeOutcome {
    /// All bytes arrived, and every digest agreed.
    Verified(EdgeFigures),
    /// The bytes did not arrive, or arrived changed.
    Broken { cause: String },
    /// It could not be asked, which says nothing of the edge: an agent of an earlier release, for instance.
    Unmeasured { cause: String },
}

/// The figures of an edge that works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EdgeFigures {
    /// Bytes of the longest stream.
    pub bytes: u64,
    /// Its time in ns, from the first byte to the receiver's confirmation.
    pub nanoseconds: u64,
    /// The shortest round trip of a call to the receiver's agent, in µs; TLS and HTTP are part of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_trip_us: Option<u64>,
    /// MTU of the sender's interface towards the receiver, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// How far the receiver's clock is ahead of the sender's, in ms. Half a round trip is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_ms: Option<i64>,
}

impl EdgeFigures {
    /// Bytes a second; at least 1.
    pub fn rate(&self) -> u64 {
        let rate = u128::from(self.bytes) * 1_000_000_000 / u128::from(self.nanoseconds.max(1));
        u64::try_from(rate).unwrap_or(u64::MAX).max(1)
    }
}

/// An edge and what was measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub struct EdgeReport {
    pub from: MemberName,
    pub to: MemberName,
    /// Where the two run, by node; by pod where the node is not known. A measurement holds for all pods of the pair.
    pub places: (String, String),
    #[serde(flatten)]
    pub outcome: EdgeOutcome,
}

/// What the pre-flight of an epoch found; a fact of the agent that leads it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PreflightReport {
    /// The epoch.
    pub id: EpochId,
    /// The transport that was measured.
    pub transport: String,
    /// The request that it answers; empty for none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub asked: String,
    /// Whether all was measured that the order needs.
    pub done: bool,
    /// Edges that were measured in this epoch.
    pub measured: u32,
    /// Time of those measurements together, in ms.
    pub took_ms: u64,
    /// Edges that the order was decided by, remembered ones included; at most [`MOST_EDGES`], those that are slow or broken first.
    pub edges: Vec<EdgeReport>,
    /// What they mean.
    pub arrangement: Arrangement,
}

/// The order of a chain by its edges.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Arrangement {
    /// All rollouts in the order of the chain; those that no place in it helps stand last.
    pub order: Vec<MemberName>,
    /// Rollouts that moved to a later place, where their edge is fast.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub moved: Vec<MemberName>,
    /// Rollouts whose edge is slow or broken wherever they stand, the slowest last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub poor: Vec<PoorMember>,
    /// Set where no edge from the source is fast: then the source is at fault, and the order is the planned one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<PoorMember>,
}

/// A member that slows or breaks every chain that it is in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoorMember {
    /// Who.
    pub member: MemberName,
    /// The sender of the edge.
    pub from: MemberName,
    /// Whether the edge carries no bytes at all.
    pub broken: bool,
    /// The edge, its figures and those of the others, as text.
    pub why: String,
}

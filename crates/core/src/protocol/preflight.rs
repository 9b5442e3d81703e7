//! The measurements between members before a chain carries weights: the preflight.
//!
//! The leading agent sends an [`EdgeRequest`] to the sender of each edge. The sender moves bytes over the data path of
//! the epoch; the receiver checks their digests as in an update. Values only; [`crate::plan::arrange`] evaluates them.

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

/// Requests that the sender of an edge measures it. Only the agent that leads the epoch sends it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EdgeRequest {
    /// The committed epoch.
    pub id: EpochId,
    /// The receiver.
    pub to: MemberName,
    /// Deadline for the response, in ms.
    pub deadline_ms: u64,
}

/// Answer to [`ClockRequest`](super::ClockRequest).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClockAnswer {
    /// The clock of the host, in ms since 1970.
    pub now_ms: i64,
}

/// The result of a stream over an edge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "camelCase", rename_all_fields = "camelCase")]
#[allow(missing_docs)]
pub enum EdgeOutcome {
    /// All bytes arrived, and every digest agreed.
    Verified(EdgeFigures),
    /// The bytes did not arrive, or arrived changed.
    Broken { cause: String },
    /// The measurement was not possible, for instance by an agent of an earlier release. It shows nothing about the edge.
    Unmeasured { cause: String },
}

/// The measurements of a working edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EdgeFigures {
    /// Bytes of the longest stream.
    pub bytes: u64,
    /// Its time in ns, from the first byte to the receiver's confirmation.
    pub nanoseconds: u64,
    /// The shortest round trip of a call to the receiver's agent, in µs, including TLS and HTTP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_trip_us: Option<u64>,
    /// MTU of the sender's interface towards the receiver, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// How far the receiver's clock is ahead of the sender's, in ms. The error is up to half a round trip.
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

/// An edge and its measurement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub struct EdgeReport {
    pub from: MemberName,
    pub to: MemberName,
    /// The places of the two ends: nodes, or pods if the node is not known. A measurement holds for all pods of the pair.
    pub places: (String, String),
    #[serde(flatten)]
    pub outcome: EdgeOutcome,
}

/// The preflight result of an epoch; a fact of the agent that leads it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PreflightReport {
    /// The epoch.
    pub id: EpochId,
    /// The measured transport.
    pub transport: String,
    /// The request that caused it; empty without one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub asked: String,
    /// Whether all edges that the order needs were measured.
    pub done: bool,
    /// Edges that were measured in this epoch.
    pub measured: u32,
    /// Total time of those measurements, in ms.
    pub took_ms: u64,
    /// Edges that determined the order, including remembered ones; at most [`MOST_EDGES`], slow and broken ones first.
    pub edges: Vec<EdgeReport>,
    /// The resulting order.
    pub arrangement: Arrangement,
}

/// The order of a chain by its edges.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Arrangement {
    /// All rollouts in the order of the chain; those that are slow at every place come last.
    pub order: Vec<MemberName>,
    /// Rollouts that moved to a later place, where their edge is fast.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub moved: Vec<MemberName>,
    /// Rollouts whose edge is slow or broken at every place, the slowest last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub poor: Vec<PoorMember>,
    /// Set if no edge from the source is fast: then the source is at fault, and the order is the planned one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<PoorMember>,
}

/// A member that slows or breaks every chain that includes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoorMember {
    /// The member.
    pub member: MemberName,
    /// The sender of the edge.
    pub from: MemberName,
    /// Whether the edge carries no bytes at all.
    pub broken: bool,
    /// The edge, its rate and the rates of the others, as text.
    pub why: String,
}

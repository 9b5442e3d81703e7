//! What engines are asked after each switch, and when replicas that refuse a version for their answer take the whole group back.
//!
//! Values, and the one count that leader and controller must agree on. How an engine is asked, and how its answer is judged, is `engine`'s.

use serde::{Deserialize, Serialize};

use super::HeldVersion;

/// A fixed prompt, and what the log-probs of the tokens that follow it must be like.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CanaryPolicy {
    /// The text that the model goes on with.
    pub prompt: String,
    /// Tokens that it is asked for; the likeliest one is taken each time.
    pub max_tokens: u32,
    /// Least log-prob of each of them, in thousandths: two of these messages are compared, which numbers with a fraction forbid.
    pub least_log_prob_milli: i32,
    /// Greatest log-prob of each of them, in thousandths.
    pub greatest_log_prob_milli: i32,
}

/// A version that a replica's engine loaded well and that its canary refused.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RefusedVersion {
    /// Which version.
    pub held: HeldVersion,
    /// What was measured, for a person.
    pub measured: String,
}

/// Whether a version is refused for all: more replicas refused it than took it, and those that have not judged yet could not change that.
///
/// Counted over replicas that judge, not over all: after `maxUnavailable` a bad version reaches few, and those few are enough to turn it back.
pub fn is_refused_by_most(refused: usize, taken: usize, undecided: usize) -> bool {
    refused > taken.saturating_add(undecided)
}

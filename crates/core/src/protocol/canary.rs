//! The canary: the prompt for engines after each switch, and when refusals of replicas count for the whole group.
//!
//! Values, and the one count on which leader and controller must agree. The crate `engine` sends the prompt and judges the responses.

use serde::{Deserialize, Serialize};

use super::HeldVersion;

/// A fixed prompt, and the allowed log-probs of the generated tokens.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CanaryPolicy {
    /// The text that the model completes.
    pub prompt: String,
    /// Tokens to generate, with greedy decoding.
    pub max_tokens: u32,
    /// Lowest log-prob of each token, in thousandths: integers, because these messages are compared for equality.
    pub least_log_prob_milli: i32,
    /// Highest log-prob of each token, in thousandths.
    pub greatest_log_prob_milli: i32,
}

/// A version that a replica's engine loaded correctly and that its canary refused.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RefusedVersion {
    /// Which version.
    pub held: HeldVersion,
    /// The measurement, as text.
    pub measured: String,
}

/// Whether a version is refused for all: more replicas refused it than accepted it, and the undecided ones cannot change that.
///
/// Counted over the replicas that judged, not over all: with `maxUnavailable` a bad version reaches few replicas, and these are enough to
/// refuse it.
pub fn is_refused_by_most(refused: usize, taken: usize, undecided: usize) -> bool {
    refused > taken.saturating_add(undecided)
}

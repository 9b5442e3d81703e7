//! The canary: the prompt for engines after each switch, and when refusals of replicas count for the whole group.
//!
//! Values, and the one count on which leader and controller must agree. The crate `engine` sends the prompt and judges the responses.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{HeldVersion, MemberName};

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

/// What a replica's engine says of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Judgement {
    /// Its canary refused it.
    Refused,
    /// It serves it.
    Taken,
    /// It may still do either.
    Undecided,
}

/// The judgements of replicas about one version. Each pod has one vote, however many engines it says it has: the vote of most of them.
#[derive(Debug, Clone, Default)]
pub struct Ballot<'a>(BTreeMap<&'a str, Count>);

/// Judgements of one kind each.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    refused: usize,
    taken: usize,
    undecided: usize,
}

impl Count {
    /// Whether more refused than accepted, and the undecided ones cannot change that.
    const fn is_refusal(self) -> bool {
        self.refused > self.taken.saturating_add(self.undecided)
    }

    /// Whether it can still become a refusal, or no refusal any more.
    const fn is_open(self) -> bool {
        !self.is_refusal() && self.refused.saturating_add(self.undecided) > self.taken
    }

    const fn add(&mut self, judgement: Judgement) {
        match judgement {
            Judgement::Refused => self.refused += 1,
            Judgement::Taken => self.taken += 1,
            Judgement::Undecided => self.undecided += 1,
        }
    }
}

impl<'a> Ballot<'a> {
    /// Counts the judgement of one replica.
    pub fn add(&mut self, member: &'a MemberName, judgement: Judgement) {
        self.0.entry(member.voter()).or_default().add(judgement);
    }

    /// Whether the version is refused for all: more pods refused it than accepted it, and the undecided ones cannot change that.
    ///
    /// Counted over the pods that judged, not over all: with `maxUnavailable` a bad version reaches few replicas, and these are enough to
    /// refuse it.
    pub fn is_refused(&self) -> bool {
        self.votes().is_refusal()
    }

    /// Pods that refuse it.
    pub fn refused(&self) -> usize {
        self.votes().refused
    }

    /// Pods that refuse or accept it.
    pub fn judged(&self) -> usize {
        let votes = self.votes();
        votes.refused + votes.taken
    }

    fn votes(&self) -> Count {
        let mut votes = Count::default();
        for pod in self.0.values() {
            votes.add(match (pod.is_refusal(), pod.is_open()) {
                (true, _) => Judgement::Refused,
                (false, true) => Judgement::Undecided,
                (false, false) => Judgement::Taken,
            });
        }
        votes
    }
}

#[cfg(test)]
mod tests;

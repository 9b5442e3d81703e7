//! The output of a simulated engine: a function of the weights it serves and of the prompt, so that wrong weights show.
//!
//! Decides tokens and log-probs from digests, and a NaN log-prob from weights that are NaN; knows no request and no clock. Two different
//! sets of weights agree on a token's log-prob with a chance of about one in a million, so a few tokens distinguish them.

use xxhash_rust::xxh3::xxh3_64;

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Token {
    /// Number in [`WORDS`].
    pub(super) id: u32,
    /// Its text, with the space before it.
    pub(super) text: &'static str,
    /// Natural logarithm of its probability: finite and at most 0, or NaN where the weights are.
    pub(super) logprob: f64,
}

#[derive(Debug)]
pub(super) struct Generated {
    pub(super) tokens: Vec<Token>,
    pub(super) aborted: bool,
}

impl Generated {
    /// Whether a token has no log-prob that is a number.
    pub(super) fn is_nan(&self) -> bool {
        self.tokens.iter().any(|token| token.logprob.is_nan())
    }
}

const WORDS: [&str; 16] = [
    " the", " quick", " brown", " fox", " jumps", " over", " lazy", " dog", " and", " its", " weights", " came", " from", " far", " away",
    ".",
];

/// The token at `position` for a prompt. `cache` is the digest of the weights that the prompt's KV was computed with: where a cache is
/// older than the weights the answer is a mixture, and differs from what either set of weights alone would give.
pub(super) fn token(weights: u128, cache: u128, nan: bool, prompt: &str, position: usize) -> Token {
    let mut input = Vec::with_capacity(prompt.len() + 40);
    input.extend_from_slice(&weights.to_le_bytes());
    input.extend_from_slice(&cache.to_le_bytes());
    input.extend_from_slice(&(position as u64).to_le_bytes());
    input.extend_from_slice(prompt.as_bytes());
    let hash = xxh3_64(&input);
    let id = u32::try_from(hash % WORDS.len() as u64).unwrap_or(0);
    let steps = u32::try_from((hash >> 32) % 1_000_000).unwrap_or(0);
    let logprob = if nan { f64::NAN } else { -f64::from(steps) / 250_000.0 };
    Token { id, text: WORDS.get(id as usize).copied().unwrap_or_default(), logprob }
}

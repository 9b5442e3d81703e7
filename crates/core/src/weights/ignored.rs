//! Names of tensors that the comparison of a version with an engine's checkpoint passes over, as patterns of the user.
//!
//! Decides which patterns are valid, and which names they match: `*` stands for any characters, everything else for itself. It never excuses
//! every name: a pattern names at least one letter or digit.

use serde::{Deserialize, Serialize};

/// Most patterns.
pub const MOST_PATTERNS: usize = 64;
/// Longest pattern, in bytes.
pub const LONGEST_PATTERN: usize = 256;

/// Patterns of names. One that is not valid matches nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct IgnoredTensors(Vec<String>);

impl IgnoredTensors {
    /// These patterns; the first [`MOST_PATTERNS`] count.
    pub fn new(patterns: Vec<String>) -> Self {
        Self(patterns)
    }

    /// Whether there is no pattern.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a pattern matches the whole name.
    pub fn matches(&self, name: &str) -> bool {
        self.0.iter().take(MOST_PATTERNS).any(|pattern| is_pattern(pattern) && is_match(pattern.as_bytes(), name.as_bytes()))
    }
}

/// Whether a text is a valid pattern: printable ASCII without spaces, at least one letter or digit, at most [`LONGEST_PATTERN`] bytes.
pub fn is_pattern(text: &str) -> bool {
    text.len() <= LONGEST_PATTERN
        && text.bytes().all(|byte| byte.is_ascii_graphic())
        && text.bytes().any(|byte| byte.is_ascii_alphanumeric())
}

/// Takes the shortest run for each `*` first, and a longer one where the rest does not match: time is at most the product of both lengths.
fn is_match(pattern: &[u8], name: &[u8]) -> bool {
    let (mut at, mut in_name) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while let Some(byte) = name.get(in_name) {
        match (pattern.get(at), star) {
            (Some(b'*'), _) => {
                star = Some((at, in_name));
                at += 1;
            }
            (Some(wanted), _) if wanted == byte => {
                at += 1;
                in_name += 1;
            }
            (_, Some((place, taken))) => {
                star = Some((place, taken + 1));
                at = place + 1;
                in_name = taken + 1;
            }
            _ => return false,
        }
    }
    pattern.iter().skip(at).all(|byte| *byte == b'*')
}

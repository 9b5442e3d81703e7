//! Which builds of the program work together. Decides whether two builds have a protocol in common, but not the consequences for a group.
//!
//! A new field that an older reader may ignore needs no new number. A field or variant that it must know, or a changed meaning, needs one.
//! [`OLDEST`] stays while this build still reads both. `tests/protocol-N.json` keeps messages of protocol N from the time when it was the
//! newest.

use serde::{Deserialize, Serialize};

/// The newest protocol that this build speaks.
pub const NEWEST: u32 = 1;
/// The oldest protocol that this build still speaks.
pub const OLDEST: u32 = 1;

/// Protocols that a build speaks, from the oldest to the newest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Protocols {
    /// The oldest.
    pub oldest: u32,
    /// The newest.
    pub newest: u32,
}

impl Protocols {
    /// Those of this build.
    pub const OURS: Self = Self { oldest: OLDEST, newest: NEWEST };

    /// The protocols of a build that does not report them, like the first builds.
    #[must_use]
    pub fn unsaid() -> Self {
        Self { oldest: 1, newest: 1 }
    }

    /// Why an agent of the build `program` with these protocols cannot work with this build, and the remedy; `None` if it can.
    #[must_use]
    pub fn lacks_ours(self, program: &str) -> Option<String> {
        self.lacks(Self::OURS, program)
    }

    fn lacks(self, ours: Self, program: &str) -> Option<String> {
        if self.oldest <= ours.newest && ours.oldest <= self.newest {
            return None;
        }
        let next = if self.oldest > ours.newest {
            "upgrade the controller first"
        } else {
            "recreate the pod, with the agent of this controller's release"
        };
        let own = env!("CARGO_PKG_VERSION");
        Some(format!("its agent ({program}) speaks protocol {self}, this controller ({own}) speaks {ours}: {next}"))
    }
}

impl std::fmt::Display for Protocols {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.oldest == self.newest { write!(to, "{}", self.newest) } else { write!(to, "{} to {}", self.oldest, self.newest) }
    }
}

#[cfg(test)]
mod tests;

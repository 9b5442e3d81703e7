//! How far apart versions in service may be (`membership.maxSkew`): one rule for the agent's probe, the roster and the controller's gate.
//!
//! Numbers only. The current version is the one that `minReady` replicas were proven to serve. A version that a single replica has may be
//! in service too, and takes no replica out of service that serves the current one.

use super::Version;

/// Where a replica's version stands by the rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skew {
    /// It may serve.
    Within,
    /// Older than the newest version in service by more than is allowed.
    TooOld,
    /// Newer than the version that counts by more than is allowed: it may serve once its own counts.
    TooNew,
}

/// Judges one replica; `newest` is [`newest_in_service`] as far as it is known, and never taken to be older than what counts.
pub fn skew(most: Version, counts: Version, newest: Version, installed: Version) -> Skew {
    if installed > counts {
        return if installed - counts <= most { Skew::Within } else { Skew::TooNew };
    }
    if newest.max(counts) - installed <= most { Skew::Within } else { Skew::TooOld }
}

/// The newest version in service, of those that replicas hold.
pub fn newest_in_service(most: Version, counts: Version, installed: impl Iterator<Item = Version>) -> Version {
    installed.filter(|version| version.saturating_sub(counts) <= most).fold(counts, Version::max)
}

//! How far apart versions in service may be (`membership.maxSkew`): one rule for the agent's probe, the roster and the controller's gate.
//!
//! Numbers only. The current version is the one that `minReady` replicas were proven to serve. A version that only one replica has may be
//! in service too, but takes no replica with the current version out of service.

use super::Version;

/// A replica's version, judged by the rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skew {
    /// It may serve.
    Within,
    /// Too much older than the newest version in service.
    TooOld,
    /// Too much newer than the current version: it may serve once its own version counts.
    TooNew,
}

/// Judges one replica. `newest` is [`newest_in_service`] as far as it is known, and never counts as older than the current version.
pub fn skew(most: Version, counts: Version, newest: Version, installed: Version) -> Skew {
    if installed > counts {
        return if installed - counts <= most { Skew::Within } else { Skew::TooNew };
    }
    if newest.max(counts) - installed <= most { Skew::Within } else { Skew::TooOld }
}

/// The newest version in service among those that replicas hold.
pub fn newest_in_service(most: Version, counts: Version, installed: impl Iterator<Item = Version>) -> Version {
    installed.filter(|version| version.saturating_sub(counts) <= most).fold(counts, Version::max)
}

//! Deadlines of a coordinator's own calls and writes.

use std::time::Duration;

/// Deadlines of the coordinator's own. Those of members are in [`MembershipConfig`](weightsync_core::membership::MembershipConfig).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// Deadline for the start of an event stream.
    pub attach: Duration,
    /// Deadline for a fence or a release.
    pub tell: Duration,
    /// Deadline for a write of the epoch.
    pub persist: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self { attach: Duration::from_secs(1), tell: Duration::from_secs(2), persist: Duration::from_secs(10) }
    }
}

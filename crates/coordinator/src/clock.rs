//! The clock of a coordinator, for membership.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

/// Milliseconds since 1970 that never go back.
pub(super) struct Clock {
    started: Instant,
    at_start: u64,
}

impl Clock {
    pub(super) fn new() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { started: Instant::now(), at_start: millis(since) }
    }

    pub(super) fn now(&self) -> u64 {
        self.at_start + millis(self.started.elapsed())
    }

    pub(super) fn instant(&self, at: u64) -> Instant {
        self.started + Duration::from_millis(at.saturating_sub(self.at_start))
    }

    /// The time of `instant` on this clock, in ms.
    pub(super) fn at(&self, instant: Instant) -> u64 {
        self.at_start + millis(instant.saturating_duration_since(self.started))
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

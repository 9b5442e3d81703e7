//! When an ended process is restarted: the wait grows with each failure in a row. A process that worked for a while starts again without
//! failures. Holds times only; starts nothing.

use std::time::{Duration, Instant};

use weightsync_net::backoff::Backoff;

/// A process that ran for this long has worked: its earlier failures no longer count. Longer than any start takes to fail.
const WORKED: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct Restarts {
    backoff: Backoff,
    started: Option<Instant>,
}

impl Restarts {
    pub(super) fn new() -> Self {
        Self { backoff: Backoff::new(Duration::from_millis(200), Duration::from_secs(30)), started: None }
    }

    pub(super) fn started(&mut self, now: Instant) {
        self.started = Some(now);
    }

    /// Records that it ended or could not be started. Returns the wait before the next start.
    pub(super) fn ended(&mut self, now: Instant) -> Duration {
        if self.started.take().is_some_and(|started| now.saturating_duration_since(started) >= WORKED) {
            self.backoff.succeeded();
        }
        self.backoff.failed()
    }
}

#[cfg(test)]
mod tests;

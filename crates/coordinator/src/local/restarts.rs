//! When a process that ended is started again: the longer it fails in a row, the longer it waits, and one that worked for a while counts
//! as new. Holds times only; starts nothing.

use std::time::{Duration, Instant};

use weightsync_net::backoff::Backoff;

/// A process that ran for this long worked: it did not fail in a row with the times before. Longer than any start takes to fail by itself.
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

    /// It ended, or could not be started; tells how long to wait before the next start.
    pub(super) fn ended(&mut self, now: Instant) -> Duration {
        if self.started.take().is_some_and(|started| now.saturating_duration_since(started) >= WORKED) {
            self.backoff.succeeded();
        }
        self.backoff.failed()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{Restarts, WORKED};

    /// A process that died now and then, after hours of work each time, waited 30 s in the end.
    #[test]
    fn a_process_that_worked_before_it_died_is_started_at_once_and_one_that_never_works_waits_longer_and_longer() {
        let mut restarts = Restarts::new();
        let mut now = Instant::now();
        let mut ran = |restarts: &mut Restarts, long: Duration| {
            restarts.started(now);
            now += long;
            restarts.ended(now)
        };
        let waits: Vec<Duration> = (0..8).map(|_| ran(&mut restarts, Duration::from_secs(1))).collect();
        assert!(waits[0] <= Duration::from_millis(200) && waits[7] > Duration::from_secs(10), "{waits:?}");
        for _ in 0..8 {
            assert!(ran(&mut restarts, WORKED) <= Duration::from_millis(200));
        }
        // One that cannot even be started failed as well.
        assert!(restarts.ended(Instant::now()) > Duration::from_millis(100));
    }
}

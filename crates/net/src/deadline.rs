//! Deadlines of waits: moving bytes extend a deadline, silence ends it, and nothing extends its last possible end.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// Which end of a wait was reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Passed {
    #[error("nothing moved for {0:?}")]
    Silent(Duration),
    #[error("not done after {0:?}")]
    Total(Duration),
}

/// A deadline that progress extends. Clones share it.
#[derive(Debug, Clone)]
pub struct ProgressDeadline {
    silence: Duration,
    total: Duration,
    begun: Instant,
    moved: watch::Sender<Instant>,
}

impl ProgressDeadline {
    /// Ends after `silence` without [`moved`](Self::moved), and after `total` in any case.
    pub fn new(silence: Duration, total: Duration) -> Self {
        let begun = Instant::now();
        Self { silence, total, begun, moved: watch::Sender::new(begun) }
    }

    /// Records progress: the silence limit starts again.
    pub fn moved(&self) {
        self.moved.send_replace(Instant::now());
    }

    /// The end of the wait if nothing moves any more.
    fn end(&self) -> Instant {
        (*self.moved.borrow() + self.silence).min(self.begun + self.total)
    }

    /// Returns when the deadline passed. Safe to cancel.
    pub async fn passed(&self) -> Passed {
        loop {
            let end = self.end();
            sleep_until(end).await;
            if self.end() <= Instant::now() {
                let total = self.begun + self.total;
                return if end >= total { Passed::Total(self.total) } else { Passed::Silent(self.silence) };
            }
        }
    }
}

#[cfg(test)]
mod tests;

//! Waits that end: a deadline that moving bytes extend and silence ends, with a last end that nothing extends.

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

    /// Something moved: the silence begins anew.
    pub fn moved(&self) {
        self.moved.send_replace(Instant::now());
    }

    /// When the wait would end if nothing moved any more.
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
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn silence_ends_a_wait() {
        let deadline = ProgressDeadline::new(SECOND, 60 * SECOND);
        let begun = Instant::now();
        assert_eq!(deadline.passed().await, Passed::Silent(SECOND));
        assert_eq!(begun.elapsed().as_secs(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn progress_extends_a_wait_up_to_its_last_end() {
        let deadline = ProgressDeadline::new(SECOND, 10 * SECOND);
        let begun = Instant::now();
        let moving = async {
            loop {
                tokio::time::sleep(SECOND / 2).await;
                deadline.moved();
            }
        };
        let passed = tokio::select! {
            biased;
            () = moving => unreachable!(),
            passed = deadline.passed() => passed,
        };
        assert_eq!(passed, Passed::Total(10 * SECOND));
        assert_eq!(begun.elapsed().as_secs(), 10);
    }
}

//! The wait before the next try: it doubles from a base up to a cap, with jitter, so that clients do not retry at the same moment.

use std::time::Duration;

/// Counts failures in a row.
#[derive(Debug, Clone)]
pub struct Backoff {
    base: Duration,
    cap: Duration,
    failures: u32,
}

impl Backoff {
    /// Waits about `base` after the first failure and never more than `cap`.
    pub fn new(base: Duration, cap: Duration) -> Self {
        Self { base, cap, failures: 0 }
    }

    /// Counts a failure and returns the wait: between half and all of the doubled time.
    pub fn failed(&mut self) -> Duration {
        let whole = self.base.saturating_mul(2u32.saturating_pow(self.failures)).min(self.cap);
        self.failures = self.failures.saturating_add(1);
        whole.mul_f64(rand::random_range(0.5..=1.0))
    }

    /// Resets the count: the next failure waits about the base again.
    pub fn succeeded(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests;

//! Decides how long an object waits after a failed reconcile: longer with each consecutive failure, for this object alone. Must never keep
//! a deleted object.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use parking_lot::Mutex;

use weightsync_net::backoff::Backoff;

/// Wait after the first failure.
const FIRST: Duration = Duration::from_millis(500);
/// Longest wait.
const LONGEST: Duration = Duration::from_secs(60);

/// Consecutive failures, by the object's UID. Holds only existing objects, once [`forget_gone`](Self::forget_gone) ran.
#[derive(Default)]
pub(super) struct Failures(Mutex<HashMap<String, Backoff>>);

impl Failures {
    /// Counts a failure of the object and returns how long to wait.
    pub(super) fn failed(&self, uid: &str) -> Duration {
        self.0.lock().entry(uid.to_owned()).or_insert_with(|| Backoff::new(FIRST, LONGEST)).failed()
    }

    /// The object's next failure is its first again.
    pub(super) fn succeeded(&self, uid: &str) {
        self.0.lock().remove(uid);
    }

    /// Forgets every object that is not among these UIDs. A failure that is counted after the deletion is forgotten by the next call.
    pub(super) fn forget_gone(&self, there: &HashSet<String>) {
        self.0.lock().retain(|uid, _| there.contains(uid));
    }

    /// Number of objects it keeps.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.lock().len()
    }
}

#[cfg(test)]
mod tests;

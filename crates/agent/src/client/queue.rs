//! Publishes that wait for their turn: one runs at a time, the others stand in line.
//!
//! Decides who is next and who is replaced (`queue: latest`). It never looks at versions or members, and it forgets a publish whose
//! trainer is gone or whose time is over before its turn came.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::enrollment::NotEnrolled;
use crate::locks::lock;
use crate::publish_job::PublishJob;
use weightsync_core::protocol::{PublishError, PublishErrorCode, QueuePolicy, Version};

/// Publishes that may wait at once; each holds a layout (megabytes for a large model), but no tensor.
const LONGEST_LINE: usize = 16;

/// The line. Filled by connections, emptied by the state machine that leads updates.
#[derive(Default)]
pub struct PublishQueue {
    waiting: Mutex<VecDeque<PublishJob>>,
    taker: Mutex<Taker>,
    changed: Notify,
}

/// What keeps a publish waiting in the line.
#[derive(Default)]
enum Taker {
    /// Its turn comes at once.
    #[default]
    Free,
    /// This version was taken, and no other since.
    Runs(Version),
    /// The agent is in no group.
    NotEnrolled(NotEnrolled),
}

impl PublishQueue {
    /// Takes a publish into the line. `Latest` ends every one that waits; a full line refuses.
    pub fn push(&self, job: PublishJob, policy: QueuePolicy) {
        self.sweep();
        let version = job.version;
        let (replaced, refused) = {
            let mut waiting = self.lock();
            let replaced = if policy == QueuePolicy::Latest { std::mem::take(&mut *waiting) } else { VecDeque::new() };
            let refused = if waiting.len() < LONGEST_LINE {
                waiting.push_back(job);
                None
            } else {
                Some(job)
            };
            (replaced, refused)
        };
        for job in replaced {
            let message = format!("version {version} was published with queue \"latest\" while version {} waited", job.version);
            fail(job, PublishErrorCode::Superseded, message, false);
        }
        if let Some(job) = refused {
            let message = format!("{LONGEST_LINE} publishes wait already: wait for one, or publish with queue \"latest\"");
            fail(job, PublishErrorCode::Internal, message, true);
        }
        self.changed.notify_one();
    }

    /// The next publish, as soon as there is one. May be dropped and called again.
    pub async fn take(&self) -> PublishJob {
        *lock(&self.taker) = Taker::Free;
        loop {
            self.sweep();
            if let Some(job) = self.lock().pop_front() {
                *lock(&self.taker) = Taker::Runs(job.version);
                return job;
            }
            self.changed.notified().await;
        }
    }

    /// Publishes wait until the agent is enrolled.
    pub(crate) fn not_enrolled(&self, cause: NotEnrolled) {
        *lock(&self.taker) = Taker::NotEnrolled(cause);
    }

    /// The agent has a certificate: its source takes publishes.
    pub(crate) fn enrolled(&self) {
        *lock(&self.taker) = Taker::Free;
    }

    /// Ends publishes whose trainer gave them up, or whose time was over before their turn came.
    pub fn sweep(&self) {
        let now = Instant::now();
        let unwanted = {
            let mut waiting = self.lock();
            let (wanted, unwanted): (VecDeque<_>, VecDeque<_>) =
                waiting.drain(..).partition(|job| !job.cancel.is_cancelled() && job.deadline > now);
            *waiting = wanted;
            unwanted
        };
        for job in unwanted {
            if job.cancel.is_cancelled() {
                fail(job, PublishErrorCode::Cancelled, "given up before its turn came".into(), true);
            } else {
                let (code, message) = self.late();
                fail(job, code, message, true);
            }
        }
    }

    /// Why the time of a publish was over before its turn came.
    fn late(&self) -> (PublishErrorCode, String) {
        match &*lock(&self.taker) {
            Taker::Free => (PublishErrorCode::Timeout, "its time was over before its turn came: raise the timeout".to_owned()),
            Taker::Runs(version) => {
                let message = format!(
                    "its time was over while an earlier publish, of version {version}, was still running: raise the timeout, or wait for that one"
                );
                (PublishErrorCode::Timeout, message)
            }
            Taker::NotEnrolled(cause) => {
                (PublishErrorCode::NotEnoughReplicas, format!("this agent is not enrolled, so it is in no group: {cause}"))
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<PublishJob>> {
        lock(&self.waiting)
    }
}

fn fail(job: PublishJob, code: PublishErrorCode, message: String, retryable: bool) {
    job.reporter.failed(PublishError { code, message, retryable, phase: None, member: None });
}

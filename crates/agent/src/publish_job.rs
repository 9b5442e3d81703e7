//! One publish as the source agent's state machine sees it: the version, its deadline, and the receiver of the result.
//!
//! The two ends of a [`Reporter`] keep one promise: a caller that requested a publish gets exactly one outcome, even if the state machine
//! drops the job. This file moves messages only; it never decides about versions, queues or members.

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::version_source::VersionSource;
use weightsync_core::protocol::{Activation, PublishError, PublishErrorCode, PublishResult, UpdatePhase, Version};

/// A publish whose turn has come.
#[allow(missing_docs)]
pub struct PublishJob {
    /// Number of the version; not yet compared with what was published before.
    pub version: Version,
    pub activation: Activation,
    pub deadline: Instant,
    /// Set when the trainer gave the publish up, or went away before its bytes were released.
    pub cancel: CancellationToken,
    pub source: Box<dyn VersionSource>,
    pub reporter: Reporter,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Report {
    Progress(Progress),
    /// Delivered everywhere it will be; waits for [`Reports::activate`].
    Staged,
    /// `minReady` was reached.
    Done(PublishResult),
    Failed(PublishError),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    /// From 1.
    pub attempt: u32,
    pub phase: UpdatePhase,
    /// Bytes that the slowest member received.
    pub bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum NotActivated {
    #[error("the trainer did not activate the staged version in time")]
    TimedOut,
    #[error("the trainer went away before it activated the staged version")]
    Gone,
}

/// The state machine's end.
pub struct Reporter {
    reports: mpsc::UnboundedSender<Report>,
    progress: watch::Sender<Option<Progress>>,
    activated: watch::Receiver<bool>,
    attempt: u32,
    over: bool,
}

/// The other end: a trainer's connection, or the loop that publishes a checkpoint that the object names.
pub(crate) struct Reports {
    reports: mpsc::UnboundedReceiver<Report>,
    progress: watch::Receiver<Option<Progress>>,
    activated: watch::Sender<bool>,
}

pub(crate) fn reporting() -> (Reporter, Reports) {
    // Unbounded, yet at most two reports are ever sent: staged and the outcome.
    let (to_reports, reports) = mpsc::unbounded_channel();
    let (to_progress, progress) = watch::channel(None);
    let (activate, activated) = watch::channel(false);
    (
        Reporter { reports: to_reports, progress: to_progress, activated, attempt: 1, over: false },
        Reports { reports, progress, activated: activate },
    )
}

impl Reporter {
    /// Progress that follows is that of this attempt, counted from 1.
    pub fn begins(&mut self, attempt: u32) {
        self.attempt = attempt;
    }

    /// Shows progress; only the latest is kept, so it may be called for every bucket.
    pub fn progress(&self, phase: UpdatePhase, bytes: u64) {
        self.progress.send_replace(Some(Progress { attempt: self.attempt, phase, bytes }));
    }

    /// Says that the version is staged and waits for the trainer to activate it, at most until `deadline`.
    pub async fn staged(&mut self, deadline: Instant) -> Result<(), NotActivated> {
        if self.reports.send(Report::Staged).is_err() {
            return Err(NotActivated::Gone);
        }
        match tokio::time::timeout_at(deadline, self.activated.wait_for(|activated| *activated)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => Err(NotActivated::Gone),
            Err(_) => Err(NotActivated::TimedOut),
        }
    }

    /// The version is served by `minReady` replicas.
    pub fn done(mut self, result: PublishResult) {
        self.end(Report::Done(result));
    }

    /// The publish failed.
    pub fn failed(mut self, error: PublishError) {
        self.end(Report::Failed(error));
    }

    fn end(&mut self, report: Report) {
        self.over = true;
        // No one listens any more: the outcome stands in the agent's own events.
        let _ = self.reports.send(report);
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        if !self.over {
            self.end(Report::Failed(PublishError {
                code: PublishErrorCode::Internal,
                message: "the agent stopped working on this publish: publish again".into(),
                retryable: true,
                phase: None,
                member: None,
            }));
        }
    }
}

impl Reports {
    /// The next report; `None` after the outcome. Of several progress reports only the latest is kept. May be dropped and called again.
    pub async fn next(&mut self) -> Option<Report> {
        tokio::select! {
            biased;
            report = self.reports.recv() => report,
            Ok(()) = self.progress.changed() => self.progress.borrow_and_update().map(Report::Progress),
        }
    }

    pub fn activate(&self) {
        self.activated.send_replace(true);
    }
}

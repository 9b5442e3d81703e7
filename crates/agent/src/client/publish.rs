//! A publish of a connection: made into a job for the queue, followed until its one outcome.
//!
//! Decides what a client's word means for its own publish, and when its patience is over. It never touches another publish.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Shared;
use super::gpu::lay_out;
use super::ring::{FromTrainer, Means, RingOfConnection, TrainerRing};
use super::turn::Turn;
use super::wire::Outbox;
use crate::checkpoint_source::CheckpointSource;
use crate::publish_job::{Progress, PublishJob, Report, Reporter, Reports, reporting};
use crate::version_source::SourceError;
use weightsync_core::protocol::{Activation, ClientReply, GpuOffer, PublishError, PublishErrorCode, QueuePolicy, UpdatePhase, Version};
use weightsync_core::weights::TensorSpec;

/// How long the state machine may take to end a publish that was given up or whose time is over; then the connection ends it.
const GRACE: Duration = Duration::from_secs(5);

/// Longest publish; a larger number is taken as this.
const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);

/// What a client asks for, whatever its bytes come from.
pub(super) struct Publish {
    pub(super) version: Version,
    pub(super) queue: QueuePolicy,
    pub(super) activation: Activation,
    pub(super) timeout_ms: u64,
}

pub(super) enum From {
    Tensors { tensors: Vec<TensorSpec>, repeatable: bool, gpu: Option<GpuOffer> },
    Checkpoint { path: String },
}

/// A publish without an outcome.
pub(super) struct Running {
    turn: Arc<Turn>,
    reports: Reports,
    to_source: mpsc::UnboundedSender<FromTrainer>,
    cancel: CancellationToken,
    timeout: Duration,
    deadline: Instant,
    give_up_at: Instant,
    cancelled: Option<String>,
    progress: Option<Progress>,
    passed_on: Option<Progress>,
}

impl Publish {
    /// Checks the request, answers `accepted` and puts it into the line.
    pub(super) fn start(self, from: From, shared: &Arc<Shared>, outbox: &Outbox, ring: &RingOfConnection) -> Result<Running, PublishError> {
        if self.timeout_ms == 0 {
            return Err(invalid("a publish needs a timeout of at least 1 ms".into()));
        }
        let timeout = Duration::from_millis(self.timeout_ms).min(LONGEST);
        let deadline = Instant::now() + timeout;
        let turn = Arc::new(Turn::new(self.version, outbox.clone()));
        let (reporter, reports) = reporting();
        let (to_source, from_trainer) = mpsc::unbounded_channel();
        let cancel = CancellationToken::new();
        let job = |source, reporter| PublishJob {
            version: self.version,
            activation: self.activation,
            deadline,
            cancel: cancel.clone(),
            source,
            reporter,
        };
        match from {
            From::Tensors { tensors, repeatable, gpu } => {
                if tensors.is_empty() {
                    return Err(invalid("a version needs at least one tensor".into()));
                }
                let layout = lay_out(tensors, shared.bucket_bytes, &shared.gpu).map_err(|error| invalid(error.to_string()))?;
                turn.set_total_bytes(layout.total_bytes);
                let means = Means {
                    most_slots: shared.slots,
                    bucket_bytes: shared.bucket_bytes,
                    offer: gpu,
                    gpu: shared.gpu.clone(),
                    kept: Arc::clone(ring),
                    rings: Arc::clone(&shared.gpu_rings),
                };
                let source = TrainerRing::new(layout, repeatable, means, Arc::clone(&turn), from_trainer);
                shared.queue.push(job(Box::new(source), reporter), self.queue);
                // Sent once it is in the queue: a client that publishes over two connections keeps its order by waiting for this.
                outbox.say(ClientReply::Accepted { version: self.version });
            }
            From::Checkpoint { path } => {
                outbox.say(ClientReply::Accepted { version: self.version });
                let (turn, shared, job_of) =
                    (Arc::clone(&turn), Arc::clone(shared), (self.version, self.activation, self.queue, cancel.clone()));
                tokio::spawn(open_checkpoint(PathBuf::from(path), turn, shared, job_of, deadline, reporter));
            }
        }
        let give_up_at = deadline + GRACE;
        let (cancelled, progress, passed_on) = (None, None, None);
        Ok(Running { turn, reports, to_source, cancel, timeout, deadline, give_up_at, cancelled, progress, passed_on })
    }
}

/// Opens the checkpoint next to the connection, whose client must hear signs of life while a slow file system answers.
async fn open_checkpoint(
    path: PathBuf,
    turn: Arc<Turn>,
    shared: Arc<Shared>,
    (version, activation, queue, cancel): (Version, Activation, QueuePolicy, CancellationToken),
    deadline: Instant,
    reporter: Reporter,
) {
    let lay_out = |tensors| lay_out(tensors, shared.bucket_bytes, &shared.gpu);
    let opened = tokio::select! {
        opened = CheckpointSource::open(path, lay_out, deadline) => opened,
        () = cancel.cancelled() => Err(SourceError::Cancelled { reason: "while the checkpoint was opened".into() }),
    };
    match opened {
        Ok(source) => {
            let (released, of_group) = (Arc::clone(&turn), Arc::clone(&shared));
            let source = source.laid_out_by(move |tensors| super::gpu::lay_out(tensors, of_group.bucket_bytes, &of_group.gpu));
            let source = Box::new(source.on_release(move || released.release()));
            turn.set_total_bytes(crate::version_source::VersionSource::layout(&*source).total_bytes);
            shared.queue.push(PublishJob { version, activation, deadline, cancel, source, reporter }, queue);
        }
        Err(error) => reporter.failed(error.publish_error(None)),
    }
}

impl Running {
    pub(super) fn version(&self) -> Version {
        self.turn.version
    }

    /// The next line about the publish; never, while there is none. May be dropped and called again.
    pub(super) async fn next(running: &mut Option<Self>) -> ClientReply {
        let Some(running) = running else { return std::future::pending().await };
        loop {
            let version = running.turn.version;
            match running.reports.next().await {
                Some(Report::Progress(progress)) => running.progress = Some(progress),
                Some(Report::Staged) => return ClientReply::Staged { version },
                Some(Report::Done(result)) => {
                    // A trainer that waits for the release alone must hear of it, also when the leader went straight to the end.
                    running.turn.release();
                    return ClientReply::Done { result };
                }
                Some(Report::Failed(error)) => return ClientReply::Error { error },
                // Unreachable while the reporter's drop reports; a wait without end is worse than a vague word.
                None => return ClientReply::Error { error: internal("the publish ended without an outcome".into()) },
            }
        }
    }

    /// Progress that was not passed on yet.
    pub(super) fn progress(&mut self) -> Option<ClientReply> {
        let progress = self.progress.filter(|progress| self.passed_on != Some(*progress))?;
        self.passed_on = Some(progress);
        let (version, total_bytes) = (self.turn.version, self.turn.total_bytes());
        Some(ClientReply::Progress { version, attempt: progress.attempt, phase: progress.phase, bytes: progress.bytes, total_bytes })
    }

    pub(super) fn opened(&self, ring: u64, events: Vec<String>) {
        self.tell(FromTrainer::Opened { ring, events });
    }

    pub(super) fn unopened(&self, ring: u64, reason: &str) {
        self.tell(FromTrainer::Unopened { ring, reason: reason.chars().take(500).collect() });
    }

    pub(super) fn filled(&self, attempt: u32, sequence: u32, slot: u32, event: bool) -> Result<(), String> {
        if self.turn.fill(attempt, sequence, slot)? {
            self.tell(FromTrainer::Filled { attempt, sequence, slot, event });
        }
        Ok(())
    }

    pub(super) fn ended(&self, attempt: u32) -> Result<(), String> {
        if self.turn.end(attempt)? {
            self.tell(FromTrainer::Ended { attempt });
        }
        Ok(())
    }

    pub(super) fn activate(&self, version: Version) -> Result<(), String> {
        if version != self.turn.version {
            return Err(format!("version {version} was activated while version {} runs", self.turn.version));
        }
        self.reports.activate();
        Ok(())
    }

    pub(super) fn cancel(&mut self, reason: &str, now: Instant) {
        self.cancelled = Some(reason.to_owned());
        self.give_up_at = self.give_up_at.min(now + GRACE);
        self.tell(FromTrainer::Failed(SourceError::Cancelled { reason: reason.to_owned() }));
        self.cancel.cancel();
    }

    /// Its client is gone. What was released goes on without it.
    pub(super) fn left(self, cause: &str) {
        if !self.turn.is_released() {
            self.tell(FromTrainer::Failed(SourceError::Gone { cause: cause.to_owned() }));
            self.cancel.cancel();
        }
    }

    pub(super) fn is_late(&self, now: Instant) -> bool {
        now >= self.deadline
    }

    /// The outcome that the connection gives when no one else gave one; anyone who leads the publish is asked to let it go, or it would keep the
    /// turn of all that come after it.
    pub(super) fn overdue(&self, now: Instant) -> Option<PublishError> {
        if now < self.give_up_at {
            return None;
        }
        self.tell(FromTrainer::Failed(SourceError::Cancelled { reason: "its time was over".into() }));
        self.cancel.cancel();
        let phase = self.progress.map(|progress| progress.phase);
        let switching = phase == Some(UpdatePhase::Activate);
        Some(match &self.cancelled {
            _ if switching => PublishError {
                code: PublishErrorCode::OutcomeUnknown,
                phase,
                ..internal(format!("version {} may be served: engines were being switched to it when its time was over", self.turn.version))
            },
            Some(reason) => PublishError { code: PublishErrorCode::Cancelled, phase, ..internal(format!("given up: {reason}")) },
            None => PublishError {
                code: PublishErrorCode::Timeout,
                phase,
                ..internal(format!("version {} had no outcome after {:?}", self.turn.version, self.timeout))
            },
        })
    }

    fn tell(&self, what: FromTrainer) {
        // The source may be gone already: the outcome is then on its way.
        let _ = self.to_source.send(what);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.turn.close();
    }
}

fn invalid(message: String) -> PublishError {
    PublishError { code: PublishErrorCode::Invalid, message, retryable: false, phase: None, member: None }
}

fn internal(message: String) -> PublishError {
    PublishError { code: PublishErrorCode::Internal, message, retryable: true, phase: None, member: None }
}

//! The task of an install that is fed bucket by bucket.
//!
//! It runs separately from its feeder, which may be dropped in the middle. The engine then stays paused and marked, and never runs with
//! half an update. Decides only when the install ends. Each [`Way`] decides the form of a bucket; the session decides the final state of
//! the engine.

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot};

use super::session::{LeftNow, Session};
use crate::http::Until;
use crate::server::Server;
use crate::{EngineError, InstallError, InstallReport, Left};
use weightsync_core::protocol::{EngineChecksum, HeldVersion};

/// One route of buckets into an engine. After an error the install has ended.
#[async_trait]
pub(super) trait Way<S: Server>: Send + 'static {
    type Bucket: Send + 'static;
    /// The result of a bucket that was accepted.
    type Receipt: Send + 'static;

    /// Pauses and marks the engine, and opens the means of its load. Has no effect if called again.
    async fn open(&mut self, session: &mut Session<S>) -> Result<(), InstallError>;

    async fn bucket(&mut self, session: &mut Session<S>, bucket: Self::Bucket) -> Result<Self::Receipt, InstallError>;

    /// Makes the engine load, and waits until it accepted more than so many buckets. Returns the number.
    async fn taken(&mut self, session: &mut Session<S>, more_than: u32) -> Result<u32, InstallError>;

    /// Has the engine take its last step, and compute checksums of its own.
    async fn seal(&mut self, _session: &mut Session<S>) -> Result<Option<EngineChecksum>, InstallError> {
        Ok(None)
    }

    async fn finish(&mut self, session: &mut Session<S>, version: HeldVersion) -> Result<InstallReport, InstallError>;

    /// Ends it, and returns the engine's state.
    async fn give_up(&mut self, session: &mut Session<S>, reason: &str) -> Left;
}

type Answer<T> = oneshot::Sender<Result<T, InstallError>>;

/// Commands of an install's owner to its task.
enum Command<B, R> {
    Open(Answer<()>),
    Bucket(B, Answer<R>),
    Taken(u32, Answer<u32>),
    Seal(Answer<Option<EngineChecksum>>),
    Finish(HeldVersion, Answer<InstallReport>),
    Abandon(String, oneshot::Sender<Left>),
}

/// The owner's end. Dropping it ends the task.
pub(super) struct Handle<B, R> {
    commands: mpsc::Sender<Command<B, R>>,
    left: LeftNow,
    url: String,
    /// The end of the install's time.
    until: Until,
}

impl<B: Send, R: Send> Handle<B, R> {
    pub(super) async fn open(&self) -> Result<(), InstallError> {
        self.ask(Command::Open).await
    }

    pub(super) async fn bucket(&self, bucket: B) -> Result<R, InstallError> {
        self.ask(|answer| Command::Bucket(bucket, answer)).await
    }

    pub(super) async fn taken(&self, more_than: u32) -> Result<u32, InstallError> {
        self.ask(|answer| Command::Taken(more_than, answer)).await
    }

    pub(super) async fn seal(&self) -> Result<Option<EngineChecksum>, InstallError> {
        self.ask(Command::Seal).await
    }

    pub(super) async fn finish(&self, version: HeldVersion) -> Result<InstallReport, InstallError> {
        self.ask(|answer| Command::Finish(version, answer)).await
    }

    pub(super) async fn abandon(&self, reason: &str) -> Left {
        let (answer, answered) = oneshot::channel();
        self.send(Command::Abandon(reason.to_owned(), answer)).await;
        answered.await.unwrap_or_else(|_| *self.left.lock())
    }

    /// Drops a command that the ended task does not accept, together with its answer channel: so a waiting caller learns of the end.
    async fn send(&self, command: Command<B, R>) {
        drop(self.commands.send(command).await);
    }

    async fn ask<T>(&self, command: impl FnOnce(Answer<T>) -> Command<B, R>) -> Result<T, InstallError> {
        let (answer, answered) = oneshot::channel();
        self.send(command(answer)).await;
        // The task may have ended before the request.
        let source = || if self.until.left().is_zero() { self.late() } else { EngineError::Cancelled };
        answered.await.unwrap_or_else(|_| Err(InstallError { step: "load", left: *self.left.lock(), source: source() }))
    }

    fn late(&self) -> EngineError {
        EngineError::Timeout { url: self.url.clone(), deadline: self.until.total() }
    }
}

pub(super) fn start<S: Server, W: Way<S>>(session: Session<S>, way: W) -> Handle<W::Bucket, W::Receipt> {
    let (commands, inbox) = mpsc::channel(1);
    let (left, url, until) = (session.left_now(), session.inner.server.url().to_owned(), session.until);
    tokio::spawn(run(session, way, inbox));
    Handle { commands, left, url, until }
}

async fn run<S: Server, W: Way<S>>(mut session: Session<S>, mut way: W, mut inbox: mpsc::Receiver<Command<W::Bucket, W::Receipt>>) {
    let cancel = session.terms.cancel.clone();
    loop {
        let command = tokio::select! {
            biased;
            () = cancel.cancelled() => None,
            command = tokio::time::timeout(session.until.left(), inbox.recv()) => command.ok().flatten(),
        };
        let goes_on = match command {
            Some(Command::Open(answer)) => tell(answer, way.open(&mut session).await),
            Some(Command::Bucket(bucket, answer)) => tell(answer, way.bucket(&mut session, bucket).await),
            Some(Command::Taken(more_than, answer)) => tell(answer, way.taken(&mut session, more_than).await),
            Some(Command::Seal(answer)) => tell(answer, way.seal(&mut session).await),
            Some(Command::Finish(version, answer)) => {
                tell(answer, way.finish(&mut session, version).await);
                false
            }
            Some(Command::Abandon(reason, answer)) => {
                let _gone = answer.send(way.give_up(&mut session, &reason).await);
                false
            }
            // Cancelled, dropped, or past the deadline.
            None => {
                way.give_up(&mut session, "its feeder is gone").await;
                false
            }
        };
        if !goes_on {
            return;
        }
    }
}

/// Sends the result, and returns whether the install continues. An owner that gave up waiting gets the outcome from the next step.
fn tell<T>(answer: Answer<T>, outcome: Result<T, InstallError>) -> bool {
    let goes_on = outcome.is_ok();
    let _gone = answer.send(outcome);
    goes_on
}

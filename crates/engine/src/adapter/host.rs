//! An install that is fed from shared host memory, from the first call to the last.
//!
//! Same order as an install from a directory (look, pause, mark, load, reset caches, compare, write the version, resume, see an answer).
//! The workers are told of buckets and check them before the pause, which begins only when there is no room for more, or nothing more to
//! come. It runs in a task of its own: whoever feeds it may be dropped in the middle, and the engine is left paused and marked then, never
//! half-fed and running.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use tokio::sync::{OwnedMutexGuard, mpsc, oneshot};

use super::Inner;
use super::install::{Before, Failed, MOST_RESERVE, Steps, Terms, at, clean};
use crate::host::{HostBucket, HostDigest, HostInstall, HostJob};
use crate::host_feed::HostFeed;
use crate::http::Until;
use crate::server::Server;
use crate::{EngineError, InstallError, InstallReport};
use weightsync_core::protocol::{HeldVersion, PausePolicy};

/// What the owner of an install asks its task for.
enum Command {
    Bucket(HostBucket, oneshot::Sender<Result<(), InstallError>>),
    Taken(u32, oneshot::Sender<Result<u32, InstallError>>),
    Finish(HeldVersion, oneshot::Sender<Result<InstallReport, InstallError>>),
    Abandon(String, oneshot::Sender<bool>),
}

/// The owner's end. Dropping it ends the task.
struct Handle {
    commands: mpsc::Sender<Command>,
    digest: HostDigest,
    dirty: Arc<AtomicBool>,
}

/// Looks at the server, waits for the turn to change it, and has its workers connect.
pub(super) async fn begin<S: Server>(inner: Arc<Inner<S>>, job: HostJob) -> Result<Box<dyn HostInstall>, InstallError> {
    let whole = Until::new(job.timeout);
    let until = whole.keeping(MOST_RESERVE.min(job.timeout / 5));
    let turn = inner.turn(until).await.map_err(at("start")).map_err(clean)?;
    inner.server.accepts(job.pause, job.kv_cache).map_err(at("start")).map_err(clean)?;
    let tensors: Vec<_> = job.layout.tensors().cloned().collect();
    let before = inner.look_at_server(&tensors, until).await.map_err(|failed| clean(inner.seen(failed)))?;
    let feed = inner.server.open_host_feed(&job, until).await.map_err(at("start")).map_err(|failed| clean(inner.seen(failed)))?;
    // Nobody may take the mark of a version that is still on its way for one that is known.
    let manifest = job.manifest.clone().unwrap_or_else(|| "0".repeat(64));
    let marked = HeldVersion { version: job.version, manifest };
    let terms = Terms { marked: marked.clone(), version: marked, pause: job.pause, kv_cache: job.kv_cache, canary: job.canary.clone() };
    let (commands, inbox) = mpsc::channel(1);
    let dirty = Arc::new(AtomicBool::new(before.is_half()));
    let pauses = before.is_half() || job.pause != PausePolicy::External;
    let digest = feed.digest();
    let steps = Steps::new();
    let running =
        Running { inner, job, terms, before, whole, until, pauses, feed, loading: false, steps, dirty: dirty.clone(), _turn: turn };
    tokio::spawn(running.run(inbox));
    Ok(Box::new(Handle { commands, digest, dirty }))
}

#[async_trait]
impl HostInstall for Handle {
    fn digest(&self) -> HostDigest {
        self.digest
    }

    async fn bucket(&mut self, bucket: HostBucket) -> Result<(), InstallError> {
        self.ask(|answer| Command::Bucket(bucket, answer)).await
    }

    async fn taken(&mut self, more_than: u32) -> Result<u32, InstallError> {
        self.ask(|answer| Command::Taken(more_than, answer)).await
    }

    async fn finish(self: Box<Self>, version: HeldVersion) -> Result<InstallReport, InstallError> {
        self.ask(|answer| Command::Finish(version, answer)).await
    }

    async fn abandon(self: Box<Self>, reason: &str) -> bool {
        let (answer, answered) = oneshot::channel();
        let _over = self.commands.send(Command::Abandon(reason.to_owned(), answer)).await;
        answered.await.unwrap_or_else(|_| self.dirty.load(Ordering::Acquire))
    }
}

impl Handle {
    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<Result<T, InstallError>>) -> Command) -> Result<T, InstallError> {
        let (answer, answered) = oneshot::channel();
        let _over = self.commands.send(command(answer)).await;
        // The task may have ended before, with nobody to tell.
        let dirty = || self.dirty.load(Ordering::Acquire);
        answered.await.unwrap_or_else(|_| Err(InstallError { step: "load", dirty: dirty(), source: EngineError::Cancelled }))
    }
}

struct Running<S: Server> {
    inner: Arc<Inner<S>>,
    job: HostJob,
    terms: Terms,
    before: Before,
    whole: Until,
    until: Until,
    pauses: bool,
    feed: Box<dyn HostFeed>,
    /// Whether the engine is loading: paused, marked, and possibly a mixture.
    loading: bool,
    steps: Steps,
    dirty: Arc<AtomicBool>,
    _turn: OwnedMutexGuard<()>,
}

impl<S: Server> Running<S> {
    async fn run(mut self, mut inbox: mpsc::Receiver<Command>) {
        let cancel = self.job.cancel.clone();
        loop {
            let command = tokio::select! {
                biased;
                () = cancel.cancelled() => None,
                command = tokio::time::timeout(self.until.left(), inbox.recv()) => command.ok().flatten(),
            };
            // Whoever gave up waiting for an answer learns the outcome from what follows.
            match command {
                Some(Command::Bucket(bucket, answer)) => {
                    let told = self.bucket(&bucket).await;
                    let failed = told.is_err();
                    let _told = answer.send(told);
                    if failed {
                        return;
                    }
                }
                Some(Command::Taken(more_than, answer)) => {
                    let taken = self.taken(more_than).await;
                    let failed = taken.is_err();
                    let _told = answer.send(taken);
                    if failed {
                        return;
                    }
                }
                Some(Command::Finish(version, answer)) => {
                    let _told = answer.send(self.finish(version).await);
                    return;
                }
                Some(Command::Abandon(reason, answer)) => {
                    let _told = answer.send(self.give_up(&reason).await);
                    return;
                }
                // Cancelled, dropped, or too late.
                None => {
                    self.give_up("whoever fed it is gone").await;
                    return;
                }
            }
        }
    }

    async fn bucket(&mut self, bucket: &HostBucket) -> Result<(), InstallError> {
        let until = self.until.at_most(self.job.silence);
        match self.feed.bucket(bucket, until).await {
            Ok(()) => Ok(()),
            Err(source) => Err(self.fail(Failed { step: "load", source }).await),
        }
    }

    async fn taken(&mut self, more_than: u32) -> Result<u32, InstallError> {
        self.load().await?;
        let until = self.until.at_most(self.job.silence);
        match self.feed.taken(more_than, until).await {
            Ok(taken) => Ok(taken),
            Err(source) => Err(self.fail(Failed { step: "load", source }).await),
        }
    }

    /// Pauses, marks, and lets the engine load; its weights are untouched when one of the first two fails.
    async fn load(&mut self) -> Result<(), InstallError> {
        if self.loading {
            return Ok(());
        }
        self.steps.done("stage");
        if let Err(failed) = self.pause_and_mark().await {
            self.feed.fail(&failed.source.to_string(), self.whole).await;
            return Err(self.inner.untouched(failed, &self.terms, &self.before, self.whole).await);
        }
        self.steps.done("pause");
        self.loading = true;
        self.dirty.store(true, Ordering::Release);
        self.inner.loading.store(true, Ordering::Release);
        match self.feed.load(self.until).await {
            Ok(()) => Ok(()),
            Err(source) => Err(self.fail(Failed { step: "load", source }).await),
        }
    }

    async fn pause_and_mark(&mut self) -> Result<(), Failed> {
        if self.pauses {
            self.inner.pause(&self.terms, self.until).await?;
        }
        self.inner.mark(&self.terms, self.until).await.map_err(at("pause"))
    }

    async fn finish(&mut self, version: HeldVersion) -> Result<InstallReport, InstallError> {
        self.terms.version = version;
        if let Err(source) = self.feed.end(self.job.silence, self.until).await {
            return Err(self.fail(Failed { step: "stage", source }).await);
        }
        self.load().await?;
        let closed = self.feed.close(self.until).await;
        self.inner.loading.store(false, Ordering::Release);
        if let Err(source) = closed {
            return Err(self.fail(Failed { step: "load", source }).await);
        }
        self.steps.done("load");
        let start = match self.inner.check(&self.terms, &self.before, self.until).await {
            Ok(start) => start,
            Err(failed @ Failed { source: EngineError::Restarted, .. }) => return Err(clean(failed)),
            Err(failed) => return Err(self.inner.dirty(failed, self.whole).await),
        };
        self.dirty.store(false, Ordering::Release);
        self.steps.done("check");
        if self.pauses {
            self.inner.run_again(self.whole).await.map_err(at("resume")).map_err(|failed| clean(self.inner.seen(failed)))?;
            self.steps.done("resume");
            let step = self.inner.see_an_answer(&self.terms, self.until, self.whole).await?;
            self.steps.done(step);
        }
        Ok(InstallReport { start, steps_ms: std::mem::take(&mut self.steps.done), owes_answer: false })
    }

    /// Ends it: whether the engine may hold a mixture.
    async fn give_up(&mut self, reason: &str) -> bool {
        tracing::warn!(engine = self.inner.server.url(), version = self.job.version, reason, "an install from shared memory was given up");
        self.fail(Failed { step: "load", source: EngineError::Cancelled }).await.dirty
    }

    /// Frees the workers, and sees that an engine that began to load is held.
    async fn fail(&mut self, failed: Failed) -> InstallError {
        self.feed.fail(&failed.source.to_string(), self.whole).await;
        self.inner.loading.store(false, Ordering::Release);
        if !self.loading {
            return InstallError { dirty: self.before.is_half(), ..clean(self.inner.seen(failed)) };
        }
        // One that started anew in the middle holds no half update.
        match self.inner.carries_the_mark(&self.terms, &self.before, self.whole).await {
            Ok(false) => {
                self.dirty.store(false, Ordering::Release);
                let error = clean(self.inner.seen(failed));
                InstallError { source: EngineError::Restarted, ..error }
            }
            Ok(true) | Err(_) => self.inner.dirty(failed, self.whole).await,
        }
    }
}

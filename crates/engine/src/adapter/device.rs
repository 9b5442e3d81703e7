//! An install that is fed bucket by bucket from GPU memory, from the first call to the last.
//!
//! Same order as an install from a directory (look, pause, mark, load, reset caches, compare, write the version, resume, see an answer),
//! with the pause put off until the first bucket is there, because the engine may serve while it still travels. It runs in a task of its own:
//! whoever feeds it may be dropped in the middle, and the engine is left paused and marked then, never half-fed and running. Buckets must
//! come in the order of the layout, each once; an engine that lacks one is never resumed. When the answer may be seen behind it: [`super::proof`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use tokio::sync::{OwnedMutexGuard, mpsc, oneshot};

use super::install::{Before, Failed, MOST_RESERVE, Steps, Terms, at, clean};
use super::{Inner, Loading};
use crate::device::{DeviceBucket, DeviceInstall, DeviceJob, DeviceRoute, Released};
use crate::feed::{Feed, FeedJob};
use crate::group::{FromGroup, OfGroup};
use crate::http::Until;
use crate::server::Server;
use crate::{EngineError, InstallError, InstallReport};
use weightsync_core::protocol::{HeldVersion, PausePolicy};
use weightsync_core::weights::Cuts;

/// What the owner of an install asks its task for.
enum Command {
    Open(oneshot::Sender<Result<(), InstallError>>),
    Bucket(DeviceBucket, oneshot::Sender<Result<Released, InstallError>>),
    Finish(HeldVersion, oneshot::Sender<Result<InstallReport, InstallError>>),
    Abandon(String, oneshot::Sender<bool>),
}

/// The owner's end. Dropping it ends the task.
struct Handle {
    commands: mpsc::Sender<Command>,
    dirty: Arc<AtomicBool>,
    /// It pauses the engine, and can do so before the first bucket says where it lies.
    holds: bool,
}

/// Looks at the server and waits for the turn to change it.
pub(super) async fn begin<S: Server>(
    inner: Arc<Inner<S>>,
    job: DeviceJob,
    group: Option<OfGroup>,
) -> Result<Box<dyn DeviceInstall>, InstallError> {
    let whole = Until::new(job.timeout);
    let until = whole.keeping(MOST_RESERVE.min(job.timeout / 5));
    if job.layout.cuts != Cuts::BetweenTensors {
        let source = EngineError::Unsupported {
            what: "the buckets of this version tear tensors".into(),
            next_step: "cut its layout between tensors".into(),
        };
        return Err(clean(Failed { step: "start", source }));
    }
    let turn = inner.turn(until).await.map_err(at("start")).map_err(clean)?;
    inner.server.accepts(job.pause, job.kv_cache).map_err(at("start")).map_err(clean)?;
    let served = inner.served_model();
    let route = match &group {
        None => inner.server.device_route(job.pause, job.kv_cache, served.as_deref(), until).await.map_err(at("start")),
        Some(of) => Ok(DeviceRoute { name: "group", gpus: Vec::new(), gated: of.server.pauses(), why_not_faster: None }),
    };
    let route = route.map_err(|failed| clean(inner.seen(failed)))?;
    let tensors: Vec<_> = job.layout.tensors().cloned().collect();
    let before = inner.look_at_server(&tensors, until).await.map_err(|failed| clean(inner.seen(failed)))?;
    // Nobody may take the mark of a version that is still on its way for one that is known.
    let manifest = job.manifest.clone().unwrap_or_else(|| "0".repeat(64));
    let marked = HeldVersion { version: job.version, manifest };
    let terms = Terms { marked: marked.clone(), version: marked, pause: job.pause, kv_cache: job.kv_cache, canary: job.canary.clone() };
    let (commands, inbox) = mpsc::channel(1);
    let dirty = Arc::new(AtomicBool::new(before.is_half()));
    let names_gpus = !route.gpus.is_empty();
    // Where the route lets the engine serve on, only an engine that is already held is held.
    let pauses = before.is_half() || (route.gated && job.pause != PausePolicy::External);
    let running = Running {
        inner,
        job,
        route,
        group,
        terms,
        before,
        whole,
        until,
        pauses,
        feed: None,
        next: 0,
        steps: Steps::new(),
        dirty: dirty.clone(),
        _turn: turn,
    };
    tokio::spawn(running.run(inbox));
    Ok(Box::new(Handle { commands, dirty, holds: pauses && names_gpus }))
}

#[async_trait]
impl DeviceInstall for Handle {
    fn holds(&self) -> bool {
        self.holds
    }

    async fn open(&mut self) -> Result<(), InstallError> {
        let (answer, answered) = oneshot::channel();
        let asked = self.commands.send(Command::Open(answer)).await;
        asked.map_err(|_| self.over())?;
        answered.await.unwrap_or_else(|_| Err(self.over()))
    }

    async fn bucket(&mut self, bucket: DeviceBucket) -> Result<Released, InstallError> {
        let (answer, answered) = oneshot::channel();
        let asked = self.commands.send(Command::Bucket(bucket, answer)).await;
        asked.map_err(|_| self.over())?;
        answered.await.unwrap_or_else(|_| Err(self.over()))
    }

    async fn finish(self: Box<Self>, version: HeldVersion) -> Result<InstallReport, InstallError> {
        let (answer, answered) = oneshot::channel();
        let asked = self.commands.send(Command::Finish(version, answer)).await;
        asked.map_err(|_| self.over())?;
        answered.await.unwrap_or_else(|_| Err(self.over()))
    }

    async fn abandon(self: Box<Self>, reason: &str) -> bool {
        let (answer, answered) = oneshot::channel();
        let asked = self.commands.send(Command::Abandon(reason.to_owned(), answer)).await;
        if asked.is_err() {
            return self.dirty.load(Ordering::Acquire);
        }
        answered.await.unwrap_or_else(|_| self.dirty.load(Ordering::Acquire))
    }
}

impl Handle {
    /// What follows when the install ended before.
    fn over(&self) -> InstallError {
        InstallError { step: "load", dirty: self.dirty.load(Ordering::Acquire), source: EngineError::Cancelled }
    }
}

struct Running<S: Server> {
    inner: Arc<Inner<S>>,
    job: DeviceJob,
    route: DeviceRoute,
    group: Option<OfGroup>,
    terms: Terms,
    before: Before,
    whole: Until,
    until: Until,
    pauses: bool,
    feed: Option<Box<dyn Feed>>,
    /// Sequence of the bucket that must come next.
    next: u32,
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
            match command {
                Some(Command::Open(answer)) => {
                    let opened = if self.feed.is_none() { self.open(Vec::new()).await } else { Ok(()) };
                    let failed = opened.is_err();
                    let _told = answer.send(opened);
                    if failed {
                        return;
                    }
                }
                Some(Command::Bucket(bucket, answer)) => {
                    let handed = self.bucket(&bucket).await;
                    let failed = handed.is_err();
                    // Whoever gave up waiting for it learns the outcome from what follows.
                    let _told = answer.send(handed);
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

    async fn bucket(&mut self, bucket: &DeviceBucket) -> Result<Released, InstallError> {
        if self.job.layout.bucket(self.next) != Some(bucket.bucket) {
            let what = format!("bucket {} came, {} was expected", bucket.bucket.sequence, self.next);
            let source = EngineError::BadReply { url: self.inner.server.url().to_owned(), what };
            return Err(self.fail(Failed { step: "load", source }).await);
        }
        if self.feed.is_none() {
            self.open(bucket.places.iter().map(|place| place.gpu.clone()).collect()).await?;
        }
        let Some(feed) = &mut self.feed else { return Err(clean(Failed { step: "load", source: EngineError::Cancelled })) };
        let until = self.until.at_most(self.job.silence);
        self.dirty.store(true, Ordering::Release);
        let loading = Loading::new(&self.inner.loading);
        let handed = feed.bucket(bucket, until).await;
        drop(loading);
        match handed {
            Ok(released) => {
                self.next += 1;
                Ok(released)
            }
            // The engine never took the first one: nothing of it was written.
            Err(source) if self.next == 0 && !feed.touched() => {
                feed.fail(&source.to_string(), self.whole).await;
                self.dirty.store(self.before.is_half(), Ordering::Release);
                Err(self.inner.untouched(Failed { step: "load", source }, &self.terms, &self.before, self.whole).await)
            }
            Err(source) => Err(self.fail(Failed { step: "load", source }).await),
        }
    }

    /// Pauses, marks and opens; the engine's weights are untouched after a failure.
    async fn open(&mut self, gpus: Vec<String>) -> Result<(), InstallError> {
        if let Err(failed) = self.try_open(gpus).await {
            return Err(self.inner.untouched(failed, &self.terms, &self.before, self.whole).await);
        }
        self.steps.done("pause");
        Ok(())
    }

    async fn try_open(&mut self, of_bucket: Vec<String>) -> Result<(), Failed> {
        let until = self.until;
        if self.pauses {
            self.inner.pause(&self.terms, until).await?;
        }
        self.inner.mark(&self.terms, until).await.map_err(at("pause"))?;
        self.feed = Some(if let Some(of) = &self.group {
            let feed = FromGroup::open(of, self.job.layout.clone(), self.job.silence, until).await.map_err(at("pause"))?;
            // Whoever opened an update before us may have written into the weights.
            self.dirty.fetch_or(feed.touched(), Ordering::AcqRel);
            Box::new(feed)
        } else {
            let gpus = if self.route.gpus.is_empty() { of_bucket } else { self.route.gpus.clone() };
            let job = FeedJob { job: &self.job, route: &self.route, gpus };
            self.inner.server.open_feed(job, until).await.map_err(at("pause"))?
        });
        if !self.pauses && self.job.pause == PausePolicy::Abort {
            self.inner.server.abort_all(until).await.map_err(at("pause"))?;
        }
        Ok(())
    }

    async fn finish(&mut self, version: HeldVersion) -> Result<InstallReport, InstallError> {
        self.terms.version = version;
        if self.next != self.job.layout.bucket_count() {
            let what = format!("{} of {} buckets were handed over", self.next, self.job.layout.bucket_count());
            let source = EngineError::BadReply { url: self.inner.server.url().to_owned(), what };
            return Err(self.fail(Failed { step: "load", source }).await);
        }
        if let Some(feed) = &mut self.feed {
            let loading = Loading::new(&self.inner.loading);
            let closed = feed.close(self.until.at_most(self.job.silence)).await;
            drop(loading);
            if let Err(source) = closed {
                return Err(self.fail(Failed { step: "load", source }).await);
            }
            if !self.pauses && self.job.pause == PausePolicy::Abort {
                // What began while buckets went in was computed with a mixture.
                if let Err(source) = self.inner.server.abort_all(self.until).await {
                    return Err(self.fail(Failed { step: "load", source }).await);
                }
            }
        } else {
            // A version without bytes.
            self.open(Vec::new()).await?;
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
        }
        let asks = self.pauses || self.job.pause != PausePolicy::External;
        let owes_answer = asks && !self.pauses && self.terms.canary.is_none() && self.inner.proven.may_owe(&start, self.route.name);
        if asks && !owes_answer {
            let step = self.inner.see_an_answer(&self.terms, self.until, self.whole).await?;
            self.steps.done(step);
            self.inner.proven.answered(&start, self.route.name);
        }
        Ok(InstallReport { start, steps_ms: std::mem::take(&mut self.steps.done), owes_answer })
    }

    /// Ends it: whether the engine may hold a mixture.
    async fn give_up(&mut self, reason: &str) -> bool {
        if self.feed.is_none() {
            // Nothing was touched, and nothing was held before unless by an earlier install.
            return self.before.is_half();
        }
        tracing::warn!(engine = self.inner.server.url(), version = self.job.version, reason, "an install was given up");
        if let Some(feed) = self.feed.as_mut().filter(|feed| !feed.touched()) {
            feed.fail(reason, self.whole).await;
            self.dirty.store(self.before.is_half(), Ordering::Release);
            let failed = Failed { step: "load", source: EngineError::Cancelled };
            return self.inner.untouched(failed, &self.terms, &self.before, self.whole).await.dirty;
        }
        self.fail(Failed { step: "load", source: EngineError::Cancelled }).await.dirty
    }

    /// The engine may hold a mixture: frees its workers, and sees that it is held.
    async fn fail(&mut self, failed: Failed) -> InstallError {
        // An engine that is stuck in a collective answers nothing: others wait for the end of this to give it up.
        let until = self.whole.at_most(self.job.silence);
        if let Some(feed) = &mut self.feed {
            feed.fail(&failed.source.to_string(), until).await;
        } else {
            return InstallError { dirty: self.before.is_half(), ..clean(failed) };
        }
        // One that started anew in the middle holds no half update.
        match self.inner.carries_the_mark(&self.terms, &self.before, until).await {
            Ok(false) => {
                self.dirty.store(false, Ordering::Release);
                let error = clean(self.inner.seen(failed));
                InstallError { source: EngineError::Restarted, ..error }
            }
            Ok(true) | Err(_) => self.inner.dirty(failed, until).await,
        }
    }
}

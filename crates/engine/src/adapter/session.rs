//! The states of one install, whatever the route of the weights: opened, held, loading, whole, running.
//!
//! Decides the state of the engine after each ending. Before the load, none of the engine's weights changed, and a failure undoes the
//! pause. From the load until the version is written, the engine may hold a mixture, and a failure leaves it paused and marked. After that
//! its weights are complete, and a failure leaves open whether it runs. A part of the deadline is reserved to undo a failure. It never
//! reports that an engine holds a version unless the engine ran with it and responded. An engine that is not paused serves while it loads;
//! that time is recorded ([`crate::mixed`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;
use tokio_util::sync::CancellationToken;

use super::Inner;
use crate::http::Until;
use crate::lifeline::Lifeline;
use crate::mixed::now_ms;
use crate::record::UNKNOWN;
use crate::server::Server;
use crate::start::Look;
use crate::{EngineError, EngineStart, Holding, InstallError, InstallReport, InstallTerms, Left};
use weightsync_core::protocol::{HeldVersion, KvCachePolicy, PausePolicy};
use weightsync_core::weights::TensorSpec;

/// Longest time reserved for undoing.
const MOST_RESERVE: Duration = Duration::from_secs(10);

/// A failed step, before its effect on the engine is known.
pub(super) struct Failed {
    pub(super) step: &'static str,
    pub(super) source: EngineError,
}

impl Failed {
    pub(super) fn left(self, left: Left) -> InstallError {
        InstallError { step: self.step, left, source: self.source }
    }
}

pub(super) fn at(step: &'static str) -> impl FnOnce(EngineError) -> Failed {
    move |source| Failed { step, source }
}

pub(super) struct Before {
    pub(super) fingerprint: String,
    pub(super) holding: Holding,
    look: Look,
}

impl Before {
    pub(super) fn is_half(&self) -> bool {
        matches!(self.holding, Holding::HalfAnUpdate(_))
    }
}

pub(super) struct Steps {
    pub(super) done: Vec<(String, u64)>,
    begun: Instant,
}

impl Steps {
    pub(super) fn new() -> Self {
        Self { done: Vec::new(), begun: Instant::now() }
    }

    pub(super) fn done(&mut self, step: &str) {
        let now = Instant::now();
        let ms = u64::try_from(now.duration_since(self.begun).as_millis()).unwrap_or(u64::MAX);
        self.done.push((step.to_owned(), ms));
        self.begun = now;
    }
}

/// Progress of an install.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The engine was only checked.
    Opened,
    /// It is marked, and paused if the policy pauses.
    Held,
    /// Its weights may be a mixture.
    Loading,
    /// They are complete, and its version field shows that.
    Whole,
}

/// Shared by the task of an install and its owner: the engine's state if the task ended now.
pub(super) type LeftNow = Arc<Mutex<Left>>;

/// One install. It holds the lock on changes of the engine while it exists.
pub(super) struct Session<S: Server> {
    pub(super) inner: Arc<Inner<S>>,
    pub(super) terms: InstallTerms,
    pub(super) steps: Steps,
    /// The end of the whole install, and the end of all work before the time to undo a failure.
    pub(super) whole: Until,
    pub(super) until: Until,
    /// Whether the engine is paused by this install.
    pub(super) pauses: bool,
    /// Whether its trainer had paused it before the load.
    quiet: bool,
    /// Since when an engine without a pause may serve a mixture, in ms since 1970; `None` if it cannot.
    serves_since: Option<u64>,
    before: Before,
    stage: Stage,
    left: LeftNow,
    _turn: OwnedMutexGuard<()>,
}

impl<S: Server> Session<S> {
    /// Waits for the lock on the engine, and checks it; `offered` must replace all its start-up tensors.
    pub(super) async fn open(inner: Arc<Inner<S>>, terms: InstallTerms, offered: &[TensorSpec]) -> Result<Self, InstallError> {
        let whole = Until::new(terms.timeout);
        let until = whole.keeping(MOST_RESERVE.min(terms.timeout / 5));
        let cancel = terms.cancel.clone();
        let opened = unless_cancelled(&cancel, "start", async {
            let turn = inner.turn(until).await.map_err(at("start"))?;
            inner.server.descriptor().accepts(terms.pause, terms.kv_cache).map_err(at("start"))?;
            Ok((turn, inner.look_at_server(offered, until).await?))
        });
        let (turn, before) = opened.await.map_err(|failed| inner.seen(failed).left(Left::AsBefore))?;
        let half = before.is_half();
        if !half {
            // Another start, or complete weights.
            inner.mixed.close(now_ms());
        }
        Ok(Self {
            steps: Steps::new(),
            whole,
            until,
            // A half-updated engine is paused whatever the policy: it must not serve before it is complete.
            pauses: half || terms.pause != PausePolicy::External,
            quiet: false,
            serves_since: None,
            stage: Stage::Opened,
            left: Arc::new(Mutex::new(if half { Left::Mixture } else { Left::AsBefore })),
            inner,
            terms,
            before,
            _turn: turn,
        })
    }

    pub(super) fn left_now(&self) -> LeftNow {
        self.left.clone()
    }

    /// Whether it held half an update before.
    pub(super) fn was_half(&self) -> bool {
        self.before.is_half()
    }

    /// Pauses if the policy pauses, and marks. A failure is undone.
    pub(super) async fn hold(&mut self) -> Result<(), InstallError> {
        let cancel = self.terms.cancel.clone();
        let held = unless_cancelled(&cancel, "pause", async {
            if self.pauses {
                self.inner.pause(&self.terms, self.was_half(), self.until).await?;
            }
            self.inner.write(Holding::HalfAnUpdate(self.terms.version.clone()), self.until).await.map_err(at("pause"))
        });
        let held = held.await;
        // A failed pause or mark may still have taken effect.
        self.stage = Stage::Held;
        match held {
            Ok(()) if self.pauses => {
                self.inner.mixed.close(now_ms());
                Ok(())
            }
            Ok(()) => {
                self.serves_since = Some(now_ms());
                // Its trainer may have paused it.
                self.quiet = self.terms.pause == PausePolicy::External && self.is_quiet(self.until).await;
                Ok(())
            }
            Err(failed) => Err(self.fail(failed).await),
        }
    }

    /// From here on the engine may hold a mixture.
    pub(super) fn loading(&mut self) {
        if self.stage != Stage::Loading
            && let Some(since) = self.serves_since.filter(|_| !self.quiet)
        {
            self.inner.mixed.open(self.terms.version.version, since);
        }
        self.stage = Stage::Loading;
        *self.left.lock() = Left::Mixture;
    }

    async fn is_quiet(&self, until: Until) -> bool {
        matches!(self.inner.server.is_paused(until).await, Ok(true))
    }

    /// Records the window of an engine that its trainer had paused and resumed before the load ended.
    async fn see_whether_it_stayed_quiet(&self, until: Until) {
        if let Some(since) = self.serves_since.filter(|_| self.quiet)
            && !self.is_quiet(until).await
        {
            self.inner.mixed.open(self.terms.version.version, since);
        }
    }

    /// The load had no effect: the engine never accepted the first bytes.
    pub(super) fn never_loaded(&mut self) {
        self.stage = Stage::Held;
        if self.serves_since.is_some() {
            self.inner.mixed.withdraw();
        }
        *self.left.lock() = if self.was_half() { Left::Mixture } else { Left::AsBefore };
    }

    /// Marks the engine as possibly too busy to respond, until the returned value is dropped.
    pub(super) fn busy(&self) -> Busy<S> {
        Busy::new(self.inner.clone())
    }

    /// Everything is loaded: compares, writes the version, resumes the engine, and checks that it responds. `way` names a route by which an
    /// engine without a pause may respond later.
    pub(super) async fn conclude(&mut self, version: HeldVersion, way: Option<&'static str>) -> Result<InstallReport, InstallError> {
        self.steps.done("load");
        self.see_whether_it_stayed_quiet(self.until).await;
        self.inner.mixed.close(now_ms());
        let start = match self.check(&version).await {
            Ok(start) => start,
            Err(failed) => return Err(self.fail(failed).await),
        };
        self.stage = Stage::Whole;
        *self.left.lock() = Left::Unknown;
        self.steps.done("check");
        if self.pauses {
            if let Err(error) = self.inner.run_again(self.whole).await {
                return Err(self.fail(at("resume")(error)).await);
            }
            self.steps.done("resume");
        }
        let asks = self.pauses || self.terms.pause != PausePolicy::External;
        let may_owe = asks && !self.pauses && self.terms.canary.is_none();
        let owes_answer = may_owe && way.is_some_and(|way| self.inner.proven.may_owe(&start, way));
        if asks && !owes_answer {
            let canary = self.terms.canary.as_ref();
            let step = self.inner.see_an_answer(canary, &self.terms.version, self.until, self.whole).await?;
            self.steps.done(step);
            if let Some(way) = way {
                self.inner.proven.answered(&start, way);
            }
        }
        Ok(InstallReport { start, steps_ms: std::mem::take(&mut self.steps.done), owes_answer })
    }

    /// Ends it early, and returns the engine's state.
    pub(super) async fn fail(&mut self, failed: Failed) -> InstallError {
        self.fail_within(failed, self.whole).await
    }

    /// The same, for an engine that may not respond while others wait for this end.
    pub(super) async fn fail_within(&mut self, failed: Failed, undo: Until) -> InstallError {
        let failed = self.inner.seen(failed);
        if self.stage == Stage::Loading {
            self.see_whether_it_stayed_quiet(undo).await;
        }
        let error = match self.stage {
            Stage::Opened => failed.left(if self.was_half() { Left::Mixture } else { Left::AsBefore }),
            Stage::Held => self.undo(failed, undo).await,
            Stage::Loading if matches!(failed.source, EngineError::Restarted) => {
                self.inner.mixed.close(now_ms());
                failed.left(Left::Unknown)
            }
            // An engine that restarted in the middle holds no half update.
            Stage::Loading => match self.carries_the_mark(undo).await {
                Ok(false) => {
                    self.inner.mixed.close(now_ms());
                    Failed { step: failed.step, source: EngineError::Restarted }.left(Left::Unknown)
                }
                Ok(true) | Err(_) => self.inner.hold_mixture(failed, undo).await,
            },
            Stage::Whole => failed.left(Left::Unknown),
        };
        *self.left.lock() = error.left;
        error
    }

    /// No weight changed: restores the earlier state, as far as that can be confirmed.
    async fn undo(&self, Failed { step, source }: Failed, undo: Until) -> InstallError {
        // Only the marked process gets its old text back: a successor holds its start-up weights.
        let unmarked = match self.carries_the_mark(undo).await {
            Ok(true) => self.inner.write(self.before.holding.clone(), undo).await,
            Ok(false) => Ok(()),
            Err(error) => Err(error),
        };
        let stays = self.was_half() || self.terms.pause == PausePolicy::External;
        let resumed = if stays { Ok(()) } else { self.inner.run_again(undo).await };
        let undone = [unmarked.err(), resumed.err()].into_iter().flatten().inspect(|error| {
            tracing::warn!(engine = self.inner.server.url(), %error, "what an install changed cannot be undone");
        });
        let left = match undone.count() {
            _ if self.was_half() => Left::Mixture,
            0 => Left::AsBefore,
            _ => Left::Unknown,
        };
        InstallError { step, left, source }
    }

    /// Whether it is still the process that was marked for this install.
    async fn carries_the_mark(&self, until: Until) -> Result<bool, EngineError> {
        let look = self.inner.start.look();
        let fingerprint = self.inner.server.fingerprint(until).await?;
        let holding = self.inner.server.holding(until).await?;
        self.inner.start.answered(look, &fingerprint, &holding);
        Ok(fingerprint == self.before.fingerprint && holding == Holding::HalfAnUpdate(self.terms.version.clone()))
    }

    /// Empties caches, checks that it is still the same start, and writes the version as the very last step.
    async fn check(&self, version: &HeldVersion) -> Result<EngineStart, Failed> {
        let (inner, until) = (&self.inner, self.until);
        if self.terms.kv_cache == KvCachePolicy::Reset {
            inner.server.reset_cache(until).await.map_err(at("check"))?;
        }
        if !self.carries_the_mark(until).await.map_err(at("check"))? {
            return Err(Failed { step: "check", source: EngineError::Restarted });
        }
        let version = Holding::Version(version.clone());
        inner.write(version.clone(), until).await.map_err(at("check"))?;
        let look = inner.start.look();
        let written = inner.server.holding(until).await.map_err(at("check"))?;
        let fingerprint = inner.server.fingerprint(until).await.map_err(at("check"))?;
        // If nothing distinguishes two starts, the process must have run all the time.
        let stood = fingerprint != UNKNOWN || inner.start.stood_since(self.before.look);
        if fingerprint != self.before.fingerprint || !stood {
            // The version was written to the successor of the process that loaded it.
            inner.write(Holding::Startup, until).await.map_err(at("check"))?;
            return Err(Failed { step: "check", source: EngineError::Restarted });
        }
        if written != version {
            let what = format!("it was given the version {:?} and reports {:?}", version.text(), written.text());
            return Err(Failed { step: "check", source: EngineError::BadReply { url: inner.server.url().to_owned(), what } });
        }
        Ok(inner.start.answered(look, &fingerprint, &written))
    }
}

impl<S: Server> Inner<S> {
    /// Evaluates a failed call as a sign of a restart.
    pub(super) fn seen(&self, failed: Failed) -> Failed {
        self.start.failed(&failed.source);
        failed
    }

    /// Whether the tensors fit, and what the server holds now.
    async fn look_at_server(&self, offered: &[TensorSpec], until: Until) -> Result<Before, Failed> {
        self.fits(offered).map_err(at("start"))?;
        let (before, _) = self.sight(until).await.map_err(at("start"))?;
        // A sleeping engine has no memory to write into. If it holds half an update, the sleep may be ours.
        if !before.is_half() && self.look_whether_it_sleeps(until).await.map_err(at("start"))? {
            return Err(Failed { step: "start", source: EngineError::Asleep { url: self.server.url().to_owned() } });
        }
        Ok(before)
    }

    /// Connects to the process that listens now, and checks its start and its version.
    pub(super) async fn sight(&self, until: Until) -> Result<(Before, EngineStart), EngineError> {
        // On the same machine the connection is accepted at once, whatever the server does.
        self.start.hold(Lifeline::open(self.server.url(), until.left() / 4).await);
        let look = self.start.look();
        let fingerprint = self.server.fingerprint(until).await?;
        let holding = self.server.holding(until).await?;
        let start = self.start.answered(look, &fingerprint, &holding);
        Ok((Before { fingerprint, holding, look }, start))
    }

    async fn pause(&self, terms: &InstallTerms, half: bool, until: Until) -> Result<(), Failed> {
        let InstallTerms { pause, kv_cache, .. } = *terms;
        let paused = if half { self.server.pause_mixture(pause, kv_cache, until) } else { self.server.pause(pause, kv_cache, until) };
        paused.await.map_err(at("pause"))?;
        if self.server.is_paused(until).await.map_err(at("pause"))? {
            return Ok(());
        }
        let what = "it confirmed the pause, and then reported that it is not paused".to_owned();
        Err(Failed { step: "pause", source: EngineError::BadReply { url: self.server.url().to_owned(), what } })
    }

    /// The engine may hold a mixture: makes sure that it is paused.
    pub(super) async fn hold_mixture(&self, failed: Failed, whole: Until) -> InstallError {
        let failed = self.seen(failed);
        let held = match self.server.is_paused(whole).await {
            Ok(true) => Ok(()),
            // The trainer does the pausing, or the engine was just resumed.
            Ok(false) | Err(_) => self.server.pause_mixture(PausePolicy::Keep, KvCachePolicy::Keep, whole).await,
        };
        match held {
            Ok(()) => self.mixed.close(now_ms()),
            Err(error) => tracing::warn!(engine = self.server.url(), %error, "an engine that may hold half an update cannot be paused"),
        }
        failed.left(Left::Mixture)
    }
}

/// While it exists, the engine core may be too busy with our work to respond.
pub(super) struct Busy<S>(Arc<Inner<S>>);

impl<S> Busy<S> {
    pub(super) fn new(inner: Arc<Inner<S>>) -> Self {
        inner.loading.store(true, std::sync::atomic::Ordering::Release);
        Self(inner)
    }
}

impl<S> Drop for Busy<S> {
    fn drop(&mut self) {
        self.0.loading.store(false, std::sync::atomic::Ordering::Release);
    }
}

async fn unless_cancelled<T>(
    cancel: &CancellationToken,
    step: &'static str,
    work: impl Future<Output = Result<T, Failed>>,
) -> Result<T, Failed> {
    tokio::select! {
        biased;
        () = cancel.cancelled() => Err(Failed { step, source: EngineError::Cancelled }),
        done = work => done,
    }
}

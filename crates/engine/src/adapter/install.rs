//! An install from the first call to the last.
//!
//! Order: look, pause, mark, load, reset caches, compare, write the version, resume, see an answer ([`super::canary`]). Until the load nothing of the
//! engine's weights was touched, and a failure undoes the pause. From the load to the version's text the engine may hold a mixture, and
//! a failure leaves it paused with the mark on it. A part of the deadline is kept back for what a failure has to undo.

use std::path::Path;
use std::time::{Duration, Instant};

use super::{Inner, Loading};
use crate::evidence::Evidence;
use crate::http::Until;
use crate::lifeline::Lifeline;
use crate::record::UNKNOWN;
use crate::server::Server;
use crate::start::Look;
use crate::{EngineError, EngineStart, Holding, InstallError, InstallJob, InstallReport};
use weightsync_core::protocol::{CanaryPolicy, HeldVersion, KvCachePolicy, PausePolicy};
use weightsync_core::weights::TensorSpec;
use weightsync_core::weights::safetensors::Checkpoint;

/// Longest time kept back for undoing.
pub(super) const MOST_RESERVE: Duration = Duration::from_secs(10);

/// A failed step, before it is known whether it left the engine dirty.
pub(super) struct Failed {
    pub(super) step: &'static str,
    pub(super) source: EngineError,
}

pub(super) fn at(step: &'static str) -> impl FnOnce(EngineError) -> Failed {
    move |source| Failed { step, source }
}

pub(super) fn clean(failed: Failed) -> InstallError {
    InstallError { step: failed.step, dirty: false, source: failed.source }
}

/// What an install is about, whichever way the weights come.
#[derive(Debug, Clone)]
pub(super) struct Terms {
    /// Written into the engine before its weights are touched.
    pub(super) marked: HeldVersion,
    /// Written when all is in.
    pub(super) version: HeldVersion,
    pub(super) pause: PausePolicy,
    pub(super) kv_cache: KvCachePolicy,
    pub(super) canary: Option<CanaryPolicy>,
}

impl Terms {
    fn of(job: &InstallJob) -> Self {
        Self {
            marked: job.version.clone(),
            version: job.version.clone(),
            pause: job.pause,
            kv_cache: job.kv_cache,
            canary: job.canary.clone(),
        }
    }
}

pub(super) struct Before {
    fingerprint: String,
    holding: Holding,
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

impl<S: Server> Inner<S> {
    pub(super) async fn install(&self, job: &InstallJob) -> Result<InstallReport, InstallError> {
        let terms = &Terms::of(job);
        let whole = Until::new(job.timeout);
        let until = whole.keeping(MOST_RESERVE.min(job.timeout / 5));
        let _turn = self.turn(until).await.map_err(at("start")).map_err(clean)?;
        let mut steps = Steps::new();
        let before = unless_cancelled(job, "start", self.look(job, until)).await.map_err(|failed| clean(self.seen(failed)))?;
        let staged = unless_cancelled(job, "start", async { self.server.stage(&job.local_directory, until).await.map_err(at("start")) });
        let staged = match staged.await {
            Ok(staged) => staged,
            Err(failed) => return Err(InstallError { dirty: before.is_half(), ..clean(self.seen(failed)) }),
        };
        // A half-updated engine is paused by us whatever the policy: it must not serve before it is whole.
        let pauses = before.is_half() || job.pause != PausePolicy::External;
        if pauses {
            let paused = unless_cancelled(job, "pause", self.pause(terms, until)).await;
            if let Err(failed) = paused {
                return Err(self.untouched(failed, terms, &before, whole).await);
            }
        }
        let mark = async { self.mark(terms, until).await.map_err(at("pause")) };
        if let Err(failed) = unless_cancelled(job, "pause", mark).await {
            return Err(self.untouched(failed, terms, &before, whole).await);
        }
        steps.done("pause");

        let loading = Loading::new(&self.loading);
        let loaded = self.load(job, staged.as_deref(), before.is_half(), until).await;
        drop(loading);
        match loaded {
            Ok(()) => steps.done("load"),
            Err(source) if never_arrived(&source) => {
                return Err(self.untouched(Failed { step: "load", source }, terms, &before, whole).await);
            }
            Err(source) => return Err(self.dirty(Failed { step: "load", source }, whole).await),
        }
        let start = match self.check(terms, &before, until).await {
            Ok(start) => start,
            Err(failed @ Failed { source: EngineError::Restarted, .. }) => return Err(clean(failed)),
            Err(failed) => return Err(self.dirty(failed, whole).await),
        };
        steps.done("check");
        if pauses {
            // Whole and at the version, so not dirty: whoever finds it paused later may resume it.
            self.run_again(whole).await.map_err(at("resume")).map_err(|failed| clean(self.seen(failed)))?;
            steps.done("resume");
            steps.done(self.see_an_answer(terms, until, whole).await?);
        }
        Ok(InstallReport { start, steps_ms: steps.done, owes_answer: false })
    }

    /// Takes a failed call into account as a sign of a restart.
    pub(super) fn seen(&self, failed: Failed) -> Failed {
        self.start.failed(&failed.source);
        failed
    }

    async fn look(&self, job: &InstallJob, until: Until) -> Result<Before, Failed> {
        self.server.accepts(job.pause, job.kv_cache).map_err(at("start"))?;
        self.server.takes_directories().map_err(at("start"))?;
        let offered = Checkpoint::open(&job.local_directory).map_err(|cause| EngineError::Unsupported {
            what: format!("the version's directory cannot be read: {cause}"),
            next_step: "write the version to a directory that this process and the engine both see".into(),
        });
        self.look_at_server(&offered.map_err(at("start"))?.specs(), until).await
    }

    /// Whether the tensors fit, and what the server holds now.
    pub(super) async fn look_at_server(&self, offered: &[TensorSpec], until: Until) -> Result<Before, Failed> {
        self.fits(offered).map_err(at("start"))?;
        let (before, _) = self.sight(until).await.map_err(at("start"))?;
        // What sleeps has no memory to write into. Half an update was ours, and so may be the sleep.
        if !before.is_half() && self.look_whether_it_sleeps(until).await.map_err(at("start"))? {
            return Err(Failed { step: "start", source: EngineError::Asleep { url: self.server.url().to_owned() } });
        }
        Ok(before)
    }

    /// Takes hold of the process that listens now, and looks at which start it is and what it holds.
    pub(super) async fn sight(&self, until: Until) -> Result<(Before, EngineStart), EngineError> {
        // On the same machine the connection is taken at once, whatever the server is busy with.
        self.start.hold(Lifeline::open(self.server.url(), until.left() / 4).await);
        let look = self.start.look();
        let fingerprint = self.server.fingerprint(until).await?;
        let holding = self.server.holding(until).await?;
        let start = self.start.answered(look, &fingerprint, &holding);
        Ok((Before { fingerprint, holding, look }, start))
    }

    pub(super) async fn pause(&self, terms: &Terms, until: Until) -> Result<(), Failed> {
        self.server.pause(terms.pause, terms.kv_cache, until).await.map_err(at("pause"))?;
        if self.server.is_paused(until).await.map_err(at("pause"))? {
            return Ok(());
        }
        let what = "it said that it paused, and then that it is not paused".to_owned();
        Err(Failed { step: "pause", source: EngineError::BadReply { url: self.server.url().to_owned(), what } })
    }

    pub(super) async fn mark(&self, terms: &Terms, until: Until) -> Result<(), EngineError> {
        self.write(Holding::HalfAnUpdate(terms.marked.clone()), until).await
    }

    /// Loads; a load that failed is repeated once from the same complete directory, the engine still paused.
    async fn load(&self, job: &InstallJob, staged: Option<&Path>, was_half: bool, until: Until) -> Result<(), EngineError> {
        let witness = Evidence::watch(staged.unwrap_or(&job.local_directory));
        if was_half {
            self.server.clear_failed_load(until).await?;
        }
        match self.server.load(&job.directory, until).await {
            Ok(()) => {}
            // A load that may still run must not be joined by a second one; one that never arrived left nothing to repair.
            Err(error @ EngineError::Timeout { .. }) => return Err(error),
            Err(error) if never_arrived(&error) => return Err(error),
            Err(error) => {
                tracing::warn!(engine = self.server.url(), %error, "the load failed: clearing it and loading once more");
                self.server.clear_failed_load(until).await?;
                self.server.load(&job.directory, until).await?;
            }
        }
        match witness {
            Some(witness) if !witness.was_opened() => Err(EngineError::NotSuccess {
                url: self.server.url().to_owned(),
                body: "it said that the weights were loaded, and opened none of their files".to_owned(),
            }),
            _ => Ok(()),
        }
    }

    /// Empties caches, sees that it is still the same start, and gives the engine the version's text as the very last word.
    pub(super) async fn check(&self, terms: &Terms, before: &Before, until: Until) -> Result<EngineStart, Failed> {
        if terms.kv_cache == KvCachePolicy::Reset {
            self.server.reset_cache(until).await.map_err(at("check"))?;
        }
        if !self.carries_the_mark(terms, before, until).await.map_err(at("check"))? {
            return Err(Failed { step: "check", source: EngineError::Restarted });
        }
        let version = Holding::Version(terms.version.clone());
        self.write(version.clone(), until).await.map_err(at("check"))?;
        let look = self.start.look();
        let written = self.server.holding(until).await.map_err(at("check"))?;
        let fingerprint = self.server.fingerprint(until).await.map_err(at("check"))?;
        // Where nothing tells one start from another, the process must have been there all the time.
        let stood = fingerprint != UNKNOWN || self.start.stood_since(before.look);
        if fingerprint != before.fingerprint || !stood {
            // The successor of the process that loaded was told that it holds the version.
            self.write(Holding::Startup, until).await.map_err(at("check"))?;
            return Err(Failed { step: "check", source: EngineError::Restarted });
        }
        if written != version {
            let what = format!("it was given the version {:?} and reports {:?}", version.text(), written.text());
            return Err(Failed { step: "check", source: EngineError::BadReply { url: self.server.url().to_owned(), what } });
        }
        Ok(self.start.answered(look, &fingerprint, &written))
    }

    /// Whether it is still the process that was marked for this install.
    pub(super) async fn carries_the_mark(&self, terms: &Terms, before: &Before, until: Until) -> Result<bool, EngineError> {
        let look = self.start.look();
        let fingerprint = self.server.fingerprint(until).await?;
        let holding = self.server.holding(until).await?;
        self.start.answered(look, &fingerprint, &holding);
        Ok(fingerprint == before.fingerprint && holding == Holding::HalfAnUpdate(terms.marked.clone()))
    }

    /// No weight was touched: gives back what was there before.
    pub(super) async fn untouched(&self, failed: Failed, terms: &Terms, before: &Before, whole: Until) -> InstallError {
        let Failed { step, source } = self.seen(failed);
        let was_half = before.is_half();
        // Only the marked process itself gets its old text back: a successor holds its start-up weights.
        let unmarked = match self.carries_the_mark(terms, before, whole).await {
            Ok(true) => self.write(before.holding.clone(), whole).await,
            Ok(false) => Ok(()),
            Err(error) => Err(error),
        };
        let resumed = if was_half || terms.pause == PausePolicy::External { Ok(()) } else { self.run_again(whole).await };
        for error in [unmarked.err(), resumed.err()].into_iter().flatten() {
            tracing::warn!(engine = self.server.url(), %error, "what an install changed cannot be undone");
        }
        InstallError { step, dirty: was_half, source }
    }

    /// The engine may hold a mixture: sees that it is paused.
    pub(super) async fn dirty(&self, failed: Failed, whole: Until) -> InstallError {
        let Failed { step, source } = self.seen(failed);
        let held = match self.server.is_paused(whole).await {
            Ok(true) => Ok(()),
            // The trainer keeps the pausing to itself, or it was just resumed.
            Ok(false) | Err(_) => self.server.pause(PausePolicy::Keep, KvCachePolicy::Keep, whole).await,
        };
        if let Err(error) = held {
            tracing::warn!(engine = self.server.url(), %error, "an engine that may hold half an update cannot be paused");
        }
        InstallError { step, dirty: true, source }
    }
}

/// Whether a call cannot have had an effect: nobody listened, or the server has no such route.
fn never_arrived(error: &EngineError) -> bool {
    match error {
        EngineError::Unreachable { source, .. } => source.is_connect(),
        EngineError::Status { status, .. } => matches!(status, 401 | 403 | 404 | 405),
        _ => false,
    }
}

async fn unless_cancelled<T>(job: &InstallJob, step: &'static str, work: impl Future<Output = Result<T, Failed>>) -> Result<T, Failed> {
    tokio::select! {
        biased;
        () = job.cancel.cancelled() => Err(Failed { step, source: EngineError::Cancelled }),
        done = work => done,
    }
}

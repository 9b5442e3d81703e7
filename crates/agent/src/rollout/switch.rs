//! Has the engine switched to a version that lies complete in a directory, one switch at a time.
//!
//! Decides what an outcome means for the machine, and what is done about an engine that holds half an update and is not fed in time: its
//! start-up weights are put back, so that it is not paused for ever. The order of calls is the adapter's.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::{Rollout, Version};
use weightsync_core::protocol::{HeldVersion, PausePolicy, ProvenBy, UpdatePolicy};
use weightsync_core::weights::Layout;
use weightsync_engine::{DraftWay, EngineError, EngineStart, InstallError, InstallJob, InstallReport, InstallTerms, Left, draft};

/// What an adapter may take beyond the time that it was given.
pub(super) const GRACE: Duration = Duration::from_secs(10);

/// A change of the engine that began.
#[derive(Debug, Default)]
pub(super) struct Switch {
    /// The start that is touched, where it is known.
    pub(super) start: Option<EngineStart>,
    /// Tensors of the version that it is given, where they are known.
    pub(super) layout: Option<Arc<Layout>>,
}

impl Rollout {
    /// Switches the engine. Ends when the engine confirmed or failed.
    pub(super) async fn switch(self: &Arc<Self>, version: Arc<Version>, policy: &UpdatePolicy) {
        let _switching = self.switching.lock().await;
        // Long after it was received: what lay here unused is read once more.
        if self.with(|inner| inner.earlier.find(&version.held).is_some())
            && let Err(reason) = self.check_kept(&version).await
        {
            self.with(|inner| {
                inner.machine.install_failed(
                    format!("the kept copy of version {} is damaged: {reason}", version.held.version),
                    Left::AsBefore,
                    None,
                    None,
                );
                inner.stop_receiving("its copy is damaged");
            });
            return;
        }
        self.switch_locked(version, policy).await;
    }

    /// Hashes a kept copy again; one that is damaged is dropped.
    pub(super) async fn check_kept(&self, version: &Arc<Version>) -> Result<(), String> {
        let checked = version.clone();
        let check = tokio::task::spawn_blocking(move || checked.check());
        let checked = check.await.unwrap_or_else(|ended| Err(ended.to_string()));
        if let Err(reason) = &checked {
            tracing::warn!(version = version.held.version, reason, "a kept copy is damaged and is dropped");
            self.with(|inner| {
                inner.kept = inner.kept.take().filter(|kept| !Arc::ptr_eq(kept, version));
                inner.earlier.remove(&version.held);
            });
        }
        checked
    }

    pub(super) async fn switch_locked(self: &Arc<Self>, version: Arc<Version>, policy: &UpdatePolicy) {
        let limit = Duration::from_millis(policy.update_timeout_ms);
        let job = InstallJob {
            terms: terms(version.held.clone(), policy),
            directory: self.in_engine(version.dir().path()),
            local_directory: version.dir().path().to_owned(),
        };
        let switch = self.begin_switch(limit, version.layout.clone());
        self.with(|inner| inner.touched = Some(version.clone()));
        let route = self.memory_route().await;
        tracing::info!(version = version.held.version, directory = %job.directory.display(), route, "the engine is being switched");
        let installed = async {
            if route.is_some() {
                match self.install_through_memory(&version, policy).await {
                    // Nothing was touched, and there is another way; not for a draft model.
                    Err(InstallError { step: "start", left: Left::AsBefore, source: error @ EngineError::Unsupported { .. } })
                        if !version.layout.has_draft() =>
                    {
                        tracing::warn!(%error, "the version does not go into the engine by shared memory");
                    }
                    done => return done,
                }
            }
            if version.layout.has_draft() {
                // Neither of the other ways says which model a tensor is for.
                let source = draft::untaken(self.engine.kind(), DraftWay::Other);
                return Err(InstallError::before_start(source));
            }
            match self.engine.takes_directories() {
                Ok(()) => self.engine.install(&job).await,
                Err(_) => self.install_through_gpus(&version, policy).await,
            }
        };
        let outcome = timeout(limit.saturating_add(GRACE), installed).await.map_err(drop);
        self.end_switch(&version.held, Some(&version), outcome.map(|ended| ended.map(|report| (report, ProvenBy::Digests))), switch, limit);
        self.probe_now.notify_one();
    }

    /// The engine is being changed by us from now on, at most so long.
    pub(super) fn begin_switch(&self, limit: Duration, layout: Arc<Layout>) -> Switch {
        self.with(|inner| {
            inner.switching = true;
            let external = inner.policy.as_ref().is_some_and(|policy| policy.pause == PausePolicy::External);
            inner.paused_until = (!external).then(|| ms_since_1970(limit));
            Switch { start: inner.engine.start().cloned(), layout: Some(layout) }
        })
    }

    /// Takes in how an install ended, and what shows that the bytes are there: none when it did not end. `files` are those of the version,
    /// where it lies in files.
    pub(super) fn end_switch(
        self: &Arc<Self>,
        held: &HeldVersion,
        files: Option<&Arc<Version>>,
        outcome: Result<Result<(InstallReport, ProvenBy), InstallError>, ()>,
        switch: Switch,
        limit: Duration,
    ) {
        let failed = |cause: String| format!("version {} could not be installed: {cause}", held.version);
        let owes_answer = matches!(&outcome, Ok(Ok((report, _))) if report.owes_answer);
        self.with(|inner| {
            inner.switching = false;
            inner.paused_until = None;
            // A new start of the engine cleans it as well; its files are let go with the next switch.
            let touched = inner.touched.take();
            let (reason, left, refused) = match outcome {
                Ok(Ok((report, proven_by))) => {
                    tracing::info!(version = held.version, steps = ?report.steps_ms, "the engine confirmed");
                    inner.took(held);
                    (inner.load_refused, inner.suspect) = (None, false);
                    inner.engine.started(report.start.clone());
                    if let Some(layout) = switch.layout {
                        inner.took = Some((report.start.clone(), held.clone(), layout));
                    }
                    inner.machine.install_confirmed(held.clone(), report.start, proven_by, report.steps_ms);
                    inner.last = Some(held.clone());
                    inner.archive(files);
                    inner.staged = inner.staged.take().filter(|staged| files.is_some_and(|files| !Arc::ptr_eq(staged, files)));
                    inner.stop_receiving("it is installed");
                    return;
                }
                Ok(Err(error)) => {
                    tracing::warn!(version = held.version, left = ?error.left, %error, "an install did not end well");
                    if let EngineError::CanaryRefused { measured } = &error.source {
                        inner.refuse(held, measured);
                    }
                    let refused = error.repeats().then_some(error.step);
                    (failed(error.to_string()), error.left, refused)
                }
                Err(()) => {
                    tracing::warn!(version = held.version, ?limit, "an install did not end");
                    (failed(format!("no end after {limit:?}")), Left::Mixture, None)
                }
            };
            if left == Left::Unknown {
                // Whole by what was seen so far: proven, it is kept as any other version.
                inner.to_prove = files.cloned();
            }
            if left != Left::AsBefore {
                inner.touched = touched;
                inner.paused_until = Some(ms_since_1970(limit));
            }
            if refused.is_some() {
                inner.machine.would_repeat();
            }
            if refused == Some("load") {
                // One version may be wrong. Where a second one is refused too, the loader may be: the start-up weights show which.
                let refused = (inner.engine.start().cloned(), held.clone());
                inner.suspect |= left == Left::Mixture
                    && inner.load_refused.as_ref().is_some_and(|(start, before)| *start == refused.0 && *before != refused.1);
                inner.load_refused = Some(refused);
            }
            inner.machine.install_failed(reason, left, Some(held), switch.start);
            inner.stop_receiving("it could not be installed");
        });
        if owes_answer {
            self.see_owed_answer(held.clone());
        }
    }

    /// Installs what lies here into an engine that started again, when it is what the group should hold. No one else is needed for that.
    pub(super) async fn reinstall(self: &Arc<Self>, policy: &UpdatePolicy) {
        let _switching = self.switching.lock().await;
        let (current, epoch) = (self.core.current(), self.core.epoch());
        let wanted = self.with(|inner| {
            let idle = inner.machine.live().is_none() && inner.machine.installed().is_none() && !inner.machine.must_not_serve();
            let of_group = current.as_ref().and_then(|current| inner.installed_once().find(|held| held.held.is(current)).cloned());
            let newest = || {
                inner.kept.clone().filter(|kept| {
                    current.as_ref().is_none_or(|current| kept.held.version > current.version)
                        && epoch.as_ref().is_none_or(|epoch| !epoch.left(kept.held.version))
                })
            };
            of_group.or_else(newest).filter(|_| idle)
        });
        let Some(version) = wanted else { return };
        if self.check_kept(&version).await.is_err() {
            return;
        }
        tracing::info!(version = version.held.version, "the engine started again and gets the kept copy");
        self.switch_locked(version, policy).await;
    }

    /// Has the start-up weights put back into an engine that was not fed in time.
    pub(super) async fn put_back(self: &Arc<Self>, limit: Duration) {
        let _switching = self.switching.lock().await;
        if self.with(|inner| !inner.machine.must_not_serve()) {
            return;
        }
        match timeout(limit.saturating_add(GRACE), self.engine.put_back(limit)).await {
            Ok(Ok(())) => {
                tracing::warn!("the engine was not fed in time: its start-up weights are back, it holds no version");
                self.with(|inner| {
                    inner.machine.put_back();
                    (inner.load_refused, inner.suspect) = (None, false);
                    inner.engine.mended();
                    inner.touched = None;
                    inner.paused_until = None;
                });
            }
            Ok(Err(error)) => {
                tracing::error!(%error, "the start-up weights cannot be put back");
                self.with(|inner| {
                    // Seen with vLLM alone, whose loader keeps a tensor that does not fit and answers 500 from then on.
                    if std::mem::take(&mut inner.suspect) && error.is_refusal() && matches!(error, EngineError::Status { .. }) {
                        let why =
                            format!("the engine takes no weights any more, not even those that it started with: restart it ({error})");
                        inner.engine.breaks(why);
                    }
                });
            }
            Err(_) => tracing::error!(?limit, "the start-up weights were not put back in time"),
        }
        // Whether or not it worked, the next try is a whole deadline away.
        self.with(|inner| inner.dirty_since = inner.dirty_since.map(|_| tokio::time::Instant::now()));
    }
}

/// What the group's rules say of an install.
pub(super) fn terms(version: HeldVersion, policy: &UpdatePolicy) -> InstallTerms {
    InstallTerms {
        version,
        pause: policy.pause,
        kv_cache: policy.kv_cache,
        canary: policy.canary.clone(),
        timeout: Duration::from_millis(policy.update_timeout_ms),
        cancel: CancellationToken::new(),
    }
}

/// The time of day after `from_now`, in ms since 1970.
pub(super) fn ms_since_1970(from_now: Duration) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.saturating_add(from_now).as_millis()).unwrap_or(u64::MAX)
}

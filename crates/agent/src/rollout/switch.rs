//! Has the engine switched to a version that lies complete in a directory, one switch at a time.
//!
//! Decides the route of an install, and what is done about an engine that holds half an update and is not fed in time: its start-up weights
//! are put back, so that it is not paused for ever. What an end means, [`super::state`] decides; the order of calls is the adapter's.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::state::{Ended, Outcome, State, Switch};
use super::{Rollout, Version};
use weightsync_core::protocol::{HeldVersion, ProvenBy, UpdatePolicy};
use weightsync_core::weights::Layout;
use weightsync_engine::{DraftWay, EngineError, InstallError, InstallJob, InstallTerms, Left, draft};

/// What an adapter may take beyond the time that it was given.
pub(super) const GRACE: Duration = Duration::from_secs(10);

impl Rollout {
    /// Switches the engine. Ends when the engine confirmed or failed.
    pub(super) async fn switch(self: &Arc<Self>, version: Arc<Version>, policy: &UpdatePolicy) {
        let _switching = self.switching.lock().await;
        // What was not compared just now is read once more: the engine's container can write there, and memory can fail.
        let first = version.is_given_first();
        if (!first || self.read(|state| state.versions.is_earlier(&version.held)))
            && let Err(reason) = self.check_kept(&version).await
        {
            self.with(|state| state.copy_lost(format!("the kept copy of version {} is damaged: {reason}", version.held.version)));
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
            self.with(|state| state.versions.damaged(version));
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
        self.with(|state| state.versions.touch(&version));
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
        let outcome = Outcome::of(timeout(limit.saturating_add(GRACE), installed).await, ProvenBy::Digests);
        self.end_switch(Ended { held: &version.held, files: Some(&version), outcome, switch, limit });
        self.probe_now.notify_one();
    }

    /// The engine is being changed by us from now on, at most so long.
    pub(super) fn begin_switch(&self, limit: Duration, layout: Arc<Layout>) -> Switch {
        let now = self.now();
        self.with(|state| state.switch_begins(limit, layout, now))
    }

    /// Takes in how an install ended.
    pub(super) fn end_switch(self: &Arc<Self>, ended: Ended<'_, Version>) {
        let (held, limit, now) = (ended.held, ended.limit, self.now());
        match &ended.outcome {
            Outcome::Confirmed(report, _) => tracing::info!(version = held.version, steps = ?report.steps_ms, "the engine confirmed"),
            Outcome::Failed(error) => tracing::warn!(version = held.version, left = ?error.left, %error, "an install did not end well"),
            Outcome::NoEnd => tracing::warn!(version = held.version, ?limit, "an install did not end"),
        }
        let owes_answer = ended.outcome.owes_answer();
        self.with(|state| state.switch_ended(ended, now));
        if owes_answer {
            self.see_owed_answer(held.clone());
        }
    }

    /// Installs what lies here into an engine that started again, when it is what the group should hold. No one else is needed for that.
    pub(super) async fn reinstall(self: &Arc<Self>, policy: &UpdatePolicy) {
        let _switching = self.switching.lock().await;
        let (current, epoch) = (self.core.current(), self.core.epoch());
        let wanted = self.read(|state| state.to_reinstall(current.as_ref(), epoch.as_deref()));
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
        if self.read(|state| !state.machine.must_not_serve()) {
            return;
        }
        match timeout(limit.saturating_add(GRACE), self.engine.put_back(limit)).await {
            Ok(Ok(())) => {
                tracing::warn!("the engine was not fed in time: its start-up weights are back, it holds no version");
                self.with(State::put_back);
            }
            Ok(Err(error)) => {
                tracing::error!(%error, "the start-up weights cannot be put back");
                self.with(|state| state.not_put_back(&error));
            }
            Err(_) => tracing::error!(?limit, "the start-up weights were not put back in time"),
        }
        let now = self.now();
        self.with(|state| state.put_back_tried(now));
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

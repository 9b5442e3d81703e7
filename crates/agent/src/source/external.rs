//! Leads versions that the trainer's own data plane moves (`delivery: External`): one attempt in the very epoch that the trainer named.
//!
//! Decides which number may be brought (as for any publish; the current one may come again, for replicas that lack it) and says at once that
//! the epoch is of no use when an attempt failed: the trainer's group is in an unknown state, and the coordinator makes another epoch.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout_at;
use tokio_util::sync::CancellationToken;

use super::Source;
use crate::external::{Ask, ExternalDesk, ExternalJob};
use crate::group::Epoch;
use crate::lead::ExternalPlan;
use crate::locks::lock;
use crate::source::outcome::{pinned, publish_error};
use weightsync_core::protocol::{Delivery, HeldVersion, PublishError, PublishErrorCode, PublishResult, external_manifest};

/// What the leader may take beyond the deadline to say how it ended.
const LATE: Duration = Duration::from_secs(5);

impl Source {
    /// Leads what trainers ask for until `cancel`.
    pub async fn run_external(self: Arc<Self>, desk: Arc<ExternalDesk>, cancel: CancellationToken) {
        loop {
            let ask = tokio::select! {
                () = cancel.cancelled() => return,
                ask = desk.asked() => ask,
            };
            match ask {
                Ask::Update(job) => tokio::select! {
                    () = cancel.cancelled() => return,
                    () = self.external(*job, &desk) => {}
                },
                Ask::Broken { epoch, reason } => {
                    if let Ok(of) = self.epoch_of(epoch) {
                        tracing::warn!(epoch, reason, "the trainer's own group does not work");
                        let version = self.current(Some(&of)).map_or(0, |current| current.version);
                        self.leader.give_up(&of, version, self.attempts.next(version), &reason);
                        desk.over(epoch, &format!("the trainer gave it up: {reason}"));
                    }
                }
            }
        }
    }

    /// Leads one version; its trainer hears exactly one outcome.
    async fn external(&self, job: ExternalJob, desk: &ExternalDesk) {
        let ExternalJob { epoch, version, digest, engine_version, deadline, cancel, mut words, tell } = job;
        let begun = self.epoch_of(epoch).and_then(|of| {
            let held = HeldVersion { version, manifest: external_manifest(of.id(), version, digest.as_deref()) };
            let feeding = self.admit_external(&of, &held)?;
            Ok((of, held, feeding))
        });
        let (of, held, feeding) = match begun {
            Ok(begun) => begun,
            Err(error) => return tell.end(Err(error)),
        };
        if cancel.is_cancelled() {
            return tell.end(Err(given_up()));
        }
        tracing::info!(version, epoch, "the trainer's own data plane begins a version");
        let plan = ExternalPlan {
            epoch: of.clone(),
            held: held.clone(),
            attempt: self.attempts.next(version),
            feeding,
            engine_version,
            deadline,
            words: &mut words,
            tell: &tell,
        };
        // The leader first: an attempt that began reports its end to the coordinator, even if it is cancelled at once.
        let outcome = tokio::select! {
            biased;
            // It ends in time by itself, and says what was under way; this ends the wait for one that does not.
            outcome = timeout_at(deadline + LATE, self.leader.lead_external(plan)) => match outcome {
                Ok(outcome) => outcome.map_err(publish_error),
                Err(_) => {
                    Err(PublishError { code: PublishErrorCode::Timeout, message: "the update did not end in time".into(), ..given_up() })
                }
            },
            () = cancel.cancelled() => Err(given_up()),
        };
        match outcome {
            Ok(brought) => {
                tracing::info!(version, epoch, installed = ?brought.installed, "the trainer's own data plane brought a version");
                lock(&self.history).reached(held.clone());
                self.core.learn_current(Some(&held));
                self.core.set_facts(|facts| facts.installed = Some(held.clone()));
                let result = PublishResult {
                    version,
                    epoch,
                    attempts: 1,
                    bytes: 0,
                    manifest: held.manifest,
                    installed: brought.installed,
                    behind: brought.behind,
                    phases_ms: brought.phases_ms,
                    mixed: brought.mixed,
                    notes: brought.notes,
                };
                self.in_roster(&result, deadline).await;
                tell.end(Ok(result));
            }
            Err(error) => {
                tracing::warn!(version, epoch, code = ?error.code, message = %error.message, "a version of the trainer's own data plane failed");
                desk.over(epoch, &format!("version {version} failed in it: {}", error.message));
                tell.end(Err(error));
            }
        }
    }

    /// The committed epoch of that number.
    fn epoch_of(&self, number: u64) -> Result<Arc<Epoch>, PublishError> {
        let refuse = |code, message: String, retryable| Err(PublishError { code, message, retryable, phase: None, member: None });
        match self.core.epoch() {
            Some(epoch) if epoch.prepared.policy.delivery != Delivery::External => {
                refuse(PublishErrorCode::Invalid, "the object's delivery is not External: its agents move the bytes".into(), false)
            }
            Some(epoch) if epoch.id().epoch == number => Ok(epoch),
            _ => {
                refuse(PublishErrorCode::Fenced, format!("epoch {number} is over ({}): go on in the next one", self.core.why_over()), true)
            }
        }
    }

    /// Whether the number may be brought; true when it is the group's already and comes again for replicas that lack it.
    fn admit_external(&self, epoch: &Epoch, held: &HeldVersion) -> Result<bool, PublishError> {
        let current = self.current(Some(epoch));
        let changed = |before: &str| PublishError {
            code: PublishErrorCode::ManifestChanged,
            message: format!(
                "version {} has other weights than before ({before}), by its digest ({}): give new weights a new number",
                held.version, held.manifest
            ),
            retryable: false,
            phase: None,
            member: None,
        };
        if let Some(current) = current.as_ref().filter(|current| current.version == held.version) {
            let same = current.manifest.is_empty() || current.manifest == held.manifest;
            return if same { Ok(true) } else { Err(changed(&current.manifest)) };
        }
        if let Some(returned) = epoch.returned().filter(|returned| returned.pinned) {
            return Err(pinned(returned.to));
        }
        let mut history = lock(&self.history);
        if let Some(must) = history.admit(held.version, current.as_ref())?.filter(|must| *must != held.manifest) {
            return Err(changed(&must));
        }
        history.tried(held.version);
        history.read(held, epoch.algorithm());
        Ok(false)
    }
}

fn given_up() -> PublishError {
    let message = "the trainer gave the version up, or went away in the middle".into();
    PublishError { code: PublishErrorCode::Cancelled, message, retryable: true, phase: None, member: None }
}

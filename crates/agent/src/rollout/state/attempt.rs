//! The attempt that a rollout receives: who leads it, where its bytes go, and when it gives way to another.
//!
//! Decides that only its leader speaks about an attempt, and that it ends with the weights that it was begun with. An attempt that the
//! engine takes while its bytes travel gives way to a later one at once: its end would be waited for in vain.

use super::State;
use crate::archive::Archived;
use crate::group::{LedBy, refusal};
use crate::rollout::machine::Opening;
use weightsync_core::protocol::{BeginRequest, FinishRequest, HeldVersion, InstallStep, Received, Refusal, RefusalCode, UpdateId};

const REPLACED: &str = "another attempt took its place";

/// Who leads an attempt, and the manifest that it must bring, where that was settled before.
#[derive(Debug)]
pub(super) struct Led {
    update: UpdateId,
    pod_uid: String,
    manifest: Option<String>,
}

/// Where the bytes of an attempt go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rollout) enum Takes {
    /// Nowhere: its version lies here already.
    Nothing,
    /// Into files.
    Files,
    /// Into the engine, while they travel.
    Engine,
    /// Into the engine, by the user's own data plane.
    External,
}

#[derive(Debug)]
pub(super) struct Receives {
    update: UpdateId,
    takes: Takes,
}

impl<F: Archived> State<F> {
    /// A leader opens an attempt. `manifest` is the one that it must end with, where that is known.
    pub(in crate::rollout) fn begins(&mut self, request: &BeginRequest, by: LedBy, manifest: Option<String>) -> Result<Opening, Refusal> {
        let complete: Vec<HeldVersion> = self.versions.all().map(|version| version.held().clone()).collect();
        let opening = self.machine.begin(request, &complete)?;
        if opening != Opening::Busy {
            self.led = Some(Led { update: request.update.clone(), pod_uid: by.pod_uid, manifest });
            if self.receiving.as_ref().is_some_and(|receiving| receiving.update != request.update) {
                self.stop(REPLACED);
            }
        }
        Ok(opening)
    }

    /// A member leads an attempt whose bytes no agent sees.
    pub(in crate::rollout) fn leads(&mut self, update: &UpdateId, by: LedBy) {
        self.led = Some(Led { update: update.clone(), pod_uid: by.pod_uid, manifest: None });
    }

    /// The pod that leads this attempt.
    pub(in crate::rollout) fn leader_of(&self, update: &UpdateId) -> Option<&str> {
        self.led.as_ref().filter(|led| led.update == *update).map(|led| led.pod_uid.as_str())
    }

    /// Refuses a message about an attempt that another member leads.
    pub(in crate::rollout) fn check_leader(&self, update: &UpdateId, by: &LedBy) -> Result<(), Refusal> {
        match self.leader_of(update) {
            Some(leader) if leader != by.pod_uid => {
                let message = format!("attempt {} of version {} is led by another member", update.attempt, update.version);
                Err(refusal(RefusalCode::Forbidden, message))
            }
            _ => Ok(()),
        }
    }

    /// Refuses other weights than the ones that were begun.
    pub(in crate::rollout) fn check_manifest(&self, request: &FinishRequest) -> Result<(), Refusal> {
        let led = self.led.as_ref().filter(|led| led.update == request.update);
        match led.and_then(|led| led.manifest.as_ref()) {
            Some(manifest) if *manifest != request.manifest_digest => {
                let message = format!("the update was begun with manifest {manifest}, it ends with {}", request.manifest_digest);
                Err(refusal(RefusalCode::Forbidden, message))
            }
            _ => Ok(()),
        }
    }

    /// The bytes of an attempt may come; false when it is over by now, or they come already.
    pub(in crate::rollout) fn receives(&mut self, update: &UpdateId, takes: Takes) -> bool {
        let known = self.receiving.as_ref().is_some_and(|receiving| receiving.update == *update);
        if known || self.machine.live() != Some(update) {
            return false;
        }
        self.receiving = Some(Receives { update: update.clone(), takes });
        true
    }

    /// Another attempt comes: one that the engine takes while its bytes travel gives way.
    pub(in crate::rollout) fn make_way(&mut self, update: &UpdateId) {
        let replaced = self.receiving.as_ref().is_some_and(|Receives { update: of, takes }| {
            *takes == Takes::Engine && of != update && (of.epoch != update.epoch || of.version <= update.version)
        });
        if replaced && !self.is_installing() {
            self.stop(REPLACED);
        }
    }

    /// Another update by the user's data plane comes: the one before gives way, unless it is being proven.
    pub(in crate::rollout) fn make_way_external(&mut self, update: &UpdateId) {
        let replaced = self
            .receiving
            .as_ref()
            .filter(|Receives { update: of, takes }| *takes == Takes::External && of != update && self.machine.live() == Some(of));
        if let Some(over) = replaced.map(|receiving| receiving.update.clone())
            && !self.is_installing()
        {
            self.machine.abort(&over, REPLACED);
            self.stop(REPLACED);
        }
    }

    /// Coverage and digests of an attempt were compared. Its files stay where the switch to them is still to come.
    pub(in crate::rollout) fn verified(
        &mut self,
        update: &UpdateId,
        outcome: Result<(HeldVersion, Option<F>), String>,
        took_ms: u64,
    ) -> Result<(), Refusal> {
        let (held, files) = match outcome {
            Ok((held, files)) => (Ok(held), files),
            Err(reason) => (Err(reason), None),
        };
        self.machine.verified(update, held, took_ms)?;
        let delivered = self.step() == Some(InstallStep::Delivered);
        self.versions.stage(files.filter(|_| delivered));
        if !delivered {
            self.stop("it is not what its manifest says, or is held already");
        }
        Ok(())
    }

    /// The bytes of a version came.
    pub(in crate::rollout) fn measured(&mut self, received: Received) {
        self.received = Some(received);
    }

    /// An attempt is given up; false when it was over already.
    pub(in crate::rollout) fn attempt_ended(&mut self, update: &UpdateId, reason: &str) -> bool {
        let ended = self.machine.abort(update, reason);
        self.stop_where(ended, reason)
    }

    /// The epoch of an attempt is over, and the attempt; false when it was over already.
    pub(in crate::rollout) fn attempt_fenced(&mut self, update: &UpdateId, reason: &str) -> bool {
        let ended = self.machine.fenced(update, reason);
        self.stop_where(ended, reason)
    }

    /// The epoch is over, and every attempt in it.
    pub(in crate::rollout) fn epoch_over(&mut self, reason: &str) {
        let ended = self.machine.epoch_over(reason);
        self.stop_where(ended, reason);
    }

    fn stop_where(&mut self, ended: bool, reason: &str) -> bool {
        if ended {
            self.stop(reason);
        }
        ended
    }

    /// Nothing of the attempt is taken any more.
    pub(super) fn stop(&mut self, reason: &str) {
        if self.receiving.take().is_some() {
            self.effects.stop = Some(reason.to_owned());
        }
    }

    /// The same, where it is this attempt.
    pub(super) fn stop_if(&mut self, update: &UpdateId, reason: &str) {
        if self.receiving.as_ref().is_some_and(|receiving| receiving.update == *update) {
            self.stop(reason);
        }
    }

    fn step(&self) -> Option<InstallStep> {
        self.machine.status().map(|status| status.step)
    }

    fn is_installing(&self) -> bool {
        self.step() == Some(InstallStep::Installing)
    }
}

//! When a rollout that feeds the others goes back to an earlier version before it feeds.
//!
//! Pure. Decides that it takes its own copy when its engine holds a version that the group left, half a version or a refused one: no one
//! else can do that for it. Once in an epoch: what fails here is another feeder's to mend, in the next one.

use std::sync::Arc;

use super::State;
use crate::archive::Archived;
use crate::group::Epoch;
use weightsync_core::protocol::HeldVersion;

impl<F: Archived> State<F> {
    /// Whether this rollout goes back to `current`, or has to, before it feeds others.
    pub(in crate::rollout) fn goes_first(&self, epoch: &Epoch, current: &HeldVersion) -> bool {
        self.going_back || self.copy_to_go_back_to(epoch, current).is_some()
    }

    /// It is time to go back: the copy to go back to, where that is due. [`went_back`](Self::went_back) follows.
    pub(in crate::rollout) fn goes_back(&mut self, epoch: &Epoch, current: &HeldVersion) -> Option<Arc<F>> {
        let version = self.copy_to_go_back_to(epoch, current)?;
        self.went_back = Some(epoch.id().clone());
        self.going_back = true;
        Some(version)
    }

    /// It went back, or could not.
    pub(in crate::rollout) fn went_back(&mut self) {
        self.going_back = false;
    }

    fn copy_to_go_back_to(&self, epoch: &Epoch, current: &HeldVersion) -> Option<Arc<F>> {
        let left = self.machine.installed().is_some_and(|installed| epoch.left(installed.held.version));
        let due = (left || self.machine.must_not_serve())
            && self.went_back.as_ref() != Some(epoch.id())
            && self.machine.live().is_none()
            && !self.switching
            && !self.engine.unhealthy();
        self.versions.find(current).filter(|_| due).cloned()
    }
}

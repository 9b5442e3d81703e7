//! What a rollout keeps of versions that its engine held before, and how one that feeds the others goes back itself.
//!
//! Decides which earlier versions stay (by count and memory, as the object says), and that a feeder goes back before it feeds, and
//! takes its own copy when its engine holds half a version or a refused one: no one else can do that for it. The copy is hashed again before it is loaded.

use std::sync::Arc;

use super::{Inner, Rollout, Version};
use crate::group::Epoch;
use crate::locks::lock;
use crate::space::{NoSpace, Reservation};
use weightsync_core::protocol::{HeldVersion, UpdatePolicy};

impl Rollout {
    /// Whether this rollout, which is to feed the others the version that the group went back to, has to go back itself before.
    pub(super) fn goes_first(&self, epoch: &Epoch, current: &HeldVersion) -> bool {
        let inner = lock(&self.inner);
        inner.going_back || inner.should_go_back(epoch, current).is_some()
    }

    /// Goes back from what lies here, where no one else will bring it.
    pub(super) async fn go_back(self: &Arc<Self>, policy: &UpdatePolicy) {
        let Some(epoch) = self.core.epoch() else { return };
        let Some(current) = epoch.current().filter(|_| epoch.feeds()) else { return };
        let begun = self.with(|inner| {
            let version = inner.should_go_back(&epoch, current)?;
            // Once in an epoch: what fails here is another feeder's to mend, in the next one.
            inner.went_back = Some(epoch.id().clone());
            inner.going_back = true;
            Some(version)
        });
        let Some(version) = begun else { return };
        tracing::info!(version = current.version, "the group goes back, and this replica goes first");
        {
            let _switching = self.switching.lock().await;
            if self.check_kept(&version).await.is_ok() {
                self.switch_locked(version, policy).await;
            }
        }
        self.with(|inner| inner.going_back = false);
    }

    /// Room for so many bytes more in its directory; earlier versions give way, the oldest first.
    pub(super) fn make_room(&self, wanted: u64) -> Result<Reservation, NoSpace> {
        loop {
            let full = match self.cgroups.reserve_in(self.dir.path(), wanted) {
                Ok(room) => return Ok(room),
                Err(full) => full,
            };
            let current = self.core.current();
            let dropped = self.with(|inner| {
                // The version that the group is at, or goes back to, stays to the last.
                if let Some(current) = &current {
                    inner.earlier.touch(current);
                }
                inner.earlier.make_room()
            });
            let Some(old) = dropped else { return Err(full) };
            tracing::info!(version = old.held.version, "an earlier version is dropped to make room");
        }
    }
}

impl Inner {
    /// The copy from which to go back, where that is due.
    fn should_go_back(&self, epoch: &Epoch, current: &HeldVersion) -> Option<Arc<Version>> {
        let left = self.machine.installed().is_some_and(|installed| epoch.left(installed.held.version));
        let due = (left || self.machine.must_not_serve())
            && self.went_back.as_ref() != Some(epoch.id())
            && self.machine.live().is_none()
            && !self.switching
            && !self.engine.unhealthy();
        self.held().find(|held| due && held.held.is(current)).cloned()
    }

    /// Versions that the engine was switched to and that are kept.
    pub(super) fn installed_once(&self) -> impl Iterator<Item = &Arc<Version>> {
        self.kept.iter().chain(self.earlier.all())
    }

    /// The engine was switched to a version, which lies in files or not; what it held before stays as long as the object wants it to.
    pub(super) fn archive(&mut self, files: Option<&Arc<Version>>) {
        let before = std::mem::replace(&mut self.kept, files.cloned());
        if let Some(before) = before.filter(|before| files.is_none_or(|files| files.held != before.held)) {
            self.earlier.put(before);
        }
        if let Some(files) = files {
            self.earlier.remove(&files.held);
        }
        let (keep, limit) = self.policy.as_ref().map_or((1, 0), |policy| (policy.keep.max(1), policy.retain_bytes));
        for old in self.earlier.trim(usize::try_from(keep - 1).unwrap_or(usize::MAX), limit) {
            tracing::debug!(version = old.held.version, "an earlier version is kept no longer");
        }
    }
}

//! What a rollout keeps of versions that its engine held before, and how one that feeds the others goes back itself.
//!
//! Decides which earlier versions stay (by count and memory, as the object says), and that a feeder goes back before it feeds, and
//! takes its own copy when its engine holds half a version or a refused one: no one else can do that for it. The copy is hashed again before it is loaded.

use std::sync::Arc;

use super::Rollout;
use super::state::State;
use crate::group::Epoch;
use crate::space::{NoSpace, Reservation};
use weightsync_core::protocol::{HeldVersion, UpdatePolicy};

impl Rollout {
    /// Whether this rollout, which is to feed the others the version that the group went back to, has to go back itself before.
    pub(super) fn goes_first(&self, epoch: &Epoch, current: &HeldVersion) -> bool {
        self.read(|state| state.goes_first(epoch, current))
    }

    /// Goes back from what lies here, where no one else will bring it.
    pub(super) async fn go_back(self: &Arc<Self>, policy: &UpdatePolicy) {
        let Some(epoch) = self.core.epoch() else { return };
        let Some(current) = epoch.current().filter(|_| epoch.feeds()) else { return };
        let Some(version) = self.with(|state| state.goes_back(&epoch, current)) else { return };
        tracing::info!(version = current.version, "the group goes back, and this replica goes first");
        {
            let _switching = self.switching.lock().await;
            if self.check_kept(&version).await.is_ok() {
                self.switch_locked(version, policy).await;
            }
        }
        self.with(State::went_back);
    }

    /// Room for so many bytes more in its directory; earlier versions give way, the oldest first.
    pub(super) fn make_room(&self, wanted: u64) -> Result<Reservation, NoSpace> {
        loop {
            let full = match self.cgroups.reserve_in(self.dir.path(), wanted) {
                Ok(room) => return Ok(room),
                Err(full) => full,
            };
            let current = self.core.current();
            let Some(old) = self.with(|state| state.versions.make_room(current.as_ref())) else { return Err(full) };
            tracing::info!(version = old.held.version, "an earlier version is dropped to make room");
        }
    }
}

//! Which replicas may be in service while versions differ: `membership.maxSkew`, and both versions while a group goes back.
//!
//! Decides for one replica from the view, so that the controller's readiness gate and the agent's probe agree. A replica without a verified
//! version never serves. The rule for numbers is in `protocol`.

use crate::protocol::{HeldVersion, MemberState, Returned, Role, Skew, Version, newest_in_service, skew};

use super::{Membership, MembershipView};

impl Membership {
    /// The newest version in service, if there is a limit. Versions that the group goes back from do not count.
    pub(super) fn newest(&self) -> Option<Version> {
        let (most, counts) = (self.config.policy.max_skew?, self.wanted()?.version);
        let left = |version: &Version| self.returned().is_some_and(|returned| returned.left(*version));
        let serve = |state: &&MemberState| state.role == Role::Rollout && !state.phase.must_not_serve();
        let installed = self
            .states()
            .filter(serve)
            .filter_map(|state| state.installed.as_ref())
            .filter(|held| self.exists(held))
            .map(|held| held.version);
        Some(newest_in_service(most, counts, installed.filter(|version| !left(version))))
    }

    /// A replica's version compared with the limit; `None` without a limit, and for a version that the group goes back from.
    pub(super) fn skew_of(&self, state: &MemberState) -> Option<Skew> {
        let (most, counts, installed) = (self.config.policy.max_skew?, self.wanted()?.version, state.installed.as_ref()?.version);
        let left = self.returned().is_some_and(|returned| returned.left(installed));
        (!left).then(|| skew(most, counts, self.newest().unwrap_or(counts), installed))
    }
}

impl MembershipView {
    /// Whether a replica with this version may be in service; else the cause as text.
    pub fn may_serve(&self, held: &HeldVersion) -> Result<(), String> {
        let Some(current) = &self.version else { return Ok(()) };
        let wanted = self.wanted.as_ref().unwrap_or(current);
        let number = held.version;
        if number == wanted.version {
            return Ok(());
        }
        if let Some(Returned { to, .. }) = self.returned.filter(|returned| returned.left(number)) {
            // Until enough were taken back both are in service.
            return if wanted == current { Err(format!("serves version {number}, the group went back to {to}")) } else { Ok(()) };
        }
        let Some(most) = self.max_skew else {
            let older = || format!("serves version {number}, the current one is {}", current.version);
            return if number >= current.version { Ok(()) } else { Err(older()) };
        };
        let newest = self.newest.unwrap_or(wanted.version);
        match skew(most, wanted.version, newest, number) {
            Skew::Within => Ok(()),
            Skew::TooOld => {
                Err(format!("serves version {number}, the newest in service is {newest}: more than membership.maxSkew ({most}) apart"))
            }
            Skew::TooNew => {
                let counts = wanted.version;
                Err(format!(
                    "holds version {number}, more than membership.maxSkew ({most}) ahead of {counts}: it serves once {number} counts"
                ))
            }
        }
    }
}

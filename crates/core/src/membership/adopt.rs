//! A restarted controller takes over a working group: all its members report that they are in it, and it is the group that the controller
//! would form.
//!
//! Otherwise a new group is formed. It never takes over an epoch that it ended itself.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::plan::roster;
use crate::protocol::{Incarnation, MemberName, MemberPhase, Reason, Role};

use super::Membership;
use super::assess::Assessment;
use super::group::Group;

/// The wait is extended at most to so many windows, for members that come one by one.
const ADOPT_WINDOWS: u64 = 10;

impl Membership {
    /// Starts the wait for agents of an earlier controller's group.
    pub(super) fn wait_for_announcements(&mut self) {
        let window = self.config.adopt_window_ms;
        self.adopt_until = Some(self.now.saturating_add(window));
        self.adopt_most = self.now.saturating_add(window.saturating_mul(ADOPT_WINDOWS));
    }

    /// A member of an earlier controller's group reported for the first time: extend the wait for the others. When thousands of agents
    /// reconnect at once, those of one group arrive one by one. A group without the late ones would be formed once more for each of them.
    pub(super) fn one_came_back(&mut self) {
        if self.adopting_until().is_some() {
            self.others_came_back(self.now);
        }
    }

    /// Agents of other objects reconnected until `at`. Has no effect after the first decision.
    pub(super) fn others_came_back(&mut self, at: u64) {
        if let Some(until) = self.adopt_until.filter(|_| self.waits_for_earlier_group()) {
            self.adopt_until = Some(until.max(at.saturating_add(self.config.adopt_window_ms).min(self.adopt_most)));
        }
    }

    /// Whether a group of an earlier controller may still be taken over.
    pub fn waits_for_earlier_group(&self) -> bool {
        self.had_epoch && self.over == 0 && self.group.is_none() && self.forming.is_none()
    }

    /// End of the wait for agents of an earlier controller's group; `None` after it, or without such a group.
    pub(super) fn adopting_until(&self) -> Option<u64> {
        self.adopt_until.filter(|until| self.had_epoch && self.now < *until)
    }

    /// Takes over a working group, if there is one. Returns whether it did.
    pub(super) fn adopt(&mut self, assessment: &Assessment) -> bool {
        let transport = assessment.eligible.iter().find_map(|member| self.agents.get(&member.life)?.state.as_ref()?.transport.clone());
        let returned = assessment.eligible.iter().find_map(|member| self.agents.get(&member.life)?.state.as_ref()?.returned);
        let mut states = assessment.eligible.iter().filter_map(|member| self.agents.get(&member.life)?.state.as_ref());
        let Some(id) = states.clone().next().and_then(|state| state.epoch.clone()) else { return false };
        if id.weightsync != self.config.weightsync || id.epoch <= self.over {
            return false;
        }
        if states.clone().any(|state| state.epoch.as_ref() != Some(&id)) {
            return false;
        }
        let candidates: Vec<_> = assessment.eligible.iter().map(|member| Arc::clone(&member.candidate)).collect();
        let roster = roster(&candidates.iter().map(|candidate| (**candidate).clone()).collect::<Vec<_>>());
        let digest = roster.digest();
        // A dirty member does not report whether it committed; a source does, and commits after all others.
        let led = states.clone().any(|state| state.role == Role::Source);
        let agree = states.all(|state| {
            (matches!(state.phase, MemberPhase::Ready | MemberPhase::Updating) || led && state.phase.must_not_serve())
                && state.epoch.as_ref() == Some(&id)
                && state.roster_digest.as_deref() == Some(digest.as_str())
        });
        if !agree {
            return false;
        }
        let members = assessment.eligible.iter();
        let lives: BTreeMap<MemberName, Incarnation> = members.map(|member| (member.candidate.name.clone(), member.life.clone())).collect();
        let message = format!("epoch {}: took over a working group of {} members", id.epoch, lives.len());
        self.epoch = self.epoch.max(id.epoch);
        self.event(Reason::GroupFormed, message, None, false);
        let mut group = Group::new(id, roster, candidates, lives, self.config.policy.clone(), self.now);
        (group.returned, group.transport) = (returned, transport.unwrap_or_default());
        self.enter(group);
        true
    }
}

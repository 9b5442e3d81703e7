//! A restarted controller takes over what works: a group whose members all say that they are in it, and that is the group it would form.
//!
//! Anything else is formed anew. It never takes over an epoch that it ended itself.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::plan::roster;
use crate::protocol::{Incarnation, MemberName, MemberPhase, Reason, Role};

use super::Membership;
use super::assess::Assessment;
use super::group::Group;
use super::mutation::Mutation;

impl Membership {
    /// Until when agents of an earlier controller's group are waited for; none when that time is over or there was no such group.
    pub(super) fn adopting_until(&self) -> Option<u64> {
        self.adopt_until.filter(|until| self.had_epoch && self.now < *until && !self.switch.is(Mutation::AdoptionSkipped))
    }

    /// Takes a working group over, if there is one. True when it did.
    pub(super) fn adopt(&mut self, assessment: &Assessment) -> bool {
        if self.switch.is(Mutation::AdoptionSkipped) {
            return false;
        }
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
        // A dirty member does not say whether it committed; a source does, and commits after all others.
        let led = states.clone().any(|state| state.role == Role::Source);
        let agree = states.all(|state| {
            (matches!(state.phase, MemberPhase::Ready | MemberPhase::Updating) || led && state.phase == MemberPhase::Dirty)
                && state.epoch.as_ref() == Some(&id)
                && state.roster_digest.as_deref() == Some(digest.as_str())
        });
        if !agree {
            return false;
        }
        let members = assessment.eligible.iter();
        let lives: BTreeMap<MemberName, Incarnation> = members.map(|member| (member.candidate.name.clone(), member.life.clone())).collect();
        let message = format!("epoch {}: {} members were found at work", id.epoch, lives.len());
        self.epoch = self.epoch.max(id.epoch);
        self.event(Reason::GroupAdopted, message, None, false);
        let mut group = Group::new(id, roster, candidates, lives, self.config.policy.clone(), self.now);
        (group.returned, group.transport) = (returned, transport.unwrap_or_default());
        self.enter(group);
        true
    }
}

//! Notifies agents in an ended epoch until their state shows it; releases all agents of a suspended or deleted object.
//!
//! Notifies only agents in an epoch of this object, and never one that the present group needs.

use crate::protocol::{EpochId, FenceRequest, Incarnation, Reason, ReleaseRequest};

use super::agents::Link;
use super::assess::Assessment;
use super::group::{Forming, Group};
use super::{Decision, Membership};

impl Membership {
    /// The group has nothing left to do: fence its members, so that none waits for the one that is gone.
    pub(super) fn dissolve(&mut self, why: Reason) {
        let Some(group) = self.group.take() else { return };
        let lives: Vec<Incarnation> = group.lives.values().cloned().collect();
        self.event(Reason::GroupFenced, format!("epoch {} ended: {why}", group.id.epoch), None, true);
        self.tell_over(&lives, &group.id, &format!("epoch {} ended: {why}", group.id.epoch));
        self.urgent = None;
        self.viable_since = None;
    }

    /// Agents in an epoch of this object, with that epoch.
    fn in_our_epochs(&self) -> Vec<(Incarnation, EpochId)> {
        let ours = self.agents.iter().filter(|(_, agent)| agent.link == Link::Live).filter_map(|(life, agent)| {
            let epoch = agent.epoch().filter(|epoch| epoch.weightsync == self.config.weightsync)?;
            Some((life.clone(), epoch.clone()))
        });
        ours.collect()
    }

    /// Agents in an epoch that is not the present one.
    pub(super) fn tell_strays(&mut self, assessment: &Assessment) {
        let adopting_until = self.adopting_until().filter(|_| self.group.is_none());
        if let Some(until) = adopting_until {
            self.wake_at(until);
        }
        for (life, epoch) in self.in_our_epochs() {
            let grouped = self.group.as_ref().is_some_and(|group| group.member_of(&life).is_some());
            let asked = match &self.forming {
                Some(Forming::Round(round)) => round.member_of(&life).is_some(),
                Some(Forming::Persisting(_)) => assessment.eligible.iter().any(|member| member.life == life),
                None => false,
            };
            // Without a group, and after the wait for agents, an earlier controller's epoch has ended as well. Otherwise its members would
            // stay in it without end, waiting for one that is gone.
            let no_one_waits = self.forming.is_none() && adopting_until.is_none();
            let over = epoch.epoch <= self.over || self.group.as_ref().map_or(no_one_waits, |group| group.id != epoch);
            if grouped || asked || !over {
                continue;
            }
            // A pod that is not selected any more is released; any other may come back and is only fenced.
            let head = |pods: &[crate::protocol::PodRef]| pods.iter().any(|pod| pod.uid == life.pod_uid);
            let known = self.candidates.iter().any(|candidate| head(&candidate.pods)) || self.left_out.iter().any(|left| head(&left.pods));
            if self.group.is_none() {
                self.over = self.over.max(epoch.epoch);
            }
            self.tell(&life, epoch, "the epoch ended", known);
        }
    }

    /// Suspended or deleted: release all agents, repeatedly until their states show it.
    pub(super) fn let_go(&mut self) {
        let reason = if self.deleted { "the object was deleted" } else { "the object is suspended" };
        let (group, forming) = (self.group.take(), self.forming.take());
        self.urgent = None;
        self.viable_since = None;
        let newest = newest(group.as_ref(), forming.as_ref());
        if let Some(id) = newest {
            // Independent of their states: a prepare may be in progress.
            let grouped = group.iter().flat_map(|group| group.lives.values());
            let asked = forming.iter().flat_map(|forming| match forming {
                Forming::Round(round) => round.members.iter().map(|member| &member.life).collect(),
                Forming::Persisting(_) => Vec::new(),
            });
            let mut to: Vec<Incarnation> = grouped.chain(asked).cloned().collect();
            to.sort();
            to.dedup();
            for life in &to {
                if let Some(agent) = self.agents.get_mut(life) {
                    agent.notified_at = Some(self.now);
                }
            }
            self.over = self.over.max(id.epoch);
            self.event(Reason::Suspended, reason, None, false);
            self.out.push(Decision::Release { to, request: ReleaseRequest { id, reason: reason.to_owned() } });
        }
        self.over = self.over.max(self.epoch);
        for (life, epoch) in self.in_our_epochs() {
            self.tell(&life, epoch, reason, false);
        }
        for life in self.outside_and_unproven() {
            self.tell(&life, self.id(self.epoch), reason, false);
        }
    }

    /// Agents in no epoch whose engine must not serve yet: WeightSync may have paused it.
    fn outside_and_unproven(&self) -> Vec<Incarnation> {
        let outside = self.agents.iter().filter(|(_, agent)| agent.link == Link::Live && agent.epoch().is_none());
        let unproven = outside.filter(|(_, agent)| agent.state.as_ref().is_some_and(|state| state.phase.must_not_serve()));
        unproven.map(|(life, _)| life.clone()).collect()
    }

    /// Notifies one agent that its epoch ended, limited in rate.
    fn tell(&mut self, life: &Incarnation, id: EpochId, reason: &str, fence: bool) {
        let resend = self.config.resend_ms;
        let notified_at = self.agents.get(life).and_then(|agent| agent.notified_at);
        if !notified_at.is_none_or(|at| self.due(at.saturating_add(resend))) {
            return;
        }
        if let Some(agent) = self.agents.get_mut(life) {
            agent.notified_at = Some(self.now);
        }
        self.wake_at(self.now.saturating_add(resend));
        let (to, reason) = (vec![life.clone()], reason.to_owned());
        self.out.push(if fence {
            Decision::Fence { to, request: FenceRequest { id, reason } }
        } else {
            Decision::Release { to, request: ReleaseRequest { id, reason } }
        });
    }
}

/// The identity that members last received.
fn newest(group: Option<&Group>, forming: Option<&Forming>) -> Option<EpochId> {
    match forming {
        Some(Forming::Round(round)) => Some(round.id.clone()),
        _ => group.map(|group| group.id.clone()),
    }
}

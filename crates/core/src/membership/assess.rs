//! Which members are eligible for a group now, and why each other member is not.
//!
//! Uses facts only: the plan's candidates, their agents' last states, and recorded failures. It starts nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::plan::{Candidate, LeftOutCode};
use crate::protocol::{EpochId, Incarnation, MemberName, MemberPhase, MemberState, Reason, Role};

use super::Membership;
use super::agents::{Agent, Link};
use super::group::{Eligible, Forming};

/// Why a member is not eligible.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Outcast {
    pub reason: Reason,
    pub message: String,
    /// When this may change by time alone.
    pub retry_at: Option<u64>,
}

impl Outcast {
    fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), retry_at: None }
    }
}

/// The assessment of all members.
#[derive(Debug, Default)]
pub(super) struct Assessment {
    /// In the order of the plan.
    pub eligible: Vec<Eligible>,
    pub out: BTreeMap<MemberName, Outcast>,
}

impl Assessment {
    /// The incarnation of an eligible member.
    pub(super) fn life(&self, name: &MemberName) -> Option<&Incarnation> {
        self.eligible.iter().find(|eligible| &eligible.candidate.name == name).map(|eligible| &eligible.life)
    }
}

impl Membership {
    pub(super) fn assess(&self) -> Assessment {
        let mut assessment = Assessment::default();
        for candidate in &self.candidates {
            match self.judge(candidate) {
                Ok(life) => assessment.eligible.push(Eligible { candidate: Arc::clone(candidate), life }),
                Err(outcast) => {
                    assessment.out.insert(candidate.name.clone(), outcast);
                }
            }
        }
        self.keep_unready(&mut assessment);
        assessment
    }

    /// A pod that is unready because its engine is paused for an update is still a member: it is judged by progress.
    fn keep_unready(&self, assessment: &mut Assessment) {
        let members: Vec<(&Arc<Candidate>, Option<&Incarnation>)> = match (&self.group, &self.forming) {
            (Some(group), _) => group.candidates.iter().map(|candidate| (candidate, group.lives.get(&candidate.name))).collect(),
            // The leader may begin before the last member's response to its commit has arrived.
            (None, Some(Forming::Round(round))) => round.members.iter().map(|member| (&member.candidate, Some(&member.life))).collect(),
            _ => return,
        };
        for (position, (candidate, present)) in members.iter().enumerate() {
            if !self.left_out.iter().any(|left| left.who == candidate.name && left.code == LeftOutCode::NotReady) {
                continue;
            }
            let Ok(life) = self.judge(candidate) else { continue };
            let updating = self.agents.get(&life).is_some_and(|agent| self.in_update(&candidate.name, agent));
            if !updating || *present != Some(&life) {
                continue;
            }
            // Its old position: after the last of its predecessors that still exists.
            let before: Vec<&MemberName> = members.iter().take(position).map(|(candidate, _)| &candidate.name).collect();
            let at = assessment.eligible.iter().rposition(|eligible| before.contains(&&eligible.candidate.name)).map_or(0, |at| at + 1);
            assessment.eligible.insert(at, Eligible { candidate: Arc::clone(*candidate), life });
        }
    }

    fn judge(&self, candidate: &Candidate) -> Result<Incarnation, Outcast> {
        let name = &candidate.name;
        let Some((life, agent)) = self.agents.of(candidate) else {
            let pod = candidate.pods.first().map_or("?", |pod| pod.name.as_str());
            return Err(Outcast::new(Reason::AgentMissing, format!("no agent has announced itself from pod {pod}")));
        };
        if let Some((reason, why)) = &agent.unusable {
            return Err(Outcast::new(*reason, why.clone()));
        }
        match &agent.link {
            Link::Lost(cause) => return Err(Outcast::new(Reason::AgentLost, cause.clone())),
            Link::Silent(since) => {
                let seconds = self.now.saturating_sub(*since) / 1000;
                return Err(Outcast::new(Reason::AgentLost, format!("its agent has sent nothing for {seconds} s")));
            }
            Link::Live => {}
        }
        let Some(state) = &agent.state else {
            return Err(Outcast::new(Reason::AgentMissing, "its agent announced itself and has not reported its state yet"));
        };
        if let Some(other) = state.epoch.as_ref().filter(|epoch| epoch.weightsync != self.config.weightsync)
            && other.created > self.config.created
        {
            let message = format!("it is in epoch {} of the newer object {}", other.epoch, other.weightsync);
            return Err(Outcast::new(Reason::PodClaimed, message));
        }
        if let Some(engine) = state.engine.as_ref().filter(|engine| candidate.role == Role::Rollout && engine.size != candidate.size) {
            let message = format!("the engine has {} worker ranks, the spec has {}", engine.size, candidate.size);
            return Err(Outcast::new(Reason::SizeMismatch, message));
        }
        let pods = candidate.pods.iter().map(|pod| pod.uid.clone()).collect();
        // It does not recover by itself: this matters more than the back-off.
        if state.wedged {
            let message = state.reason.clone().unwrap_or_else(|| "its HTTP front answers, but it computes nothing".to_owned());
            return Err(Outcast::new(Reason::EngineWedged, message));
        }
        if let Some(strike) = self.backoff.holding_off(self.now, name, &pods) {
            let retry_at = Some(strike.until);
            // The problem of its edge matters more than the back-off.
            if strike.is_of_an_edge() {
                return Err(Outcast { reason: strike.reason, message: strike.message.clone(), retry_at });
            }
            let message = format!("{}: {} (failure {} in a row)", strike.reason, strike.message, strike.count);
            return Err(Outcast { reason: Reason::BackingOff, message, retry_at });
        }
        let updating = self.in_update(name, agent);
        if updating && self.stuck_at(agent).is_some_and(|at| self.now >= at) {
            return Err(Outcast::new(Reason::MemberFailed, "it has been in one update for longer than update.timeoutSeconds"));
        }
        if !updating && !Self::is_well(state) {
            // A new agent waits for its engine's first response. Report an engine that never responds only once the cause is known.
            let unasked = state.reason.is_none() && state.engine.is_none() && state.epoch.is_none();
            if unasked {
                return Err(Outcast::new(Reason::AgentMissing, "its engine has not responded to its agent yet"));
            }
            // For a member in a group it counts as a failure of the engine. Otherwise it would join and leave without end.
            let message = state.reason.clone().unwrap_or_else(|| "its engine does not respond to its probes".to_owned());
            return Err(Outcast::new(Reason::EngineUnhealthy, message));
        }
        Ok(life.clone())
    }

    fn is_well(state: &MemberState) -> bool {
        state.role == Role::Source || state.healthy && state.phase != MemberPhase::EngineDown
    }

    /// Whether the member is in an update of the group, of the one that is being formed, or of one that may yet be taken over.
    pub(super) fn in_update(&self, name: &MemberName, agent: &Agent) -> bool {
        let (id, policy) = match (&self.group, &self.forming) {
            (Some(group), _) => (&group.id, &group.policy),
            (None, Some(Forming::Round(round))) => (&round.id, &round.policy),
            _ => return self.adopting_until().is_some() && self.updates_in_our_epoch(agent),
        };
        agent.phase() == Some(MemberPhase::Updating) && agent.epoch() == Some(id) || self.updates.has(self.now, id, policy, name)
    }

    /// Whether an agent reports that it is in an update of a present epoch of this object.
    pub(super) fn updates_in_our_epoch(&self, agent: &Agent) -> bool {
        let ours = |epoch: &EpochId| epoch.weightsync == self.config.weightsync && epoch.epoch > self.over;
        agent.phase() == Some(MemberPhase::Updating) && agent.epoch().is_some_and(ours)
    }

    /// When an update of this member counts as stuck.
    pub(super) fn stuck_at(&self, agent: &Agent) -> Option<u64> {
        let policy = &self.config.policy;
        agent.updating_since.map(|since| since.saturating_add(policy.update_timeout_ms).saturating_add(policy.silence_ms))
    }
}

//! An abstract agent as the leader of an update: it begins it, moves from step to step, and judges the outcome.

use std::collections::BTreeSet;

use weightsync_core::protocol::*;

use super::agent::{Agent, Leading, PeerMessage, Reminder, SILENCE, Wants};
use super::names::{member, slot_of};

impl Agent {
    /// The trainer publishes a version.
    pub(super) fn publish(&mut self, version: Version, wants: &mut Wants) {
        if self.installed.as_ref().is_some_and(|held| held.version >= version)
            || self.pending == Some(version)
            || !self.may_publish(version)
        {
            return;
        }
        self.pending = Some(version);
        self.put(super::names::held(version));
        self.lead(wants);
    }

    /// Begins the update that is possible in the committed epoch.
    pub(super) fn lead(&mut self, wants: &mut Wants) {
        if self.commit.is_none() || self.leading.is_some() || self.goes_first(wants) {
            return;
        }
        let (Some(commit), Some(prepared)) = (&self.commit, &self.prepared) else { return };
        let me = member(self.slot);
        let rollouts = prepared.roster.members.iter().filter(|other| other.role == Role::Rollout && other.name != me);
        let rollouts: Vec<usize> = rollouts.map(|other| slot_of(&other.name)).collect();
        let enough = rollouts.len() >= prepared.policy.min_ready as usize;
        let feeding = commit.feeder.as_ref() == Some(&me);
        let version = match (self.pending, &commit.current) {
            (Some(version), _) if enough => version,
            (_, Some(current)) if feeding && self.keeps(current) => current.version,
            _ => return,
        };
        let feeding = self.pending != Some(version);
        self.attempts += 1;
        let id = UpdateId { epoch: commit.id.clone(), version, attempt: self.attempts };
        for peer in &rollouts {
            wants.peers.push((*peer, PeerMessage::Begin { id: id.clone(), feeding }));
        }
        let steps = rollouts.into_iter().map(|peer| (peer, None)).collect();
        self.leading = Some(Leading { id, feeding, phase: UpdatePhase::Begin, steps, refused: BTreeSet::new() });
        self.show_progress(wants);
        self.advance(wants);
    }

    fn show_progress(&self, wants: &mut Wants) {
        if let Some(leading) = &self.leading {
            wants.events.push(AgentEvent::Update { update: view(leading) });
            wants.reminders.push((SILENCE, Reminder::StepOver(leading.id.clone(), leading.phase)));
        }
    }

    /// Moves to the next step of an update once every member responded to the present one.
    pub(super) fn advance(&mut self, wants: &mut Wants) {
        let Some(leading) = &mut self.leading else { return };
        if leading.steps.values().any(|step| is_open(leading.phase, *step)) {
            return;
        }
        let id = leading.id.clone();
        match leading.phase {
            UpdatePhase::Begin => {
                leading.phase = UpdatePhase::Transfer;
                for (peer, _) in leading.steps.iter().filter(|(_, step)| **step == Some(InstallStep::Receiving)) {
                    wants.peers.push((*peer, PeerMessage::Data { id: id.clone() }));
                }
            }
            UpdatePhase::Transfer => {
                leading.phase = UpdatePhase::Activate;
                for (peer, step) in leading.steps.iter_mut().filter(|(_, step)| **step == Some(InstallStep::Delivered)) {
                    *step = Some(InstallStep::Installing);
                    wants.peers.push((*peer, PeerMessage::Activate { id: id.clone() }));
                }
            }
            _ => {
                self.finish(wants);
                return;
            }
        }
        self.show_progress(wants);
        self.advance(wants);
    }

    fn finish(&mut self, wants: &mut Wants) {
        let Some(mut leading) = self.leading.take() else { return };
        let min_ready = self.prepared.as_ref().map_or(1, |prepared| prepared.policy.min_ready as usize);
        let installed = leading.steps.values().filter(|step| **step == Some(InstallStep::Installed)).count();
        let judged = leading.steps.iter().filter_map(|(slot, step)| match (leading.refused.contains(slot), step) {
            (true, _) => Some((member(*slot), Judgement::Refused)),
            (false, Some(InstallStep::Installed)) => Some((member(*slot), Judgement::Taken)),
            (false, _) => None,
        });
        let judged: Vec<_> = judged.collect();
        let mut ballot = Ballot::default();
        for (name, judgement) in &judged {
            ballot.add(name, *judgement);
        }
        let refused = !leading.feeding && ballot.is_refused();
        let enough = if leading.feeding { installed == leading.steps.len() } else { installed >= min_ready && !refused };
        leading.phase = if enough { UpdatePhase::Done } else { UpdatePhase::Failed };
        if enough && self.slot == 0 && !leading.feeding {
            let held = super::names::held(leading.id.version);
            self.took(&held);
            self.installed = Some(held);
            self.pending = None;
        }
        if refused {
            self.give_up(leading.id.version);
        }
        wants.events.push(AgentEvent::Update { update: view(&leading) });
        if leading.feeding && self.pending.is_some() && leading.steps.len() >= min_ready {
            // The trainer may have published another version meanwhile.
            self.lead(wants);
        }
    }

    /// A peer's process has ended.
    pub(super) fn peer_gone(&mut self, peer: usize, wants: &mut Wants) {
        if let Some(epoch) = &self.epoch {
            let (id, cause) = (epoch.clone(), "connection closed".to_owned());
            wants.events.push(AgentEvent::PeerLost { id, peer: member(peer), cause });
        }
        if let Some(leading) = &mut self.leading
            && let Some(step) = leading.steps.get_mut(&peer)
            && *step != Some(InstallStep::Installed)
        {
            *step = Some(InstallStep::Failed);
            self.advance(wants);
        }
    }

    /// The time limit of a step: members without a response have failed.
    pub(super) fn step_over(&mut self, id: &UpdateId, phase: UpdatePhase, wants: &mut Wants) {
        if let Some(leading) = self.leading.as_mut().filter(|leading| leading.id == *id && leading.phase == phase) {
            let epoch = leading.id.epoch.clone();
            for (peer, step) in leading.steps.iter_mut().filter(|(_, step)| is_open(phase, **step)) {
                let (id, cause) = (epoch.clone(), "it says nothing".to_owned());
                wants.events.push(AgentEvent::PeerLost { id, peer: member(*peer), cause });
                *step = Some(InstallStep::Failed);
            }
            self.advance(wants);
        }
    }
}

/// Whether a phase still waits for a member at that step.
fn is_open(phase: UpdatePhase, step: Option<InstallStep>) -> bool {
    match phase {
        UpdatePhase::Begin => step.is_none(),
        UpdatePhase::Transfer => step == Some(InstallStep::Receiving),
        _ => matches!(step, Some(InstallStep::Delivered | InstallStep::Installing)),
    }
}

pub(super) fn view(leading: &Leading) -> UpdateView {
    let progress = leading
        .steps
        .iter()
        .filter_map(|(slot, step)| Some(MemberProgress { member: member(*slot), bytes: 0, step: (*step)?, reason: None }));
    UpdateView {
        id: leading.id.epoch.clone(),
        version: leading.id.version,
        attempt: leading.id.attempt,
        phase: leading.phase,
        total_bytes: 1,
        members: progress.collect(),
        phases_ms: Vec::new(),
        failure: None,
        feeding: leading.feeding,
    }
}

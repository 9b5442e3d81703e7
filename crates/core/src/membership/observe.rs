//! Processes observations: records facts, and passes responses to their round.
//!
//! A message about another epoch, or from another incarnation than the one that was called, changes nothing.

use crate::protocol::{
    EngineFacts, EpochId, Incarnation, MemberName, MemberPhase, MemberState, PrepareResponse, Reason, Refusal, RefusalCode, Role,
    UpdateView,
};

use super::backoff::Weight;
use super::forming::SETTLE_MS;
use super::group::{Failure, Forming, Phase, Prepared, Round};
use super::{Decision, EPOCHS_AHEAD, Membership, Observation};

impl Membership {
    pub(super) fn observe(&mut self, observation: Observation) {
        match observation {
            Observation::Tick => {}
            Observation::Configure(mut config) => {
                self.hold_request(&mut config);
                let preflight = |config: &super::MembershipConfig| {
                    let policy = &config.policy.transport;
                    (policy.preflight, policy.preflight_asked.clone())
                };
                if preflight(&config) != preflight(&self.config) {
                    self.backoff.forget_edges();
                }
                self.config = *config;
            }
            Observation::Candidates { candidates, left_out } => {
                self.planned = true;
                self.candidates = candidates.into_iter().map(std::sync::Arc::new).collect();
                self.left_out = left_out;
                let candidates = self.candidates.iter().flat_map(|candidate| &candidate.pods);
                let left_out = self.left_out.iter().flat_map(|left| &left.pods);
                let grouped = self.group.iter().flat_map(|group| &group.candidates).flat_map(|candidate| &candidate.pods);
                let pods = candidates.chain(left_out).chain(grouped).map(|pod| pod.uid.as_str()).collect();
                self.agents.prune(&pods);
                let agents = &self.agents;
                let (planned, left_out) = (&self.candidates, &self.left_out);
                let is_member = |name: &MemberName| {
                    planned.iter().any(|candidate| &candidate.name == name) || left_out.iter().any(|left| &left.who == name)
                };
                self.updates.prune(|life| agents.get(life).is_some(), is_member);
            }
            Observation::Announced(announcement) => self.agents.announce(self.now, announcement),
            Observation::AddressRefused { announcement, why } => self.agents.refuse(self.now, announcement, why),
            Observation::Proven(announced) => self.note_announced(announced),
            Observation::State(state) => self.note_state(*state),
            Observation::ComingBack { at } => self.others_came_back(at),
            Observation::Alive { from } => self.agents.alive(self.now, &from),
            Observation::AgentLost { from, cause } => self.agents.lost(&from, cause),
            Observation::Prepared { id, member, response } => self.note_prepared(&id, &member, *response),
            Observation::PrepareFailed { id, member, refusal } => self.note_failed(&id, member, refusal, true),
            Observation::Committed { id, member, from } => self.note_committed(&id, &member, &from),
            Observation::CommitFailed { id, member, refusal } => self.note_failed(&id, member, refusal, false),
            Observation::EpochPersisted { epoch } => self.persisted(epoch),
            Observation::PersistFailed { epoch, message } => {
                if let Some(Forming::Persisting(persisting)) = &mut self.forming
                    && persisting.epoch == epoch
                {
                    persisting.failure = Some(message);
                }
            }
            Observation::PersistConflict { epoch, message } => {
                let asked = matches!(&self.forming, Some(Forming::Persisting(persisting)) if persisting.epoch == epoch);
                if asked {
                    self.stop(message);
                }
            }
            Observation::Update { from, update } => {
                self.agents.alive(self.now, &from);
                if update.id.weightsync == self.config.weightsync {
                    self.note_update(&from, *update);
                }
            }
            Observation::PeerLost { from, id, peer, cause } => {
                self.agents.alive(self.now, &from);
                self.note_peer_lost(&from, &id, peer, cause);
            }
            Observation::Suspend(suspended) => self.suspended = suspended,
            Observation::Delete => self.deleted = true,
        }
    }

    /// Stops deciding: another leader does.
    fn stop(&mut self, message: String) {
        self.forming = None;
        self.event(Reason::PersistFailed, message.clone(), None, true);
        self.out.push(Decision::StepDown { message: message.clone() });
        self.stopped = Some(message);
    }

    fn note_state(&mut self, mut state: MemberState) {
        let refused_claim = self.correct(&mut state);
        if let Some(epoch) = state.epoch.as_ref().filter(|epoch| epoch.weightsync == self.config.weightsync) {
            // Used numbers are never reused. One that is not in status was used before this controller started.
            self.had_epoch |= epoch.epoch > self.epoch;
            self.epoch = self.epoch.max(epoch.epoch);
        }
        let life = state.incarnation.clone();
        let committed = matches!(state.phase, MemberPhase::Ready | MemberPhase::Updating).then(|| state.epoch.clone()).flatten();
        let name = state.member.clone();
        let of_ours = committed.as_ref().is_some_and(|epoch| epoch.weightsync == self.config.weightsync && epoch.epoch > self.over);
        if of_ours && self.agents.get(&life).is_some_and(|agent| agent.state.is_none()) {
            self.one_came_back();
        }
        let unchecked = |state: &MemberState| state.engine.as_ref().and_then(EngineFacts::nothing_compared);
        // Reported of members only, so what was known before it had a name was not.
        let before = self.agents.get(&life).and_then(|agent| agent.state.as_ref()).filter(|before| before.member.is_some());
        let known = before.and_then(unchecked);
        if let Some(why) = unchecked(&state).filter(|why| name.is_some() && known.as_ref() != Some(why)) {
            self.event(Reason::EngineUnproven, why, name.clone(), false);
        }
        let restarted = self.agents.state(self.now, state);
        if let Some(agent) = self.agents.get_mut(&life) {
            agent.refused_claim = refused_claim;
        }
        if restarted {
            let what = "its engine restarted: it serves again once it holds the current version";
            self.event(Reason::MemberRestarted, what.to_owned(), name, true);
        }
        // The response to a commit may be lost while the resulting state arrives.
        if let (Some(id), Some(Forming::Round(round))) = (committed, &self.forming)
            && round.id == id
            && let Some(member) = round.member_of(&life).cloned()
        {
            self.note_committed(&id, &member, &life);
        }
    }

    /// Removes claims that a member cannot make: its role, which the plan decides, and an epoch that no controller can have written.
    /// Returns the removed claim.
    fn correct(&self, state: &mut MemberState) -> Option<String> {
        // Only an incarnation that was announced with the role of its candidate represents it.
        let planned = self.agents.get(&state.incarnation).map_or(state.role, |agent| agent.role);
        let role = std::mem::replace(&mut state.role, planned);
        let most = self.written.saturating_add(EPOCHS_AHEAD);
        if let Some(epoch) = state.epoch.take_if(|epoch| epoch.weightsync == self.config.weightsync && epoch.epoch > most) {
            return Some(format!("it reports epoch {}, the last one that a controller wrote is {}", epoch.epoch, self.written));
        }
        (role != planned).then(|| match planned {
            Role::Source => "it claims to be a rollout and is a source".to_owned(),
            Role::Rollout => "it claims to be a source and is a rollout".to_owned(),
        })
    }

    /// The present round, if a response is about it.
    fn asked(&mut self, id: &EpochId) -> Option<&mut Round> {
        match &mut self.forming {
            Some(Forming::Round(round)) if &round.id == id => Some(round),
            _ => None,
        }
    }

    fn note_prepared(&mut self, id: &EpochId, member: &MemberName, response: PrepareResponse) {
        let Some(round) = self.asked(id) else { return };
        if !matches!(round.phase, Phase::Preparing) || round.life(member) != Some(&response.incarnation) {
            return;
        }
        // The others refuse a commit with such an address, so one member would block the group.
        let head = round.roster.member(member).and_then(|member| member.pods.first());
        if head.and_then(|head| head.has_listener(&response.data_address)) == Some(false) {
            let message = format!("its data address {} is not an address of its pod", response.data_address);
            self.note_failed(id, member.clone(), Refusal { code: RefusalCode::Invalid, message }, true);
            return;
        }
        // Ignore the state in the response: only the event stream keeps the order of states. A late response would show an engine with a
        // version that it has lost since.
        let groups = response.state.engine.and_then(|engine| engine.groups);
        let prepared = Prepared { data: response.data_address, gpus: response.gpus, fabric: response.fabric, groups };
        round.prepared.insert(member.clone(), prepared);
    }

    fn note_committed(&mut self, id: &EpochId, member: &MemberName, from: &Incarnation) {
        let Some(round) = self.asked(id) else { return };
        let Phase::Committing { asked, .. } = &round.phase else { return };
        if asked.contains(member) && round.life(member) == Some(from) {
            round.committed.insert(member.clone());
        }
    }

    fn note_failed(&mut self, id: &EpochId, member: MemberName, refusal: Refusal, prepare: bool) {
        let now = self.now;
        let Some(round) = self.asked(id) else { return };
        let about_this_phase = match &round.phase {
            Phase::Preparing => prepare && !round.prepared.contains_key(&member),
            Phase::Committing { asked, .. } => !prepare && asked.contains(&member) && !round.committed.contains(&member),
        };
        if !about_this_phase || round.life(&member).is_none() {
            return;
        }
        let reason = match refusal.code {
            RefusalCode::CanaryUnavailable | RefusalCode::Unsupported if prepare => Reason::Unsupported,
            _ => Reason::FormationFailed,
        };
        let blames_peer = !prepare && refusal.code == RefusalCode::PeerUnreachable;
        round.failed.insert(member, Failure { reason, message: refusal.message, blames_peer });
        let settle_at = now.saturating_add(SETTLE_MS).min(round.deadline);
        round.settle_at.get_or_insert(settle_at);
    }

    /// Whether an incarnation may report that update: the agent of a source's pod may, and the feeder of the group in which the update
    /// runs. Ended updates are only shown, so they are not checked.
    fn leads(&self, from: &Incarnation, update: &UpdateView) -> bool {
        let planned = self.candidates.iter().map(|candidate| (candidate.role, &candidate.pods));
        let left_out = self.left_out.iter().map(|left| (left.role, &left.pods));
        let grouped = self.group.iter().flat_map(|group| &group.candidates).map(|candidate| (candidate.role, &candidate.pods));
        let mut sources = planned.chain(left_out).chain(grouped).filter(|(role, _)| *role == Role::Source);
        if sources.any(|(_, pods)| pods.iter().any(|pod| pod.uid == from.pod_uid)) {
            return true;
        }
        let (member, feeder) = match (&self.group, &self.forming) {
            (Some(group), _) if group.id == update.id => {
                // An adopted group has no known feeder.
                let feeder = group.feeder.clone().or_else(|| self.choose_feeder(group.lives.iter()));
                (group.member_of(from), feeder)
            }
            (_, Some(Forming::Round(round))) if round.id == update.id => match &round.phase {
                Phase::Committing { feeder, .. } => (round.member_of(from), feeder.clone()),
                Phase::Preparing => return false,
            },
            _ => return update.id.epoch <= self.over,
        };
        update.feeding && member.is_some() && member == feeder.as_ref()
    }

    fn note_update(&mut self, from: &Incarnation, update: UpdateView) {
        if !self.leads(from, &update) {
            return;
        }
        let members: Vec<MemberName> = update.members.iter().map(|member| member.member.clone()).collect();
        let (version, feeding, in_group) = (update.version, update.feeding, self.group.as_ref().is_some_and(|group| group.id == update.id));
        let noted = self.updates.note(self.now, from, update);
        if noted.began
            && let Some(group) = &self.group
        {
            for life in members.iter().filter_map(|member| group.lives.get(member)).chain([from]) {
                self.agents.update_began(self.now, life);
            }
        }
        if !in_group {
            return;
        }
        if let Some(cause) = noted.failed {
            let what = if feeding { "feeding of version" } else { "update to version" };
            self.event(Reason::UpdateFailed, format!("{what} {version} failed: {cause}"), None, true);
        }
        for repeated in noted.repeated {
            self.strike(&repeated.member, Weight::Failure, Reason::MemberFailed, &repeated.message);
        }
    }

    fn note_peer_lost(&mut self, from: &Incarnation, id: &EpochId, peer: MemberName, cause: String) {
        let report = (self.now, cause);
        match (&mut self.forming, &mut self.group) {
            (Some(Forming::Round(round)), _) if &round.id == id => {
                if let Some(reporter) = round.member_of(from).cloned() {
                    round.reports.entry((reporter, peer)).or_insert(report);
                }
            }
            (_, Some(group)) if &group.id == id => {
                if let Some(reporter) = group.member_of(from).cloned() {
                    group.reports.entry((reporter, peer)).or_insert(report);
                }
            }
            _ => {}
        }
    }
}

//! How a group is formed: its number is written, then every member prepares, then every member commits.
//!
//! A member that misses a deadline or refuses is left out of the next epoch and named. Nothing is ever repeated inside one epoch, and no
//! member receives an epoch before it is persisted.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::plan::roster;
use crate::protocol::{
    CommitRequest, EpochId, FenceRequest, Incarnation, MemberAddress, MemberName, PrepareRequest, Reason, Role, Roster, TransportChoice,
};

use super::assess::Assessment;
use super::backoff::Weight;
use super::group::Eligible;
use super::group::{Failure, Forming, Group, Persisting, Phase, Round, Urgent, unreachable};
use super::transport::choose;
use super::{Decision, Membership};

/// Time to collect failures with the same cause after the first one, in ms.
pub(super) const SETTLE_MS: u64 = 300;

/// Most members in the reason of an epoch.
const NAMED: usize = 3;

impl Membership {
    /// Requests the next epoch number.
    pub(super) fn persist(&mut self, why: Reason) {
        let epoch = self.epoch.saturating_add(1);
        let retry_at = self.now.saturating_add(self.config.persist_retry_ms);
        self.out.push(Decision::PersistEpoch { epoch });
        self.forming = Some(Forming::Persisting(Persisting { epoch, why, tries: 1, retry_at, failure: None }));
    }

    /// Repeats the request for a number that was not confirmed.
    pub(super) fn persist_again(&mut self) {
        let Some(Forming::Persisting(persisting)) = &self.forming else { return };
        let retry_at = persisting.retry_at;
        if !self.due(retry_at) {
            return;
        }
        let Some(Forming::Persisting(persisting)) = &mut self.forming else { return };
        persisting.tries = persisting.tries.saturating_add(1);
        let wait = self.config.persist_retry_ms.saturating_mul(1 << persisting.tries.saturating_sub(1).min(4));
        persisting.retry_at = self.now.saturating_add(wait);
        let (epoch, retry_at) = (persisting.epoch, persisting.retry_at);
        self.out.push(Decision::PersistEpoch { epoch });
        self.wake_at(retry_at);
    }

    /// The epoch is persisted: start the round if it is still needed.
    pub(super) fn persisted(&mut self, epoch: u64) {
        let Some(Forming::Persisting(persisting)) = &self.forming else { return };
        if persisting.epoch != epoch {
            return;
        }
        self.written = self.written.max(epoch);
        self.begin_round(epoch);
    }

    fn begin_round(&mut self, epoch: u64) {
        let why = match self.forming.take() {
            Some(Forming::Persisting(persisting)) => persisting.why,
            other => {
                self.forming = other;
                return;
            }
        };
        self.epoch = self.epoch.max(epoch);
        let assessment = self.assess();
        self.find_lost(&assessment);
        let same = self.group.as_ref().is_some_and(|group| {
            group.lost.is_empty()
                && group.lives.len() == assessment.eligible.len()
                && assessment.eligible.iter().all(|member| group.lives.get(&member.candidate.name) == Some(&member.life))
        });
        let still_wanted = !same || matches!(why, Reason::UpdateFailed | Reason::Updating | Reason::SpecChanged | Reason::VersionRefused);
        if !still_wanted || !self.is_viable(&assessment.eligible) {
            return;
        }
        let id = self.id(epoch);
        let roster = give_ranks(&assessment.eligible);
        if why == Reason::Updating {
            self.repairs = self.repairs.saturating_add(1);
        }
        let because = self.because(why);
        self.end_group(&assessment, &id, &because);
        self.over = self.over.max(epoch.saturating_sub(1));
        self.urgent = None;
        let policy = self.config.policy.clone();
        let deadline_ms = self.config.prepare_deadline_ms;
        for member in &assessment.eligible {
            let request = PrepareRequest {
                id: id.clone(),
                member: member.candidate.name.clone(),
                roster: roster.clone(),
                policy: policy.clone(),
                why: because.clone(),
                deadline_ms,
            };
            self.out.push(Decision::Prepare { to: member.life.clone(), request: Box::new(request) });
        }
        self.forming = Some(Forming::Round(Box::new(Round {
            id,
            roster,
            why: because,
            members: assessment.eligible,
            policy,
            phase: Phase::Preparing,
            prepared: BTreeMap::new(),
            committed: BTreeSet::new(),
            failed: BTreeMap::new(),
            reports: BTreeMap::new(),
            deadline: self.now.saturating_add(deadline_ms),
            settle_at: None,
        })));
    }

    pub(super) fn id(&self, epoch: u64) -> EpochId {
        EpochId { weightsync: self.config.weightsync.clone(), created: self.config.created, term: self.term, epoch }
    }

    /// Why a new epoch is formed, as text: the first few members that were lost by the group or by the round before, or another cause.
    fn because(&self, why: Reason) -> String {
        let lost = self.group.iter().flat_map(|group| &group.lost);
        let lost: Vec<_> = lost.take(NAMED).map(cause).collect();
        if !lost.is_empty() {
            return lost.join("; ");
        }
        if let Some(Urgent { causes, .. }) = self.urgent.as_ref().filter(|urgent| urgent.why == why && !urgent.causes.is_empty()) {
            return causes.join("; ");
        }
        let lives = self.group.iter().flat_map(|group| &group.lives).filter(|(_, life)| why == Reason::Updating && self.life_lacks(life));
        let lacking: Vec<_> = lives.take(NAMED).map(|(name, _)| name.to_string()).collect();
        match self.wanted().filter(|_| !lacking.is_empty()) {
            Some(wanted) => format!("{why}: {} without version {}", lacking.join(", "), wanted.version),
            None => why.to_string(),
        }
    }

    /// Notifies members of the old group that are not in the new one; the others learn it from their prepare.
    fn end_group(&mut self, assessment: &Assessment, new: &EpochId, because: &str) {
        let Some(group) = self.group.take() else { return };
        let left = group.lives.iter().filter(|(name, life)| assessment.life(name) != Some(*life));
        let left: Vec<Incarnation> = left.map(|(_, life)| life.clone()).collect();
        let reason = format!("epoch {} takes its place: {because}", new.epoch);
        self.tell_over(&left, &group.id, &reason);
    }

    /// Fences reachable agents, and remembers when.
    pub(super) fn tell_over(&mut self, agents: &[Incarnation], id: &EpochId, reason: &str) {
        let mut to = Vec::new();
        for life in agents {
            // A silent agent is fenced too: it may wake up with the old epoch.
            if let Some(agent) = self.agents.get_mut(life)
                && !matches!(agent.link, super::agents::Link::Lost(_))
            {
                agent.notified_at = Some(self.now);
                to.push(life.clone());
            }
        }
        if !to.is_empty() {
            self.over = self.over.max(id.epoch);
            self.out.push(Decision::Fence { to, request: FenceRequest { id: id.clone(), reason: reason.to_owned() } });
        }
    }

    /// Advances a round. Returns whether something changed.
    pub(super) fn advance_round(&mut self, assessment: &Assessment) -> bool {
        let Some(Forming::Round(round)) = &self.forming else { return false };
        let gone = round.members.iter().find(|member| assessment.life(&member.candidate.name) != Some(&member.life));
        if let Some(gone) = gone.map(|member| member.candidate.name.clone()) {
            self.give_up_on(&gone, assessment);
            return true;
        }
        let open = round.unanswered();
        let (deadline, settle_at) = (round.deadline, round.settle_at);
        let excuses = round.failed.values().all(|failure| failure.blames_peer);
        if round.failed.is_empty() {
            if open.is_empty() {
                return self.next_wave();
            }
        } else if open.is_empty() && !excuses || settle_at.is_some_and(|at| self.due(at)) {
            self.blame(&[]);
            return true;
        }
        if self.due(deadline) {
            self.blame(&open);
            return true;
        }
        false
    }

    /// A member of the round cannot be in it any more.
    fn give_up_on(&mut self, name: &MemberName, assessment: &Assessment) {
        let Some(Forming::Round(round)) = self.forming.take() else { return };
        let life = round.life(name).cloned();
        let (reason, message) = self.why_lost(name, life.as_ref(), assessment);
        self.count_loss(name, reason, &message);
        self.abandon(&round, assessment, &BTreeMap::from([(name.clone(), (reason, message))]));
    }

    /// Leaves out the failed members, and starts a new epoch.
    fn blame(&mut self, late: &[MemberName]) {
        let Some(Forming::Round(round)) = self.forming.take() else { return };
        let preparing = matches!(round.phase, Phase::Preparing);
        let (call, limit) =
            if preparing { ("prepare", self.config.prepare_deadline_ms) } else { ("commit", self.config.commit_deadline_ms) };
        let mut blamed: BTreeMap<MemberName, (Reason, String)> = BTreeMap::new();
        for name in late {
            blamed.insert(name.clone(), (Reason::FormationFailed, format!("no response to {call} within {limit} ms")));
        }
        for (name, failure) in round.failed.iter().filter(|(_, failure)| !failure.blames_peer) {
            blamed.insert(name.clone(), (failure.reason, failure.message.clone()));
        }
        if blamed.is_empty() {
            let reports = round.reports.iter().map(|((reporter, peer), (_, cause))| (reporter, peer, cause.as_str()));
            let role = |name: &MemberName| round.roster.member(name).map(|member| member.role);
            for (name, message) in unreachable(reports, role) {
                blamed.insert(name, (Reason::PeerUnreachable, message));
            }
        }
        if blamed.is_empty() {
            // No member was named: leave out those that could not continue, the source last.
            let source = |name: &MemberName| round.roster.member(name).is_some_and(|member| member.role == Role::Source);
            let only_sources = round.failed.keys().all(source);
            for (name, failure) in round.failed.iter().filter(|(name, _)| only_sources || !source(name)) {
                blamed.insert(name.clone(), (failure.reason, failure.message.clone()));
            }
        }
        for (name, (reason, message)) in &blamed {
            self.strike(name, Weight::Failure, *reason, message);
        }
        let assessment = self.assess();
        self.abandon(&round, &assessment, &blamed);
    }

    /// Ends a round because of these members; the next epoch follows at once, with the remaining ones, and its reason names these.
    fn abandon(&mut self, round: &Round, assessment: &Assessment, failed: &BTreeMap<MemberName, (Reason, String)>) {
        let why = failed.values().next().map_or(Reason::FormationFailed, |(reason, _)| *reason);
        self.over = self.over.max(round.id.epoch);
        let left = round.members.iter().filter(|member| assessment.life(&member.candidate.name) != Some(&member.life));
        let left: Vec<Incarnation> = left.map(|member| member.life.clone()).collect();
        self.tell_over(&left, &round.id, &format!("epoch {} was given up: {why}", round.id.epoch));
        let causes = failed.iter().take(NAMED).map(cause).collect();
        self.urgent = Some(Urgent { why, causes });
    }

    /// All members of a wave responded: start the next wave, or complete the group.
    fn next_wave(&mut self) -> bool {
        let Some(Forming::Round(mut round)) = self.forming.take() else { return false };
        if matches!(round.phase, Phase::Preparing) {
            let lives = round.members.iter().map(|member| (&member.candidate.name, &member.life));
            let feeder = self.choose_feeder(lives);
            let mut waves = [Vec::new(), Vec::new(), Vec::new()];
            let [followers, feeding, leading] = &mut waves;
            for Eligible { candidate, .. } in &round.members {
                let wave = match candidate.role {
                    Role::Source => &mut *leading,
                    Role::Rollout if feeder.as_ref() == Some(&candidate.name) => &mut *feeding,
                    Role::Rollout => &mut *followers,
                };
                wave.push(candidate.name.clone());
            }
            let waves: VecDeque<_> = waves.into_iter().filter(|wave| !wave.is_empty()).collect();
            let transport = match choose(&round.policy, &round.facts()) {
                Ok(transport) => transport,
                Err(in_the_way) => {
                    round.failed.extend(
                        in_the_way
                            .into_iter()
                            .map(|(name, message)| (name, Failure { reason: Reason::TransportUnavailable, message, blames_peer: false })),
                    );
                    self.forming = Some(Forming::Round(round));
                    self.blame(&[]);
                    return true;
                }
            };
            round.phase = Phase::Committing {
                asked: BTreeSet::new(),
                waves,
                current: self.wanted().cloned(),
                returned: self.returned(),
                feeder,
                transport: Box::new(transport),
            };
            round.deadline = self.now.saturating_add(self.config.commit_deadline_ms);
        }
        let wave = match &mut round.phase {
            Phase::Committing { waves, .. } => waves.pop_front(),
            Phase::Preparing => None,
        };
        match wave {
            Some(wave) => {
                self.send_commits(&mut round, wave);
                self.forming = Some(Forming::Round(round));
            }
            None => self.commit_group(*round),
        }
        true
    }

    fn send_commits(&mut self, round: &mut Round, wave: Vec<MemberName>) {
        let mut addresses = Vec::new();
        for member in &round.members {
            let agent = self.agents.get(&member.life);
            let (Some(agent), Some(prepared)) = (agent, round.prepared.get(&member.candidate.name)) else { continue };
            let engine = agent.state.as_ref().and_then(|state| state.engine.as_ref());
            addresses.push(MemberAddress {
                member: member.candidate.name.clone(),
                incarnation: member.life.clone(),
                control: agent.control.clone(),
                data: prepared.data.clone(),
                engine_url: engine.map(|engine| engine.url.clone()),
            });
        }
        let lives: Vec<(MemberName, Incarnation)> =
            wave.into_iter().filter_map(|name| round.life(&name).cloned().map(|life| (name, life))).collect();
        let Phase::Committing { asked, current, returned, feeder, transport, .. } = &mut round.phase else { return };
        for (name, to) in lives {
            let request = CommitRequest {
                id: round.id.clone(),
                addresses: addresses.clone(),
                current: current.clone(),
                returned: *returned,
                refused: self.refused.keys().copied().collect(),
                feeder: feeder.clone(),
                transport: transport.as_ref().clone(),
                secret: String::new(),
                deadline_ms: self.config.commit_deadline_ms,
            };
            asked.insert(name.clone());
            self.out.push(Decision::Commit { to, member: name, request: Box::new(request) });
        }
    }

    fn commit_group(&mut self, round: Round) {
        let (feeder, returned, transport) = match round.phase {
            Phase::Committing { feeder, returned, transport, .. } => (feeder, returned, *transport),
            Phase::Preparing => (None, None, TransportChoice::default()),
        };
        let (epoch, world, why) = (round.id.epoch, round.roster.world_size, &round.why);
        let message = format!("epoch {epoch}: {} members, world size {world}, over {} ({why})", round.members.len(), transport.name());
        self.event(Reason::GroupFormed, message, None, false);
        // No Events for members of the first group: all of them are new.
        let joined = round.members.iter().map(|member| member.candidate.name.clone());
        let joined = joined.filter(|name| !self.last_offsets.is_empty() && !self.last_offsets.contains_key(name));
        for name in joined.collect::<Vec<_>>() {
            self.event(Reason::MemberJoined, format!("joined in epoch {epoch}"), Some(name), false);
        }
        let lives = round.members.iter().map(|member| (member.candidate.name.clone(), member.life.clone())).collect();
        let candidates = round.members.into_iter().map(|member| member.candidate).collect();
        let mut group = Group::new(round.id, round.roster, candidates, lives, round.policy, self.now);
        (group.feeder, group.returned, group.transport) = (feeder, returned, transport);
        self.enter(group);
    }

    /// A group works from now on.
    pub(super) fn enter(&mut self, group: Group) {
        self.over = self.over.max(group.id.epoch.saturating_sub(1));
        self.last_offsets = group.roster.members.iter().map(|member| (member.name.clone(), member.rank_offset)).collect();
        self.lack_since = None;
        self.viable_since = None;
        self.urgent = None;
        self.group = Some(group);
        self.forming = None;
    }
}

fn give_ranks(members: &[Eligible]) -> Roster {
    let candidates: Vec<_> = members.iter().map(|member| (*member.candidate).clone()).collect();
    roster(&candidates)
}

/// A lost member in the reason of an epoch.
fn cause((name, (reason, message)): (&MemberName, &(Reason, String))) -> String {
    format!("{name}: {reason}: {message}")
}

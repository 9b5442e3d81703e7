//! Whether the group must change, why, and when a new one is due.
//!
//! A loss is due at once. A member that leaves in good order, one that joins, new rules and a member that needs feeding wait for the end
//! of a running update, because a new epoch ends it. Every such wait has an end of its own.

use crate::plan::LeftOutCode;
use crate::protocol::{Incarnation, MemberName, Reason, Role};

use super::agents::{Agent, Link};
use super::assess::Assessment;
use super::backoff::Weight;
use super::forming::SETTLE_MS;
use super::group::Eligible;
use super::group::unreachable;
use super::{JoinPolicy, Membership};

impl Membership {
    /// Whether a group of these members has anything to do: a source and a receiver, or a feeder and a member to feed.
    pub(super) fn is_viable(&self, members: &[Eligible]) -> bool {
        let rollouts = members.iter().filter(|member| member.candidate.role == Role::Rollout);
        let count = rollouts.clone().count();
        if count == 0 {
            return false;
        }
        if count < members.len() {
            return true;
        }
        let Some(feeder) = self.choose_feeder(members.iter().map(|member| (&member.candidate.name, &member.life))) else { return false };
        // A member that goes back from its own copy needs a group for that.
        let alone = self.returned().is_some();
        rollouts.filter(|member| alone || member.candidate.name != feeder).any(|member| self.life_lacks(&member.life))
    }

    pub(super) fn life_lacks(&self, life: &Incarnation) -> bool {
        self.agents.get(life).and_then(|agent| agent.state.as_ref()).is_some_and(|state| self.lacks(state))
    }

    /// Why a member of a group or round has changed or is lost.
    pub(super) fn why_lost(&self, name: &MemberName, life: Option<&Incarnation>, assessment: &Assessment) -> (Reason, String) {
        if assessment.life(name).is_some() {
            return (Reason::MemberRestarted, "a new incarnation of its agent replaced it".to_owned());
        }
        if let Some(out) = assessment.out.get(name) {
            return (out.reason, out.message.clone());
        }
        let left = self.left_out.iter().find(|left| &left.who == name);
        let link = life.and_then(|life| self.agents.get(life)).map(|agent| &agent.link);
        // An agent that died explains better than an engine that it left paused.
        if let Some(left) = left.filter(|left| left.code == LeftOutCode::Terminating || link == Some(&Link::Live)) {
            return (left.code.reason(), left.message.clone());
        }
        match link {
            Some(Link::Lost(cause)) => (Reason::AgentLost, cause.clone()),
            Some(Link::Silent(_)) => (Reason::AgentLost, "its agent stopped sending".to_owned()),
            _ => (Reason::MemberLeft, "its pod is gone or not selected any more".to_owned()),
        }
    }

    /// Records a loss as the member's failure, if it is its own fault.
    pub(super) fn count_loss(&mut self, name: &MemberName, reason: Reason, message: &str) {
        let weight = match reason {
            Reason::AgentLost | Reason::MemberRestarted | Reason::EngineUnhealthy | Reason::EngineWedged | Reason::GroupFenced => {
                Weight::Loss
            }
            Reason::MemberFailed => Weight::Failure,
            // Already recorded, or not the member's fault.
            Reason::BackingOff | Reason::BadEdge => return,
            _ => {
                self.event(reason, message, Some(name.clone()), true);
                return;
            }
        };
        self.strike(name, weight, reason, message);
    }

    /// Finds lost or changed members of the group. Returns whether it found any.
    pub(super) fn find_lost(&mut self, assessment: &Assessment) -> bool {
        let Some(group) = &self.group else { return false };
        let mut lost: Vec<(MemberName, Reason, String)> = Vec::new();
        let mut leaving = Vec::new();
        let mut strays = Vec::new();
        for (name, life) in group.lives.iter().filter(|(name, _)| !group.lost.contains_key(*name)) {
            let agent = self.agents.get(life);
            if assessment.life(name) == Some(life) {
                if agent.and_then(|agent| agent.epoch()) != Some(&group.id) {
                    strays.push(name.clone());
                }
                continue;
            }
            let (reason, message) = self.why_lost(name, Some(life), assessment);
            let in_order = match self.left_out.iter().find(|left| &left.who == name) {
                Some(left) => left.code != LeftOutCode::NotReady && reason == left.code.reason(),
                None => reason == Reason::MemberLeft,
            };
            if in_order && agent.is_some_and(Agent::is_present) {
                leaving.push(name.clone());
            } else {
                lost.push((name.clone(), reason, message));
            }
        }
        let now = self.now;
        let Some(group) = &mut self.group else { return false };
        group.leaving.retain(|name, _| leaving.contains(name));
        let mut left = Vec::new();
        for name in leaving {
            if let std::collections::btree_map::Entry::Vacant(entry) = group.leaving.entry(name.clone()) {
                entry.insert(now);
                left.push(name);
            }
        }
        group.strays.retain(|name, _| strays.contains(name));
        let mut wakes = Vec::new();
        for name in strays {
            let at = group.strays.entry(name.clone()).or_insert(now).saturating_add(self.config.resend_ms);
            if now >= at {
                lost.push((name, Reason::GroupFenced, "its agent is not in the epoch any more".to_owned()));
            } else {
                wakes.push(at);
            }
        }
        // A member's report about itself needs no confirmation: its GPU worker ended, and the communicator with it.
        let by_itself: Vec<_> = group.reports.iter().filter(|((reporter, peer), _)| reporter == peer).collect();
        let by_itself: Vec<_> = by_itself.into_iter().map(|((_, name), (_, cause))| (name.clone(), cause.clone())).collect();
        group.reports.retain(|(reporter, peer), _| reporter != peer);
        lost.extend(by_itself.into_iter().map(|(name, cause)| (name, Reason::GpuWorkerLost, cause)));
        // For engines that join by themselves only the source reports. The next group must not include one that refused: the others would
        // wait for it in a broadcast again.
        if group.transport.engines.is_some() {
            let sources: Vec<_> =
                group.roster.members.iter().filter(|member| member.role == Role::Source).map(|member| &member.name).collect();
            let by_source: Vec<_> = group.reports.iter().filter(|((reporter, _), _)| sources.contains(&reporter)).collect();
            lost.extend(by_source.into_iter().map(|((_, peer), (_, cause))| (peer.clone(), Reason::PeerUnreachable, cause.clone())));
            group.reports.clear();
        }
        let settled = group.reports.values().map(|(at, _)| at.saturating_add(SETTLE_MS)).min();
        match settled {
            Some(at) if now >= at => {
                let reports = group.reports.iter().map(|((reporter, peer), (_, cause))| (reporter, peer, cause.as_str()));
                let role = |name: &MemberName| group.roster.member(name).map(|member| member.role);
                let blamed = unreachable(reports, role);
                group.reports.clear();
                lost.extend(blamed.into_iter().map(|(name, message)| (name, Reason::PeerUnreachable, message)));
            }
            Some(at) => wakes.push(at),
            None => {}
        }
        for at in wakes {
            self.wake_at(at);
        }
        for name in left {
            let (_, message) = self.why_lost(&name, None, assessment);
            self.event(Reason::MemberLeft, message, Some(name), false);
        }
        let found = !lost.is_empty();
        for (name, reason, message) in lost {
            let source = |group: &super::group::Group| group.roster.member(&name).is_some_and(|member| member.role == Role::Source);
            let may_wait = reason == Reason::GpuWorkerLost && !self.group.as_ref().is_some_and(source);
            if reason == Reason::PeerUnreachable || may_wait {
                self.strike(&name, Weight::Failure, reason, &message);
            } else {
                self.count_loss(&name, reason, &message);
            }
            if let Some(group) = &mut self.group {
                group.leaving.remove(&name);
                group.lost.entry(name).or_insert((reason, message));
            }
        }
        found
    }

    /// Remembers since when members could join.
    pub(super) fn note_waiting(&mut self, assessment: &Assessment) {
        let group = self.group.as_ref();
        let joins = |eligible: &&Eligible| group.is_none_or(|group| !group.lives.contains_key(&eligible.candidate.name));
        let names: Vec<MemberName> = assessment.eligible.iter().filter(joins).map(|eligible| eligible.candidate.name.clone()).collect();
        self.waiting.retain(|name, _| names.contains(name));
        let version = self.version.as_ref().map(|version| version.version);
        for name in names {
            self.waiting.entry(name).or_insert((self.now, version));
        }
    }

    /// Why a new group is due now, if it is.
    pub(super) fn need(&mut self, assessment: &Assessment) -> Option<Reason> {
        let Some(group) = &self.group else { return self.need_first(assessment) };
        if let Some((reason, _)) = group.lost.values().next() {
            return Some(*reason);
        }
        // The spec or the canary requires another version than the running update: do not wait for it.
        if self.is_asked_otherwise(group.returned) {
            return Some(if self.refusal().is_some() { Reason::VersionRefused } else { Reason::SpecChanged });
        }
        let id = group.id.clone();
        let busy_until = self.busy_until();
        let leaving_until = group.leaving.values().map(|since| since.saturating_add(self.config.leave_grace_ms)).min();
        let retry_at = self.updates.retry_at(&id);
        if let Some(at) = leaving_until
            && (busy_until.is_none() || self.due(at))
        {
            return Some(Reason::MemberLeft);
        }
        if let Some(until) = busy_until {
            self.wake_at(until);
            self.lack_since = None;
            return None;
        }
        if let Some(at) = retry_at
            && self.due(at)
        {
            return Some(Reason::UpdateFailed);
        }
        self.need_join(assessment).or_else(|| self.need_rules()).or_else(|| self.need_feeding(assessment))
    }

    /// Until when an update runs in the group.
    fn busy_until(&self) -> Option<u64> {
        let group = self.group.as_ref()?;
        let reported = self.updates.running_until(self.now, &group.id, &group.policy);
        let seen = group.lives.values().filter_map(|life| {
            let agent = self.agents.get(life).filter(|agent| agent.epoch() == Some(&group.id))?;
            self.stuck_at(agent).filter(|at| self.now < *at)
        });
        reported.into_iter().chain(seen).max()
    }

    /// When there is no group.
    fn need_first(&mut self, assessment: &Assessment) -> Option<Reason> {
        if !self.is_viable(&assessment.eligible) {
            self.viable_since = None;
            self.urgent = None;
            return None;
        }
        let since = *self.viable_since.get_or_insert(self.now);
        if let Some(urgent) = &self.urgent {
            return Some(urgent.why);
        }
        let adopting_until = self.adopting_until();
        // Announced, and silent or lost before its first state: a controller with thousands of reconnecting agents has not connected to it
        // yet.
        let unreported = |agent: &Agent| agent.state.is_none() && agent.unusable.is_none();
        let unreported = || self.candidates.iter().filter_map(|candidate| self.agents.of(candidate)).any(|(_, agent)| unreported(agent));
        let unknown = || self.left_out.iter().any(|left| left.code == LeftOutCode::NotReported);
        let missing = assessment.out.values().any(|out| out.reason == Reason::AgentMissing)
            || adopting_until.is_some() && (unreported() || unknown());
        // A pod that is paused for an update may be unready and missing from the plan. Without this check, a group that could be taken over
        // with it would be ended in the middle of the update.
        let paused = |agent: &Agent| agent.link == Link::Live && self.updates_in_our_epoch(agent);
        let updating = adopting_until.is_some() && self.agents.iter().any(|(_, agent)| paused(agent));
        if !missing && !updating {
            return Some(Reason::GroupForming);
        }
        if let Some(until) = adopting_until {
            self.wake_at(until);
            return None;
        }
        self.due(since.saturating_add(self.config.debounce_ms)).then_some(Reason::GroupForming)
    }

    /// Members that could join.
    fn need_join(&mut self, assessment: &Assessment) -> Option<Reason> {
        let group = self.group.as_ref()?;
        let version = self.version.as_ref().map(|version| version.version);
        let too_few = group.rollouts() < self.config.policy.min_ready;
        let sources = |name: &MemberName| {
            assessment.eligible.iter().any(|eligible| &eligible.candidate.name == name && eligible.candidate.role == Role::Source)
        };
        let may_join = |(name, (_, seen)): &(&MemberName, &(u64, Option<u64>))| {
            self.config.join == JoinPolicy::Immediate || too_few || version.is_none() || *seen != version || sources(name)
        };
        let first = self.waiting.iter().filter(may_join).map(|(_, (since, _))| *since).min()?;
        let at = first.max(group.committed_at).saturating_add(self.config.debounce_ms);
        (self.is_viable(&assessment.eligible) && self.due(at)).then_some(Reason::MemberJoined)
    }

    /// New policies that the members have not received.
    fn need_rules(&mut self) -> Option<Reason> {
        let group = self.group.as_ref()?;
        if group.policy == self.config.policy {
            return None;
        }
        let at = group.committed_at.saturating_add(self.config.debounce_ms);
        self.due(at).then_some(Reason::SpecChanged)
    }

    /// Members that lack the version although a feeder exists.
    fn need_feeding(&mut self, assessment: &Assessment) -> Option<Reason> {
        let group = self.group.as_ref()?;
        let lacks = group.lives.values().any(|life| self.life_lacks(life));
        let feeder = self.choose_feeder(group.lives.iter());
        if !lacks {
            self.repairs = 0;
        }
        if !lacks || feeder.is_none() || !self.is_viable(&assessment.eligible) {
            self.lack_since = None;
            return None;
        }
        let since = *self.lack_since.get_or_insert(self.now);
        let grace = self.config.feed_grace_ms.saturating_mul(1 << self.repairs.min(8));
        self.due(since.saturating_add(grace)).then_some(Reason::Updating)
    }
}

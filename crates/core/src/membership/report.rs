//! What status shows: the state and reason of every member, and the problems.
//!
//! Reports the present incarnation only. A replica counts as ready only in a committed group, with the current version confirmed by its
//! engine, and never while it may hold half an update.

use std::sync::Arc;

use crate::plan::{Candidate, LeftOut};
use crate::protocol::{MemberName, MemberPhase, MemberState, Reason, Role, Skew, TransportChoice};

use super::assess::Assessment;
use super::group::{Forming, Group, Phase};
use super::{Degradation, GroupStage, JoinPolicy, MemberStanding, MemberView, Membership, MembershipView};

impl Membership {
    pub(super) fn look(&self, assessment: &Assessment) -> MembershipView {
        let members = self.members(assessment);
        let rollouts = members.iter().filter(|member| member.role == Role::Rollout);
        let count = |members: usize| u32::try_from(members).unwrap_or(u32::MAX);
        let ready = rollouts.clone().filter(|member| matches!(member.standing, MemberStanding::Ready | MemberStanding::Updating));
        let counted = |member: &&MemberView| {
            let left = self.left_out.iter().find(|left| left.who == member.name);
            left.is_none_or(|left| left.code.counts_as_replica())
        };
        let (ready, total) = (count(ready.count()), count(rollouts.filter(counted).count()));
        let roster = self.roster();
        let members_in = self.group.as_ref().map(|group| group.lives.iter());
        let hindrance = self.hindrance(&members);
        MembershipView {
            stage: self.stage(),
            epoch: self.epoch,
            id: self.present_id(),
            committed: self.group.is_some(),
            world_size: roster.map_or(0, |roster| roster.world_size),
            version: self.version.clone(),
            wanted: self.wanted().cloned(),
            returned: self.returned(),
            refused: self.refused.keys().copied().collect(),
            max_skew: self.config.policy.max_skew,
            newest: self.newest(),
            feeder: match self.group.as_ref().and_then(|group| group.feeder.clone()) {
                Some(feeder) => Some(feeder),
                None => members_in.and_then(|members| self.choose_feeder(members)),
            },
            transport: self.group.as_ref().map(|group| self.transport_of(group)),
            preflight: self.preflight().cloned().map(Box::new),
            update: self.updates.latest().cloned(),
            total,
            ready,
            min_ready: self.config.policy.min_ready,
            degraded: self.degradations(assessment, &members, ready),
            hindrance,
            released: self.is_released(),
            members,
        }
    }

    /// The transport, with the source's own report if it sent one.
    fn transport_of(&self, group: &Group) -> TransportChoice {
        let states = group.lives.values().filter_map(|life| self.agents.get(life)?.state.as_ref());
        let mut sources = states.filter(|state| state.role == Role::Source && state.epoch.as_ref() == Some(&group.id));
        sources.find_map(|state| state.transport.clone()).unwrap_or_else(|| group.transport.clone())
    }

    /// Reports new problems of the group, or of a member outside it.
    pub(super) fn tell_degradations(&mut self, before: &[Degradation]) {
        // A loss or a failure was reported when it happened.
        let reported = |reason: Reason| {
            use Reason::{AgentLost, AgentMissing, BackingOff, MemberFailed};
            matches!(reason, BackingOff | AgentLost | AgentMissing | MemberFailed)
        };
        // The same holds for a refusal of the whole group; two in a row are two problems.
        let counted = |new: &Degradation| new.reason == Reason::VersionRefused && new.member.is_none();
        let lost = |name: &MemberName| self.group.as_ref().is_some_and(|group| group.lost.contains_key(name));
        let new = self.view.degraded.iter().filter(|new| {
            !reported(new.reason)
                && !counted(new)
                && !new.member.as_ref().is_some_and(lost)
                && !before.iter().any(|old| old.reason == new.reason && old.member == new.member)
        });
        for Degradation { reason, member, message } in new.cloned().collect::<Vec<_>>() {
            self.event(reason, message, member, true);
        }
    }

    fn stage(&self) -> GroupStage {
        if self.stopped.is_some() {
            return GroupStage::SteppedDown;
        }
        if self.deleted {
            return GroupStage::Released;
        }
        if self.suspended {
            return GroupStage::Suspended;
        }
        match (&self.forming, &self.group) {
            (Some(Forming::Persisting(_)), _) => GroupStage::Persisting,
            (Some(Forming::Round(round)), _) if matches!(round.phase, Phase::Preparing) => GroupStage::Preparing,
            (Some(Forming::Round(_)), _) => GroupStage::Committing,
            (None, Some(_)) => GroupStage::Committed,
            (None, None) if self.is_adopting() => GroupStage::Adopting,
            (None, None) => GroupStage::Idle,
        }
    }

    fn is_adopting(&self) -> bool {
        self.had_epoch && self.over == 0 && (self.adopting_until().is_some() || !self.planned)
    }

    fn roster(&self) -> Option<&crate::protocol::Roster> {
        match (&self.forming, &self.group) {
            (Some(Forming::Round(round)), _) => Some(&round.roster),
            (_, Some(group)) => Some(&group.roster),
            _ => None,
        }
    }

    fn present_id(&self) -> Option<crate::protocol::EpochId> {
        match (&self.forming, &self.group) {
            (Some(Forming::Round(round)), _) => Some(round.id.clone()),
            (_, Some(group)) => Some(group.id.clone()),
            _ => None,
        }
    }

    /// Whether no reachable agent is in an epoch of this object.
    fn is_released(&self) -> bool {
        let inside = |agent: &super::agents::Agent| {
            agent.link == super::agents::Link::Live && agent.epoch().is_some_and(|epoch| epoch.weightsync == self.config.weightsync)
        };
        self.group.is_none() && self.forming.is_none() && !self.agents.iter().any(|(_, agent)| inside(agent))
    }

    fn members(&self, assessment: &Assessment) -> Vec<MemberView> {
        // A paused pod that the plan left out is still a member.
        let kept = assessment.eligible.iter().map(|eligible| &eligible.candidate);
        let mut candidates: Vec<&Arc<Candidate>> = kept.filter(|kept| !self.candidates.iter().any(|one| one.name == kept.name)).collect();
        candidates.extend(&self.candidates);
        candidates.sort_by_key(|candidate| candidate.role == Role::Rollout);
        let mut members: Vec<MemberView> = candidates.iter().map(|candidate| self.member(candidate, assessment)).collect();
        let shown: Vec<MemberName> = members.iter().map(|member| member.name.clone()).collect();
        let left_out = self.left_out.iter().filter(|left| !shown.contains(&left.who));
        members.extend(left_out.map(Self::left_out_member));
        members
    }

    fn member(&self, candidate: &Candidate, assessment: &Assessment) -> MemberView {
        let name = &candidate.name;
        let bound = self.agents.of(candidate);
        let state = bound.and_then(|(_, agent)| agent.state.as_ref());
        let (standing, reason, message) = self.standing(candidate, assessment);
        let dirty = state.is_some_and(|state| state.phase.must_not_serve());
        let nothing_compared = state.and_then(|state| state.engine.as_ref()?.nothing_compared());
        let message = [Some(message), state.and_then(mixed), nothing_compared].into_iter().flatten().filter(|part| !part.is_empty());
        let message = message.collect::<Vec<_>>().join("; ");
        MemberView {
            name: name.clone(),
            role: candidate.role,
            pods: candidate.pods.clone(),
            incarnation: bound.map(|(life, _)| life.clone()),
            rank_offset: self.roster().and_then(|roster| roster.member(name)).map(|member| member.rank_offset),
            size: candidate.size,
            standing,
            keeps: state.map_or_else(Vec::new, |state| state.keeps().cloned().collect()),
            dirty,
            wedged: state.is_some_and(|state| state.wedged),
            installed: state.filter(|_| !dirty).and_then(|state| state.installed.clone()),
            proven_by: state.filter(|_| !dirty).and_then(|state| state.proven_by),
            engine_url: state.and_then(|state| state.engine.as_ref()).map(|engine| engine.url.clone()),
            paused_until: state.and_then(|state| state.paused_until),
            received: state.and_then(|state| state.received.clone()),
            fabric: state.and_then(|state| state.fabric.clone()),
            retry_at: assessment.out.get(name).and_then(|out| out.retry_at),
            reason,
            message,
        }
    }

    /// A false claim of a member.
    fn refused_claim(&self, candidate: &Candidate) -> Option<String> {
        let (_, agent) = self.agents.of(candidate)?;
        let invented = || {
            let (wanted, installed) = (self.wanted()?, agent.state.as_ref()?.installed.as_ref()?);
            let invented = installed.version > wanted.version && !self.exists(installed);
            invented.then(|| format!("it claims to hold version {}, which no source announced", installed.version))
        };
        agent.refused_claim.clone().or_else(invented)
    }

    fn left_out_member(left: &LeftOut) -> MemberView {
        MemberView {
            name: left.who.clone(),
            role: left.role,
            pods: left.pods.clone(),
            incarnation: None,
            rank_offset: None,
            size: 0,
            standing: MemberStanding::Out,
            keeps: Vec::new(),
            dirty: false,
            wedged: false,
            installed: None,
            proven_by: None,
            engine_url: None,
            paused_until: None,
            received: None,
            fabric: None,
            retry_at: None,
            reason: left.code.reason(),
            message: left.message.clone(),
        }
    }

    fn standing(&self, candidate: &Candidate, assessment: &Assessment) -> (MemberStanding, Reason, String) {
        let name = &candidate.name;
        let Some(life) = assessment.life(name) else {
            let out = assessment.out.get(name);
            return out.map_or((MemberStanding::Out, Reason::MemberLeft, String::new()), |out| {
                (MemberStanding::Out, out.reason, out.message.clone())
            });
        };
        if let Some(Forming::Round(round)) = &self.forming
            && round.life(name) == Some(life)
        {
            let message = format!("epoch {} is being formed", round.id.epoch);
            return (MemberStanding::Forming, Reason::GroupForming, message);
        }
        match &self.group {
            Some(group) if group.lives.get(name) == Some(life) && !group.lost.contains_key(name) => self.standing_in(group, candidate),
            _ => {
                let (reason, message) = self.why_waiting(name, assessment);
                (MemberStanding::Waiting, reason, message)
            }
        }
    }

    fn standing_in(&self, group: &Group, candidate: &Candidate) -> (MemberStanding, Reason, String) {
        let member = self.agents.of(candidate).and_then(|(_, agent)| agent.state.as_ref().map(|state| (agent, state)));
        let Some((agent, state)) = member else {
            return (MemberStanding::Out, Reason::AgentMissing, String::new());
        };
        let updating = self.in_update(&candidate.name, agent);
        let named = |held: &crate::protocol::HeldVersion| format!("version {}", held.version);
        let current = self.wanted().map_or_else(String::new, named);
        let number = self.version.as_ref().map_or(0, |version| version.version);
        let dirty = state.phase.must_not_serve();
        // During waves, the last replicas serve their old version until their switch.
        let skew = self.skew_of(state);
        let turn = !dirty
            && skew != Some(Skew::TooOld)
            && self.updates.awaits_its_turn(self.now, &group.id, &group.policy, &candidate.name, number);
        if self.is_behind(state) && !turn {
            let standing = match state.phase {
                MemberPhase::Dirty => MemberStanding::Dirty,
                MemberPhase::Unknown => MemberStanding::Unknown,
                _ => MemberStanding::Behind,
            };
            let serves = !dirty && skew == Some(Skew::Within);
            let meanwhile = if serves { "; it serves meanwhile (membership.maxSkew)" } else { "" };
            if updating {
                return (standing, Reason::Updating, format!("it is being fed {current}{meanwhile}"));
            }
            if standing == MemberStanding::Unknown {
                let message = state.reason.clone().unwrap_or_else(|| "the version of its engine is not known".to_owned());
                return (standing, Reason::EngineUnproven, message);
            }
            if standing == MemberStanding::Dirty {
                let message = state.reason.clone().unwrap_or_else(|| "an install did not end well".to_owned());
                let reason = if state.refused.is_empty() { Reason::InstallFailed } else { Reason::VersionRefused };
                return (standing, reason, message);
            }
            let feeder = self.choose_feeder(group.lives.iter());
            return match feeder {
                Some(feeder) => (standing, Reason::Updating, format!("waits for {current} from {feeder}{meanwhile}")),
                None => (standing, Reason::NoFeeder, format!("no member retains {current}; it waits for the next one{meanwhile}")),
            };
        }
        if updating && candidate.role == Role::Rollout {
            return (MemberStanding::Updating, Reason::Updating, "takes part in an update".to_owned());
        }
        let message = match (candidate.role, current.is_empty()) {
            (Role::Source, _) => format!("leads epoch {}", group.id.epoch),
            (Role::Rollout, true) => "in the group; there is no version yet".to_owned(),
            (Role::Rollout, false) => match &state.installed {
                Some(installed) if skew == Some(Skew::TooNew) => {
                    format!("holds {}, and serves once that counts (membership.maxSkew)", named(installed))
                }
                Some(installed) if self.lacks(state) => format!("serves {} until it is switched to {current}", named(installed)),
                _ => format!("serves {current}"),
            },
        };
        (MemberStanding::Ready, Reason::MemberReady, message)
    }

    /// Why a member that could take part is not in a group.
    fn why_waiting(&self, name: &MemberName, assessment: &Assessment) -> (Reason, String) {
        if self.suspended || self.deleted {
            return (Reason::Suspended, "released".to_owned());
        }
        if self.group.is_none() {
            if self.is_adopting() {
                return (Reason::GroupForming, "a controller that started waits for the agents".to_owned());
            }
            let has = |role: Role| assessment.eligible.iter().any(|member| member.candidate.role == role);
            if !has(Role::Rollout) {
                return (Reason::BelowMinReady, "there is no rollout to send to".to_owned());
            }
            if !has(Role::Source) && !self.is_viable(&assessment.eligible) {
                return (Reason::NoSource, "no trainer's agent takes part, and no member needs feeding".to_owned());
            }
            return (Reason::GroupForming, "a group is about to be formed".to_owned());
        }
        let busy = self.group.as_ref().is_some_and(|group| self.updates.running_until(self.now, &group.id, &group.policy).is_some());
        if busy {
            return (Reason::JoinPending, "joins when the running update ends".to_owned());
        }
        let seen = self.waiting.get(name).map(|(_, version)| *version);
        let version = self.version.as_ref().map(|version| version.version);
        if self.config.join == JoinPolicy::NextVersion && version.is_some() && seen.is_none_or(|seen| seen == version) {
            return (Reason::JoinPending, "joins with the next version (membership.join)".to_owned());
        }
        (Reason::JoinPending, "joins with the next epoch".to_owned())
    }

    fn degradations(&self, assessment: &Assessment, members: &[MemberView], ready: u32) -> Vec<Degradation> {
        let mut found: Vec<Degradation> = Vec::new();
        let mut add = |reason, member: Option<&MemberName>, message: String| {
            found.push(Degradation { reason, member: member.cloned(), message });
        };
        for member in members {
            match (member.standing, member.reason) {
                // The plan itself reports which of the pods that it leaves out are a mistake.
                (MemberStanding::Out, reason)
                    if self.left_out.iter().any(|left| left.who == member.name && left.code.reason() == reason) => {}
                (MemberStanding::Out, Reason::MemberLeft) => {}
                (MemberStanding::Out | MemberStanding::Dirty | MemberStanding::Unknown, reason) => {
                    add(reason, Some(&member.name), member.message.clone());
                }
                (MemberStanding::Behind, Reason::NoFeeder) => add(Reason::NoFeeder, Some(&member.name), member.message.clone()),
                _ => {}
            }
        }
        for candidate in &self.candidates {
            if let Some(claim) = self.refused_claim(candidate) {
                add(Reason::ClaimRefused, Some(&candidate.name), claim);
            }
        }
        for poor in self.poor_members() {
            add(Reason::BadEdge, Some(&poor.member), poor.why.clone());
        }
        if !self.planned || self.is_adopting() || self.suspended || self.deleted {
            return found;
        }
        let has = |role: Role| assessment.eligible.iter().any(|member| member.candidate.role == role);
        if !has(Role::Source) {
            add(Reason::NoSource, None, "no trainer's agent takes part: no publish is possible".to_owned());
        }
        if !has(Role::Rollout) {
            add(Reason::BelowMinReady, None, "no rollout can take part".to_owned());
        }
        if let Some(message) = self.refusal() {
            add(Reason::VersionRefused, None, message);
        }
        if let Some(message) = self.target_missing() {
            add(Reason::TargetVersionMissing, None, message);
        }
        let min_ready = self.config.policy.min_ready;
        if ready < min_ready && self.group.is_some() {
            add(Reason::BelowMinReady, None, format!("{ready} replicas are ready, minReady is {min_ready}"));
        }
        if let Some(Forming::Persisting(persisting)) = &self.forming
            && let Some(failure) = &persisting.failure
        {
            add(Reason::PersistFailed, None, format!("epoch {} cannot be written: {failure}", persisting.epoch));
        }
        found.sort();
        found
    }
}

/// The latest time in which a replica's engine answered from a mixture while it loaded a version.
fn mixed(state: &MemberState) -> Option<String> {
    let last = state.mixed.last()?;
    let holds = state.installed.as_ref().is_some_and(|installed| installed.version == last.version);
    match last.end_ms {
        None => Some(format!("its engine may answer with a mixture of versions since {} (ms since 1970)", last.begin_ms)),
        Some(end) if holds || state.phase.must_not_serve() => Some(format!(
            "its engine answered with a mixture while version {} was loaded, from {} to {end} (ms since 1970)",
            last.version, last.begin_ms
        )),
        Some(_) => None,
    }
}

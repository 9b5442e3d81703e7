//! Versions that replicas refuse by their canary, and when this counts for the group.
//!
//! A version is refused once more pods refused it than accepted it, and the undecided ones cannot change that
//! (`docs/decisions/0007-canary.md`): a pod has one vote, however many engines it says it has. A refused number never counts again. If the group is at a refused version, this chooses the one to go
//! back to: the highest lower version that a member keeps. `target.rs` does the rest. Below a majority, only the replicas that refuse do
//! not serve.

use crate::protocol::{Ballot, HeldVersion, Judgement, MemberState, RefusedVersion, Role, Version};

use super::{Membership, Reason};

/// Refused versions that are remembered; of more, the lowest are forgotten, which cannot be published again anyway.
pub(super) const REMEMBERED: usize = 16;

impl Membership {
    /// Counts the reports, and remembers what most refuse.
    pub(super) fn learn_refused(&mut self) {
        if self.config.policy.canary.is_none() {
            return;
        }
        let open = |refused: &&RefusedVersion| {
            // Older versions than the current one were judged earlier: the replicas that accepted them have moved on.
            let number = refused.held.version;
            self.exists(&refused.held)
                && !self.refused.contains_key(&number)
                && self.version.as_ref().is_none_or(|current| number >= current.version)
        };
        let mut asked: Vec<HeldVersion> =
            self.states().flat_map(|state| &state.refused).filter(open).map(|refused| refused.held.clone()).collect();
        asked.sort_by(|a, b| (a.version, &a.manifest).cmp(&(b.version, &b.manifest)));
        asked.dedup();
        for held in asked {
            if let Some(why) = self.refused_by_most(&held) {
                self.refuse(held.version, why);
            }
        }
    }

    /// Why the version is refused for all, where it is.
    fn refused_by_most(&self, held: &HeldVersion) -> Option<String> {
        let (mut ballot, mut measured) = (Ballot::default(), Vec::new());
        for candidate in self.candidates.iter().filter(|candidate| candidate.role == Role::Rollout) {
            let Some((_, agent)) = self.agents.of(candidate).filter(|(_, agent)| agent.is_present()) else { continue };
            let Some(state) = &agent.state else { continue };
            let took = |installed: &HeldVersion| installed == held || installed.version > held.version;
            let judgement = if let Some(refused) = state.refused.iter().find(|refused| refused.held == *held) {
                measured.push(format!("{}: {}", candidate.name, refused.measured));
                Judgement::Refused
            } else if !state.phase.must_not_serve() && state.installed.as_ref().is_some_and(took) {
                Judgement::Taken
            } else if self.in_update(&candidate.name, agent) {
                Judgement::Undecided
            } else {
                continue;
            };
            ballot.add(&candidate.name, judgement);
        }
        let (refused, judged) = (ballot.refused(), ballot.judged());
        ballot.is_refused().then(|| format!("{refused} of {judged} pods that judged it refuse it ({})", measured.join("; ")))
    }

    fn refuse(&mut self, number: Version, why: String) {
        self.refused.insert(number, why.clone());
        while self.refused.len() > REMEMBERED {
            self.refused.pop_first();
        }
        // A refused number was used: it never counts, whatever a member reports later.
        self.highest = self.highest.max(number);
        self.event(Reason::VersionRefused, format!("version {number}: {why}; {}", self.what_follows(number)), None, true);
    }

    /// What happens to the group, as text.
    fn what_follows(&self, number: Version) -> String {
        match &self.version {
            None => "there is no earlier version: the start-up weights of replicas are restored".to_owned(),
            Some(current) if current.version != number => format!("version {} stays", current.version),
            Some(_) => match self.before_refused() {
                Some(before) => format!("the group goes back to version {before}"),
                None => "no member keeps an earlier version to go back to (membership.keep, update.retainMiB)".to_owned(),
            },
        }
    }

    /// Whether a version must not be delivered.
    pub(super) fn is_refused(&self, number: Version) -> bool {
        self.config.policy.canary.is_some() && self.refused.contains_key(&number)
    }

    /// The version to go back to by itself, when the one that counts is refused.
    pub(super) fn before_refused(&self) -> Option<Version> {
        let current = self.version.as_ref().map(|version| version.version).filter(|number| self.is_refused(*number))?;
        let may = |number: &Version| *number < current && !self.is_refused(*number);
        // Once chosen it stays, also if members are lost meanwhile.
        let chosen = self.target.as_ref().map(|target| target.version).filter(may);
        chosen.or_else(|| {
            self.states().flat_map(MemberState::keeps).filter(|kept| self.exists(kept)).map(|kept| kept.version).filter(may).max()
        })
    }

    /// The message about a refused version until a higher one counts.
    pub(super) fn refusal(&self) -> Option<String> {
        let current = self.version.as_ref().map(|version| version.version);
        let (number, why) = self
            .refused
            .last_key_value()
            .filter(|(number, _)| self.is_refused(**number) && current.is_none_or(|current| **number >= current))?;
        let follows = self.what_follows(*number);
        Some(format!("version {number} is refused: {why}; {follows}; a publish needs a higher number"))
    }
}

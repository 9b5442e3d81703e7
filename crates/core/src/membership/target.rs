//! Going back to an earlier version, because of `spec.targetVersion` or because the canary refuses the current one (`canary.rs`).
//!
//! Decides which version all replicas should hold (it must be kept complete by a member, else nothing changes), and when it counts: as soon
//! as enough replicas report that their engines confirmed it. The version goes back only in this way. From then on, a number up to the
//! highest one that ever counted does not count again only because a replica has it.

use std::collections::BTreeMap;

use crate::protocol::{HeldVersion, MemberState, Reason, Returned, Role, Version};

use super::Membership;

impl Membership {
    /// The version that every rollout should hold; `None` if the current one is refused and no member keeps another.
    pub(super) fn wanted(&self) -> Option<&HeldVersion> {
        let brought = |version: &&HeldVersion| !self.is_refused(version.version);
        self.target.as_ref().or(self.version.as_ref().filter(brought))
    }

    /// The rollback for members, if there is one.
    pub(super) fn returned(&self) -> Option<Returned> {
        let to = self.wanted()?.version;
        let (from, pinned) = (self.highest.max(to), self.config.target == Some(to));
        (pinned || from > to).then_some(Returned { to, from, pinned })
    }

    /// Whether the group's members have an outdated rollback. They detect by themselves that a new version exceeded the one they went back
    /// from.
    pub(super) fn is_asked_otherwise(&self, reported: Option<Returned>) -> bool {
        let now = self.returned();
        now != reported && (now.is_some() || reported.is_some_and(|reported| reported.pinned))
    }

    /// The number to go back to: the spec's, unless the canary refused it; else the one before a refused one.
    fn going_to(&self) -> Option<Version> {
        self.config.target.filter(|number| !self.is_refused(*number)).or_else(|| self.before_refused())
    }

    /// Finds the version to go back to, and makes it current once enough replicas serve it.
    pub(super) fn learn_target(&mut self) {
        let Some(number) = self.going_to() else {
            self.target = None;
            return;
        };
        if let Some(current) = self.version.as_ref().filter(|version| version.version == number) {
            self.target = Some(current.clone());
            return;
        }
        if self.target.as_ref().is_none_or(|target| target.version != number) {
            self.target = self.kept(number);
        }
        let Some(target) = self.target.clone() else { return };
        let min_ready = self.config.policy.min_ready.max(1);
        let serve = |state: &&MemberState| {
            let whole = state.role == Role::Rollout && !state.phase.must_not_serve();
            whole && state.installed.as_ref() == Some(&target)
        };
        // A source reports that a version once counted; here only replicas that serve it now count.
        let enough = self.states().filter(serve).count() >= usize::try_from(min_ready).unwrap_or(usize::MAX);
        if !enough {
            return;
        }
        let (reason, before) = match &self.version {
            Some(before) => (Reason::RolledBack, format!("; {} was current before", before.version)),
            None => (Reason::VersionReached, String::new()),
        };
        self.highest = self.highest.max(number);
        self.version = Some(target);
        self.event(reason, format!("version {number} is served by enough replicas (minReady is {min_ready}){before}"), None, false);
    }

    /// Why the version in the spec is not delivered.
    pub(super) fn target_missing(&self) -> Option<String> {
        let number = self.config.target.filter(|number| self.target.as_ref().is_none_or(|target| target.version != *number))?;
        if self.is_refused(number) {
            let why = "nothing changes; to use it anyway, remove spec.canary";
            return Some(format!("targetVersion names version {number}, which the canary refused: {why}"));
        }
        let mut kept: BTreeMap<Version, usize> = BTreeMap::new();
        for state in self.states() {
            for held in state.keeps().filter(|held| self.exists(held)) {
                *kept.entry(held.version).or_default() += 1;
            }
        }
        let listed: Vec<String> = kept.iter().rev().map(|(version, members)| format!("{version} (by {members})")).collect();
        let listed = if listed.is_empty() { "none at all".to_owned() } else { listed.join(", ") };
        let keep = self.config.policy.keep;
        Some(format!(
            "no member keeps version {number} of targetVersion, so nothing changes; kept versions: {listed} \
             (membership.keep: {keep})"
        ))
    }

    /// A version that a member keeps complete. If there are several weights with this number, those that most members have.
    fn kept(&self, number: Version) -> Option<HeldVersion> {
        let mut counts: BTreeMap<&String, usize> = BTreeMap::new();
        for held in self.states().flat_map(MemberState::keeps).filter(|held| held.version == number && self.exists(held)) {
            *counts.entry(&held.manifest).or_default() += 1;
        }
        let most = counts.into_iter().max_by_key(|(manifest, count)| (*count, std::cmp::Reverse(*manifest)))?;
        Some(HeldVersion { version: number, manifest: most.0.clone() })
    }

    /// The last states of all candidates' reachable agents.
    pub(super) fn states(&self) -> impl Iterator<Item = &MemberState> {
        self.candidates.iter().filter_map(|candidate| {
            let (_, agent) = self.agents.of(candidate)?;
            agent.state.as_ref().filter(|_| agent.is_present())
        })
    }
}

//! Invariants of versions: when one counts, when the group may go back, when one is refused for all, and how far apart those in service may
//! be (`docs/decisions/0006-going-back.md`, `0007-canary.md`, `0009-skew.md`).

use std::collections::BTreeSet;

use weightsync_core::membership::{MemberView, MembershipView};
use weightsync_core::protocol::*;

use super::STRAY;
use crate::agent::Agent;
use crate::world::{World, version_of};

/// Reachable rollouts, with their last reports.
fn heard(world: &World, view: &MembershipView) -> Vec<(MemberView, MemberState)> {
    let lost = |reason: Reason| matches!(reason, Reason::AgentLost | Reason::AgentMissing);
    let rollouts = view.members.iter().filter(|shown| shown.role == Role::Rollout && world.law.planned.contains_key(&shown.name));
    let lied = |shown: &&MemberView| shown.incarnation.as_ref().is_some_and(|life| world.law.was_lied_to_by(life));
    let rollouts = rollouts.filter(|shown| !lied(shown));
    let said = rollouts.filter(|shown| !lost(shown.reason)).filter_map(|shown| {
        let state = world.law.reported.get(shown.incarnation.as_ref()?)?;
        Some((shown.clone(), state.clone()))
    });
    said.collect()
}

/// The version that a replica serves; `None` if its engine may hold half an update.
fn serves(state: &MemberState) -> Option<Version> {
    state.installed.as_ref().filter(|_| state.phase != MemberPhase::Dirty).map(|held| held.version)
}

impl World {
    pub(super) fn check_version(&mut self, view: &MembershipView) {
        let version = version_of(view).unwrap_or(0);
        let (before, highest) = (self.law.version, self.law.highest);
        if version == before {
            return;
        }
        let asked = self.rules.target == Some(version);
        if version < before {
            if !asked && !view.refused.contains(&before) {
                self.fail(|| format!("the version went back from {before} to {version}"));
            }
            let back = view.members.iter().filter_map(|shown| self.law.reported.get(shown.incarnation.as_ref()?));
            let back = back.filter(|state| state.role == Role::Rollout && serves(state) == Some(version)).count();
            if (back as u32) < view.min_ready {
                self.fail(|| format!("the group counts as back at version {version} although only {back} replicas serve it"));
            }
        } else {
            let holders = self.law.installed.get(&version).map_or(0, BTreeSet::len);
            if (holders as u32) < view.min_ready {
                self.fail(|| format!("version {version} counts although only {holders} replicas ever held it"));
            }
            if version <= highest && !asked {
                self.fail(|| format!("version {version} counts again although the group went back from it"));
            }
            if self.rules.policy.canary.is_some() && view.refused.contains(&version) {
                self.fail(|| format!("version {version} counts although most replicas refuse it"));
            }
        }
        (self.law.version, self.law.highest) = (version, highest.max(version));
    }

    /// A version is refused for all if and only if more replicas refuse it than accepted it.
    pub(super) fn check_refused(&mut self, view: &MembershipView) {
        if self.rules.policy.canary.is_none() {
            return;
        }
        let refuses = |state: &MemberState, version: Version| state.refused.iter().any(|refused| refused.held.version == version);
        for version in &view.refused {
            if !self.law.refused.insert(*version) {
                continue;
            }
            let heard = heard(self, view);
            let against = heard.iter().filter(|(_, state)| refuses(state, *version)).count();
            let taken = heard.iter().filter(|(_, state)| serves(state).is_some_and(|serves| serves >= *version)).count();
            if against <= taken {
                self.fail(|| format!("version {version} is refused for all although {against} replicas refuse it and {taken} took it"));
            }
        }
        let (now, current) = (self.now, version_of(view).unwrap_or(0));
        // The true state, as far as the controller could have received it.
        let known = |slot: &usize| {
            let here = &self.slots[*slot];
            here.attached == Some(self.reign) && !here.frozen && !here.terminating && now >= here.slow.1.max(here.stream_floor)
        };
        let agents: Vec<_> = (1..self.slots.len()).filter(known).filter_map(|slot| self.slots[slot].agent.as_ref()).collect();
        let of = |version: Version| {
            let refuses = |agent: &&&Agent| agent.refused.iter().any(|refused| refused.held.version == version);
            agents.iter().filter(refuses).count()
        };
        let open = |version: &Version| *version >= current && !view.refused.contains(version) && !self.law.stepped_down && !self.rival;
        let all: BTreeSet<Version> = agents.iter().flat_map(|agent| &agent.refused).map(|refused| refused.held.version).collect();
        let most: Vec<Version> = all.into_iter().filter(|version| open(version) && 2 * of(*version) > self.slots.len() - 1).collect();
        self.law.unheard.retain(|version, _| most.contains(version));
        for version in most {
            let since = *self.law.unheard.entry(version).or_insert(now);
            if now > since + STRAY {
                self.fail(|| format!("most replicas refuse version {version}, and nothing happens"));
            }
        }
    }

    /// Versions in service are no further apart than the object allows, and no replica is taken out of service without need.
    pub(super) fn check_skew(&mut self, view: &MembershipView) {
        let (Some(most), Some(current)) = (self.rules.policy.max_skew, version_of(view)) else { return };
        // A controller that stepped down receives nothing any more.
        if view.returned.is_some() || self.law.stepped_down {
            return;
        }
        let heard = heard(self, view);
        let held = heard.iter().filter_map(|(shown, state)| Some((shown, serves(state)?, shown.installed.as_ref()?)));
        let held: Vec<(&MemberView, Version, bool)> =
            held.map(|(shown, serves, held)| (shown, serves, view.may_serve(held).is_ok())).collect();
        let in_service = || held.iter().filter(|(_, _, serves)| *serves).map(|(_, version, _)| *version);
        let (oldest, newest) = (in_service().min().unwrap_or(current), in_service().max().unwrap_or(current));
        if newest - oldest > most {
            self.fail(|| format!("versions {oldest} and {newest} are in service at once, membership.maxSkew is {most}"));
        }
        // A version that is too new to serve makes no other version too old.
        let ahead = held.iter().map(|(_, version, _)| *version).filter(|version| version.saturating_sub(current) <= most);
        let highest = ahead.fold(current, Version::max);
        for (shown, version, in_service) in &held {
            let near = *version <= current && highest - version <= most;
            if !in_service && (*version == current || near) {
                self.fail(|| format!("{} is out of service with version {version}, which counts or is near enough", shown.name));
            }
            if *in_service && version.saturating_sub(current) > most {
                self.fail(|| format!("{} is in service with version {version}, too far ahead of {current}", shown.name));
            }
        }
    }
}

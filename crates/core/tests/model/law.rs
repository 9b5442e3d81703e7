//! The invariants of every world after every step, and the definition of "healed".
//!
//! Knows the true state of agents, and what the controller received. A claim in status is judged by what the controller received, because
//! it cannot know more.

mod versions;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use weightsync_core::membership::{Decision, GroupStage, MemberStanding, MembershipView, Observation};
use weightsync_core::protocol::*;

use super::agent::Agent;
use super::names::{member, slot_of};
use super::world::World;

/// Longest time in which a group that lost a member, or is being formed, may stay so.
const BOUND: u64 = 17_000;
/// Longest time in which an agent may stay in an ended epoch.
const STRAY: u64 = 6_000;
/// Most epochs that one fault may cause.
const EPOCHS: usize = 14;

#[derive(Debug, Clone, Default)]
pub(super) struct Law {
    pub broken: Option<String>,
    pub stepped_down: bool,
    /// Slots whose engine really held a version, ever.
    installed: BTreeMap<Version, BTreeSet<usize>>,
    /// Incarnations whose engine really confirmed a version, ever.
    verified: BTreeSet<(Incarnation, Version)>,
    /// Incarnations that really kept a complete version, ever.
    kept: BTreeSet<(Incarnation, Version)>,
    /// Actions of agents that the controller received.
    prepared: BTreeSet<(u64, MemberName)>,
    committed: BTreeSet<(u64, MemberName)>,
    notified_prepared: BTreeSet<(u64, MemberName)>,
    /// By epoch.
    rosters: BTreeMap<u64, Roster>,
    reported: BTreeMap<Incarnation, MemberState>,
    planned: BTreeMap<MemberName, String>,
    version: Version,
    /// The highest version that ever counted.
    highest: Version,
    /// Versions that status showed as refused.
    refused: BTreeSet<Version>,
    /// Since when most replicas refuse a version that status does not show as refused.
    unheard: BTreeMap<Version, u64>,
    conflict: bool,
    /// The last epoch that was to be written.
    asked: u64,
    /// The last epoch whose feeder was checked.
    fed_in: Option<u64>,
    forming: Option<(u64, u64)>,
    broken_group: Option<(u64, u64)>,
    strays: BTreeMap<usize, u64>,
    pub epochs_allowed: usize,
    /// Longest back-off after the last fault, in total.
    pub longest_hold_off: u64,
}

impl Law {
    fn fail(&mut self, what: impl FnOnce() -> String) {
        if self.broken.is_none() {
            self.broken = Some(what());
        }
    }

    /// Whether the last report of an incarnation was false.
    fn was_lied_to_by(&self, life: &Incarnation) -> bool {
        let invented = |held: &HeldVersion| held.manifest == super::names::INVENTED;
        self.reported.get(life).is_some_and(|state| state.installed.as_ref().is_some_and(invented))
    }

    /// Records the true state of an agent.
    pub(super) fn note_agent(&mut self, slot: usize, agent: &Agent) {
        if let Some(held) = agent.installed.as_ref().filter(|_| !agent.dirty && slot != 0) {
            self.installed.entry(held.version).or_default().insert(slot);
            self.verified.insert((agent.life.clone(), held.version));
        }
        for held in agent.retained.iter().chain(&agent.earlier) {
            self.kept.insert((agent.life.clone(), held.version));
        }
        if let Some(epoch) = agent.epoch.as_ref() {
            self.prepared.insert((epoch.epoch, member(slot)));
            if agent.commit.is_some() {
                self.committed.insert((epoch.epoch, member(slot)));
            }
        }
    }

    /// Records what the controller receives.
    pub(super) fn note_observation(&mut self, observation: &Observation) {
        match observation {
            Observation::State(state) => {
                self.reported.insert(state.incarnation.clone(), (**state).clone());
            }
            Observation::Candidates { candidates, .. } => {
                self.planned = candidates.iter().map(|candidate| (candidate.name.clone(), candidate.pods[0].uid.clone())).collect();
            }
            Observation::Prepared { id, member, .. } => {
                self.notified_prepared.insert((id.epoch, member.clone()));
            }
            Observation::PersistConflict { epoch, .. } if *epoch >= self.asked => self.conflict = true,
            _ => {}
        }
    }

    /// A new controller knows nothing that the earlier one received.
    pub(super) fn controller_restarted(&mut self, _now: u64) {
        self.reported.clear();
        self.planned.clear();
        self.forming = None;
        self.broken_group = None;
        self.conflict = false;
        self.stepped_down = false;
    }

    fn check_roster(&mut self, id: &EpochId, roster: &Roster) {
        let mut next = 0;
        for (position, entry) in roster.members.iter().enumerate() {
            if entry.rank_offset != next {
                self.fail(|| format!("{}: {} has offset {}, not {next}", id.epoch, entry.name, entry.rank_offset));
            }
            if entry.role == Role::Source && position != 0 {
                self.fail(|| format!("{}: the source is not rank 0", id.epoch));
            }
            next = entry.rank_offset + entry.size;
        }
        if roster.world_size != next {
            self.fail(|| format!("{}: world size {} is not {next}", id.epoch, roster.world_size));
        }
        let known = self.rosters.entry(id.epoch).or_insert_with(|| roster.clone());
        if known != roster {
            self.fail(|| format!("{}: two members were sent different rosters", id.epoch));
        }
        if self.rosters.len() > self.epochs_allowed.max(EPOCHS) {
            self.fail(|| "too many epochs".to_owned());
        }
    }
}

impl World {
    fn fail(&mut self, what: impl FnOnce() -> String) {
        self.law.fail(what);
    }

    /// The invariants of a decision.
    pub(super) fn law_on_decision(&mut self, decision: &Decision) {
        let acts = matches!(decision, Decision::PersistEpoch { .. } | Decision::Prepare { .. } | Decision::Commit { .. });
        if acts && self.law.conflict {
            self.fail(|| format!("{decision:?} although another controller decides"));
        }
        match decision {
            Decision::PersistEpoch { epoch } => {
                self.law.asked = *epoch;
                if *epoch > 10_000 {
                    self.fail(|| format!("epoch {epoch} is to be written because an agent named it"));
                }
                let highest = self.law.rosters.keys().copied().max().unwrap_or(0);
                if *epoch <= highest {
                    self.fail(|| format!("epoch {epoch} is used again"));
                }
            }
            Decision::Prepare { to, request } => {
                let id = &request.id;
                if id.epoch > self.stored_epoch {
                    self.fail(|| format!("{} hears of epoch {} before it is written", request.member, id.epoch));
                }
                if self.law.rosters.keys().any(|other| *other > id.epoch) {
                    self.fail(|| format!("epoch {} after a higher one", id.epoch));
                }
                let uid = request.roster.member(&request.member).map(|entry| entry.pods[0].uid.clone());
                let planned = self.law.planned.get(&request.member).cloned();
                let kept = planned.is_none();
                if uid.as_deref() != Some(to.pod_uid.as_str()) || !kept && planned.as_deref() != Some(to.pod_uid.as_str()) {
                    self.fail(|| format!("{} of pod {} is asked, the plan says {planned:?}", request.member, to.pod_uid));
                }
                self.law.check_roster(id, &request.roster);
            }
            Decision::Commit { member, request, .. } => {
                let roster = self.law.rosters.get(&request.id.epoch).cloned().unwrap_or_default();
                for entry in &roster.members {
                    let key = (request.id.epoch, entry.name.clone());
                    if !self.law.prepared.contains(&key) || !self.law.notified_prepared.contains(&key) {
                        self.fail(|| format!("{member} commits {} although {} never prepared it", request.id.epoch, entry.name));
                    }
                    if slot_of(member) == 0 && slot_of(&entry.name) != 0 && !self.law.committed.contains(&key) {
                        self.fail(|| format!("{member} leads {} although {} never committed it", request.id.epoch, entry.name));
                    }
                }
                if let Some(feeder) = &request.feeder {
                    let address = request.addresses.iter().find(|address| &address.member == feeder);
                    let state = address.and_then(|address| self.law.reported.get(&address.incarnation));
                    let current = request.current.as_ref().map_or(0, |held| held.version);
                    // A source may have received a newer one between two waves; it brings that version to all members.
                    let fits = |held: &HeldVersion| held.version == current || request.returned.is_none() && held.version > current;
                    if state.is_none_or(|state| !state.keeps().any(fits)) {
                        self.fail(|| format!("{feeder} is to feed {:?}, which it does not hold", request.current));
                    }
                    self.check_feeder(feeder, request);
                }
                let refused = |held: &HeldVersion| request.refused.contains(&held.version);
                if let Some(current) = request.current.as_ref().filter(|held| refused(held) && self.rules.policy.canary.is_some()) {
                    self.fail(|| format!("{member} is asked to hold {current:?}, which most replicas refuse"));
                }
            }
            _ => {}
        }
    }

    /// The feeder must have kept the version completely. A replica that may hold half an update may feed only if no other member has the
    /// version.
    fn check_feeder(&mut self, feeder: &MemberName, request: &CommitRequest) {
        let Some(current) = request.current.as_ref() else { return };
        let address = |name: &MemberName| request.addresses.iter().find(|address| &address.member == name);
        let Some(life) = address(feeder).map(|address| address.incarnation.clone()) else { return };
        if !self.law.kept.contains(&(life.clone(), current.version)) {
            self.fail(|| format!("{feeder} is to feed {current:?}, which it never kept in full"));
        }
        // Chosen before the first commit; reports between two commits of an epoch come too late.
        if self.law.fed_in.replace(request.id.epoch) == Some(request.id.epoch) {
            return;
        }
        let reported = |life: &Incarnation| self.law.reported.get(life);
        let dirty = |life: &Incarnation| reported(life).is_none_or(|state| state.phase == MemberPhase::Dirty);
        let other = request.addresses.iter().find(|address| {
            !dirty(&address.incarnation) && reported(&address.incarnation).is_some_and(|state| state.keeps().any(|kept| kept == current))
        });
        if dirty(&life)
            && let Some(other) = other.map(|address| address.member.clone())
        {
            self.fail(|| format!("{feeder} is to feed with half an update in its engine, although {other} keeps the version too"));
        }
    }

    /// The invariants after every step.
    pub(super) fn check(&mut self) {
        // Shared during the check, not copied: there are millions of checks.
        let membership = Rc::clone(&self.membership);
        let view = membership.latest();
        self.check_version(view);
        self.check_refused(view);
        self.check_members(view);
        self.check_skew(view);
        self.check_bounds(view);
        self.check_strays(view);
        self.store(view);
    }

    fn check_members(&mut self, view: &MembershipView) {
        for shown in &view.members {
            let slot = slot_of(&shown.name);
            // Its own report determines what status shows about it.
            if shown.incarnation.as_ref().is_some_and(|life| self.law.was_lied_to_by(life)) {
                continue;
            }
            if shown.reason == Reason::BackingOff && !self.slots[slot].guilty {
                self.fail(|| format!("{} is held off although nothing was wrong with it: {}", shown.name, shown.message));
            }
            let ready = matches!(shown.standing, MemberStanding::Ready | MemberStanding::Updating);
            let reported = shown.incarnation.as_ref().and_then(|life| self.law.reported.get(life));
            let dirty = reported.is_some_and(|state| state.phase == MemberPhase::Dirty);
            let installed = reported.and_then(|state| state.installed.as_ref()).map_or(0, |held| held.version);
            if dirty && (ready || !shown.dirty || shown.installed.is_some()) {
                self.fail(|| format!("{} may hold half an update and is shown as {shown:?}", shown.name));
            }
            if let (Role::Rollout, Some(life), Some(held)) = (shown.role, &shown.incarnation, &shown.installed)
                && !self.law.verified.contains(&(life.clone(), held.version))
            {
                self.fail(|| format!("{} is said to serve {held:?}, which its engine never confirmed", shown.name));
            }
            if shown.role != Role::Rollout || !ready {
                continue;
            }
            let Some(life) = &shown.incarnation else {
                self.fail(|| format!("{} is ready and has no agent", shown.name));
                continue;
            };
            let planned = self.law.planned.get(&shown.name);
            if planned.is_some_and(|uid| *uid != life.pod_uid) {
                self.fail(|| format!("{} is ready by an agent of a pod that is gone", shown.name));
            }
            let Some(current) = view.version.as_ref().map(|held| held.version) else { continue };
            let Some(wanted) = view.wanted.as_ref().map(|held| held.version) else { continue };
            // While a group goes back, both versions are in service; after that, only the earlier one.
            let lags = installed < current.min(wanted) || wanted < installed && installed < current;
            let left = wanted == current && view.returned.is_some_and(|returned| returned.left(installed));
            if lags || left || !self.law.verified.contains(&(life.clone(), installed)) {
                self.fail(|| format!("{} counts as ready at {current} with {installed} installed", shown.name));
            }
        }
    }

    /// Every state has an end.
    fn check_bounds(&mut self, view: &MembershipView) {
        let now = self.now;
        let forming = matches!(view.stage, GroupStage::Preparing | GroupStage::Committing)
            || view.stage == GroupStage::Persisting && !self.api_down && !self.rival;
        let epoch = view.id.as_ref().map_or(0, |id| id.epoch);
        self.law.forming = forming.then(|| self.law.forming.filter(|(of, _)| *of == epoch).unwrap_or((epoch, now)));
        if let Some((_, since)) = self.law.forming
            && now > since + BOUND
        {
            self.fail(|| format!("epoch {epoch} has been {:?} for {} ms", view.stage, now - since));
        }
        let gone = |slot: usize| self.slots[slot].agent.is_none() || self.slots[slot].frozen;
        let broken = view.committed && view.members.iter().any(|shown| shown.rank_offset.is_some() && gone(slot_of(&shown.name)));
        let broken = broken && !self.api_down && !self.rival && !self.law.stepped_down;
        self.law.broken_group = broken.then(|| self.law.broken_group.filter(|(of, _)| *of == epoch).unwrap_or((epoch, now)));
        if let Some((_, since)) = self.law.broken_group
            && now > since + BOUND / 2
        {
            self.fail(|| format!("a member of epoch {epoch} is dead or silent for {} ms and nothing happens", now - since));
        }
    }

    /// No agent stays in an ended epoch.
    fn check_strays(&mut self, view: &MembershipView) {
        for slot in 0..self.slots.len() {
            let here = &self.slots[slot];
            // Its report is known only when it arrives.
            let lies = here.lies || here.agent.as_ref().is_some_and(|agent| self.law.was_lied_to_by(&agent.life));
            let heard = here.attached == Some(self.reign) && !here.frozen && !lies && self.now >= here.slow.1.max(here.stream_floor);
            let epoch = here.agent.as_ref().filter(|_| heard).and_then(|agent| agent.epoch.as_ref());
            let stray = epoch.is_some_and(|epoch| match &view.id {
                Some(id) => epoch.epoch < id.epoch,
                None => view.stage == GroupStage::Idle,
            });
            if !stray {
                self.law.strays.remove(&slot);
                continue;
            }
            let since = *self.law.strays.entry(slot).or_insert(self.now);
            if self.now > since + STRAY {
                self.fail(|| format!("{} is still in an epoch that is over", member(slot)));
            }
        }
    }
}

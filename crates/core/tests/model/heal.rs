//! The definition of "healed": every live member serves the version that it should, and status shows that.

use weightsync_core::membership::{GroupStage, MemberStanding};
use weightsync_core::protocol::*;

use super::names::member;
use super::world::{World, version_of};

impl World {
    /// The version that every member reaches in the end, and whether the trainer publishes it. This is the trainer's pending version if it
    /// may be published, otherwise the group's version or its target.
    fn aim(&self, can_publish: bool) -> (Version, bool) {
        let view = self.membership.latest();
        let held_back = view.returned.is_some_and(|returned| returned.pinned || self.wanted <= returned.from);
        // A leader may have received a refusal that was lost with its replica before the coordinator received it.
        let reported = self.slots[0].agent.as_ref().is_some_and(|source| source.gone.contains(&self.wanted));
        if can_publish && !held_back && !reported && !view.refused.contains(&self.wanted) {
            return (self.wanted, true);
        }
        (view.wanted.as_ref().map(|held| held.version).or(version_of(view)).unwrap_or(0), false)
    }

    /// Whether a rollout can never reach that version.
    fn cannot_take(&self, slot: usize, version: Version) -> bool {
        let here = &self.slots[slot];
        here.deaf || self.rules.policy.canary.is_some() && here.sour.contains(&version)
    }

    /// Whether the world is at rest: no member is fed repeatedly with a version that it cannot accept.
    pub(super) fn is_steady(&self) -> bool {
        let version = version_of(self.membership.latest()).unwrap_or(0);
        self.healed().is_ok() && !(1..self.slots.len()).any(|slot| self.cannot_take(slot, version))
    }

    /// Whether every live member serves the trainer's version; otherwise, the reason.
    pub(super) fn healed(&self) -> Result<(), String> {
        let view = self.membership.latest();
        let lives = |slot: &usize| {
            let here = &self.slots[*slot];
            here.exists && !here.terminating && !here.frozen && here.agent.as_ref().is_some_and(|agent| agent.healthy)
        };
        let mut living: Vec<usize> = (0..self.slots.len()).filter(lives).collect();
        let willing = living.iter().filter(|slot| **slot != 0 && !self.slots[**slot].deaf).count();
        let can_publish = living.contains(&0) && willing as u32 >= view.min_ready;
        let (version, publishes) = self.aim(can_publish);
        self.target_is_followed(&living)?;
        living.retain(|slot| !self.cannot_take(*slot, version));
        let keeps = |slot: &usize| {
            let agent = self.slots[*slot].agent.as_ref();
            agent.is_some_and(|agent| view.wanted.as_ref().is_some_and(|wanted| agent.keeps(wanted)))
        };
        for slot in &living {
            let Some(agent) = &self.slots[*slot].agent else { continue };
            let held = agent.installed.as_ref().map_or(0, |held| held.version);
            // Without a trainer and without another member that retains the version, it waits. It must not count as ready.
            let fed = can_publish || version > 0 && living.iter().any(|other| other != slot && keeps(other));
            let left = view.returned.is_some_and(|returned| returned.left(held));
            let lacks = *slot != 0 && fed && (held < version || left || agent.dirty);
            let unpublished = *slot == 0 && publishes && held < version;
            if lacks || unpublished || agent.incoming.is_some() || agent.leading.is_some() {
                return Err(format!("{} holds {held} of {version}, dirty {}", member(*slot), agent.dirty));
            }
        }
        if living.len() == 1 || !can_publish {
            return match view.stage {
                GroupStage::Idle | GroupStage::Committed => Ok(()),
                stage => Err(format!("{stage:?}")),
            };
        }
        if view.stage != GroupStage::Committed || version_of(view).unwrap_or(0) != version {
            return Err(format!("{:?} at version {:?}", view.stage, view.version));
        }
        for slot in &living {
            let commit = self.slots[*slot].agent.as_ref().and_then(|agent| agent.commit.as_ref());
            if commit.map(|commit| &commit.id) != view.id.as_ref() {
                return Err(format!("{} is not in the group", member(*slot)));
            }
            let shown = view.members.iter().find(|shown| shown.name == member(*slot));
            if shown.is_none_or(|shown| shown.standing != MemberStanding::Ready) {
                return Err(format!("{} is shown as {shown:?}", member(*slot)));
            }
        }
        let grouped = view.members.iter().filter(|shown| shown.rank_offset.is_some());
        let grouped = grouped.filter(|shown| !self.cannot_take(super::names::slot_of(&shown.name), version)).count();
        if grouped == living.len() { Ok(()) } else { Err(format!("{grouped} in the group, {} live", living.len())) }
    }

    /// The group returns to the spec's version while any member keeps it.
    fn target_is_followed(&self, living: &[usize]) -> Result<(), String> {
        let wanted = self.membership.latest().wanted.as_ref().map(|held| held.version);
        let Some(target) = self.rules.target.filter(|target| wanted != Some(*target)) else { return Ok(()) };
        let keeps = |slot: &&usize| self.slots[**slot].agent.as_ref().is_some_and(|agent| agent.keeps(&super::names::held(target)));
        match living.iter().find(keeps) {
            Some(slot) => {
                Err(format!("{} keeps version {target}, which the spec names, and the group is to hold {wanted:?}", member(*slot)))
            }
            None => Ok(()),
        }
    }
}

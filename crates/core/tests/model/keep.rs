//! An abstract agent's versions besides the one that it serves: those that it keeps, those that its canary refused, and those that the
//! group abandoned. Also: how a feeder goes back by itself.

use weightsync_core::protocol::*;

use super::agent::{Agent, INSTALL, Incoming, Reminder, Wants};
use super::names::{held, member};

impl Agent {
    /// The rollback in its epoch.
    pub(super) fn returned(&self) -> Option<Returned> {
        self.commit.as_ref().and_then(|commit| commit.returned)
    }

    /// Whether the group abandoned that version.
    pub(super) fn left(&self, version: Version) -> bool {
        self.returned().is_some_and(|returned| returned.left(version))
    }

    /// Whether it keeps that version completely.
    pub(super) fn keeps(&self, wanted: &HeldVersion) -> bool {
        self.retained.iter().chain(&self.earlier).any(|kept| kept == wanted)
    }

    /// A version arrived completely. The previous one stays at least until the engine accepted this one.
    pub(super) fn put(&mut self, held: HeldVersion) {
        if self.retained.as_ref() == Some(&held) {
            return;
        }
        self.earlier.retain(|kept| *kept != held);
        self.earlier.splice(0..0, self.retained.replace(held));
        self.trim(1);
    }

    /// The engine or the group accepted a version: the agent keeps as many as the rules allow, this one first.
    pub(super) fn took(&mut self, held: &HeldVersion) {
        if self.keeps(held) {
            self.put(held.clone());
        }
        self.refused.retain(|refused| refused.held.version > held.version);
        self.trim(0);
    }

    fn trim(&mut self, more: usize) {
        // The version of the group, or its target, is removed last.
        let current = self.commit.as_ref().and_then(|commit| commit.current.as_ref());
        self.earlier.sort_by_key(|kept| Some(kept) != current);
        let keep = self.prepared.as_ref().map_or(1, |prepared| prepared.policy.keep.max(1) as usize);
        self.earlier.truncate(keep - 1 + more);
    }

    pub(super) fn asks_canary(&self) -> bool {
        self.prepared.as_ref().is_some_and(|prepared| prepared.policy.canary.is_some())
    }

    /// Its canary refused a version: the agent does not keep it.
    pub(super) fn refuse_version(&mut self, held: HeldVersion) {
        self.earlier.retain(|kept| *kept != held);
        if self.retained.as_ref() == Some(&held) {
            self.retained = (!self.earlier.is_empty()).then(|| self.earlier.remove(0));
        }
        self.refused.retain(|refused| refused.held != held);
        self.refused.push(RefusedVersion { held, measured: "no number".to_owned() });
        self.refused.sort_by_key(|refused| refused.held.version);
    }

    /// Whether its engine is paused by a leader: in the worst case it then fails its probes. While it loads its own copy, the agent counts
    /// no failures.
    pub(super) fn paused(&self) -> bool {
        self.incoming.as_ref().is_some_and(|incoming| incoming.installing && incoming.leader != self.slot)
    }

    /// Engines differ in speed: the first one has the version while the others load it.
    pub(super) fn install_time(&self) -> u64 {
        INSTALL + 5 * self.slot as u64
    }

    /// For a source: whether a number may be published.
    pub(super) fn may_publish(&self, version: Version) -> bool {
        let held_back = self.returned().is_some_and(|returned| returned.pinned || version <= returned.from);
        !held_back && !self.gone.contains(&version)
    }

    /// For a source: the group refused a version, and its trainer gets the error.
    pub(super) fn give_up(&mut self, version: Version) {
        self.gone.insert(version);
        self.pending = self.pending.filter(|pending| *pending != version);
    }

    /// For a source: the versions in a commit.
    pub(super) fn hear_of_versions(&mut self) {
        let Some(commit) = self.commit.clone().filter(|_| self.slot == 0) else { return };
        commit.refused.iter().for_each(|version| self.give_up(*version));
        self.pending = self.pending.filter(|pending| self.may_publish(*pending));
    }

    /// A feeder whose own engine does not serve the version goes first, from its own copy: no other member can feed it. Once in an epoch.
    pub(super) fn goes_first(&mut self, wants: &mut Wants) -> bool {
        let Some(commit) = self.commit.clone().filter(|_| self.slot != 0) else { return false };
        let Some(current) = commit.current.as_ref().filter(|current| commit.feeder == Some(member(self.slot)) && self.keeps(current))
        else {
            return false;
        };
        if self.incoming.as_ref().is_some_and(|incoming| incoming.leader == self.slot) {
            return true;
        }
        let due = self.dirty || self.installed.as_ref().is_some_and(|installed| self.left(installed.version));
        if !due || self.went_back.as_ref() == Some(&commit.id) || self.incoming.is_some() || !self.healthy {
            return false;
        }
        self.went_back = Some(commit.id.clone());
        self.attempts += 1;
        let id = UpdateId { epoch: commit.id.clone(), version: current.version, attempt: self.attempts };
        self.incoming = Some(Incoming { id: id.clone(), leader: self.slot, delivered: true, installing: true, heard: 0 });
        wants.reminders.push((self.install_time(), Reminder::Installed(id, self.start)));
        debug_assert_eq!(*current, held(current.version));
        true
    }
}

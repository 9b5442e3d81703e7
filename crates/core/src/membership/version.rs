//! Which version is current, which members lack it, and which can feed it.
//!
//! The version moves when enough replicas report that their engines confirmed it, or when a source, which waits for the same, reports it.
//! It moves only to a version that exists (`proven.rs`). A leader's progress never moves it, and it goes back only by `target.rs`.

use std::collections::BTreeMap;

use crate::protocol::{HeldVersion, Incarnation, MemberName, MemberState, Reason, Role};

use super::Membership;

impl Membership {
    /// Derives the current version from the members' states.
    pub(super) fn learn_version(&mut self) {
        let mut installed: BTreeMap<(u64, &str), u32> = BTreeMap::new();
        let min_ready = self.config.policy.min_ready.max(1);
        for candidate in &self.candidates {
            let Some(state) = self.agents.of(candidate).and_then(|(_, agent)| agent.state.as_ref()) else { continue };
            let Some(held) = state.installed.as_ref().filter(|_| !state.phase.must_not_serve()) else { continue };
            // Also not for the first version: some accepted it, and most refused it.
            if self.is_refused(held.version) || !self.exists(held) {
                continue;
            }
            // A source's report counts for as many replicas as it waited for.
            let weight = if candidate.role == Role::Source { min_ready } else { 1 };
            *installed.entry((held.version, held.manifest.as_str())).or_default() += weight;
        }
        let reached = installed.iter().rfind(|(_, count)| **count >= min_ready);
        let reached = reached.map(|((version, manifest), _)| HeldVersion { version: *version, manifest: (*manifest).to_owned() });
        let highest = self.version.as_ref().map(|_| self.highest);
        if let Some(reached) = reached.filter(|reached| highest.is_none_or(|highest| reached.version > highest)) {
            let message = format!("version {} is served by enough replicas (minReady is {min_ready})", reached.version);
            self.highest = reached.version;
            self.version = Some(reached);
            self.event(Reason::VersionReached, message, None, false);
        }
    }

    /// Whether a replica must be fed the version that all should hold.
    pub(super) fn lacks(&self, state: &MemberState) -> bool {
        self.wanted().map_or_else(|| is_dirty(state), |wanted| self.does_not_serve(state, wanted))
    }

    /// Whether a replica serves neither the version that counts nor the one that the group goes back to.
    pub(super) fn is_behind(&self, state: &MemberState) -> bool {
        self.lacks(state) && self.version.as_ref().is_none_or(|version| self.does_not_serve(state, version))
    }

    /// Whether a replica does not serve that version completely, nor a newer one that exists and that the group did not go back from.
    fn does_not_serve(&self, state: &MemberState, wanted: &HeldVersion) -> bool {
        if state.role == Role::Source {
            return false;
        }
        is_dirty(state)
            || state.installed.as_ref().is_none_or(|installed| {
                installed.version < wanted.version
                    || installed.version == wanted.version && !wanted.manifest.is_empty() && installed.manifest != wanted.manifest
                    || installed.version > wanted.version && (installed.version <= self.highest || !self.exists(installed))
            })
    }

    /// Whether a member keeps the version that all should hold, complete and verified.
    fn retains(&self, state: &MemberState) -> bool {
        let Some(wanted) = self.wanted() else { return false };
        state.keeps().any(|kept| kept.version == wanted.version && (wanted.manifest.is_empty() || kept.manifest == wanted.manifest))
    }

    /// The feeder: the source if it retains the version, else a rollout that does. A rollout that also serves it is preferred; one whose
    /// own engine holds half an update is the last choice (its copy is complete). Equal candidates take turns, so that one that keeps
    /// nothing does not block the others.
    pub(super) fn choose_feeder<'a>(&self, members: impl Iterator<Item = (&'a MemberName, &'a Incarnation)>) -> Option<MemberName> {
        let (mut best, mut alike) = (0, Vec::new());
        for (name, life) in members {
            let Some(state) = self.agents.get(life).and_then(|agent| agent.state.as_ref()) else { continue };
            let rank = match (self.retains(state), state.role) {
                (false, _) => continue,
                (true, Role::Source) => 3,
                (true, Role::Rollout) if !self.lacks(state) => 2,
                (true, Role::Rollout) => u8::from(!state.phase.must_not_serve()),
            };
            if alike.is_empty() || rank > best {
                (best, alike) = (rank, vec![name]);
            } else if rank == best {
                alike.push(name);
            }
        }
        let turn = usize::try_from(self.repairs.saturating_sub(1)).unwrap_or_default();
        let turn = turn.checked_rem(alike.len())?;
        alike.get(turn).map(|name| (*name).clone())
    }
}

/// Whether the engine of a replica may hold half an update.
fn is_dirty(state: &MemberState) -> bool {
    state.role == Role::Rollout && state.phase.must_not_serve()
}

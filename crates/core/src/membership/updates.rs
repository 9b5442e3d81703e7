//! The leaders' reports of their updates: whether one runs, which members fail in it, and when a failed one needs a new epoch.
//!
//! Judges by progress: a report that does not change for too long means that no update runs. It never moves the version; replicas do that.

use std::collections::BTreeMap;

use crate::protocol::{EpochId, Incarnation, InstallStep, MemberName, UpdatePhase, UpdatePolicy, UpdateView};

/// Wait before the first epoch that a failed update causes; doubles with each failure in a row.
const RETRY_BASE_MS: u64 = 250;
/// Longest such wait.
const RETRY_MAX_MS: u64 = 30_000;
/// A member that refuses or fails this often in a row is left out of the next epoch.
const MISSES: u32 = 2;

#[derive(Debug, Clone)]
struct Track {
    view: UpdateView,
    began_at: u64,
    changed_at: u64,
}

/// A member that refused or failed too often.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Repeated {
    pub member: MemberName,
    pub message: String,
}

/// The effect of a report.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Noted {
    /// Another update than the one before.
    pub began: bool,
    /// Members to leave out.
    pub repeated: Vec<Repeated>,
    /// Why it failed, when it did just now.
    pub failed: Option<String>,
}

/// Updates of one object, by leader.
#[derive(Debug, Clone, Default)]
pub(super) struct Updates {
    tracks: BTreeMap<Incarnation, Track>,
    misses: BTreeMap<MemberName, u32>,
    failures: u32,
    retry: Option<Retry>,
}

/// A new epoch that a failed update causes.
#[derive(Debug, Clone)]
struct Retry {
    /// The epoch in which the update failed.
    failed_in: EpochId,
    /// When the new one is due.
    at: u64,
    leader: Incarnation,
    /// Whether only members were fed: else a publish waits for the new epoch.
    feeding: bool,
}

impl Updates {
    pub(super) fn note(&mut self, now: u64, from: &Incarnation, view: UpdateView) -> Noted {
        let mut noted = Noted::default();
        let key = |view: &UpdateView| (view.id.clone(), view.version, view.attempt, view.feeding);
        let before = self.tracks.get(from).filter(|track| key(&track.view) == key(&view));
        if let Some(before) = before {
            if before.view.phase.is_over() || before.view == view {
                return noted;
            }
        } else {
            noted.began = true;
        }
        let began_at = before.map_or(now, |track| track.began_at);
        if view.phase.is_over() {
            noted.repeated = self.count_misses(&view);
            let pending = self.retry.as_ref().filter(|retry| retry.failed_in == view.id);
            let publish_waits = pending.is_some_and(|retry| !retry.feeding);
            if view.phase == UpdatePhase::Done {
                // A feeding repairs a failed one of its leader, and never a failed publish.
                if !view.feeding || pending.is_none_or(|retry| retry.feeding && retry.leader == *from) {
                    self.failures = 0;
                    self.retry = None;
                }
            } else {
                let wait = RETRY_BASE_MS.checked_shl(self.failures).unwrap_or(RETRY_MAX_MS).min(RETRY_MAX_MS);
                self.failures = self.failures.saturating_add(1).min(32);
                let feeding = view.feeding && !publish_waits;
                self.retry = Some(Retry { failed_in: view.id.clone(), at: now.saturating_add(wait), leader: from.clone(), feeding });
                noted.failed = Some(view.failure.clone().unwrap_or_else(|| "no cause was given".to_owned()));
            }
        }
        self.tracks.insert(from.clone(), Track { view, began_at, changed_at: now });
        noted
    }

    /// Counts members that refused or failed. If no member got further, the cause is common and not a member's fault.
    fn count_misses(&mut self, view: &UpdateView) -> Vec<Repeated> {
        let missed = |step: InstallStep| matches!(step, InstallStep::Refused | InstallStep::Failed);
        let common = view.members.iter().all(|member| missed(member.step));
        let mut repeated = Vec::new();
        for member in &view.members {
            if member.step == InstallStep::Installed {
                self.misses.remove(&member.member);
            } else if missed(member.step) && !common {
                let count = self.misses.entry(member.member.clone()).or_default();
                *count += 1;
                if *count >= MISSES {
                    self.misses.remove(&member.member);
                    let message = member.reason.clone().unwrap_or_else(|| "no cause was given".to_owned());
                    repeated.push(Repeated { member: member.member.clone(), message });
                }
            }
        }
        repeated
    }

    /// Until when an update of this epoch counts as running without a new report.
    pub(super) fn running_until(&self, now: u64, id: &EpochId, policy: &UpdatePolicy) -> Option<u64> {
        let ends = self.tracks.values().filter(|track| &track.view.id == id && !track.view.phase.is_over()).map(|track| {
            // A staged update waits for its trainer, within the time of the whole update.
            let silence = if track.view.phase == UpdatePhase::Staged { policy.update_timeout_ms } else { policy.silence_ms };
            let longest = track.began_at.saturating_add(policy.update_timeout_ms).saturating_add(policy.silence_ms);
            track.changed_at.saturating_add(silence).min(longest)
        });
        ends.filter(|end| now < *end).max()
    }

    /// Whether a running update of this epoch switches or feeds that member now.
    pub(super) fn has(&self, now: u64, id: &EpochId, policy: &UpdatePolicy, member: &MemberName) -> bool {
        self.running_until(now, id, policy).is_some()
            && self.tracks.values().filter(|track| &track.view.id == id && !track.view.phase.is_over()).any(|track| {
                let busy = |step| matches!(step, InstallStep::Receiving | InstallStep::Delivered | InstallStep::Installing);
                track.view.members.iter().any(|progress| &progress.member == member && busy(progress.step))
            })
    }

    /// Whether a member holds that version complete, in a running update of this epoch, and waits for its switch.
    pub(super) fn awaits_its_turn(&self, now: u64, id: &EpochId, policy: &UpdatePolicy, member: &MemberName, version: u64) -> bool {
        let running = self.running_until(now, id, policy).is_some() && policy.max_unavailable > 0;
        let of = |track: &&Track| &track.view.id == id && track.view.version == version && track.view.phase == UpdatePhase::Activate;
        running
            && self.tracks.values().filter(of).any(|track| {
                track.view.members.iter().any(|progress| &progress.member == member && progress.step == InstallStep::Delivered)
            })
    }

    /// When the new epoch after a failed update of this epoch is due.
    pub(super) fn retry_at(&self, id: &EpochId) -> Option<u64> {
        self.retry.as_ref().filter(|retry| retry.failed_in == *id).map(|retry| retry.at)
    }

    /// The view that changed last.
    pub(super) fn latest(&self) -> Option<&UpdateView> {
        self.tracks.values().max_by_key(|track| track.changed_at).map(|track| &track.view)
    }

    /// Moves all limits by the time without a step.
    pub(super) fn forgive(&mut self, ms: u64) {
        for track in self.tracks.values_mut() {
            track.began_at = track.began_at.saturating_add(ms);
            track.changed_at = track.changed_at.saturating_add(ms);
        }
    }

    /// Forgets leaders and members that are gone, but not the last report: status shows it.
    pub(super) fn prune(&mut self, known: impl Fn(&Incarnation) -> bool, is_member: impl Fn(&MemberName) -> bool) {
        self.misses.retain(|name, _| is_member(name));
        let latest = self.tracks.iter().max_by_key(|(_, track)| track.changed_at).map(|(from, _)| from.clone());
        self.tracks.retain(|from, _| known(from) || Some(from) == latest.as_ref());
    }
}

//! The last update attempts of one object: for the web page, and to count each attempt once. Bounded; nothing is stored, so a restarted
//! controller begins with an empty history.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::watch;

use super::now;
use weightsync_core::membership::MembershipView;
use weightsync_core::protocol::{InstallStep, UpdatePhase, UpdateView, cut};

/// Attempts that are kept for one object.
pub(crate) const KEPT: usize = 20;
/// Phases that are kept for one attempt; more than exist.
const PHASES: usize = 8;
/// Members that are kept for one attempt.
const MEMBERS: usize = 64;
/// Longest text of a failure in bytes.
const FAILURE: usize = 512;

/// A report of an update that was just added to a history.
pub struct Noted<'a> {
    /// The group at that time.
    pub view: &'a MembershipView,
    /// The update.
    pub update: &'a UpdateView,
    /// When it was noted, in ms since 1970.
    pub at: u64,
    /// Whether this report is the first that shows its end.
    pub ended: bool,
}

/// Notes every report of an update, and calls `noted` for it; ends with the view.
pub async fn record(mut view: watch::Receiver<MembershipView>, history: Arc<Mutex<History>>, mut noted: impl FnMut(&Noted<'_>)) {
    loop {
        let seen = view.borrow_and_update().clone();
        if let Some(update) = &seen.update {
            let at = now();
            let ended = history.lock().note(update, at);
            noted(&Noted { view: &seen, update, at, ended });
        }
        if view.changed().await.is_err() {
            return;
        }
    }
}

/// One attempt to deliver a version, as its leader last reported it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Attempt {
    version: u64,
    attempt: u32,
    epoch: u64,
    /// Whether it was a feeding of members that lacked the version.
    feeding: bool,
    /// `Begin`, `Transfer`, `Verify`, `Staged`, `Activate`, `Done` or `Failed`.
    phase: UpdatePhase,
    bytes: u64,
    /// When it was first seen here, in ms since 1970.
    begun: u64,
    /// Finished phases with their times in ms.
    phases: Vec<(String, u64)>,
    installed: usize,
    members: usize,
    failure: Option<String>,
    /// Bytes that each member received and checked, and whether it installed the version.
    received: Vec<MemberBytes>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct MemberBytes {
    member: String,
    bytes: u64,
    installed: bool,
}

impl Attempt {
    fn of(update: &UpdateView, begun: u64) -> Self {
        let installed = |step: InstallStep| step == InstallStep::Installed;
        Self {
            version: update.version,
            attempt: update.attempt,
            epoch: update.id.epoch,
            feeding: update.feeding,
            phase: update.phase,
            bytes: update.total_bytes,
            begun,
            phases: update.phases_ms.iter().take(PHASES).cloned().collect(),
            installed: update.members.iter().filter(|member| installed(member.step)).count(),
            members: update.members.len(),
            received: update
                .members
                .iter()
                .take(MEMBERS)
                .map(|member| MemberBytes { member: member.member.to_string(), bytes: member.bytes, installed: installed(member.step) })
                .collect(),
            failure: update.failure.as_deref().map(|failure| cut(failure, FAILURE)),
        }
    }

    fn is(&self, update: &UpdateView) -> bool {
        (self.version, self.attempt, self.epoch, self.feeding) == (update.version, update.attempt, update.id.epoch, update.feeding)
    }

    fn is_over(&self) -> bool {
        self.phase.is_over()
    }
}

/// The last attempts of one object, the latest last.
#[derive(Debug, Default)]
pub struct History(VecDeque<Attempt>);

impl History {
    /// Records the state of an attempt at `now` (ms since 1970); true if it ended.
    pub fn note(&mut self, update: &UpdateView, now: u64) -> bool {
        if let Some(known) = self.0.iter_mut().rev().find(|known| known.is(update)) {
            let was_over = known.is_over();
            *known = Attempt::of(update, known.begun);
            return known.is_over() && !was_over;
        }
        let fresh = Attempt::of(update, now);
        let over = fresh.is_over();
        self.0.push_back(fresh);
        while self.0.len() > KEPT {
            self.0.pop_front();
        }
        over
    }

    /// The attempts, the latest first.
    pub fn latest(&self) -> Vec<Attempt> {
        self.0.iter().rev().cloned().collect()
    }
}

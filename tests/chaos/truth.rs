//! Compares what an engine says of itself with what the roster and the pod's `/readyz` say of it. Decides what is a difference, and how long
//! one may last. Asks no one.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;
use weightsync_core::membership::{MemberStanding, MembershipView};

use crate::fixture::{HEALTH_PERIOD, UPDATE, member};

/// What a busy machine adds to each bound, in ms.
const BUSY_MS: u64 = 5_000;
pub const BUSY: Duration = Duration::from_millis(BUSY_MS);

/// The longest difference outside of an update: an engine is unhealthy after three probes in a row, each of which ends within a second
/// (`UpdateFile::policy`) and follows the one before after a health period. The margin is for a busy machine.
pub const STEADY: Duration = Duration::from_millis(3 * (1_000 + HEALTH_PERIOD) + BUSY_MS);

/// The longest difference with an update in it: an engine may be paused for the update's own deadline. Then the bound of [`STEADY`] begins.
pub const UPDATING: Duration = Duration::from_secs(UPDATE.as_secs() + STEADY.as_secs());

/// An engine's answers to the test's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    /// Every tensor is that of this version.
    Version(u64),
    /// The tensors are of no published version.
    Mixture,
    /// It did not say.
    Silent,
}

/// An engine, by its own answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Truth {
    pub holds: Holds,
    /// Whether it computed a token before its deadline.
    pub runs: bool,
}

/// What others say of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The row of the roster; none without one.
    pub standing: Option<MemberStanding>,
    /// The version in that row.
    pub installed: Option<u64>,
    /// Whether `/readyz` of the pod answered 200.
    pub ready: bool,
    /// Whether an update may hold the engine: one runs, or the roster says until when it is paused.
    pub update: bool,
}

impl Claim {
    /// What the coordinator's roster and a pod's page say.
    pub fn new(view: &MembershipView, number: usize, ready: bool) -> Self {
        let name = member(number);
        let row = view.members.iter().find(|row| row.name.0 == name);
        let standing = row.map(|row| row.standing);
        let paused = row.is_some_and(|row| row.paused_until.is_some());
        let running = view.update.as_ref().is_some_and(|update| !update.phase.is_over());
        Self {
            standing,
            installed: row.and_then(|row| row.installed.as_ref()).map(|held| held.version),
            ready,
            update: running || paused || standing == Some(MemberStanding::Updating),
        }
    }

    fn in_service(&self) -> bool {
        matches!(self.standing, Some(MemberStanding::Ready | MemberStanding::Updating))
    }

    /// Whether the agent that speaks for the engine is heard, so that the row is about now.
    fn is_heard(&self) -> bool {
        self.in_service() || self.standing == Some(MemberStanding::Behind)
    }
}

/// One way in which both do not agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Difference {
    /// The roster counts it as ready, and it computes nothing.
    RosterReadyEngineStopped,
    /// Its pod is ready, and it computes nothing.
    PodReadyEngineStopped,
    /// The roster names a version, and it holds another one.
    RosterNamesAnotherVersion,
    /// Its pod is ready, and it holds no version.
    PodReadyEngineMixed,
}

/// All differences between a claim and what is so.
pub fn differences(claim: &Claim, truth: Truth) -> Vec<Difference> {
    let mixed = truth.holds == Holds::Mixture;
    // An engine that says nothing does not run, which is a difference of its own.
    let other = |installed: u64| mixed || matches!(truth.holds, Holds::Version(version) if version != installed);
    [
        (claim.in_service() && !truth.runs, Difference::RosterReadyEngineStopped),
        (claim.ready && !truth.runs, Difference::PodReadyEngineStopped),
        (claim.is_heard() && claim.installed.is_some_and(other), Difference::RosterNamesAnotherVersion),
        (claim.ready && mixed, Difference::PodReadyEngineMixed),
    ]
    .into_iter()
    .filter_map(|(so, difference)| so.then_some(difference))
    .collect()
}

/// Since when a difference lasts.
#[derive(Debug, Clone, Copy)]
struct Since {
    first: Instant,
    /// When it was first seen, or last seen with an update.
    steady: Instant,
}

/// The differences of one engine that last.
#[derive(Debug, Default)]
pub struct Ledger(BTreeMap<Difference, Since>);

impl Ledger {
    /// Takes one look: the claims before and after the engine was asked. Names each difference that lasts longer than it may, once.
    pub fn look(&mut self, now: Instant, before: &Claim, truth: Truth, after: &Claim) -> Vec<(Difference, Duration)> {
        let both = differences(after, truth);
        let seen: Vec<_> = differences(before, truth).into_iter().filter(|difference| both.contains(difference)).collect();
        self.0.retain(|difference, _| seen.contains(difference));
        let mut late = Vec::new();
        for difference in seen {
            let since = self.0.entry(difference).or_insert(Since { first: now, steady: now });
            if before.update || after.update {
                since.steady = now;
            }
            let lasted = now.duration_since(since.first);
            if now.duration_since(since.steady) > STEADY || lasted > UPDATING {
                late.push((difference, lasted));
                *since = Since { first: now, steady: now };
            }
        }
        late
    }
}

#[cfg(test)]
#[path = "truth/tests.rs"]
mod tests;

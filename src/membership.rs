//! When a group is formed, fenced and formed anew.
//!
//! Pure: observations and a clock value in, decisions out. Never waits, never sends: `coordinator` carries the decisions out. It never
//! trusts what an earlier life of a member, an older epoch or another object says, and it leaves what works alone.

mod config;
mod decision;
mod observation;
mod view;

pub use config::{BackoffConfig, JoinPolicy, MembershipConfig, Restored};
pub use decision::Decision;
pub use observation::{LeftOut, LeftOutKind, Observation};
pub use view::{Degradation, GroupStage, MemberStanding, MemberView, MembershipView};

/// Membership of one object. One owner calls [`step`](Self::step) for each observation, in the order of their arrival.
#[derive(Debug)]
pub struct Membership {
    config: MembershipConfig,
    restored: Restored,
}

impl Membership {
    /// Starts with what was known before. Decides nothing until the first `Candidates`.
    pub fn new(config: MembershipConfig, restored: Restored) -> Self {
        Self { config, restored }
    }

    /// Takes one observation at the time `now_ms` (any clock that never goes back) and tells what is to be done.
    pub fn step(&mut self, _now_ms: u64, observation: Observation) -> Vec<Decision> {
        if let Observation::Configure(config) = observation {
            self.config = *config;
        }
        Vec::new()
    }

    /// When to call [`step`](Self::step) with `Tick` at the latest, if nothing else happens before.
    pub fn next_wakeup(&self) -> Option<u64> {
        None
    }

    /// Everything that status needs.
    pub fn view(&self) -> MembershipView {
        MembershipView {
            stage: GroupStage::Idle,
            epoch: self.restored.epoch,
            id: None,
            committed: false,
            world_size: 0,
            version: self.restored.version.clone(),
            feeder: None,
            update: None,
            members: Vec::new(),
            total: 0,
            ready: 0,
            min_ready: self.config.policy.min_ready,
            degraded: Vec::new(),
            released: false,
        }
    }
}

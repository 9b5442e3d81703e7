//! Brings the group's current version to rollouts that lack it: joiners, restarted engines, replicas that missed it.
//!
//! Decides which rollouts lack it, by the members' reports, and when a failed one is tried again: each backs off alone. It never lowers a
//! member's version while another leader may be publishing, unless the group went back from that version. Nor does it lower a version that
//! enough members serve to make it count, as after a publish with an unknown outcome.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::{Instant, sleep_until};

use super::table::{Failure, Switching};
use super::{Leader, Plan, Stage};
use crate::attempts::Attempts;
use crate::group::Epoch;
use crate::locks::lock;
use crate::version_source::VersionSource;
use weightsync_core::protocol::{EpochId, HeldVersion, MemberName, MemberPhase, MemberState, Role, UpdatePhase};
use weightsync_core::weights::{DigestAlgorithm, Manifest};
use weightsync_net::backoff::Backoff;

/// First and longest wait after a member could not be fed.
const AGAIN: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));

/// How often it is looked whether there is something to feed now.
const LOOK: Duration = Duration::from_millis(500);

pub struct Copy {
    pub held: HeldVersion,
    pub algorithm: DigestAlgorithm,
    pub source: Box<dyn VersionSource>,
}

/// Who keeps what others may lack.
#[async_trait]
pub trait Holder: Send + Sync {
    /// What this agent is to bring to members of the epoch that lack it; none when it does not hold it or is not asked to.
    fn to_feed(&self, epoch: &Epoch) -> Option<Copy>;

    /// Compares the copy of a version that reached no one with its digests, and drops one that is damaged: another member feeds then.
    async fn suspect(&self, _held: &HeldVersion) {}
}

pub struct Feeder {
    leader: Arc<Leader>,
    holder: Arc<dyn Holder>,
    attempts: Arc<Attempts>,
    held_off: Mutex<HeldBack>,
}

/// Members that could not be fed, in one epoch: the next one begins again.
#[derive(Default)]
struct HeldBack {
    epoch: Option<EpochId>,
    members: HashMap<MemberName, HeldOff>,
}

struct HeldOff {
    until: Instant,
    backoff: Backoff,
}

impl Feeder {
    pub fn new(leader: Arc<Leader>, holder: Arc<dyn Holder>, attempts: Arc<Attempts>) -> Self {
        Self { leader, holder, attempts, held_off: Mutex::default() }
    }

    /// Feeds anyone who lacks the current version, for ever. May be dropped at any time: what runs is given up then.
    pub async fn run(&self) {
        let mut standing = self.leader.core().standing();
        loop {
            let epoch = standing.borrow_and_update().committed().cloned();
            let Some(epoch) = epoch else {
                if standing.changed().await.is_err() {
                    return;
                }
                continue;
            };
            if !epoch.feeds() && self.leader.core().me().role == Role::Rollout {
                if standing.changed().await.is_err() {
                    return;
                }
                continue;
            }
            let mut known = self.leader.peers(&epoch).watch();
            let states: HashMap<MemberName, MemberState> = {
                let known = known.borrow_and_update();
                known.iter().filter_map(|(name, peer)| Some((name.clone(), peer.state.clone()?))).collect()
            };
            if let Some(copy) = self.holder.to_feed(&epoch) {
                let lacking = self.lacking(&epoch, &copy.held, &states);
                if !lacking.is_empty() {
                    self.feed(&epoch, copy, lacking).await;
                    continue;
                }
            }
            tokio::select! {
                changed = standing.changed() => if changed.is_err() { return },
                _ = known.changed() => {}
                () = sleep_until(Instant::now() + LOOK) => {}
            }
        }
    }

    /// Members that lack the version and can take it now, in the order of the chain.
    fn lacking(&self, epoch: &Epoch, held: &HeldVersion, states: &HashMap<MemberName, MemberState>) -> Vec<MemberName> {
        let may_lower = self.leader.core().me().role == Role::Source || !epoch.has_source();
        let now = Instant::now();
        let mut held_off = lock(&self.held_off);
        if held_off.epoch.as_ref() != Some(epoch.id()) {
            *held_off = HeldBack { epoch: Some(epoch.id().clone()), members: HashMap::new() };
        }
        let held_off = &mut held_off.members;
        let mut lacking = epoch.rollouts();
        let enough = usize::try_from(epoch.prepared.policy.min_ready.max(1)).unwrap_or(usize::MAX);
        let counts = |version: &HeldVersion| {
            let serves = |state: &&MemberState| state.phase == MemberPhase::Ready && state.installed.as_ref() == Some(version);
            let serving = lacking.iter().filter_map(|name| states.get(name)).filter(serves).count();
            serving >= enough && !epoch.commit.refused.contains(&version.version)
        };
        let later: Vec<HeldVersion> = states.values().filter_map(|state| state.installed.clone()).filter(counts).collect();
        lacking.retain(|name| {
            let Some(state) = states.get(name) else { return false };
            let there = state.epoch.as_ref() == Some(epoch.id()) && matches!(state.phase, MemberPhase::Ready | MemberPhase::Dirty);
            let lacks = match &state.installed {
                None => true,
                Some(installed) => {
                    let lowers =
                        installed.version <= held.version || epoch.left(installed.version) || may_lower && !later.contains(installed);
                    !installed.is(held) && lowers
                }
            };
            if there && !lacks {
                held_off.remove(name);
            }
            there && lacks && state.healthy && held_off.get(name).is_none_or(|off| off.until <= now)
        });
        lacking
    }

    async fn feed(&self, epoch: &Arc<Epoch>, copy: Copy, members: Vec<MemberName>) {
        let Copy { held, algorithm, mut source } = copy;
        let attempt = self.attempts.next(held.version);
        tracing::info!(version = held.version, attempt, members = ?members, "members that lack the current version are fed");
        let plan = Plan {
            epoch: epoch.clone(),
            version: held.version,
            attempt,
            feeding: true,
            manual: false,
            algorithm,
            members: members.clone(),
            min_ready: 1,
            known: Some(held.manifest.clone()),
            must: None,
            source: source.as_mut(),
            keep: None,
            stage: &mut NoStage,
        };
        // Given up in the middle: no one is held off for that.
        let outcome = self.leader.lead(plan).await;
        let fed = outcome.map(|brought| brought.installed).unwrap_or_default();
        if fed.is_empty() {
            self.holder.suspect(&held).await;
        }
        let mut held_off = lock(&self.held_off);
        let held_off = &mut held_off.members;
        for member in members {
            if fed.contains(&member) {
                held_off.remove(&member);
                continue;
            }
            let now = Instant::now();
            let off = held_off.entry(member).or_insert_with(|| HeldOff { until: now, backoff: Backoff::new(AGAIN.0, AGAIN.1) });
            off.until = now + off.backoff.failed();
        }
    }
}

/// No one waits for a feeding, and no one is asked.
struct NoStage;

#[async_trait]
impl Stage for NoStage {
    fn progress(&mut self, _phase: UpdatePhase, _bytes: u64) {}

    fn streamed(&mut self, _manifest: &Manifest, _held: &HeldVersion) -> Result<(), Failure> {
        Ok(())
    }

    async fn staged(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn switching(&mut self, _known: Switching) {}
}

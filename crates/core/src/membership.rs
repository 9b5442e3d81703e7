//! When a group is formed, fenced and formed again.
//!
//! Pure: observations and a clock value in, decisions out. Never waits, never sends: `coordinator` acts on the decisions. It never trusts
//! messages of an earlier incarnation of a member, of an older epoch or of another object, and it does not disturb a working group.
//!
//! It decides from the known state, not from the latest event ([`Observation`]s are facts, and each can be repeated). After each step it
//! makes the same checks in the same order, so a lost message costs only time.
//!
//! 1. `agents`: which agents are reachable, and which incarnation represents a member.
//! 2. `proven`: which versions exist. `canary`: which version most replicas refuse; `version`: which one enough replicas hold; `target`:
//!    the target of the spec.
//! 3. `preflight`: members whose edges slow all others. `assess`: which members are eligible for a group, and why the others are not.
//! 4. `need`: whether the group must change, why, and when a new one is due.
//! 5. `forming`: the new epoch is written, prepared, committed.
//! 6. `ending`: agents in an ended epoch are notified.

mod adopt;
mod agents;
mod assess;
mod backoff;
mod canary;
mod config;
mod decision;
mod ending;
mod forming;
mod group;
mod hindrance;
mod need;
mod observation;
mod observe;
mod preflight;
mod proven;
mod report;
mod skew;
mod target;
#[cfg(test)]
mod tests;
mod transport;
mod updates;
mod version;
mod view;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use config::{BackoffConfig, JoinPolicy, MembershipConfig, Restored};
pub use decision::Decision;
pub use observation::Observation;
pub use view::{Degradation, GroupStage, MemberStanding, MemberView, MembershipView};

use crate::plan::Candidate;
pub use crate::plan::LeftOut;
use crate::protocol::{HeldVersion, MemberName, Reason, Version};
use agents::Agents;
use backoff::{Backoff, Failure, Weight};
use group::{Forming, Group, Urgent};
use preflight::Requests;
use proven::Proven;
use updates::Updates;

/// Most iterations of one step; more would be an endless loop.
const MOVES: usize = 64;

/// How far an agent's reported epoch may be above the last one that a controller wrote. Status may have been restored from a backup, so a
/// higher number is accepted; a number that no controller can have written is not.
const EPOCHS_AHEAD: u64 = 1 << 20;

/// Membership of one object. One owner calls [`step`](Self::step) for each observation, in the order of their arrival.
#[derive(Debug, Clone)]
pub struct Membership {
    config: MembershipConfig,
    term: u64,
    /// Time of the last step.
    now: u64,
    /// When the next step is due at the latest.
    wake: Option<u64>,
    /// End of the wait for agents of an earlier controller's group; unset before the first step.
    adopt_until: Option<u64>,
    /// Latest possible end of that wait.
    adopt_most: u64,
    /// Whether there was an epoch before this controller.
    had_epoch: bool,
    /// The highest epoch that was persisted or seen.
    epoch: u64,
    /// The highest epoch that a controller wrote, as far as this one read or wrote it.
    written: u64,
    /// Epochs up to this one have ended.
    over: u64,
    /// Versions that sources announced.
    proven: Proven,
    version: Option<HeldVersion>,
    /// The highest version that ever counted; above `version` once the group went back.
    highest: u64,
    /// Versions that most replicas refused, with what they measured where this controller counted.
    refused: BTreeMap<Version, String>,
    /// The version to go back to (from the spec, or after a refusal), once a member that keeps it was found.
    target: Option<HeldVersion>,
    planned: bool,
    candidates: Vec<Arc<Candidate>>,
    left_out: Vec<LeftOut>,
    agents: Agents,
    backoff: Backoff,
    updates: Updates,
    group: Option<Group>,
    forming: Option<Forming>,
    /// When the last request for a preflight was followed, and the request that waits since.
    preflight: Requests,
    /// Why the next group is due at once.
    urgent: Option<Urgent>,
    /// Since when a first group would be useful.
    viable_since: Option<u64>,
    /// Since when members that are not in the group could be, and which version was current then.
    waiting: BTreeMap<MemberName, (u64, Option<u64>)>,
    /// Since when a member of the group lacks the version without being fed.
    lack_since: Option<u64>,
    /// Epochs made for members that lack the version, since none lacked it.
    repairs: u32,
    last_offsets: BTreeMap<MemberName, u32>,
    suspended: bool,
    deleted: bool,
    /// Why another controller decides now.
    stopped: Option<String>,
    /// Whether the last step that was due came late.
    overslept: bool,
    /// The view after the last step.
    view: MembershipView,
    out: Vec<Decision>,
}

impl Membership {
    /// Starts with the restored state. Decides nothing until the first `Candidates`.
    pub fn new(config: MembershipConfig, restored: Restored) -> Self {
        let mut membership = Self {
            config,
            term: restored.term,
            now: 0,
            wake: None,
            adopt_until: None,
            adopt_most: 0,
            had_epoch: restored.epoch > 0,
            epoch: restored.epoch,
            written: restored.epoch,
            over: 0,
            highest: restored
                .version
                .iter()
                .map(|held| held.version)
                .chain(restored.refused.iter().copied())
                .fold(restored.highest, u64::max),
            proven: Proven::default(),
            version: restored.version,
            refused: restored.refused.into_iter().map(|number| (number, "see its Event".to_owned())).collect(),
            target: None,
            planned: false,
            candidates: Vec::new(),
            left_out: Vec::new(),
            agents: Agents::default(),
            backoff: Backoff::default(),
            updates: Updates::default(),
            group: None,
            forming: None,
            preflight: Requests::default(),
            urgent: None,
            viable_since: None,
            waiting: BTreeMap::new(),
            lack_since: None,
            repairs: 0,
            last_offsets: BTreeMap::new(),
            suspended: false,
            deleted: false,
            stopped: None,
            overslept: false,
            view: MembershipView::empty(),
            out: Vec::new(),
        };
        membership.view = membership.look(&assess::Assessment::default());
        membership
    }

    /// Everything that status needs, as it was after the last step.
    pub fn view(&self) -> MembershipView {
        self.view.clone()
    }

    /// The same, without a copy.
    pub fn latest(&self) -> &MembershipView {
        &self.view
    }

    /// Takes one observation at the time `now_ms` (any monotonic clock) and returns the decisions.
    pub fn step(&mut self, now_ms: u64, observation: Observation) -> Vec<Decision> {
        if self.stopped.is_some() {
            return Vec::new();
        }
        if self.is_only_a_heartbeat(now_ms, &observation) {
            return Vec::new();
        }
        self.set_clock(now_ms);
        self.observe(observation);
        self.settle();
        std::mem::take(&mut self.out)
    }

    /// Fast path: a heartbeat of a healthy agent changes only its silence limit; with a thousand agents these are most observations.
    fn is_only_a_heartbeat(&mut self, now_ms: u64, observation: &Observation) -> bool {
        let Observation::Alive { from } = observation else { return false };
        let silent = self.agents.get(from).is_some_and(|agent| matches!(agent.link, agents::Link::Silent(_)));
        if silent || self.wake.is_none_or(|wake| now_ms >= wake) {
            return false;
        }
        self.agents.alive(self.now.max(now_ms), from);
        true
    }

    /// When to call [`step`](Self::step) with `Tick` at the latest, if nothing else happens before.
    pub fn next_wakeup(&self) -> Option<u64> {
        self.wake.filter(|_| self.stopped.is_none())
    }

    /// Advances the time. Time without a call is not counted as silence: the members' responses may be in the queue, and get half a silence
    /// limit to arrive. (Only once in a row; otherwise a caller that is always late would never find a silent member.)
    fn set_clock(&mut self, now_ms: u64) {
        let now = self.now.max(now_ms);
        let tolerated = self.config.agent_silence_ms / 2;
        if let Some(late) = self.wake.and_then(|wake| now.checked_sub(wake)) {
            if late > tolerated {
                let excuse = late.saturating_add(if self.overslept { 0 } else { tolerated });
                self.agents.forgive(excuse);
                self.updates.forgive(excuse);
                if let Some(Forming::Round(round)) = &mut self.forming {
                    round.deadline = round.deadline.saturating_add(excuse);
                    round.settle_at = round.settle_at.map(|at| at.saturating_add(excuse));
                }
            }
            self.overslept = late > tolerated;
        }
        self.now = now;
        if self.adopt_until.is_none() {
            self.wait_for_announcements();
        }
    }

    /// Repeats all checks until nothing changes.
    fn settle(&mut self) {
        self.wake = None;
        let assessment = self.decide();
        let view = self.look(&assessment);
        let before = std::mem::replace(&mut self.view, view);
        self.tell_degradations(&before.degraded);
    }

    /// Decides; returns the final assessment.
    fn decide(&mut self) -> assess::Assessment {
        if self.stopped.is_some() {
            return self.assess();
        }
        if let Some(at) = self.agents.find_silent(self.now, self.config.agent_silence_ms) {
            self.wake_at(at);
        }
        self.follow_request();
        self.learn_refused();
        self.learn_version();
        self.learn_target();
        if self.suspended || self.deleted {
            self.let_go();
            return self.assess();
        }
        if !self.planned {
            return assess::Assessment::default();
        }
        self.heed_preflight();
        let mut assessment = self.assess();
        for _ in 0..MOVES {
            if !self.advance(&assessment) {
                break;
            }
            assessment = self.assess();
        }
        for outcast in assessment.out.values() {
            if let Some(at) = outcast.retry_at {
                self.wake_at(at);
            }
        }
        self.tell_strays(&assessment);
        let group = self.group.as_ref();
        let in_group = |name: &MemberName| group.is_some_and(|group| group.lives.contains_key(name) && !group.lost.contains_key(name));
        if let Some(at) = self.backoff.forgive(self.now, self.config.backoff, in_group) {
            self.wake_at(at);
        }
        assessment
    }

    /// One change, if one is due.
    fn advance(&mut self, assessment: &assess::Assessment) -> bool {
        match &self.forming {
            Some(Forming::Round(_)) => return self.advance_round(assessment),
            Some(Forming::Persisting(_)) => {
                self.persist_again();
                return self.find_lost(assessment);
            }
            None => {}
        }
        if self.group.is_none() && self.adopt(assessment) {
            return true;
        }
        self.find_lost(assessment);
        self.note_waiting(assessment);
        let Some(why) = self.need(assessment) else { return false };
        let broken = self.group.as_ref().is_none_or(|group| !group.lost.is_empty() || !group.leaving.is_empty());
        if self.is_viable(&assessment.eligible) {
            self.persist(why);
            true
        } else if broken && self.group.is_some() {
            self.dissolve(why);
            true
        } else {
            false
        }
    }

    /// Whether a time has come; otherwise schedules a step for it.
    fn due(&mut self, at: u64) -> bool {
        if self.now >= at {
            return true;
        }
        self.wake_at(at);
        false
    }

    fn wake_at(&mut self, at: u64) {
        self.wake = Some(self.wake.map_or(at, |wake| wake.min(at)));
    }

    fn event(&mut self, reason: Reason, message: impl Into<String>, member: Option<MemberName>, warning: bool) {
        self.out.push(Decision::Event { reason, message: message.into(), member, warning });
    }

    /// UIDs of a member's pods: from the group, from the round, or else from the plan. A loss may be observed when the successor is known
    /// already.
    fn pods_of(&self, member: &MemberName) -> std::collections::BTreeSet<String> {
        let grouped = self.group.iter().flat_map(|group| &group.candidates);
        let forming = self.forming.iter().flat_map(|forming| match forming {
            Forming::Round(round) => round.members.iter().map(|member| &member.candidate).collect(),
            Forming::Persisting(_) => Vec::new(),
        });
        let found = grouped.chain(forming).chain(&self.candidates).find(|candidate| &candidate.name == member);
        found.map_or_else(Default::default, |candidate| candidate.pods.iter().map(|pod| pod.uid.clone()).collect())
    }

    /// Records a failure of a member, and creates an Event.
    fn strike(&mut self, member: &MemberName, weight: Weight, reason: Reason, message: &str) {
        let failure = Failure { member, pods: self.pods_of(member), weight, reason, message };
        self.backoff.strike(self.now, self.config.backoff, failure);
        self.event(reason, message, Some(member.clone()), true);
    }
}

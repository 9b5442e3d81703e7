//! When a group is formed, fenced and formed again.
//!
//! Pure: observations and a clock value in, decisions out. Never waits, never sends: `coordinator` carries the decisions out. It never
//! trusts what an earlier life of a member, an older epoch or another object says, and it leaves what works alone.
//!
//! Everything is judged from what is known now, not from what just happened ([`Observation`]s are facts, and each can be repeated): after
//! each step the same questions are asked in the same order, so a message that was lost costs time and nothing else.
//!
//! 1. `agents`: who can be spoken with, and which life speaks for a member.
//! 2. `proven`: which versions exist. `canary`: which version most refuse; `version`: which one enough replicas hold; `target`: which one the spec asks for.
//! 3. `preflight`: whose edges hold up all others. `assess`: who could be in a group, and why the others could not.
//! 4. `need`: whether the group is as it should be; if not, why, and when a new one is due.
//! 5. `forming`: the new epoch is written, prepared, committed.
//! 6. `ending`: anyone who is in an epoch that is over is informed.

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
use group::{Forming, Group};
use proven::Proven;
use updates::Updates;

/// How often one step may change its mind; more would be a circle.
const MOVES: usize = 64;

/// How far an epoch that an agent reports may lie above the last one that a controller wrote. Status may have been restored from a backup, so
/// a higher number is believed; a number that no controller can have written is not.
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
    /// Until when agents of an earlier controller's group are waited for; unset before the first step.
    adopt_until: Option<u64>,
    /// No word of a member moves that further than this.
    adopt_most: u64,
    /// Whether there was an epoch before this controller.
    had_epoch: bool,
    /// The highest epoch that was persisted or seen.
    epoch: u64,
    /// The highest epoch that a controller wrote, as far as this one read or wrote it.
    written: u64,
    /// Epochs up to this one are over.
    over: u64,
    /// Versions that sources announced.
    proven: Proven,
    version: Option<HeldVersion>,
    /// The highest version that ever counted; above `version` once the group went back.
    highest: u64,
    /// Versions that most replicas refused, with what they measured where this controller counted.
    refused: BTreeMap<Version, String>,
    /// The version that the spec names, or that a refused one is left for, once somebody was found to keep it.
    target: Option<HeldVersion>,
    planned: bool,
    candidates: Vec<Arc<Candidate>>,
    left_out: Vec<LeftOut>,
    agents: Agents,
    backoff: Backoff,
    updates: Updates,
    group: Option<Group>,
    forming: Option<Forming>,
    /// Why the next group is due at once.
    urgent: Option<Reason>,
    /// Since when a first group would make sense.
    viable_since: Option<u64>,
    /// Since when members that are not in the group could be, and which version was current then.
    waiting: BTreeMap<MemberName, (u64, Option<u64>)>,
    /// Since when a member of the group lacks the version while no one brings it.
    lack_since: Option<u64>,
    /// Epochs made for members that lack the version, since no one lacked it.
    repairs: u32,
    last_offsets: BTreeMap<MemberName, u32>,
    suspended: bool,
    deleted: bool,
    /// Why another controller decides now.
    stopped: Option<String>,
    /// Whether the last step that was due came late.
    overslept: bool,
    /// What was seen after the last step.
    view: MembershipView,
    out: Vec<Decision>,
}

impl Membership {
    /// Starts with what was known before. Decides nothing until the first `Candidates`.
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
            refused: restored.refused.into_iter().map(|number| (number, "as its Event said".to_owned())).collect(),
            target: None,
            planned: false,
            candidates: Vec::new(),
            left_out: Vec::new(),
            agents: Agents::default(),
            backoff: Backoff::default(),
            updates: Updates::default(),
            group: None,
            forming: None,
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

    /// Takes one observation at the time `now_ms` (any clock that never goes back) and tells what is to be done.
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

    /// A heartbeat of an agent that is well changes nothing but its limit; with a thousand agents it is most of what happens.
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

    /// Time goes on. Time in which no one called us is not held against members: their answers may lie in the queue, and have half a
    /// silence to come out of it. (Only once in a row, or anyone who always comes late would never find anybody silent.)
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

    /// Asks all questions until nothing changes any more.
    fn settle(&mut self) {
        self.wake = None;
        let assessment = self.decide();
        let view = self.look(&assessment);
        let before = std::mem::replace(&mut self.view, view);
        self.tell_degradations(&before.degraded);
    }

    /// Decides; tells how everybody was judged in the end.
    fn decide(&mut self) -> assess::Assessment {
        if self.stopped.is_some() {
            return self.assess();
        }
        if let Some(at) = self.agents.find_silent(self.now, self.config.agent_silence_ms) {
            self.wake_at(at);
        }
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

    /// Whether a time has come; otherwise makes sure that a step is taken then.
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

    /// UIDs of the pods that a member has in the group, in the round, or else by what is wanted: a loss is heard of when its successor
    /// may be known already.
    fn pods_of(&self, member: &MemberName) -> std::collections::BTreeSet<String> {
        let grouped = self.group.iter().flat_map(|group| &group.candidates);
        let forming = self.forming.iter().flat_map(|forming| match forming {
            Forming::Round(round) => round.members.iter().map(|member| &member.candidate).collect(),
            Forming::Persisting(_) => Vec::new(),
        });
        let found = grouped.chain(forming).chain(&self.candidates).find(|candidate| &candidate.name == member);
        found.map_or_else(Default::default, |candidate| candidate.pods.iter().map(|pod| pod.uid.clone()).collect())
    }

    /// Holds a failure against one member, and tells people.
    fn strike(&mut self, member: &MemberName, weight: Weight, reason: Reason, message: &str) {
        let failure = Failure { member, pods: self.pods_of(member), weight, reason, message };
        self.backoff.strike(self.now, self.config.backoff, failure);
        self.event(reason, message, Some(member.clone()), true);
    }
}

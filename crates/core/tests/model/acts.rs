//! The actions of users and trainers besides publishing good versions: a target version, a bad version, engines that accept none for a
//! while. Each scenario is played without a fault first, and then with every fault at its steps.

use weightsync_core::membership::MembershipConfig;
use weightsync_core::protocol::{CanaryPolicy, UpdatePolicy, Version};

use super::event::Event;
use super::faults::Fault;
use super::names::config;
use super::play::{Played, every_fault};
use super::world::World;

/// Time for an act to take effect: the trainer checks its version each second.
pub(super) const SEEN: u64 = 2_500;
/// Longest act, without a fault.
const LONGEST: u64 = 40_000;
/// Most epochs that one fault may cause in a scenario: engines that accept nothing cause some by themselves.
const EPOCHS: usize = 60;
/// Longest back-off of members that refused versions for a while.
const HOLD_OFF: u64 = 120_000;

/// One action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Act {
    /// The trainer has another version.
    Publish,
    /// The same, but the canary of these rollouts refuses it.
    PublishBad(&'static [usize]),
    /// The spec names a version, or none any more.
    Target(Option<Version>),
    /// These engines accept no version; the others do.
    Deaf(&'static [usize]),
}

/// Actions after the first version, in a group with its own rules.
#[derive(Debug, Clone, Copy)]
pub(super) struct Story {
    pub name: &'static str,
    pub rollouts: usize,
    pub min_ready: u32,
    pub keep: u32,
    pub canary: bool,
    pub max_skew: Option<Version>,
    pub acts: &'static [Act],
    /// The actions during which faults are injected, as in `from..to`.
    pub faults_in: (usize, usize),
    /// Faults are injected at one of so many steps: worlds with more replicas take longer.
    pub one_step_in: u64,
}

/// A group returns to a version that it keeps, stays there, and continues with a higher one.
pub(super) const GOING_BACK: Story = Story {
    name: "going back",
    rollouts: 2,
    min_ready: 1,
    keep: 2,
    canary: false,
    max_skew: None,
    acts: &[Act::Publish, Act::Target(Some(1)), Act::Target(None)],
    faults_in: (1, 3),
    one_step_in: 1,
};

/// One replica accepts a version, so that it counts, and then the others refuse it.
pub(super) const REFUSED_BY_MOST: Story = Story {
    name: "refused by most",
    rollouts: 3,
    min_ready: 1,
    keep: 2,
    canary: true,
    max_skew: None,
    acts: &[Act::PublishBad(&[2, 3])],
    faults_in: (0, 1),
    one_step_in: 3,
};

/// All refuse a version, which never counts.
pub(super) const REFUSED_BY_ALL: Story =
    Story { name: "refused by all", rollouts: 2, acts: &[Act::PublishBad(&[1, 2])], one_step_in: 1, ..REFUSED_BY_MOST };

/// One of three refuses a version: this affects only that replica.
pub(super) const REFUSED_BY_ONE: Story = Story { name: "refused by one", acts: &[Act::PublishBad(&[2])], ..REFUSED_BY_MOST };

/// One replica lacks two versions, and may serve while it lacks one.
pub(super) const LEFT_BEHIND: Story = Story {
    name: "late member",
    rollouts: 3,
    min_ready: 2,
    keep: 1,
    canary: false,
    max_skew: Some(1),
    acts: &[Act::Deaf(&[3]), Act::Publish, Act::Publish, Act::Deaf(&[])],
    faults_in: (2, 4),
    one_step_in: 5,
};

/// One replica has two newer versions that never counted, and another lacks one version.
pub(super) const AHEAD: Story = Story {
    name: "ahead",
    acts: &[Act::Deaf(&[3]), Act::Publish, Act::Deaf(&[2, 3]), Act::Publish, Act::Publish, Act::Deaf(&[])],
    faults_in: (4, 6),
    ..LEFT_BEHIND
};

impl Story {
    fn rules(&self) -> MembershipConfig {
        let canary = CanaryPolicy { prompt: String::new(), max_tokens: 1, least_log_prob_milli: -1, greatest_log_prob_milli: 0 };
        let rules = config(self.min_ready);
        let policy = UpdatePolicy { keep: self.keep, max_skew: self.max_skew, canary: self.canary.then_some(canary), ..rules.policy };
        MembershipConfig { policy, ..rules }
    }

    /// Plays the scenario without faults. Calls `at` before each step of the actions with faults.
    pub(super) fn play(&self, mut at: impl FnMut(&World, &Event)) -> Result<Played, String> {
        let mut world = World::with_rules(self.rollouts, self.rules());
        world.acts = self.acts.iter().copied().collect();
        (world.law.epochs_allowed, world.law.longest_hold_off) = (EPOCHS, HOLD_OFF);
        let (from, to) = self.faults_in;
        let (mut begun, mut played) = (0, 0);
        loop {
            if let Some(event) = world.play_one() {
                if (from + 1..=to).contains(&played) {
                    at(&world, &event);
                }
                world.deliver(event);
            }
            if let Some(broken) = &world.law.broken {
                return Err(format!("without any fault: {broken}"));
            }
            let healed = if world.now < begun + SEEN { Err("it has only begun".to_owned()) } else { world.healed() };
            match healed {
                Ok(()) => {
                    let Some(act) = world.acts.pop_front() else { return Ok(Played { worlds: 1, steps: world.steps }) };
                    world.act(act);
                    (begun, played) = (world.now, played + 1);
                }
                Err(why) if world.now > begun + LONGEST => {
                    return Err(format!("without any fault: act {played} is not done after {LONGEST} ms: {why}"));
                }
                Err(_) => {}
            }
        }
    }
}

impl World {
    /// Performs the action.
    pub(super) fn act(&mut self, act: Act) {
        match act {
            Act::Publish => self.wanted += 1,
            Act::PublishBad(slots) => {
                self.wanted += 1;
                for slot in slots {
                    // A member that refuses what the others accept may be backed off.
                    self.slots[*slot].guilty = true;
                    self.slots[*slot].sour.push(self.wanted);
                }
            }
            Act::Target(target) => {
                self.rules.target = target;
                self.configure();
            }
            Act::Deaf(deaf) => {
                for slot in 0..self.slots.len() {
                    self.slots[slot].deaf = deaf.contains(&slot);
                    self.slots[slot].guilty |= deaf.contains(&slot);
                }
            }
        }
        for slot in &mut self.slots {
            if let Some(agent) = &mut slot.agent {
                (agent.sour, agent.deaf) = (slot.sour.clone(), slot.deaf);
            }
        }
    }
}

/// Plays the basic faults at the steps of the scenario, and all others at every fifth step.
fn exhaust(story: &Story, at_least: u64) {
    let (mut played, mut steps, mut failures) = (Played::default(), 0_u64, Vec::new());
    let (faults, sampled) = (Fault::basic(story.rollouts), Fault::more(story.rollouts));
    if let Err(why) = story.play(|_, _| {}) {
        panic!("{}:\nThe first:\n{why}", story.name);
    }
    let outcome = story.play(|world, event| {
        steps += 1;
        if !steps.is_multiple_of(story.one_step_in) {
            return;
        }
        every_fault(world, event, &faults, &mut played, &mut failures);
        if steps.is_multiple_of(5 * story.one_step_in) {
            every_fault(world, event, &sampled, &mut played, &mut failures);
        }
    });
    failures.extend(outcome.err());
    if let Some(first) = failures.first() {
        let heads: Vec<String> = failures.iter().map(|failure| failure.lines().take(2).collect::<Vec<_>>().join("\n")).collect();
        panic!("{} of the first {} worlds failed:\n{}\n\nThe first:\n{first}", failures.len(), played.worlds, heads.join("\n"));
    }
    println!("{}: {steps} steps, {} worlds, {} events", story.name, played.worlds, played.steps);
    assert!(played.worlds >= at_least, "only {} worlds were played", played.worlds);
}

#[test]
fn rollback_survives_every_single_fault_at_every_step() {
    exhaust(&GOING_BACK, 500);
}

#[test]
fn counted_version_most_refuse_is_left_under_any_fault() {
    exhaust(&REFUSED_BY_MOST, 500);
}

#[test]
fn version_all_refuse_never_counts_under_any_fault() {
    exhaust(&REFUSED_BY_ALL, 500);
}

#[test]
fn a_version_that_one_refuses_stays_whatever_fails_meanwhile() {
    exhaust(&REFUSED_BY_ONE, 500);
}

#[test]
fn lagging_replica_serves_within_the_skew_limit() {
    exhaust(&LEFT_BEHIND, 500);
}

#[test]
fn replica_ahead_takes_no_other_out_of_service() {
    exhaust(&AHEAD, 500);
}

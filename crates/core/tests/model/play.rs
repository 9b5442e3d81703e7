//! Plays one scenario: a group is formed, two versions are published, a fault is injected at one step, and the group heals.

use super::acts::SEEN;
use super::event::Event;
use super::faults::{Fault, is_message};
use super::world::World;

/// Every live member serves the current version again within this time after the end of a fault.
pub(super) const HEAL: u64 = 60_000;
/// The next version is served within this time.
const NEXT: u64 = 20_000;
/// A broken rule makes thousands of worlds fail; no more worlds are played after so many failures.
pub(super) const ENOUGH: usize = 5;

/// How much was played.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Played {
    pub worlds: u64,
    pub steps: u64,
}

/// Least ready replicas in a group with so many rollouts.
pub(super) fn min_ready(rollouts: usize) -> u32 {
    if rollouts > 2 { 2 } else { 1 }
}

impl World {
    /// Plays until every member serves the wanted version. The error names what did not hold.
    pub(super) fn heal(&mut self, until: u64) -> Result<(), String> {
        let mut until = until;
        let longest = until + self.law.longest_hold_off;
        let heal = HEAL + self.law.longest_hold_off / 10;
        loop {
            if let Some(event) = self.play_one() {
                self.deliver(event);
            }
            if let Some(broken) = &self.law.broken {
                return Err(broken.clone());
            }
            // A member that failed often is backed off for longer than everything else takes.
            let held_off = self.membership.latest().members.iter().filter_map(|shown| shown.retry_at).max().unwrap_or(0);
            until = until.max(held_off.min(longest));
            if self.now >= until {
                let healed = self.healed();
                if healed.is_ok() || self.now > until + heal {
                    return healed.map_err(|why| format!("not healed {} ms after the end of the fault: {why}", self.now - until));
                }
            }
        }
    }

    /// Plays on after a fault that ends at `until`. `steady` is the epoch of a healthy group that this fault must not disturb.
    pub(super) fn recover(&mut self, fault: Fault, until: u64, steady: Option<u64>) -> Result<(), String> {
        let disturbed = |world: &Self| match steady.filter(|epoch| world.stored_epoch != *epoch) {
            Some(_) => Err("the restarted controller disturbed what worked".to_owned()),
            None => Ok(()),
        };
        if fault == Fault::Rival {
            // No more decisions are needed; a working group continues.
            let end = self.now + 12_000;
            while self.now < end && self.law.broken.is_none() {
                if let Some(event) = self.play_one() {
                    self.deliver(event);
                }
            }
            return self.law.broken.clone().map_or(Ok(()), Err);
        }
        self.heal(until)?;
        disturbed(self)?;
        if self.held.is_some() {
            self.change_rules();
            self.heal(self.now + 2_000)?;
        }
        let no_one_can_publish = self.slots[0].frozen || self.slots[0].agent.is_none();
        let no_one_listens = self.slots.iter().skip(1).filter(|slot| slot.agent.is_some() && !slot.frozen).count();
        if no_one_can_publish || (no_one_listens as u32) < self.rules.policy.min_ready {
            return Ok(());
        }
        let more = !self.acts.is_empty();
        while let Some(act) = self.acts.pop_front() {
            self.act(act);
            self.heal(self.now + SEEN)?;
        }
        self.wanted += 1;
        let begin = self.now;
        self.heal(self.now + 1)?;
        if !more {
            disturbed(self)?;
        }
        if self.now > begin + NEXT + self.law.longest_hold_off {
            Err(format!("the next version took {} ms", self.now - begin))
        } else {
            Ok(())
        }
    }
}

/// Plays the scenario without faults. Calls `at` before each of its steps.
pub(super) fn story(rollouts: usize, mut at: impl FnMut(&World, &Event)) -> Result<Played, String> {
    let mut world = World::new(rollouts, min_ready(rollouts));
    loop {
        if let Some(event) = world.play_one() {
            at(&world, &event);
            world.deliver(event);
        }
        if let Some(broken) = &world.law.broken {
            return Err(format!("without any fault: {broken}"));
        }
        if world.now > 30_000 {
            return Err(format!("without any fault: not done after {} ms: {:?}", world.now, world.healed()));
        }
        if world.healed().is_ok() && world.queue.is_empty() {
            if world.wanted == 2 {
                return Ok(Played { worlds: 1, steps: world.steps });
            }
            world.wanted += 1;
        }
    }
}

/// Plays every fault at one step, until there are enough failures.
pub(super) fn every_fault(world: &World, event: &Event, faults: &[Fault], played: &mut Played, failures: &mut Vec<String>) {
    for fault in faults {
        if failures.len() >= ENOUGH {
            return;
        }
        if fault.is_about_the_message() && !is_message(event) {
            continue;
        }
        let mut other = world.clone();
        let steady = other.is_steady();
        let epoch = other.stored_epoch;
        let until = other.inject(*fault, event.clone());
        let steady = (*fault == Fault::ControllerRestarted && steady).then_some(epoch);
        let outcome = other.recover(*fault, until, steady);
        played.worlds += 1;
        played.steps += other.steps - world.steps;
        if let Err(why) = outcome {
            let what = World::describe(*fault, event);
            let trace = if failures.is_empty() { retrace(world, event, *fault) } else { String::new() };
            failures.push(format!("{} rollouts, {} ms: {what}\n  {why}\n{trace}", world.slots.len() - 1, world.now));
        }
    }
}

/// Plays the failed world again and prints every line.
fn retrace(world: &World, event: &Event, fault: Fault) -> String {
    let mut again = world.clone();
    again.trace = Some(Vec::new());
    let until = again.inject(fault, event.clone());
    let _ = again.recover(fault, until, None);
    let lines = again.trace.take().unwrap_or_default();
    let shown = lines.iter().filter(|line| !line.contains(" Alive(")).take(150).cloned().collect::<Vec<_>>();
    shown.join("\n")
}

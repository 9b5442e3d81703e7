//! Every single fault at every single step.

use super::faults::Fault;
use super::play::{Played, every_fault, story};
use crate::membership::mutation::Switch;

fn exhaust(rollouts: usize, at_least: u64) {
    let faults = Fault::all(rollouts);
    let mut played = Played::default();
    let mut steps = 0;
    let mut failures = Vec::new();
    let outcome = story(rollouts, Switch::default(), |world, event| {
        steps += 1;
        failures.extend(every_fault(world, event, &faults, &mut played));
    });
    failures.extend(outcome.err());
    if let Some(first) = failures.first() {
        let heads: Vec<String> = failures.iter().map(|failure| failure.lines().take(2).collect::<Vec<_>>().join("\n")).collect();
        panic!("{} of {} worlds failed:\n{}\n\nThe first:\n{first}", failures.len(), played.worlds, heads.join("\n"));
    }
    println!("{rollouts} rollouts: {steps} steps x {} faults: {} worlds, {} events", faults.len(), played.worlds, played.steps);
    assert!(played.worlds >= at_least, "only {} worlds were played", played.worlds);
}

#[test]
fn one_rollout_survives_every_single_fault_at_every_step() {
    exhaust(1, 1);
}

#[test]
fn two_rollouts_survive_every_single_fault_at_every_step() {
    exhaust(2, 1);
}

#[test]
fn three_rollouts_survive_every_single_fault_at_every_step() {
    exhaust(3, 1);
}

#[test]
fn four_rollouts_survive_every_single_fault_at_every_step() {
    exhaust(4, 1);
}

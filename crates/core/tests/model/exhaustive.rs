//! Every single fault at every single step.

use super::faults::Fault;
use super::play::{Played, every_fault, story};

/// Plays all faults of `faults` at every step, and those of `sampled` at every fifth.
fn exhaust(rollouts: usize, faults: &[Fault], sampled: &[Fault], at_least: u64) {
    let mut played = Played::default();
    let mut steps = 0;
    let mut failures = Vec::new();
    let outcome = story(rollouts, |world, event| {
        steps += 1;
        every_fault(world, event, faults, &mut played, &mut failures);
        if steps % 5 == 0 {
            every_fault(world, event, sampled, &mut played, &mut failures);
        }
    });
    failures.extend(outcome.err());
    if let Some(first) = failures.first() {
        let heads: Vec<String> = failures.iter().map(|failure| failure.lines().take(2).collect::<Vec<_>>().join("\n")).collect();
        panic!("{} of the first {} worlds failed:\n{}\n\nThe first:\n{first}", failures.len(), played.worlds, heads.join("\n"));
    }
    println!(
        "{rollouts} rollouts: {steps} steps x {} faults (and {} more at every fifth step): {} worlds, {} events",
        faults.len(),
        sampled.len(),
        played.worlds,
        played.steps
    );
    assert!(played.worlds >= at_least, "only {} worlds were played", played.worlds);
}

fn all(rollouts: usize) -> Vec<Fault> {
    [Fault::basic(rollouts), Fault::more(rollouts)].concat()
}

#[test]
fn one_rollout_survives_every_single_fault_at_every_step() {
    exhaust(1, &all(1), &[], 2_500);
}

#[test]
fn two_rollouts_survive_every_single_fault_at_every_step() {
    exhaust(2, &all(2), &[], 5_500);
}

#[test]
fn three_rollouts_survive_every_single_fault_at_every_step() {
    exhaust(3, &Fault::basic(3), &Fault::more(3), 3_000);
}

#[test]
fn four_rollouts_survive_every_single_fault_at_every_step() {
    exhaust(4, &Fault::basic(4), &Fault::more(4), 4_500);
}

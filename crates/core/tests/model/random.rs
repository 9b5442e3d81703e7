//! Random sequences of faults, one after another and overlapping, end well once they stop.
//!
//! The same sequences are played each time; `PROPTEST_CASES` sets another number. Sequences that once broke an invariant stay in `found`.

use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use super::faults::{Fault, is_message};
use super::play::{Played, min_ready};
use super::world::World;

/// Sequences that are played each time.
const CASES: u32 = 1000;

/// A fault that ends, for a slot of any world.
fn fault() -> impl Strategy<Value = Fault> {
    let slot = 0_usize..5;
    prop_oneof![
        (slot.clone(), 1_000_u64..12_000).prop_map(|(slot, ms)| Fault::Silent(slot, Some(ms))),
        (slot.clone(), 10_u64..8_000).prop_map(|(slot, ms)| Fault::Killed(slot, Some(ms))),
        slot.clone().prop_map(Fault::Restarted),
        slot.clone().prop_map(Fault::Replaced),
        slot.clone().prop_map(Fault::AgentRestarted),
        slot.clone().prop_map(Fault::EngineRestarted),
        (slot.clone(), 1_000_u64..8_000).prop_map(|(slot, ms)| Fault::Unhealthy(slot, ms)),
        slot.clone().prop_map(Fault::Terminated),
        (slot.clone(), 100_u64..7_000, 1_000_u64..10_000).prop_map(|(slot, by, ms)| Fault::Slow(slot, by, ms)),
        (slot.clone(), 1_u32..4).prop_map(|(slot, times)| Fault::Refuses(slot, times)),
        (slot.clone(), 1_u32..3).prop_map(|(slot, times)| Fault::BadInstall(slot, times)),
        (slot, 1_000_u64..9_000).prop_map(|(slot, ms)| Fault::CutOff(slot, ms)),
        Just(Fault::Lost),
        (1_u64..8_000).prop_map(Fault::Late),
        (1_u64..12_000).prop_map(Fault::Doubled),
        Just(Fault::ControllerRestarted),
        (100_u64..6_000).prop_map(Fault::ApiDown),
    ]
}

/// Plays a world in which each fault comes so many events after the previous one. The error ends with the trace.
pub(super) fn play(rollouts: usize, faults: &[(usize, Fault)], trace: bool) -> Result<Played, String> {
    let mut world = World::new(rollouts, min_ready(rollouts));
    world.trace = trace.then(Vec::new);
    // With several faults at once, their effects cannot be separated, and each may cause epochs.
    world.law.epochs_allowed = 120;
    world.law.longest_hold_off = 3_600_000;
    world.slots.iter_mut().for_each(|slot| slot.guilty = true);
    let mut until = 0;
    for (after, fault) in faults {
        until = until.max(strike_after(&mut world, *after, fault.within(rollouts), until));
        world.wanted += 1;
    }
    let outcome = world.heal(until + 1);
    let lines = world.trace.take().unwrap_or_default();
    let lines: Vec<String> = lines.into_iter().filter(|line| !line.contains(" Alive(")).collect();
    match outcome {
        Ok(()) => Ok(Played { worlds: 1, steps: world.steps }),
        Err(why) => Err(format!("{why}\n{}", lines.join("\n"))),
    }
}

/// Injects a fault after so many events, or when nothing happens any more. Returns the end of the fault.
fn strike_after(world: &mut World, after: usize, fault: Fault, until: u64) -> u64 {
    let mut left = after;
    loop {
        let event = world.play_one();
        let fits = event.as_ref().is_some_and(|event| !fault.is_about_the_message() || is_message(event));
        match event {
            Some(event) if left == 0 && fits => return world.inject(fault, event),
            Some(event) => {
                left = left.saturating_sub(1);
                world.deliver(event);
            }
            None => {}
        }
        if world.law.broken.is_some() || world.now > until + 60_000 {
            return world.strike(fault);
        }
    }
}

#[test]
fn any_sequence_of_faults_ends_well() {
    let usual = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    let config = if std::env::var_os("PROPTEST_CASES").is_some() {
        usual
    } else {
        ProptestConfig { cases: CASES, rng_seed: RngSeed::Fixed(1), ..usual }
    };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let total = std::cell::RefCell::new(Played::default());
    let worlds = (1_usize..5, prop::collection::vec((1_usize..60, fault()), 1..7));
    let outcome = runner.run(&worlds, |(rollouts, faults)| {
        let played = play(rollouts, &faults, false).map_err(TestCaseError::fail)?;
        let mut total = total.borrow_mut();
        (total.worlds, total.steps) = (total.worlds + played.worlds, total.steps + played.steps);
        Ok(())
    });
    if let Err(proptest::test_runner::TestError::Fail(_, (rollouts, faults))) = &outcome {
        panic!("{rollouts} rollouts, {faults:?}:\n{}", play(*rollouts, faults, true).unwrap_err());
    }
    outcome.unwrap();
    let total = total.borrow();
    println!("random sequences of faults: {} worlds, {} events", total.worlds, total.steps);
}

/// A sequence that once broke an invariant.
fn ends_well(rollouts: usize, faults: &[(usize, Fault)]) {
    if let Err(why) = play(rollouts, faults, true) {
        panic!("{why}");
    }
}

#[test]
fn found_members_in_an_old_epoch_without_their_source() {
    ends_well(2, &[(6, Fault::Slow(0, 5_979, 6_149)), (7, Fault::ControllerRestarted)]);
    ends_well(1, &[(48, Fault::ControllerRestarted), (8, Fault::Silent(1, Some(9_969)))]);
}

#[test]
fn found_round_given_up_after_a_start_with_a_late_member() {
    ends_well(1, &[(9, Fault::ControllerRestarted), (8, Fault::Killed(1, Some(6_003)))]);
}

#[test]
fn found_feeder_that_leads_before_all_have_committed() {
    let faults = [
        (42, Fault::Killed(4, Some(3_130))),
        (54, Fault::CutOff(0, 8_090)),
        (1, Fault::Killed(3, Some(10))),
        (29, Fault::ControllerRestarted),
    ];
    ends_well(2, &faults);
}

#[test]
fn found_a_dirty_feeder_where_a_clean_one_keeps_the_version_too() {
    let faults =
        [(51, Fault::Unhealthy(3, 1_000)), (24, Fault::EngineRestarted(2)), (1, Fault::Refuses(3, 1)), (1, Fault::Silent(2, Some(3_003)))];
    ends_well(3, &faults);
}

#[test]
fn found_a_source_that_leads_while_its_own_answer_is_late() {
    let faults = [
        (23, Fault::BadInstall(0, 1)),
        (20, Fault::BadInstall(0, 1)),
        (9, Fault::Slow(2, 4_941, 3_003)),
        (28, Fault::Slow(1, 2_939, 1_000)),
        (8, Fault::BadInstall(0, 2)),
    ];
    ends_well(1, &faults);
}

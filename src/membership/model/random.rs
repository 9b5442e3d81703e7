//! Random sequences of faults, one after another and on top of each other, end well once they stop.

use proptest::prelude::*;

use super::faults::{Fault, is_message};
use super::play::min_ready;
use super::world::World;
use crate::membership::mutation::Switch;

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

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Each fault strikes some events after the one before.
    #[test]
    fn any_sequence_of_faults_ends_well(rollouts in 1_usize..5, faults in prop::collection::vec((1_usize..60, fault()), 1..7)) {
        let mut world = World::new(rollouts, min_ready(rollouts), Switch::default());
        // Of several faults at once nobody can tell whose fault is whose, and each may take epochs of its own.
        world.law.epochs_allowed = 120;
        world.slots.iter_mut().for_each(|slot| slot.guilty = true);
        let mut until = 0;
        for (after, fault) in faults {
            let mut left = after;
            loop {
                let event = world.play_one();
                let fits = event.as_ref().is_some_and(|event| !fault.is_about_the_message() || is_message(event));
                if left == 0 && fits && let Some(event) = event {
                    until = until.max(world.inject(fault.within(rollouts), event));
                    break;
                }
                if let Some(event) = event {
                    left = left.saturating_sub(1);
                    world.deliver(event);
                }
                prop_assert!(world.law.broken.is_none(), "{:?}", world.law.broken);
                if world.now > until + 60_000 {
                    // Nothing happens any more: the fault strikes at rest.
                    until = until.max(world.strike(fault.within(rollouts)));
                    break;
                }
            }
            world.wanted += 1;
        }
        let outcome = world.heal(until + 1);
        prop_assert!(outcome.is_ok(), "{}", outcome.unwrap_err());
    }
}

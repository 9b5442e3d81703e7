//! The rule of `membership.maxSkew`.

use proptest::prelude::*;

use crate::protocol::{Skew, Version, newest_in_service, skew};

#[test]
fn the_rule_is_a_table() {
    // (limit, current version, newest version, version of the replica)
    for (most, counts, newest, installed, expected) in [
        (0, 5, 5, 5, Skew::Within),
        (0, 5, 5, 4, Skew::TooOld),
        (0, 5, 5, 6, Skew::TooNew),
        (1, 5, 5, 4, Skew::Within),
        (1, 5, 6, 4, Skew::TooOld),
        (1, 5, 6, 6, Skew::Within),
        (1, 5, 6, 5, Skew::Within),
        (1, 5, 5, 7, Skew::TooNew),
        // The known newest version is outdated.
        (1, 5, 3, 4, Skew::Within),
        (1, 5, 3, 3, Skew::TooOld),
    ] {
        assert_eq!(skew(most, counts, newest, installed), expected, "{most} {counts} {newest} {installed}");
    }
    assert_eq!(newest_in_service(1, 5, [3, 6, 9].into_iter()), 6, "9 is not in service");
    assert_eq!(newest_in_service(1, 5, [3].into_iter()), 5);
}

proptest! {
    #[test]
    fn versions_in_service_stay_within_the_skew(
        most in 0_u64..5, counts in 0_u64..20, installed in prop::collection::vec(0_u64..20, 0..8),
    ) {
        let newest = newest_in_service(most, counts, installed.iter().copied());
        let serving: Vec<Version> = installed.iter().copied().filter(|held| skew(most, counts, newest, *held) == Skew::Within).collect();
        if let (Some(least), Some(greatest)) = (serving.iter().min(), serving.iter().max()) {
            prop_assert!(greatest - least <= most, "{:?} of {:?}", serving, installed);
        }
        prop_assert_eq!(serving.contains(&counts), installed.contains(&counts));
        // The rule takes as many replicas out of service as it must, and no more.
        prop_assert!(installed.iter().all(|held| *held != newest || serving.contains(held)));
    }
}

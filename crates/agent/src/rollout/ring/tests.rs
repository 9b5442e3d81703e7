use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn regions_in_use_never_overlap_and_empty_ring_fills(
        capacity in 1_u64..200,
        steps in proptest::collection::vec(proptest::option::of(1_u64..220), 1..200),
    ) {
        let mut ring = Ring::new(capacity);
        let mut used: VecDeque<(u64, u64)> = VecDeque::new();
        for step in steps {
            let Some(bytes) = step else {
                ring.give_back();
                used.pop_front();
                continue;
            };
            match ring.take(bytes) {
                Some(start) => {
                    prop_assert!(start + bytes <= capacity);
                    let apart = used.iter().all(|(other, length)| start + bytes <= *other || other + length <= start);
                    prop_assert!(apart, "{start}+{bytes} lies in {used:?}");
                    used.push_back((start, bytes));
                }
                None => prop_assert!(!used.is_empty() || bytes > capacity),
            }
        }
    }

    #[test]
    fn ring_of_three_longest_regions_takes_a_second_one(lengths in proptest::collection::vec(1_u64..50, 1..100)) {
        let mut ring = Ring::new(3 * 50);
        let mut in_use = 0;
        for bytes in lengths {
            while ring.take(bytes).is_none() {
                prop_assert!(in_use > 1, "one region is in use and another of {bytes} finds no room");
                ring.give_back();
                in_use -= 1;
            }
            in_use += 1;
        }
    }
}

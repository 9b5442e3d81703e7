//! Which parts of a ring of memory are in use: regions are taken in order and given back in order.
//!
//! Pure. A region lies in one piece, so the end of the ring may stay empty. Decides places only; it knows no bytes.

use std::collections::VecDeque;

/// The places of a ring of so many bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ring {
    capacity: u64,
    /// Start and length of the regions in use, the oldest first.
    used: VecDeque<(u64, u64)>,
    /// First byte behind the newest region.
    head: u64,
}

impl Ring {
    pub(crate) fn new(capacity: u64) -> Self {
        Self { capacity, used: VecDeque::new(), head: 0 }
    }

    /// The first byte of a new region; none while there is no room for it.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u64> {
        let start = match self.used.front() {
            None => 0,
            // What is in use lies in one piece.
            Some((oldest, _)) if self.head > *oldest => {
                if self.head.checked_add(bytes)? <= self.capacity {
                    self.head
                } else if bytes <= *oldest {
                    0
                } else {
                    return None;
                }
            }
            // It goes round the end: what is free lies in one piece.
            Some((oldest, _)) if self.head.checked_add(bytes)? <= *oldest => self.head,
            Some(_) => return None,
        };
        let end = start.checked_add(bytes).filter(|end| *end <= self.capacity)?;
        self.used.push_back((start, bytes));
        self.head = end;
        Some(start)
    }

    /// Gives the oldest region back.
    pub(crate) fn give_back(&mut self) {
        self.used.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn regions_in_use_never_overlap_and_an_empty_ring_takes_all_that_it_can_hold(
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
        fn a_ring_of_three_times_the_longest_region_always_takes_one_more_than_one(lengths in proptest::collection::vec(1_u64..50, 1..100)) {
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
}

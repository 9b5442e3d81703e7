use proptest::prelude::*;

use super::tensor;
use crate::weights::{Coverage, CoverageError, Dtype, Layout};

#[test]
fn a_missing_byte_names_its_tensor() {
    let layout = Layout::new("model", vec![tensor("a", Dtype::U8, &[10]), tensor("b", Dtype::U8, &[10])], 64).unwrap();
    let mut coverage = Coverage::new(layout.total_bytes);
    let missing = |coverage: &Coverage| match coverage.check(&layout) {
        Err(CoverageError::Missing { tensor, missing, .. }) => (tensor, missing),
        other => panic!("{other:?}"),
    };
    assert_eq!(missing(&coverage), ("a".into(), 74));
    coverage.record(0, 65).unwrap();
    assert_eq!(missing(&coverage), ("b".into(), 9));
    coverage.record(66, 8).unwrap();
    assert_eq!(missing(&coverage), ("b".into(), 1));
    assert_eq!(coverage.first_gap(), Some((65, 66)));
    coverage.record(65, 1).unwrap();
    assert_eq!(coverage.first_gap(), None);
    coverage.check(&layout).unwrap();
}

#[test]
fn byte_written_twice_or_past_the_end_is_refused() {
    let mut coverage = Coverage::new(100);
    coverage.record(10, 10).unwrap();
    coverage.record(30, 10).unwrap();
    let before = coverage.clone();
    for (offset, bytes) in [(10, 10), (15, 1), (5, 6), (19, 1), (0, 100), (19, 12), (39, 5), (12, 30)] {
        assert!(matches!(coverage.record(offset, bytes), Err(CoverageError::Overlap { .. })), "{offset} {bytes}");
    }
    for (offset, bytes) in [(99, 2), (101, 0), (u64::MAX, 5), (0, u64::MAX)] {
        assert!(matches!(coverage.record(offset, bytes), Err(CoverageError::Beyond { .. })), "{offset} {bytes}");
    }
    assert_eq!(coverage, before);
}

#[test]
fn a_stream_without_bytes_is_complete() {
    assert_eq!(Coverage::new(0).first_gap(), None);
}

proptest! {
    #[test]
    fn it_agrees_with_a_map_of_bytes(ranges in prop::collection::vec((0u64..70, 0u64..20), 0..40)) {
        let mut coverage = Coverage::new(64);
        let mut map = [false; 64];
        for (offset, bytes) in ranges {
            let (start, end) = (offset as usize, (offset + bytes) as usize);
            let free = end <= 64 && !map[start..end].iter().any(|written| *written);
            prop_assert_eq!(coverage.record(offset, bytes).is_ok(), free);
            if free {
                map[start..end].fill(true);
            }
            let written = map.iter().filter(|written| **written).count() as u64;
            prop_assert_eq!(coverage.written(), written);
            prop_assert_eq!(coverage.first_gap().is_none(), written == 64);
            let first = map.iter().position(|written| !written).map(|start| {
                let length = map[start..].iter().position(|written| *written).unwrap_or(64 - start);
                (start as u64, (start + length) as u64)
            });
            prop_assert_eq!(coverage.first_gap(), first);
        }
    }
}

use proptest::prelude::*;

use super::{tensor, tensors};
use crate::weights::{Dtype, Layout, LoadUnits, TensorSpec};

fn in_unit(name: &str, unit: &str) -> TensorSpec {
    TensorSpec { load_unit: Some(unit.into()), ..tensor(name, Dtype::U8, &[64]) }
}

#[test]
fn a_unit_is_whole_when_its_last_tensor_is() {
    let specs = vec![in_unit("q", "qkv"), tensor("alone", Dtype::U8, &[64]), in_unit("k", "qkv"), in_unit("v", "qkv")];
    let units = LoadUnits::new(&Layout::new("model", specs, 64).unwrap());
    let whole = |received| units.complete_after(received).iter().map(|unit| unit.entries.clone()).collect::<Vec<_>>();
    assert_eq!(whole(127), Vec::<Vec<usize>>::new());
    assert_eq!(whole(128), [vec![1]]);
    assert_eq!(whole(255), [vec![1]]);
    assert_eq!(whole(256), [vec![1], vec![0, 2, 3]]);
    assert_eq!(units.most_bytes_open(), 256);
}

#[test]
fn units_one_behind_the_other_hold_only_themselves_open() {
    let specs = vec![in_unit("a", "1"), in_unit("b", "1"), in_unit("c", "2"), tensor("d", Dtype::U8, &[64])];
    let units = LoadUnits::new(&Layout::new("model", specs, 64).unwrap());
    assert_eq!(units.most_bytes_open(), 128);
}

proptest! {
    #[test]
    fn every_tensor_is_in_one_unit_and_units_end_in_order(specs in tensors()) {
        let layout = Layout::new("model", specs, 64).unwrap();
        let units = LoadUnits::new(&layout);
        let mut members: Vec<_> = units.all().iter().flat_map(|unit| unit.entries.clone()).collect();
        members.sort_unstable();
        prop_assert_eq!(members, (0..layout.entries.len()).collect::<Vec<_>>());
        prop_assert!(units.all().is_sorted_by_key(|unit| unit.end));
        prop_assert_eq!(units.complete_after(layout.total_bytes), units.all());
        for unit in units.all() {
            let names: std::collections::HashSet<_> = unit.entries.iter().map(|index| layout.entries[*index].tensor.load_unit.clone()).collect();
            prop_assert!(names.len() == 1 && (unit.entries.len() == 1 || !names.contains(&None)));
            prop_assert_eq!(unit.end, unit.entries.iter().map(|index| layout.entries[*index].end()).max().unwrap());
        }
    }
}

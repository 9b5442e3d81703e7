//! Tests of weights: one file for each topic.
#![allow(clippy::cast_possible_truncation)]

mod coverage;
mod digest;
mod gsum;
mod hostile;
mod ignored;
mod layout;
mod manifest;
mod safetensors;
mod section;
mod tree;
mod wire;

use proptest::prelude::*;

use super::{Dtype, TensorSpec};

/// A tensor without a load unit.
pub fn tensor(name: &str, dtype: Dtype, shape: &[u64]) -> TensorSpec {
    TensorSpec::new(name.into(), dtype, shape.to_vec())
}

/// Lists of tensors of every type, including scalars and empty ones, in a few load units.
pub fn tensors() -> impl Strategy<Value = Vec<TensorSpec>> {
    let one = (0..Dtype::ALL.len(), prop::collection::vec(0u64..7, 0..4), prop::option::of(0u8..3));
    prop::collection::vec(one, 0..24).prop_map(|drawn| {
        let named = drawn.into_iter().enumerate().map(|(index, (dtype, mut shape, unit))| {
            let dtype = Dtype::ALL[dtype];
            if dtype.bits() < 8 {
                shape.push(4);
            }
            let tensor = TensorSpec::new(format!("layers.{index}.weight"), dtype, shape);
            TensorSpec { load_unit: unit.map(|unit| format!("unit {unit}")), ..tensor }
        });
        named.collect()
    })
}

/// Bytes that differ at each place, so that a misplaced byte shows.
pub fn pattern(length: usize) -> Vec<u8> {
    (0..length as u64).map(|place| (place.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

//! The tensors that engines receive: each whole, once, aligned, with one element type in a broadcast.

use proptest::prelude::*;

use crate::weights::{Dtype, Layout, TensorSpec, WireError};

fn spec(name: &str, dtype: Dtype, shape: &[u64]) -> TensorSpec {
    TensorSpec::new(name.into(), dtype, shape.to_vec())
}

fn layout(tensors: Vec<TensorSpec>, bucket: u64) -> Layout {
    Layout::new("model", tensors, bucket).unwrap().cut_between_tensors()
}

#[test]
fn neighbours_without_a_gap_are_sent_from_where_they_lie() {
    let layout = layout(vec![spec("a", Dtype::BF16, &[32]), spec("b", Dtype::BF16, &[64])], 1 << 20);
    let wire = layout.wire(&layout.bucket(0).unwrap()).unwrap();
    assert_eq!((wire.len(), wire[0].in_place(), wire[0].bytes), (1, Some(0), 192));
}

#[test]
fn a_gap_or_another_element_type_is_packed_away() {
    let tensors =
        vec![spec("a", Dtype::BF16, &[3]), spec("scale", Dtype::F32, &[1]), spec("none", Dtype::BF16, &[0]), spec("b", Dtype::BF16, &[5])];
    let layout = layout(tensors, 1 << 20);
    let wire = layout.wire(&layout.bucket(0).unwrap()).unwrap();
    assert_eq!(
        wire.iter().map(|wire| (wire.dtype, wire.tensors.clone(), wire.bytes)).collect::<Vec<_>>(),
        [(Dtype::F32, vec![1], 4), (Dtype::BF16, vec![0, 3], 16),]
    );
    assert_eq!(wire[1].runs, [(0, 6), (128, 10)]);
}

#[test]
fn bucket_that_tears_a_tensor_is_refused_before_sending() {
    let even = Layout::new("model", vec![spec("a", Dtype::F32, &[1000])], 64).unwrap();
    assert!(matches!(even.wire(&even.bucket(0).unwrap()), Err(WireError::Torn { sequence: 0, .. })));
}

fn tensors() -> impl Strategy<Value = Vec<TensorSpec>> {
    let dtype = prop::sample::select(vec![Dtype::BF16, Dtype::F32, Dtype::F8_E4M3, Dtype::I64, Dtype::F16]);
    let shape = prop::collection::vec(0_u64..9, 0..4);
    let tensor = (dtype, shape).prop_map(|(dtype, shape)| spec("", dtype, &shape));
    prop::collection::vec(tensor, 1..40).prop_map(|mut tensors| {
        for (number, tensor) in tensors.iter_mut().enumerate() {
            tensor.name = format!("t{number}");
        }
        tensors
    })
}

proptest! {
    #[test]
    fn every_tensor_with_bytes_is_sent_once_whole_and_aligned(tensors in tensors(), bucket in 64_u64..4096) {
        let layout = layout(tensors, bucket);
        let mut sent = vec![0_u32; layout.entries.len()];
        for bucket in layout.buckets() {
            for wire in layout.wire(&bucket).unwrap() {
                let mut bytes = 0;
                for tensor in &wire.tensors {
                    let entry = &layout.entries[*tensor];
                    sent[*tensor] += 1;
                    prop_assert_eq!(entry.tensor.dtype, wire.dtype);
                    prop_assert!(bytes % (entry.tensor.dtype.bits() / 8) == 0, "SGLang: unaligned received tensor");
                    bytes += entry.bytes;
                }
                prop_assert_eq!(bytes, wire.bytes);
                prop_assert!(bytes > 0, "engines refuse an empty bucket without entering it");
                prop_assert_eq!(wire.runs.iter().map(|(_, bytes)| bytes).sum::<u64>(), wire.bytes);
                // The runs in order contain the tensors in order.
                let mut read = wire.runs.iter().flat_map(|(offset, length)| *offset..offset + length);
                for tensor in &wire.tensors {
                    let entry = &layout.entries[*tensor];
                    for byte in 0..entry.bytes {
                        prop_assert_eq!(read.next(), Some(entry.offset - bucket.offset + byte));
                    }
                }
            }
        }
        for (entry, sent) in layout.entries.iter().zip(sent) {
            prop_assert_eq!(sent, u32::from(entry.bytes > 0), "{}", entry.tensor.name);
        }
    }
}

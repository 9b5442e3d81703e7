use std::sync::Arc;

use super::{Spread, TensorDigests, pool};
use weightsync_core::weights::{DigestAlgorithm, Dtype, Layout, TREE_BLOCK, TensorHasher, TensorHasherError, TensorSpec};

fn layout(sizes: &[usize]) -> Arc<Layout> {
    let tensors = sizes.iter().enumerate().map(|(number, size)| TensorSpec::new(format!("t{number}"), Dtype::U8, vec![*size as u64]));
    Arc::new(Layout::new("model", tensors.collect(), 4 << 20).unwrap())
}

fn stream(layout: &Layout) -> Vec<u8> {
    (0..layout.total_bytes).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

#[test]
fn threads_give_the_same_digests_as_one_core() {
    let layout = layout(&[10, 0, 3 * TREE_BLOCK + 7, TREE_BLOCK, 1, 0, 9 * TREE_BLOCK, 0]);
    let stream = stream(&layout);
    for part in [1000, 256 << 10, TREE_BLOCK, 5 << 20, stream.len()] {
        for algorithm in [DigestAlgorithm::Blake3, DigestAlgorithm::Xxh3_128, DigestAlgorithm::Gsum64] {
            let (mut one, mut many) = (TensorHasher::new(layout.clone(), algorithm), TensorDigests::new(layout.clone(), algorithm));
            for (number, bytes) in stream.chunks(part).enumerate() {
                one.update(bytes).unwrap();
                many.update(bytes).unwrap();
                assert_eq!(one.position(), many.position());
                if number % 37 == 0 {
                    assert_eq!(one.ended(), many.ended().unwrap(), "{part} {algorithm:?}");
                }
            }
            assert_eq!(one.finish().unwrap(), many.finish().unwrap(), "{part} {algorithm:?}");
        }
    }
}

#[test]
fn stream_of_another_length_has_no_digests() {
    let layout = layout(&[10, 100]);
    let length = usize::try_from(layout.total_bytes).unwrap();
    let fresh = || TensorDigests::new(layout.clone(), DigestAlgorithm::Blake3);
    let mut short = fresh();
    short.update(&vec![0; length - 1]).unwrap();
    assert!(matches!(short.finish(), Err(TensorHasherError::TooShort { .. })));
    assert_eq!(fresh().update(&vec![0; length + 3]), Err(TensorHasherError::TooLong { extra: 3 }));
    assert!(fresh().add(64, &[1]).is_err());
}

#[test]
fn blocks_that_wait_are_bounded() {
    let layout = layout(&[64 * TREE_BLOCK]);
    let pool = pool().unwrap();
    let mut spread = Spread::new(layout.clone(), pool);
    let stream = stream(&layout);
    for part in stream.chunks(TREE_BLOCK) {
        spread.update(part).unwrap();
        let state = spread.work.state.lock();
        assert!(state.open + state.spare.len() <= super::AHEAD * pool.threads + 1);
    }
    spread.finish().unwrap();
}

//! blake3 of tensors in blocks equals blake3 in one piece.

use std::sync::Arc;

use super::{pattern as bytes, tensor};
use crate::weights::{BlockValue, DigestAlgorithm, Dtype, Layout, TREE_BLOCK, TensorHasher, block_bytes, digest_hex, tree_digest};

#[test]
fn digest_of_blocks_is_the_blake3_of_the_whole() {
    let lengths =
        [0, 1, 1024, TREE_BLOCK - 1, TREE_BLOCK, TREE_BLOCK + 1, 2 * TREE_BLOCK, 3 * TREE_BLOCK + 5, 7 * TREE_BLOCK, 8 * TREE_BLOCK + 1];
    for length in lengths {
        let tensor = bytes(length);
        let count = length.div_ceil(TREE_BLOCK).max(1) as u64;
        let values: Vec<BlockValue> = (0..count)
            .map(|number| {
                let start = usize::try_from(number).unwrap() * TREE_BLOCK;
                let end = start + usize::try_from(block_bytes(length as u64, number)).unwrap();
                BlockValue::of(length as u64, number, &tensor[start..end])
            })
            .collect();
        let whole = blake3::hash(&tensor).to_hex();
        assert_eq!(tree_digest(&values).map(digest_hex).as_deref(), Some(&whole[..32]), "{length}");
    }
    assert_eq!(tree_digest(&[]), None);
}

#[test]
fn stream_gives_the_blake3_of_each_tensor() {
    let sizes = [70_u64, 4, 0, 1000];
    let specs = sizes.iter().enumerate().map(|(number, size)| tensor(&format!("t{number}"), Dtype::U8, &[*size])).collect();
    let layout = Arc::new(Layout::new("model", specs, 1 << 20).unwrap());
    let stream = bytes(usize::try_from(layout.total_bytes).unwrap());
    let mut hasher = TensorHasher::new(layout.clone(), DigestAlgorithm::Blake3);
    stream.chunks(7).for_each(|part| hasher.update(part).unwrap());
    let expected: Vec<String> = layout
        .entries
        .iter()
        .map(|entry| {
            let range = usize::try_from(entry.offset).unwrap()..usize::try_from(entry.offset + entry.bytes).unwrap();
            blake3::hash(&stream[range]).to_hex()[..32].to_owned()
        })
        .collect();
    assert_eq!(hasher.finish().unwrap().into_iter().map(digest_hex).collect::<Vec<_>>(), expected);
}

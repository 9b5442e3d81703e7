use std::sync::Arc;

use proptest::prelude::*;

use super::{pattern, tensor, tensors};
use crate::weights::{
    BLOCK_BYTES, BlockHasher, BucketHasher, DigestAlgorithm, Dtype, Layout, TensorHasher, TensorHasherError, bucket_digest, digest_hex,
    parse_digest_hex, tensor_digest,
};

#[test]
fn the_digest_is_the_one_of_xxhash_itself() {
    // Python xxhash 4.1.0: xxhash.xxh3_128_hexdigest(b""), of b"weightsync", of bytes(range(256)) * 8.
    assert_eq!(digest_hex(tensor_digest(b"")), "99aa06d3014798d86001c324468d497f");
    assert_eq!(digest_hex(tensor_digest(b"weightsync")), "8260638b9eccaf8688854f19e7daffde");
    let long: Vec<u8> = (0..=255).cycle().take(256 * 8).collect();
    assert_eq!(digest_hex(tensor_digest(&long)), "df73e0768dd183fadd420471ff96bd00");
}

#[test]
fn a_bucket_is_hashed_block_by_block() {
    let bytes = pattern(2 * BLOCK_BYTES + 5);
    for length in [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES] {
        assert_eq!(bucket_digest(&bytes[..length]), tensor_digest(&bytes[..length]), "{length}");
    }
    for length in [BLOCK_BYTES + 1, 2 * BLOCK_BYTES, bytes.len()] {
        let blocks: Vec<u128> = bytes[..length].chunks(BLOCK_BYTES).map(tensor_digest).collect();
        let wanted = tensor_digest(&blocks.iter().flat_map(|block| block.to_le_bytes()).collect::<Vec<_>>());
        assert_eq!(bucket_digest(&bytes[..length]), wanted, "{length}");
        let (mut in_parts, mut in_blocks) = (BucketHasher::new(), BucketHasher::new());
        for _ in 0..2 {
            for part in bytes[..length].chunks(300_007) {
                in_parts.update(part);
            }
            for block in &blocks {
                in_blocks.block(*block);
            }
            assert_eq!((in_parts.take(), in_blocks.take()), (wanted, wanted), "{length}");
        }
    }
}

#[test]
fn hex_that_is_not_canonical_is_no_digest() {
    let hex = digest_hex(0xAB);
    assert_eq!(parse_digest_hex(&hex), Some(0xAB));
    let upper = hex.to_uppercase();
    for wrong in ["", "ab", &upper, "+0000000000000000000000000000001", &format!("{hex}0")] {
        assert_eq!(parse_digest_hex(wrong), None, "{wrong}");
    }
}

#[test]
fn stream_of_wrong_length_is_reported() {
    let layout = Arc::new(Layout::new("model", vec![tensor("a", Dtype::U8, &[10]), tensor("b", Dtype::U8, &[10])], 64).unwrap());
    let mut hasher = TensorHasher::new(layout.clone(), DigestAlgorithm::Xxh3_128);
    hasher.update(&[0; 70]).unwrap();
    assert_eq!(hasher.update(&[0; 5]), Err(TensorHasherError::TooLong { extra: 1 }));
    assert_eq!(hasher.finish(), Err(TensorHasherError::TooShort { tensor: "b".into(), position: 70, total: 74 }));
}

#[test]
fn bytes_between_tensors_do_not_count() {
    let layout = Arc::new(Layout::new("model", vec![tensor("a", Dtype::U8, &[10]), tensor("b", Dtype::U8, &[10])], 64).unwrap());
    let digests = |gap: u8| {
        let mut stream = pattern(74);
        stream[10..64].fill(gap);
        let mut hasher = TensorHasher::new(layout.clone(), DigestAlgorithm::Xxh3_128);
        hasher.update(&stream).unwrap();
        hasher.finish().unwrap()
    };
    assert_eq!(digests(0), digests(9));
}

proptest! {
    #[test]
    fn parts_of_any_length_give_the_digest_of_the_whole(length in 0usize..5000, cuts in prop::collection::vec(1usize..700, 1..8)) {
        let bytes = pattern(length);
        let mut hasher = BlockHasher::new();
        for _ in 0..2 {
            let (mut rest, mut cut) = (bytes.as_slice(), cuts.iter().cycle());
            while !rest.is_empty() {
                let (now, later) = rest.split_at((*cut.next().unwrap()).min(rest.len()));
                hasher.update(now);
                rest = later;
            }
            prop_assert_eq!(hasher.take(), tensor_digest(&bytes));
        }
    }

    #[test]
    fn tensor_digests_do_not_depend_on_how_the_stream_is_cut(specs in tensors(), cuts in prop::collection::vec(0usize..300, 1..6)) {
        prop_assume!(cuts.iter().any(|cut| *cut > 0));
        let layout = Arc::new(Layout::new("model", specs, 64).unwrap());
        let stream = pattern(layout.total_bytes as usize);
        let mut hasher = TensorHasher::new(layout.clone(), DigestAlgorithm::Xxh3_128);
        let (mut rest, mut cut) = (stream.as_slice(), cuts.iter().cycle());
        while !rest.is_empty() {
            let (now, later) = rest.split_at((*cut.next().unwrap()).min(rest.len()));
            hasher.update(now).unwrap();
            rest = later;
        }
        let wanted: Vec<_> = layout.entries.iter().map(|entry| tensor_digest(&stream[entry.offset as usize..entry.end() as usize])).collect();
        prop_assert_eq!(hasher.finish().unwrap(), wanted);
    }
}

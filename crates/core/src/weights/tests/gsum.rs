use std::sync::Arc;

use proptest::prelude::*;

use super::{pattern, tensors};
use crate::weights::{Bucket, DigestAlgorithm, Gsum64, Layout, TensorHasher, gsum64, gsum64_from};

/// The definition, word by word.
fn defined(bytes: &[u8]) -> u64 {
    let words = bytes.chunks(8).enumerate().map(|(index, chunk)| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        let x = u64::from_le_bytes(word) ^ (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (x & 0xFFFF_FFFF).wrapping_mul(x >> 32).wrapping_add(x)
    });
    words.fold(0, u64::wrapping_add)
}

#[test]
fn known_bytes_have_known_sums() {
    // By hand: one word of zeros is lo * hi + x of the spread itself.
    let spread = 0x9E37_79B9_7F4A_7C15_u64;
    assert_eq!(gsum64(&[0; 8]), 0x7F4A_7C15_u64.wrapping_mul(0x9E37_79B9).wrapping_add(spread));
    assert_eq!(gsum64(&[]), 0);
    assert_ne!(gsum64(&[0; 8]), gsum64(&[0; 16]));
    // A short tail is padded with zeros; only the layout knows the length.
    assert_eq!(gsum64(&[7, 0, 0]), gsum64(&[7, 0, 0, 0, 0, 0, 0, 0]));
}

proptest! {
    #[test]
    fn parts_of_any_length_add_up(length in 0usize..3000, cuts in prop::collection::vec(1usize..90, 1..8), seed in any::<u8>()) {
        let bytes: Vec<u8> = pattern(length).into_iter().map(|byte| byte ^ seed).collect();
        let mut sum = Gsum64::new();
        for _ in 0..2 {
            let (mut rest, mut cut) = (bytes.as_slice(), cuts.iter().cycle());
            while !rest.is_empty() {
                let (now, later) = rest.split_at((*cut.next().unwrap()).min(rest.len()));
                sum.update(now);
                rest = later;
            }
            prop_assert_eq!(sum.take(), defined(&bytes));
        }
        prop_assert_eq!(gsum64(&bytes), defined(&bytes));
    }

    #[test]
    fn a_changed_or_misplaced_word_shows(length in 16usize..400, place in any::<prop::sample::Index>(), bit in 0u8..8) {
        let bytes = pattern(length);
        let mut changed = bytes.clone();
        changed[place.index(length)] ^= 1 << bit;
        prop_assert_ne!(gsum64(&bytes), gsum64(&changed));
        let mut swapped = bytes.clone();
        swapped[..16].rotate_left(8);
        prop_assert!(bytes[..8] == bytes[8..16] || gsum64(&bytes) != gsum64(&swapped));
    }

    /// For some buckets the bytes are known, for others only the shares that a GPU computed: the digests are the same.
    #[test]
    fn shares_of_buckets_give_the_digests_of_the_bytes(specs in tensors(), by_share in prop::collection::vec(any::<bool>(), 8)) {
        let layout = Arc::new(Layout::new("model", specs, 128).unwrap());
        let stream = pattern(layout.total_bytes as usize);
        let bytes_of = |bucket: &Bucket| &stream[bucket.offset as usize..(bucket.offset + bucket.bytes) as usize];
        let mut hasher = TensorHasher::new(layout.clone(), DigestAlgorithm::Gsum64);
        for (bucket, share) in layout.buckets().zip(by_share.iter().cycle()) {
            let bytes = bytes_of(&bucket);
            if *share {
                let parts = layout.digest_parts(bucket.offset, bucket.bytes);
                let share = |part: &crate::weights::DigestPart| {
                    gsum64_from(part.first_word, &bytes[part.offset as usize..(part.offset + part.bytes) as usize])
                };
                hasher.add(bucket.bytes, &parts.iter().map(share).collect::<Vec<_>>()).unwrap();
            } else {
                hasher.update(bytes).unwrap();
            }
        }
        let wanted: Vec<u128> =
            layout.entries.iter().map(|entry| gsum64(&stream[entry.offset as usize..entry.end() as usize]).into()).collect();
        prop_assert_eq!(hasher.finish().unwrap(), wanted);
    }
}

#[test]
fn shares_that_do_not_fit_the_stream_are_refused() {
    let specs = vec![super::tensor("a", crate::weights::Dtype::U8, &[128])];
    let layout = Arc::new(Layout::new("model", specs, 64).unwrap());
    let fresh = |algorithm| TensorHasher::new(layout.clone(), algorithm);
    assert!(fresh(DigestAlgorithm::Xxh3_128).add(64, &[1]).is_err());
    assert!(fresh(DigestAlgorithm::Gsum64).add(64, &[]).is_err());
    assert!(fresh(DigestAlgorithm::Gsum64).add(64, &[1, 2]).is_err());
    assert!(fresh(DigestAlgorithm::Gsum64).add(129, &[1]).is_err());
    let mut cut = fresh(DigestAlgorithm::Gsum64);
    cut.update(&[0; 3]).unwrap();
    assert!(cut.add(64, &[1]).is_err());
}

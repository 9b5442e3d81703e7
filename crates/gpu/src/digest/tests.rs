use proptest::prelude::*;

use super::*;
use weightsync_core::weights::gsum64_from;

proptest! {
    #[test]
    fn pieces_are_few_and_their_sums_are_those_of_the_parts(lengths in proptest::collection::vec(0_u64..3_000_000, 0..6), first in 0_u64..1 << 50) {
        let mut parts = Vec::new();
        let mut offset = 0;
        for bytes in lengths {
            parts.push(Part { offset, bytes, first_word: first + offset });
            offset += bytes.next_multiple_of(64);
        }
        let memory: Vec<u8> = (0..offset).map(|at| (at.wrapping_mul(2_654_435_761) >> 7).to_le_bytes()[0]).collect();
        let sum = |part: &Part| {
            let start = usize::try_from(part.offset).unwrap();
            gsum64_from(part.first_word, &memory[start..start + usize::try_from(part.bytes).unwrap()])
        };
        let cut = pieces(&parts);
        prop_assert!(cut.len() as u64 <= parts.len() as u64 + BLOCKS);
        let mut sums = vec![0_u64; parts.len()];
        for (owner, piece) in &cut {
            prop_assert!(piece.offset % 8 == 0);
            sums[*owner] = sums[*owner].wrapping_add(sum(piece));
        }
        prop_assert_eq!(sums, parts.iter().map(sum).collect::<Vec<_>>());
    }
}

#[test]
fn long_part_among_short_ones_is_shared_by_the_blocks() {
    let parts = [Part { offset: 0, bytes: 256 << 20, first_word: 0 }, Part { offset: 256 << 20, bytes: 64, first_word: 0 }];
    let longest = pieces(&parts).iter().map(|(_, piece)| piece.bytes).max().unwrap();
    assert!(longest <= (256 << 20) / BLOCKS + 8192, "{longest}");
}

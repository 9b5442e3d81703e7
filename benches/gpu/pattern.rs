//! The bytes of a bucket: word `j` of bucket `i` is `(j + 1) * P + i * Q` mod 2^64, which torch computes on a GPU as well.

const P: u64 = 0x9E37_79B9_7F4A_7C15;
const Q: u64 = 0xD1B5_4A32_D192_ED03;

/// The first `bytes` bytes of bucket `bucket`.
pub fn bytes(bucket: u64, bytes: usize) -> Vec<u8> {
    let shift = bucket.wrapping_mul(Q);
    let mut pattern = Vec::with_capacity(bytes.next_multiple_of(8));
    let mut word = shift;
    for _ in 0..bytes.div_ceil(8) {
        word = word.wrapping_add(P);
        pattern.extend_from_slice(&word.to_le_bytes());
    }
    pattern.truncate(bytes);
    pattern
}

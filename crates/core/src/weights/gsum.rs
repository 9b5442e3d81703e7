//! gsum64 on a CPU: the same digest that GPUs compute.
//!
//! The sum over 8-byte little-endian words d(i) of `lo32(x) * hi32(x) + x`, where `x = d(i) xor (i + 1) * 0x9E3779B97F4A7C15`, all modulo
//! 2^64; a tail shorter than a word is padded with zeros. The place of every word counts, so a swap shows. Parts add up in any order, so
//! thousands of threads can share the work. It detects corruption, misplacement and loss, but no attacker.

/// 2^64 divided by the golden ratio: spreads places over all bits.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// The gsum64 of some bytes.
pub fn gsum64(bytes: &[u8]) -> u64 {
    gsum64_from(0, bytes)
}

/// The share of a part whose first word has the index `first_word` in the whole. The wrapping sum of all shares is the gsum64 of the whole.
/// Only the last part may end inside a word.
pub fn gsum64_from(first_word: u64, part: &[u8]) -> u64 {
    let (words, tail) = part.as_chunks::<8>();
    let mut place = first_word.wrapping_add(1).wrapping_mul(SPREAD);
    let mut sum = 0u64;
    for word in words {
        sum = sum.wrapping_add(mixed(u64::from_le_bytes(*word), place));
        place = place.wrapping_add(SPREAD);
    }
    if tail.is_empty() {
        return sum;
    }
    let mut last = [0; 8];
    last.iter_mut().zip(tail).for_each(|(to, from)| *to = *from);
    sum.wrapping_add(mixed(u64::from_le_bytes(last), place))
}

fn mixed(word: u64, place: u64) -> u64 {
    let x = word ^ place;
    (x & 0xFFFF_FFFF).wrapping_mul(x >> 32).wrapping_add(x)
}

/// The gsum64 of bytes in parts of any length.
#[derive(Debug, Clone, Default)]
pub struct Gsum64 {
    sum: u64,
    words: u64,
    /// Bytes of the incomplete word.
    begun: [u8; 8],
    /// Their number, less than 8.
    length: usize,
}

impl Gsum64 {
    /// A sum without bytes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next part, of any length.
    pub fn update(&mut self, mut part: &[u8]) {
        if self.length > 0 {
            let (now, later) = part.split_at_checked(8 - self.length).unwrap_or((part, &[]));
            self.begun.iter_mut().skip(self.length).zip(now).for_each(|(to, from)| *to = *from);
            self.length += now.len();
            part = later;
            if self.length < 8 {
                return;
            }
            self.sum = self.sum.wrapping_add(gsum64_from(self.words, &self.begun));
            self.words += 1;
            self.length = 0;
        }
        let (whole, tail) = part.split_at_checked(part.len() - part.len() % 8).unwrap_or((part, &[]));
        self.sum = self.sum.wrapping_add(gsum64_from(self.words, whole));
        self.words += whole.len() as u64 / 8;
        self.begun.iter_mut().zip(tail).for_each(|(to, from)| *to = *from);
        self.length = tail.len();
    }

    /// Takes a part of `bytes` bytes whose share was computed elsewhere, with [`words`](Self::words) as its first word. Returns false and
    /// takes nothing if the previous part ended inside a word.
    #[must_use]
    pub fn add(&mut self, bytes: u64, share: u64) -> bool {
        if self.length > 0 {
            return false;
        }
        self.sum = self.sum.wrapping_add(share);
        self.words = self.words.wrapping_add(bytes.div_ceil(8));
        true
    }

    /// Complete words since the start.
    pub fn words(&self) -> u64 {
        self.words
    }

    /// The gsum64 of all parts since the start. Resets the sum for the next item.
    pub fn take(&mut self) -> u64 {
        let Self { sum, words, begun, length } = std::mem::take(self);
        sum.wrapping_add(gsum64_from(words, begun.get(..length).unwrap_or_default()))
    }
}

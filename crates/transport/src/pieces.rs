//! Cuts a bucket into pieces that fit into slots.

use bytes::Bytes;

/// A part of some bytes, without what lies after their end.
pub(super) fn cut(bytes: &Bytes, offset: u64, length: u64) -> Bytes {
    let place = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(bytes.len());
    bytes.slice(place(offset)..place(offset.saturating_add(length)))
}

/// Cuts `bytes` bytes into pieces of at most `longest`: first byte and length of each.
pub(super) fn pieces(bytes: u64, longest: u64) -> impl Iterator<Item = (u64, u64)> + Send {
    let longest = longest.max(64);
    (0..bytes.div_ceil(longest)).map(move |number| {
        let offset = number * longest;
        (offset, longest.min(bytes - offset))
    })
}

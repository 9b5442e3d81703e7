//! Texts from elsewhere, at a bounded length. Never cuts a character in two.

/// The start of `text`: at most `most` bytes, whole characters.
#[must_use]
pub fn cut(text: &str, most: usize) -> String {
    let end = (0..=most.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    text.get(..end).unwrap_or_default().to_owned()
}

//! What a version of weights is: named tensors laid end to end, cut into buckets, proven by digests.
//!
//! This room decides layout, digests and coverage. It never talks to a network, an engine or a clock, and it
//! never trusts a length that it read: every number from outside is checked before memory is asked for.

mod dtype;
mod layout;

pub use dtype::Dtype;
pub use layout::{Bucket, Encoding, Entry, Layout, LayoutError, TensorSpec};

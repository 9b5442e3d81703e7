//! A peer's registered memory. Decides nothing; it lives as long as a read from it may.

use std::sync::Arc;

use super::held::Resource;

/// A peer's registered memory, to be read into one region. Its metadata is forgotten with the last clone.
#[derive(Clone)]
pub struct Peer {
    pub(super) number: u64,
    pub(super) name: Arc<str>,
    // Goes before its region.
    pub(super) resource: Resource,
    pub(super) region: Resource,
}

impl Peer {
    /// Name of its worker, and a number for its region.
    pub fn name(&self) -> &str {
        &self.name
    }
}

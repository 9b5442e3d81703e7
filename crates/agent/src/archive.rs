//! Versions that an agent keeps, the last used first, within a count and a limit of memory.
//!
//! Pure. Decides which one goes when there are too many: the one that was not used for longest.

use std::sync::Arc;

use weightsync_core::protocol::HeldVersion;

pub trait Archived {
    fn held(&self) -> &HeldVersion;

    /// Memory that it takes, in bytes.
    fn memory(&self) -> u64;
}

/// Versions, the last used first; each at most once.
#[derive(Debug)]
pub struct Archive<T>(Vec<Arc<T>>);

impl<T> Default for Archive<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Archived> Archive<T> {
    /// Puts one in front.
    pub fn put(&mut self, item: Arc<T>) {
        self.remove(item.held());
        self.0.insert(0, item);
    }

    pub fn remove(&mut self, held: &HeldVersion) -> Option<Arc<T>> {
        let at = self.0.iter().position(|item| item.held() == held)?;
        Some(self.0.remove(at))
    }

    /// Counts one as the last used.
    pub fn touch(&mut self, wanted: &HeldVersion) {
        if let Some(at) = self.0.iter().position(|item| item.held().is(wanted)) {
            let item = self.0.remove(at);
            self.0.insert(0, item);
        }
    }

    pub fn find(&self, wanted: &HeldVersion) -> Option<&Arc<T>> {
        self.0.iter().find(|item| item.held().is(wanted))
    }

    /// All, the last used first.
    pub fn all(&self) -> impl Iterator<Item = &Arc<T>> {
        self.0.iter()
    }

    /// Memory that all take, in bytes.
    pub fn memory(&self) -> u64 {
        self.0.iter().fold(0, |sum, item| sum.saturating_add(item.memory()))
    }

    /// Lets those go that are more than `keep`, or more than `limit` bytes in all; what takes no memory goes by the count alone.
    pub fn trim(&mut self, keep: usize, limit: u64) -> Vec<Arc<T>> {
        let mut gone = if self.0.len() > keep { self.0.split_off(keep) } else { Vec::new() };
        while self.memory() > limit
            && let Some(item) = self.make_room()
        {
            gone.push(item);
        }
        gone
    }

    /// Lets the one go that takes memory and was not used for longest.
    pub fn make_room(&mut self) -> Option<Arc<T>> {
        let at = self.0.iter().rposition(|item| item.memory() > 0)?;
        Some(self.0.remove(at))
    }
}

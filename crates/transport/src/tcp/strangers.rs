//! Connections that have not sent a hello yet. Decides which of them is closed when there are too many: first of the same address, then one
//! from no member's address, always the oldest. So silent strangers never keep a member out.
//!
//! Counts only; it never reads from a connection.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// The strangers of one listener. Clones share them.
#[derive(Clone)]
pub(super) struct Strangers(Arc<Mutex<Table>>);

struct Table {
    most: usize,
    of_one: usize,
    next: u64,
    waiting: BTreeMap<u64, Waiting>,
}

struct Waiting {
    from: IpAddr,
    expected: bool,
    evicted: CancellationToken,
}

impl Table {
    fn count(&self, of: impl Fn(&Waiting) -> bool) -> usize {
        self.waiting.values().filter(|waiting| of(waiting)).count()
    }

    /// Closes the oldest that `of` selects; false if there is none.
    fn evict(&mut self, of: impl Fn(&Waiting) -> bool) -> bool {
        let oldest = self.waiting.iter().find(|(_, waiting)| of(waiting)).map(|(id, _)| *id);
        let evicted = oldest.and_then(|id| self.waiting.remove(&id));
        evicted.map(|waiting| waiting.evicted.cancel()).is_some()
    }
}

impl Strangers {
    /// Room for so many, and half as many from one address.
    pub(super) fn new(most: usize) -> Self {
        Self(Arc::new(Mutex::new(Table { most, of_one: most.div_ceil(2), next: 0, waiting: BTreeMap::new() })))
    }

    /// A place for a connection from that address; `expected` if a member has it. `None` if only members wait, and this is no member.
    pub(super) fn enter(&self, from: IpAddr, expected: bool) -> Option<Stranger> {
        let from = from.to_canonical();
        let mut table = self.0.lock();
        if table.count(|waiting| waiting.from == from) >= table.of_one {
            table.evict(|waiting| waiting.from == from);
        }
        let full = table.waiting.len() >= table.most;
        if full && !table.evict(|waiting| !waiting.expected) && !(expected && table.evict(|_| true)) {
            return None;
        }
        let id = table.next;
        table.next += 1;
        let evicted = CancellationToken::new();
        table.waiting.insert(id, Waiting { from, expected, evicted: evicted.clone() });
        Some(Stranger { strangers: self.clone(), id, evicted })
    }
}

/// A connection without a hello; dropping this frees its place.
pub(super) struct Stranger {
    strangers: Strangers,
    id: u64,
    evicted: CancellationToken,
}

impl Stranger {
    /// Completes when another connection took its place.
    pub(super) fn evicted(&self) -> CancellationToken {
        self.evicted.clone()
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.strangers.0.lock().waiting.remove(&self.id);
    }
}

#[cfg(test)]
mod tests;

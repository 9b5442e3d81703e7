//! Which connections a listener keeps. Decides which connection ends when there are too many: of the same address first, and always an idle
//! one of a peer without a certificate. So a silent peer never keeps a working one out.
//!
//! Counts only; it never reads from a connection.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};

use super::limits::Limits;

/// A peer without a certificate keeps its place for this long during a request or a handshake.
const PATIENCE: Duration = Duration::from_secs(2);

/// The places of one listener. Clones share them.
#[derive(Clone)]
pub(super) struct Places(Arc<Shared>);

struct Shared {
    limits: Caps,
    table: Mutex<Table>,
    freed: Notify,
}

/// Why there is no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Full {
    /// That address has all its places in use.
    Address,
    /// All places are in use.
    Listener,
}

struct Caps {
    connections: usize,
    per_address: usize,
    strangers: usize,
}

#[derive(Default)]
struct Table {
    next: u64,
    taken: BTreeMap<u64, Entry>,
}

struct Entry {
    from: IpAddr,
    /// Whether the peer showed a certificate.
    known: bool,
    /// In a handshake, a request or a response.
    busy: bool,
    /// When it became busy or idle.
    since: Instant,
    evicted: CancellationToken,
}

impl Table {
    fn count(&self, of: impl Fn(&Entry) -> bool) -> usize {
        self.taken.values().filter(|entry| of(entry)).count()
    }

    /// Ends one of the connections that `of` selects: first peers without a certificate, of the address that has most of them, the one idle
    /// for longest. Returns false if all are in use. So a few addresses that reconnect again and again never displace an address with a
    /// single connection.
    fn evict(&mut self, now: Instant, of: impl Fn(&Entry) -> bool, members_too: bool) -> bool {
        let rank = |entry: &Entry| match (entry.known, entry.busy) {
            (false, false) => Some(0),
            (false, true) => (now.saturating_duration_since(entry.since) >= PATIENCE).then_some(1),
            (true, false) => members_too.then_some(2),
            (true, true) => None,
        };
        let candidates = self.taken.iter().filter(|(_, entry)| of(entry));
        let ranked: Vec<_> = candidates.filter_map(|(id, entry)| Some((rank(entry)?, entry, *id))).collect();
        let mut counts = BTreeMap::<(u8, IpAddr), usize>::new();
        for (rank, entry, _) in &ranked {
            *counts.entry((*rank, entry.from)).or_default() += 1;
        }
        let count = |rank: u8, from: IpAddr| counts.get(&(rank, from)).copied().unwrap_or(0);
        let victim = ranked.into_iter().map(|(rank, entry, id)| (rank, Reverse(count(rank, entry.from)), entry.since, id)).min();
        let Some(entry) = victim.and_then(|(.., id)| self.taken.remove(&id)) else { return false };
        entry.evicted.cancel();
        true
    }
}

impl Places {
    pub(super) fn new(limits: &Limits) -> Self {
        let limits = Caps {
            connections: limits.connections.max(1),
            per_address: limits.per_address.max(1),
            strangers: limits.strangers.min(limits.connections).max(1),
        };
        Self(Arc::new(Shared { limits, table: Mutex::default(), freed: Notify::new() }))
    }

    /// A place for a connection from that address, at once.
    pub(super) fn take(&self, from: IpAddr) -> Result<Place, Full> {
        let (now, from, limits) = (Instant::now(), from.to_canonical(), &self.0.limits);
        let mut table = self.0.table.lock();
        // A member may displace its own connections only.
        if table.count(|entry| entry.from == from) >= limits.per_address && !table.evict(now, |entry| entry.from == from, true) {
            return Err(Full::Address);
        }
        let full = table.count(|entry| !entry.known) >= limits.strangers || table.taken.len() >= limits.connections;
        if full && !table.evict(now, |_| true, false) {
            return Err(Full::Listener);
        }
        let id = table.next;
        table.next += 1;
        let evicted = CancellationToken::new();
        table.taken.insert(id, Entry { from, known: false, busy: false, since: now, evicted: evicted.clone() });
        Ok(Place { places: self.clone(), id, evicted })
    }

    /// A place for a connection from that address. If all are in use, waits up to [`PATIENCE`] for a free one.
    pub(super) async fn wait(&self, from: IpAddr) -> Result<Place, Full> {
        let free = async {
            loop {
                match self.take(from) {
                    Err(Full::Listener) => {}
                    taken => return taken,
                }
                // Connections in use also become old enough to be ended.
                let _ = timeout(PATIENCE / 16, self.0.freed.notified()).await;
            }
        };
        timeout(PATIENCE, free).await.unwrap_or(Err(Full::Listener))
    }
}

/// The place of one connection; dropping it frees the place.
pub(super) struct Place {
    places: Places,
    id: u64,
    evicted: CancellationToken,
}

impl Place {
    /// Records that the peer presented a certificate.
    pub(super) fn known(&self) {
        if let Some(entry) = self.places.0.table.lock().taken.get_mut(&self.id) {
            entry.known = true;
        }
    }

    /// Marks the connection as in use until the returned value is dropped.
    pub(super) fn busy(self: &Arc<Self>) -> Busy {
        self.set(true);
        Busy(self.clone())
    }

    /// Completes when another connection gets the place.
    pub(super) fn evicted(&self) -> WaitForCancellationFuture<'_> {
        self.evicted.cancelled()
    }

    fn set(&self, busy: bool) {
        if let Some(entry) = self.places.0.table.lock().taken.get_mut(&self.id) {
            (entry.busy, entry.since) = (busy, Instant::now());
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.0.table.lock().taken.remove(&self.id);
        self.places.0.freed.notify_one();
    }
}

/// A connection in use; it is idle again when this is dropped.
pub(super) struct Busy(Arc<Place>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

#[cfg(test)]
mod tests;

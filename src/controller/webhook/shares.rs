//! Memory for bodies of reviews, taken as their bytes arrive: callers need no certificate, and the controller has little memory.
//!
//! Decides who may take another part: a lane has a fixed number of them, and one address gets at most a quarter. What a caller announces
//! counts for nothing, so that silent callers hold nothing. It never reads a body.

use std::collections::BTreeMap;
use std::net::IpAddr;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Bytes of one part.
pub(super) const PART: usize = 64 << 10;

/// Parts for bodies of one kind.
pub(super) struct Lane {
    parts: usize,
    taken: Mutex<Taken>,
    freed: Notify,
}

#[derive(Default)]
struct Taken {
    all: usize,
    by_address: BTreeMap<IpAddr, usize>,
}

/// The parts of one body; dropping it frees them.
pub(super) struct Share<'a> {
    lane: &'a Lane,
    from: IpAddr,
    parts: usize,
}

impl Lane {
    pub(super) fn new(bytes: usize) -> Self {
        Self { parts: bytes / PART, taken: Mutex::default(), freed: Notify::new() }
    }

    /// A share without a part.
    pub(super) fn share(&self, from: IpAddr) -> Share<'_> {
        Share { lane: self, from: from.to_canonical(), parts: 0 }
    }

    fn take(&self, from: IpAddr) -> bool {
        let mut taken = self.taken.lock();
        let own = taken.by_address.get(&from).copied().unwrap_or(0);
        let free = taken.all < self.parts && own < self.parts / 4;
        if free {
            taken.all += 1;
            taken.by_address.insert(from, own + 1);
        }
        free
    }
}

impl Share<'_> {
    /// Bytes that it has room for.
    pub(super) fn bytes(&self) -> usize {
        self.parts * PART
    }

    /// Takes another part, as soon as its address may.
    pub(super) async fn grow(&mut self) {
        loop {
            let mut freed = std::pin::pin!(self.lane.freed.notified());
            // Before the look: a part that is freed between the two is not missed.
            freed.as_mut().enable();
            if self.lane.take(self.from) {
                self.parts += 1;
                return;
            }
            freed.await;
        }
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        if self.parts == 0 {
            return;
        }
        let mut taken = self.lane.taken.lock();
        taken.all = taken.all.saturating_sub(self.parts);
        let own = taken.by_address.get(&self.from).copied().unwrap_or(0).saturating_sub(self.parts);
        if own == 0 {
            taken.by_address.remove(&self.from);
        } else {
            taken.by_address.insert(self.from, own);
        }
        drop(taken);
        // All look again: the first in line may be of an address that has its quarter.
        self.lane.freed.notify_waiters();
    }
}

//! The slots of this member that the next member may still read, by the numbers that they were offered with.
//!
//! Decides who keeps slots: the next member, until it says that it read a piece. It never frees a slot that is held elsewhere too.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tokio::sync::mpsc;
use weightsync_core::protocol::MemberName;

/// What is offered in one stream. `T` keeps a slot from being used again.
pub(crate) struct Offered<T> {
    /// None at the end of the chain.
    next: Option<MemberName>,
    out: Mutex<Out<T>>,
}

struct Out<T> {
    number: u32,
    held: BTreeMap<u32, T>,
}

impl<T> Offered<T> {
    /// To this member.
    pub(super) fn to(next: Option<MemberName>) -> Self {
        Self { next, out: Mutex::new(Out { number: 0, held: BTreeMap::new() }) }
    }

    /// Keeps a slot until the next member has read it, and numbers it. At the end of the chain it is not kept.
    pub(crate) fn offer(&self, held: T) -> u32 {
        let mut out = self.out.lock();
        let number = out.number;
        out.number = number.wrapping_add(1);
        if self.next.is_some() {
            out.held.insert(number, held);
        }
        number
    }

    /// The next member has read it. Numbers that were not offered change nothing.
    pub(crate) fn taken(&self, number: u32) {
        let _held = self.out.lock().held.remove(&number);
    }

    /// The next member, while it keeps any slot.
    pub(crate) fn keeper(&self) -> Option<&MemberName> {
        self.next.as_ref().filter(|_| !self.out.lock().held.is_empty())
    }
}

/// The next number that comes; waits for ever where no member says any.
pub(crate) async fn next_taken(taken: &mut Option<mpsc::UnboundedReceiver<u32>>) -> Option<u32> {
    match taken {
        Some(taken) => taken.recv().await,
        None => None,
    }
}

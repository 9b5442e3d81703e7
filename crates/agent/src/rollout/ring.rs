//! Which parts of a ring of memory are in use: regions are taken in order and given back in order.
//!
//! Pure. A region lies in one piece, so the end of the ring may stay empty. Decides places only; it knows no bytes.

use std::collections::VecDeque;

/// The places of a ring of so many bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ring {
    capacity: u64,
    /// Start and length of the regions in use, the oldest first.
    used: VecDeque<(u64, u64)>,
    /// First byte after the newest region.
    head: u64,
}

impl Ring {
    pub(crate) fn new(capacity: u64) -> Self {
        Self { capacity, used: VecDeque::new(), head: 0 }
    }

    /// The first byte of a new region; none while there is no room for it.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u64> {
        let start = match self.used.front() {
            None => 0,
            // What is in use lies in one piece.
            Some((oldest, _)) if self.head > *oldest => {
                if self.head.checked_add(bytes)? <= self.capacity {
                    self.head
                } else if bytes <= *oldest {
                    0
                } else {
                    return None;
                }
            }
            // It goes round the end: what is free lies in one piece.
            Some((oldest, _)) if self.head.checked_add(bytes)? <= *oldest => self.head,
            Some(_) => return None,
        };
        let end = start.checked_add(bytes).filter(|end| *end <= self.capacity)?;
        self.used.push_back((start, bytes));
        self.head = end;
        Some(start)
    }

    /// Gives the oldest region back.
    pub(crate) fn give_back(&mut self) {
        self.used.pop_front();
    }
}

#[cfg(test)]
mod tests;

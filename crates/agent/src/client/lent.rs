//! What of a ring is lent to the trainer, slot by slot.
//!
//! Decides that nothing is lent any more once it was taken back: anyone who lends slots again as they come free may be in the middle of that when
//! the publish ends. A slot that it lent then lay here for ever, and each later publish waited for it before it went over the host.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Slots that the trainer may write, or writes, by number. Nothing is lent at first.
pub(super) struct LentSlots<T>(Mutex<Option<BTreeMap<u32, T>>>);

impl<T> Default for LentSlots<T> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<T> LentSlots<T> {
    fn lock(&self) -> MutexGuard<'_, Option<BTreeMap<u32, T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lends these, and from now on single ones.
    pub(super) fn lend_all(&self, slots: BTreeMap<u32, T>) {
        *self.lock() = Some(slots);
    }

    /// Lends one more; false, and it is dropped, once all were taken back.
    pub(super) fn lend(&self, number: u32, slot: T) -> bool {
        match self.lock().as_mut() {
            Some(lent) => {
                lent.insert(number, slot);
                true
            }
            None => false,
        }
    }

    pub(super) fn take(&self, number: u32) -> Option<T> {
        self.lock().as_mut()?.remove(&number)
    }

    /// Takes all back; nothing more is lent.
    pub(super) fn take_all_back(&self) {
        // Dropped without the lock: what is freed may be taken by anyone who wants to lend it next.
        let taken = self.lock().take();
        drop(taken);
    }
}

#[cfg(test)]
mod tests;

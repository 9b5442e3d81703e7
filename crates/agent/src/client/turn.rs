//! The shared state of one publish: its connection, its source, and the slots of its ring that are lent out.
//!
//! Decides the order of messages about slots: it is that of the book.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::slots::{Fill, Slots};
use super::wire::{Outbox, Outgoing};
use weightsync_core::protocol::{ClientReply, Version};

/// What one publish shares between its connection, its source and the slots that are lent out.
pub(super) struct Turn {
    pub(super) version: Version,
    outbox: Outbox,
    /// None before the ring was announced, and again when the publish is over.
    slots: Mutex<Option<Slots>>,
    released: AtomicBool,
    total_bytes: AtomicU64,
}

impl Turn {
    pub(super) fn new(version: Version, outbox: Outbox) -> Self {
        Self { version, outbox, slots: Mutex::new(None), released: AtomicBool::new(false), total_bytes: AtomicU64::new(0) }
    }

    /// The book of slots. Messages to the client about slots are sent while it is held, so that the order of the lines is that of the book.
    pub(super) fn slots(&self) -> MutexGuard<'_, Option<Slots>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The publish is over: slots that are still read are not spoken of any more.
    pub(super) fn close(&self) {
        *self.slots() = None;
    }

    pub(super) fn is_released(&self) -> bool {
        self.released.load(Ordering::SeqCst)
    }

    /// Says once that the trainer's tensors may change.
    pub(super) fn release(&self) {
        if !self.released.swap(true, Ordering::SeqCst) {
            self.outbox.say(ClientReply::Released { version: self.version });
        }
    }

    pub(super) fn set_total_bytes(&self, bytes: u64) {
        self.total_bytes.store(bytes, Ordering::Relaxed);
    }

    pub(super) fn total_bytes(&self) -> u64 {
        self.total_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn say(&self, reply: ClientReply) {
        self.outbox.say(reply);
    }

    /// Lends a slot of the ring that was announced in the attempt `since` again, unless another ring is written now. `lend` is done before
    /// the client hears of it, and says whether it is still lent.
    pub(super) fn free(&self, since: u32, slot: u32, lend: impl FnOnce() -> bool) {
        let mut book = self.slots();
        if book.as_mut().is_some_and(|slots| slots.free(since, slot)) && lend() {
            self.outbox.say(ClientReply::Free { slot });
        }
    }

    /// Says something to the client, with the ring's memory next to it.
    pub(super) fn put(&self, line: Outgoing) {
        self.outbox.put(line);
    }

    /// Enters a filled slot into the book; returns whether the source must be notified.
    pub(super) fn fill(&self, attempt: u32, sequence: u32, slot: u32) -> Result<bool, String> {
        let mut slots = self.slots();
        let fill = slots.as_mut().ok_or("a bucket came before the ring was announced")?.fill(attempt, sequence, slot)?;
        if fill == Fill::Stale {
            self.outbox.say(ClientReply::Free { slot });
        }
        Ok(fill == Fill::Next)
    }

    /// Enters the end of an attempt into the book; returns whether the source must be notified.
    pub(super) fn end(&self, attempt: u32) -> Result<bool, String> {
        self.slots().as_mut().ok_or("the end came before the ring was announced")?.end(attempt)
    }
}

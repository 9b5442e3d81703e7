//! A trainer's tensors as a source of buckets: slots of shared memory that the trainer fills and the update reads in place.
//!
//! A slot is lent out as [`Bytes`] and given back to the trainer when the last clone is dropped. This file decides when a slot changes
//! hands; whether what a client says makes sense is decided by [`Slots`], and whether an attempt is repeated by whoever leads it.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::mpsc;

use super::memfd::SharedMemory;
use super::slots::{Fill, Slots};
use super::wire::{Outbox, Outgoing};
use crate::agent::version_source::{SourceError, VersionSource};
use crate::protocol::{ClientReply, Version};
use crate::transport::Payload;
use crate::weights::{Bucket, Layout};

/// Slots start at multiples of this, so that a bucket never shares a page with another.
const PAGE: u64 = 4096;

/// The shared memory of a connection. It outlives a publish, and serves the next one if that needs the same size.
pub(super) struct Ring {
    memory: SharedMemory,
    slots: u32,
    slot_bytes: u64,
}

impl Ring {
    fn create(slots: u32, slot_bytes: u64) -> std::io::Result<Self> {
        let length = slot_bytes.checked_mul(u64::from(slots)).and_then(|bytes| usize::try_from(bytes).ok());
        let length = length.ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(Self { memory: SharedMemory::create("weightsync-ring", length)?, slots, slot_bytes })
    }

    pub(super) fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    fn range(&self, slot: u32, bytes: u64) -> Option<Range<usize>> {
        let start = usize::try_from(u64::from(slot).checked_mul(self.slot_bytes)?).ok()?;
        Some(start..start.checked_add(usize::try_from(bytes).ok()?)?)
    }
}

/// The ring of a connection, if it has one yet.
pub(super) type RingOfConnection = Arc<Mutex<Option<Arc<Ring>>>>;

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

    /// The book of slots. What is said to the client about slots is said while it is held, so that the order of the lines is that of the book.
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

    /// Takes a filled slot into the book; tells whether the source is to hear of it.
    pub(super) fn fill(&self, attempt: u32, sequence: u32, slot: u32) -> Result<bool, String> {
        let mut slots = self.slots();
        let fill = slots.as_mut().ok_or("a bucket came before the ring was announced")?.fill(attempt, sequence, slot)?;
        if fill == Fill::Stale {
            self.outbox.say(ClientReply::Free { slot });
        }
        Ok(fill == Fill::Next)
    }

    /// Takes the end of an attempt into the book; tells whether the source is to hear of it.
    pub(super) fn end(&self, attempt: u32) -> Result<bool, String> {
        self.slots().as_mut().ok_or("the end came before the ring was announced")?.end(attempt)
    }
}

/// What a connection tells the source of its publish.
pub(super) enum FromTrainer {
    Filled { attempt: u32, sequence: u32, slot: u32 },
    Ended { attempt: u32 },
    Failed(SourceError),
}

/// A slot that is read. Given back when dropped.
struct Lent {
    ring: Arc<Ring>,
    turn: Arc<Turn>,
    slot: u32,
    range: Range<usize>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.ring.memory.bytes(self.range.clone()).unwrap_or_default()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(slots) = self.turn.slots().as_mut() {
            slots.free(self.slot);
            self.turn.outbox.say(ClientReply::Free { slot: self.slot });
        }
    }
}

/// A trainer that writes its tensors into the ring.
pub(super) struct TrainerRing {
    layout: Layout,
    repeatable: bool,
    most_slots: u32,
    turn: Arc<Turn>,
    kept: RingOfConnection,
    from_trainer: mpsc::UnboundedReceiver<FromTrainer>,
    ring: Option<Arc<Ring>>,
    ended: bool,
    failed: Option<SourceError>,
}

impl TrainerRing {
    /// Nothing is allocated, and the client is not asked for a byte, before the first [`VersionSource::next`].
    pub(super) fn new(
        layout: Layout,
        repeatable: bool,
        most_slots: u32,
        turn: Arc<Turn>,
        kept: RingOfConnection,
        from_trainer: mpsc::UnboundedReceiver<FromTrainer>,
    ) -> Self {
        Self { layout, repeatable, most_slots, turn, kept, from_trainer, ring: None, ended: false, failed: None }
    }

    async fn open(&self) -> Result<Arc<Ring>, SourceError> {
        let buckets = self.layout.bucket_count();
        let slots = self.most_slots.min(buckets).max(1);
        let slot_bytes = self.layout.bucket_bytes.min(self.layout.total_bytes).max(1).next_multiple_of(PAGE);
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        // One strong reference: no slot of an earlier publish is read any more.
        let fits = |ring: &Arc<Ring>| ring.slots == slots && ring.slot_bytes == slot_bytes && Arc::strong_count(ring) == 1;
        let (ring, new) = if let Some(ring) = kept.filter(fits) {
            (ring, false)
        } else {
            let created = tokio::task::spawn_blocking(move || Ring::create(slots, slot_bytes)).await;
            let created = created.map_err(|error| error.to_string()).and_then(|ring| ring.map_err(|error| error.to_string()));
            let what = || format!("no {slots} buckets of {slot_bytes} bytes of shared memory for the trainer");
            (Arc::new(created.map_err(|cause| SourceError::Io { what: what(), cause })?), true)
        };
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&ring));
        let reply = ClientReply::Ring { memfd: new, layout: self.layout.clone(), slots, slot_bytes, attempt: 1 };
        let mut book = self.turn.slots();
        *book = Some(Slots::new(slots, buckets));
        self.turn.outbox.put(if new { Outgoing::WithMemory(reply, Arc::clone(&ring)) } else { Outgoing::Line(reply) });
        drop(book);
        Ok(ring)
    }

    fn attempt(&self) -> u32 {
        self.turn.slots().as_ref().map_or(0, Slots::attempt)
    }

    fn take(&self, ring: &Arc<Ring>, sequence: u32, slot: u32) -> Result<(Bucket, Bytes), SourceError> {
        let bucket = self.layout.bucket(sequence);
        let lent = bucket.and_then(|bucket| Some((bucket, ring.range(slot, bucket.bytes)?)));
        let (bucket, range) = lent.ok_or_else(|| SourceError::Nonsense { what: format!("bucket {sequence} does not exist") })?;
        let lent = Lent { ring: Arc::clone(ring), turn: Arc::clone(&self.turn), slot, range };
        Ok((bucket, Bytes::from_owner(lent)))
    }
}

#[async_trait]
impl VersionSource for TrainerRing {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn repeatable(&self) -> bool {
        self.repeatable && !self.turn.is_released()
    }

    async fn next(&mut self, silence: Duration) -> Result<Option<(Bucket, Payload)>, SourceError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if self.ended {
            return Ok(None);
        }
        let ring = match &self.ring {
            Some(ring) => Arc::clone(ring),
            None => Arc::clone(self.ring.insert(self.open().await?)),
        };
        loop {
            let heard = tokio::time::timeout(silence, self.from_trainer.recv()).await.map_err(|_| SourceError::Silent { silence })?;
            match heard {
                Some(FromTrainer::Filled { attempt, sequence, slot }) => {
                    let taken = self.take(&ring, sequence, slot)?;
                    // One of an attempt that is over is given back by the drop.
                    if attempt == self.attempt() {
                        return Ok(Some((taken.0, taken.1.into())));
                    }
                }
                Some(FromTrainer::Ended { attempt }) if attempt == self.attempt() => {
                    self.ended = true;
                    return Ok(None);
                }
                Some(FromTrainer::Ended { .. }) => {}
                Some(FromTrainer::Failed(error)) => {
                    self.failed = Some(error.clone());
                    return Err(error);
                }
                None => return Err(SourceError::Gone { cause: "its connection ended".into() }),
            }
        }
    }

    async fn restart(&mut self, reason: &str) -> Result<(), SourceError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if !self.repeatable() {
            return Err(SourceError::NotRepeatable { reason: reason.to_owned() });
        }
        let mut book = self.turn.slots();
        if let Some(slots) = book.as_mut() {
            let attempt = slots.again();
            self.turn.outbox.say(ClientReply::Again { attempt, reason: reason.to_owned() });
        }
        self.ended = false;
        Ok(())
    }

    async fn released(&mut self) {
        self.turn.release();
    }
}

//! The copies of versions that a source keeps, to try again, to feed joiners and to go back.
//!
//! Decides whether there is room for one: within the limit that the object states, and within the memory of the pod, asked before it is
//! used. A copy of bytes that stay where they are (a checkpoint) takes no memory.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::archive::Archived;
use crate::lead::Keep;
use crate::locks::lock;
use crate::space::{Cgroups, Reservation};
use crate::version_source::{SourceError, VersionSource};
use weightsync_core::protocol::HeldVersion;
use weightsync_core::weights::{Bucket, DigestAlgorithm, Layout};
use weightsync_transport::Payload;

/// A complete copy.
pub struct Retained {
    pub held: HeldVersion,
    pub algorithm: DigestAlgorithm,
    copy: Copy,
}

enum Copy {
    Memory { layout: Arc<Layout>, buckets: Arc<Vec<Bytes>> },
    Elsewhere(Mutex<Box<dyn VersionSource>>),
}

impl Retained {
    /// A copy in memory; none when buckets are missing.
    pub fn in_memory(held: HeldVersion, algorithm: DigestAlgorithm, layout: &Layout, buckets: Vec<Bytes>) -> Option<Self> {
        let bytes: u64 = buckets.iter().map(|bucket| bucket.len() as u64).sum();
        let whole = bytes == layout.total_bytes && buckets.len() == layout.bucket_count() as usize;
        whole.then(|| Self { held, algorithm, copy: Copy::Memory { layout: Arc::new(layout.clone()), buckets: Arc::new(buckets) } })
    }

    /// Bytes that stay where they are.
    pub fn elsewhere(held: HeldVersion, algorithm: DigestAlgorithm, reader: Box<dyn VersionSource>) -> Self {
        Self { held, algorithm, copy: Copy::Elsewhere(Mutex::new(reader)) }
    }

    /// Reads it, from the first byte.
    pub fn source(&self) -> Option<Box<dyn VersionSource>> {
        match &self.copy {
            Copy::Memory { layout, buckets } => Some(Box::new(MemoryReader { layout: layout.clone(), buckets: buckets.clone(), next: 0 })),
            Copy::Elsewhere(reader) => lock(reader).another(),
        }
    }
}

impl Archived for Retained {
    fn held(&self) -> &HeldVersion {
        &self.held
    }

    fn memory(&self) -> u64 {
        match &self.copy {
            Copy::Memory { layout, .. } => layout.total_bytes,
            Copy::Elsewhere(_) => 0,
        }
    }
}

/// Takes a copy of a stream while it is sent, once however many attempts send it.
#[derive(Default)]
pub struct Keeper(watch::Sender<Kept>, Option<Reservation>);

#[derive(Default)]
struct Kept {
    buckets: Vec<Bytes>,
    /// Buckets that came in this attempt.
    came: u32,
    /// Whether no more will come in it.
    gave_up: bool,
}

impl Keeper {
    /// One with room for all that it will keep.
    pub fn with(room: Reservation) -> Self {
        Self(watch::Sender::default(), Some(room))
    }

    /// What was kept; the keeper is empty then.
    pub fn empty(&self) -> Vec<Bytes> {
        self.0.send_replace(Kept::default()).buckets
    }

    /// Gets ready for another attempt; false when not all of the `given` buckets of the last one came here in time. A bucket is copied
    /// off the path, so the last one may still be on its way when an attempt ends.
    pub async fn rewind(&self, given: u32, limit: Duration) -> bool {
        let whole = self.whole(given, limit).await;
        self.0.send_modify(|kept| (kept.came, kept.gave_up) = (0, false));
        whole
    }

    /// Whether so many buckets of this attempt are here now.
    pub fn is_whole(&self, buckets: u32) -> bool {
        self.0.borrow().came >= buckets
    }

    pub fn bucket(&self, number: u32) -> Option<Bytes> {
        self.0.borrow().buckets.get(usize::try_from(number).ok()?).cloned()
    }
}

#[async_trait]
impl Keep for Keeper {
    fn keep(&self, bytes: Bytes) -> Bytes {
        self.note(|| Bytes::copy_from_slice(&bytes))
    }

    fn take(&self, bytes: Bytes) {
        self.note(|| bytes);
    }

    fn give_up(&self) {
        self.0.send_modify(|kept| kept.gave_up = true);
    }

    async fn whole(&self, buckets: u32, limit: Duration) -> bool {
        let mut kept = self.0.subscribe();
        let come = timeout(limit, kept.wait_for(|kept| kept.gave_up || kept.came >= buckets)).await;
        matches!(come, Ok(Ok(kept)) if kept.came >= buckets)
    }
}

impl Keeper {
    fn note(&self, copy: impl FnOnce() -> Bytes) -> Bytes {
        let before = self.0.borrow().came;
        let copy = self.bucket(before).unwrap_or_else(copy);
        self.0.send_modify(|kept| {
            if kept.buckets.len() as u64 == u64::from(kept.came) {
                kept.buckets.push(copy.clone());
                if let Some(room) = &self.1 {
                    room.used(copy.len() as u64);
                }
            }
            kept.came += 1;
        });
        copy
    }
}

/// Room for a copy of `wanted` bytes in memory next to `kept` bytes that are kept already; an error says why there is none. `spare` bytes of
/// memory are there for it and are not taken again.
pub fn fits(wanted: u64, kept: u64, limit: u64, spare: u64, cgroups: &Cgroups) -> Result<Reservation, String> {
    if wanted.saturating_add(kept) > limit {
        return Err(format!("{wanted} bytes and {kept} kept already are more than `retain` allows ({limit})"));
    }
    cgroups.reserve(wanted.saturating_sub(spare)).map_err(|error| error.to_string())
}

struct MemoryReader {
    layout: Arc<Layout>,
    buckets: Arc<Vec<Bytes>>,
    next: u32,
}

#[async_trait]
impl VersionSource for MemoryReader {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn repeatable(&self) -> bool {
        true
    }

    async fn next(&mut self, _silence: Duration) -> Result<Option<(Bucket, Payload)>, SourceError> {
        let Some(bucket) = self.layout.bucket(self.next) else { return Ok(None) };
        let bytes = usize::try_from(self.next).ok().and_then(|index| self.buckets.get(index)).cloned();
        let bytes = bytes.ok_or_else(|| SourceError::Nonsense { what: "the retained copy lacks a bucket".into() })?;
        self.next += 1;
        Ok(Some((bucket, bytes.into())))
    }

    async fn restart(&mut self, _reason: &str) -> Result<(), SourceError> {
        self.next = 0;
        Ok(())
    }

    async fn released(&mut self) {}
}

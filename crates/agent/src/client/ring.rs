//! A trainer's tensors as a source of buckets: slots of memory that the trainer fills and the update reads in place.
//!
//! Decides in which memory a publish writes, host or GPU, when its turn comes, and again when an attempt is repeated: the group may have
//! changed. Says why when it is host memory though the tensors lie on a GPU. Whether what a client says makes sense is decided by [`Slots`],
//! and whether an attempt is repeated by anyone who leads it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use super::gpu::{self, RingSize, SourceGpu};
use super::gpu_ring::{GpuRings, TrainerGpuRing};
use super::host_ring::HostRing;
use super::slots::Slots;
use super::turn::Turn;
use super::wire::Outgoing;
use crate::version_source::{SourceError, VersionSource};
use weightsync_core::protocol::{ClientReply, GpuOffer, GpuRing};
use weightsync_core::weights::{Bucket, Cuts, Layout};
use weightsync_transport::{DeviceMemory, DevicePayload, Payload};

/// Slots start at multiples of this, so that a bucket never shares a page with another.
const PAGE: u64 = 4096;

/// Memory that a trainer writes into.
#[derive(Clone)]
pub(super) enum Ring {
    Host(Arc<HostRing>),
    Gpu(Arc<TrainerGpuRing>),
}

/// The ring of a connection, if it has one yet. It outlives a publish, and serves the next one if that needs the same.
pub(super) type RingOfConnection = Arc<Mutex<Option<Ring>>>;

/// The messages of a connection to the source of its publish.
pub(super) enum FromTrainer {
    Opened { ring: u64, events: Vec<String> },
    Unopened { ring: u64, reason: String },
    Filled { attempt: u32, sequence: u32, slot: u32, event: bool },
    Ended { attempt: u32 },
    Failed(SourceError),
}

pub(super) struct Means {
    /// Slots of a ring in host memory.
    pub(super) most_slots: u32,
    /// Size of a bucket where weights travel through hosts; 0 chooses by the model's size.
    pub(super) bucket_bytes: u64,
    pub(super) offer: Option<GpuOffer>,
    pub(super) gpu: SourceGpu,
    pub(super) kept: RingOfConnection,
    pub(super) rings: Arc<GpuRings>,
}

/// A trainer that writes its tensors into the ring.
pub(super) struct TrainerRing {
    layout: Layout,
    repeatable: bool,
    means: Means,
    turn: Arc<Turn>,
    from_trainer: mpsc::UnboundedReceiver<FromTrainer>,
    attempt: u32,
    open: Option<Open>,
    ended: bool,
    failed: Option<SourceError>,
}

enum NoGpu {
    /// The trainer is gone, or silent.
    Source(SourceError),
    /// The ring lies in host memory then.
    Because(String),
}

/// A ring that is announced and may be written.
struct Open {
    ring: Ring,
    /// The attempt in which it was announced: what was filled before does not lie in it.
    since: u32,
    _lender: Option<AbortOnDropHandle<()>>,
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Ring::Gpu(ring) = &self.ring {
            ring.take_back();
        }
    }
}

impl TrainerRing {
    /// Nothing is allocated, and the client is not asked for a byte, before the first [`VersionSource::next`].
    pub(super) fn new(
        layout: Layout,
        repeatable: bool,
        means: Means,
        turn: Arc<Turn>,
        from_trainer: mpsc::UnboundedReceiver<FromTrainer>,
    ) -> Self {
        Self { layout, repeatable, means, turn, from_trainer, attempt: 1, open: None, ended: false, failed: None }
    }

    async fn open(&mut self, silence: Duration) -> Result<(), SourceError> {
        let because = match self.means.offer.clone() {
            None => None,
            Some(offer) => match self.open_gpu(&offer, silence).await {
                Ok(ring) => {
                    let lender = tokio::spawn(Arc::clone(&ring).lend_again(Arc::clone(&self.turn), self.attempt));
                    let (ring, lender) = (Ring::Gpu(ring), Some(AbortOnDropHandle::new(lender)));
                    self.open = Some(Open { ring, since: self.attempt, _lender: lender });
                    return Ok(());
                }
                Err(NoGpu::Source(error)) => return Err(error),
                Err(NoGpu::Because(reason)) => {
                    tracing::info!(version = self.turn.version, reason, "a trainer with tensors on a GPU writes into host memory");
                    Some(reason)
                }
            },
        };
        let ring = Ring::Host(self.open_host(because).await?);
        self.open = Some(Open { ring, since: self.attempt, _lender: None });
        Ok(())
    }

    async fn open_host(&self, host_because: Option<String>) -> Result<Arc<HostRing>, SourceError> {
        let slots = self.means.most_slots.min(self.layout.bucket_count()).max(1);
        let slot_bytes = self.layout.largest_bucket().max(1).next_multiple_of(PAGE);
        let kept = lock(&self.means.kept).take();
        // One strong reference: no slot of an earlier publish is read any more.
        let fits = |ring: &Arc<HostRing>| ring.slots == slots && ring.slot_bytes == slot_bytes && Arc::strong_count(ring) == 1;
        let kept = kept.and_then(|ring| if let Ring::Host(ring) = ring { Some(ring).filter(fits) } else { None });
        let (ring, new) = if let Some(ring) = kept {
            (ring, false)
        } else {
            let created = tokio::task::spawn_blocking(move || HostRing::create(slots, slot_bytes)).await;
            let created = created.map_err(|error| error.to_string()).and_then(|ring| ring.map_err(|error| error.to_string()));
            let what = || format!("no {slots} buckets of {slot_bytes} bytes of shared memory for the trainer");
            (Arc::new(created.map_err(|cause| SourceError::Io { what: what(), cause })?), true)
        };
        *lock(&self.means.kept) = Some(Ring::Host(Arc::clone(&ring)));
        let reply = self.announced(new, RingSize { slots, slot_bytes }, None, host_because);
        let mut book = self.turn.slots();
        *book = Some(Slots::new(self.attempt, slots, self.layout.bucket_count()));
        self.turn.put(if new { Outgoing::WithMemory(reply, Arc::clone(&ring)) } else { Outgoing::Line(reply) });
        drop(book);
        Ok(ring)
    }

    /// The ring on the GPU, proven and lent to the trainer.
    async fn open_gpu(&mut self, offer: &GpuOffer, silence: Duration) -> Result<Arc<TrainerGpuRing>, NoGpu> {
        let source = self.means.gpu.borrow().clone().map_err(NoGpu::Because)?;
        if let Some(obstacle) = gpu::obstacle(offer, &source.gpu, gpu::own_pid_namespace()) {
            return Err(NoGpu::Because(obstacle));
        }
        let kept = lock(&self.means.kept).take();
        let kept = kept.and_then(|ring| if let Ring::Gpu(ring) = ring { Some(ring) } else { None });
        let ring = if let Some(ring) = kept.filter(|ring| ring.serves(&source.worker, self.layout.largest_bucket())) {
            ring
        } else {
            self.means.rings.make_room(&self.means.kept).await;
            let size = source.ring_for(&self.layout).map_err(NoGpu::Because)?;
            let created = TrainerGpuRing::create(&self.means.rings, &self.turn, &source, size).await;
            Arc::new(created.map_err(NoGpu::Because)?)
        };
        let size = ring.size();
        let announcement = ring.announcement();
        let proven = announcement.proven;
        if proven {
            ring.lend_all().await.map_err(NoGpu::Because)?;
        }
        let reply = self.announced(false, size, Some(announcement), None);
        let slots = Slots::new(self.attempt, size.slots, self.layout.bucket_count());
        {
            let mut book = self.turn.slots();
            *book = proven.then_some(slots);
            self.turn.say(reply);
        }
        if !proven {
            let handles = self.opened(ring.number(), silence).await?;
            let events = ring.prove(&handles).await.map_err(NoGpu::Because)?;
            ring.lend_all().await.map_err(NoGpu::Because)?;
            let mut book = self.turn.slots();
            *book = Some(Slots::new(self.attempt, size.slots, self.layout.bucket_count()));
            self.turn.say(ClientReply::Ready { ring: ring.number(), events });
        }
        *lock(&self.means.kept) = Some(Ring::Gpu(Arc::clone(&ring)));
        Ok(ring)
    }

    /// Waits until the trainer opened the ring of that number, and answers its events.
    async fn opened(&mut self, number: u64, silence: Duration) -> Result<Vec<String>, NoGpu> {
        loop {
            match self.heard(silence).await.map_err(NoGpu::Source)? {
                FromTrainer::Opened { ring, events } if ring == number => return Ok(events),
                FromTrainer::Unopened { ring, reason } if ring == number => {
                    self.means.rings.closed(number);
                    return Err(NoGpu::Because(reason));
                }
                // What was under way when the ring was announced again: its slots are no longer spoken of.
                _ => {}
            }
        }
    }

    async fn heard(&mut self, silence: Duration) -> Result<FromTrainer, SourceError> {
        let heard = tokio::time::timeout(silence, self.from_trainer.recv()).await.map_err(|_| SourceError::Silent { silence })?;
        match heard {
            Some(FromTrainer::Failed(error)) => {
                self.failed = Some(error.clone());
                Err(error)
            }
            Some(heard) => Ok(heard),
            None => Err(SourceError::Gone { cause: "its connection ended".into() }),
        }
    }

    fn announced(&self, memfd: bool, size: RingSize, gpu: Option<GpuRing>, host_because: Option<String>) -> ClientReply {
        let cuts = match self.layout.cuts {
            Cuts::Even => Vec::new(),
            Cuts::BetweenTensors => self.layout.buckets().map(|bucket| bucket.offset).collect(),
        };
        let RingSize { slots, slot_bytes } = size;
        ClientReply::Ring { memfd, layout: self.layout.clone(), slots, slot_bytes, attempt: self.attempt, cuts, gpu, host_because }
    }

    fn take(&self, sequence: u32, slot: u32, event: bool) -> Result<(Bucket, Payload), SourceError> {
        let taken = self.layout.bucket(sequence).and_then(|bucket| {
            let open = self.open.as_ref()?;
            let payload = match &open.ring {
                Ring::Host(ring) if !event => ring.filled(&self.turn, open.since, slot, bucket.bytes)?.into(),
                Ring::Host(_) => return None,
                Ring::Gpu(ring) => {
                    let (slot, after) = ring.filled(slot, event)?;
                    let (worker, memory) = (slot.ring().worker().clone(), DeviceMemory::Slot(slot));
                    Payload::Device(DevicePayload { worker, memory, offset: 0, bytes: bucket.bytes, after, lent: None })
                }
            };
            Some((bucket, payload))
        });
        taken.ok_or_else(|| SourceError::Nonsense { what: format!("bucket {sequence} cannot be in slot {slot}, or has no event") })
    }

    /// Whether the ring that is open is still there, and is still what a publish would write into.
    fn still_right(&self) -> bool {
        let Some(open) = &self.open else { return false };
        let source = self.means.gpu.borrow();
        match (&open.ring, source.as_ref()) {
            (Ring::Gpu(ring), Ok(source)) => ring.alive() && ring.is_of(&source.worker),
            (Ring::Gpu(_), Err(_)) => false,
            (Ring::Host(_), _) => true,
        }
    }
}

#[async_trait]
impl VersionSource for TrainerRing {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn lay_out(&mut self) {
        // What the trainer was informed of stays as it is.
        if self.open.is_some() || self.attempt > 1 {
            return;
        }
        let tensors = self.layout.tensors().cloned().collect();
        match gpu::lay_out(tensors, self.means.bucket_bytes, &self.means.gpu) {
            Ok(layout) => self.layout = layout,
            // It was laid out before from the same tensors: that stays.
            Err(error) => tracing::warn!(%error, "a version cannot be laid out again"),
        }
    }

    fn repeatable(&self) -> bool {
        self.repeatable && !self.turn.is_released()
    }

    fn holds(&self) -> bool {
        self.open.is_none() || self.still_right()
    }

    async fn next(&mut self, silence: Duration) -> Result<Option<(Bucket, Payload)>, SourceError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if self.ended {
            return Ok(None);
        }
        if self.open.is_none() {
            self.open(silence).await?;
        }
        loop {
            match self.heard(silence).await? {
                FromTrainer::Filled { attempt, sequence, slot, event } => {
                    if self.open.as_ref().is_none_or(|open| attempt < open.since) {
                        continue;
                    }
                    let taken = self.take(sequence, slot, event)?;
                    // One of an attempt that is over is given back by the drop.
                    if attempt == self.attempt {
                        return Ok(Some(taken));
                    }
                }
                FromTrainer::Ended { attempt } if attempt == self.attempt => {
                    self.ended = true;
                    return Ok(None);
                }
                _ => {}
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
        self.ended = false;
        if self.open.is_none() {
            return Ok(());
        }
        self.attempt = self.attempt.saturating_add(1);
        if self.still_right() {
            let mut book = self.turn.slots();
            if let Some(slots) = book.as_mut() {
                slots.again();
                self.turn.say(ClientReply::Again { attempt: self.attempt, reason: reason.to_owned() });
            }
        } else {
            // The next requested bucket announces another ring, which makes the trainer start over.
            *self.turn.slots() = None;
            self.open = None;
        }
        Ok(())
    }

    async fn released(&mut self) {
        self.turn.release();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

//! A ring in memory of the agent's worker that a trainer on the same GPU writes into.
//!
//! Decides when the memory is proven: the trainer opened it, wrote the agent's random bytes at its very end, and the worker read them there
//! after the trainer's event. Until then no bucket is taken from it. A ring serves one connection only: what another process may still
//! have queued towards it can never reach the bytes of a later one. It is freed when the trainer closed it: freeing what another process
//! has open is undefined (CUDA driver API, cuIpcCloseMemHandle). It never decides about attempts or versions.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::gpu::{RingSize, SourceWorker};
use super::lent::LentSlots;
use super::ring::{Ring as Kept, RingOfConnection};
use super::turn::Turn;
use weightsync_core::protocol::worker::{IpcHandle, Part};
use weightsync_core::protocol::{ClientReply, GpuRing};
use weightsync_core::weights::gsum64;
use weightsync_gpu::worker::{Event, Ring, Slot, Worker};

/// A worker that needs longer for one of these small things hangs.
const STEP: Duration = Duration::from_secs(30);

/// Bytes that the trainer writes to prove that it means the same memory.
const CHECK_BYTES: usize = 64;

/// One wait for a slot; the next follows.
const TURN: Duration = Duration::from_secs(3600);

/// A trainer that does not close a ring within this long is gone, or broken.
const CLOSING: Duration = Duration::from_secs(5);

/// The rings on the GPU, of all connections.
#[derive(Default)]
pub(super) struct GpuRings(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// Of rings that may be open at a trainer: cancelled when it closed them, and when they were freed.
    rings: BTreeMap<u64, Ends>,
    /// The connection whose ring is on the GPU; there is room for one.
    holder: Weak<Mutex<Option<Kept>>>,
}

#[derive(Clone, Default)]
struct Ends {
    closed: CancellationToken,
    freed: CancellationToken,
}

impl GpuRings {
    pub(super) fn closed(&self, ring: u64) {
        if let Some(ends) = lock(&self.0).rings.get(&ring) {
            ends.closed.cancel();
        }
    }

    /// Frees the ring of the connection that has one, and writes this one down instead. No one writes into it: its publish is over, or
    /// this one would not have its turn.
    pub(super) async fn make_room(&self, kept: &RingOfConnection) {
        let freed: Vec<CancellationToken> = {
            let mut known = lock(&self.0);
            let before = std::mem::replace(&mut known.holder, Arc::downgrade(kept));
            let freed = known.rings.values().map(|ends| ends.freed.clone()).collect();
            drop(known);
            if let Some(before) = before.upgrade() {
                let mut kept = lock(&before);
                if matches!(*kept, Some(Kept::Gpu(_))) {
                    *kept = None;
                }
            }
            freed
        };
        for freed in freed {
            // One that is still read is freed later; there may be room for both.
            let _ = timeout(CLOSING + Duration::from_secs(1), freed.cancelled()).await;
        }
    }
}

/// Memory of a worker, for one connection.
pub(super) struct TrainerGpuRing {
    rings: Arc<GpuRings>,
    ends: Ends,
    turn: Arc<Turn>,
    number: u64,
    gpu: String,
    ring: Ring,
    check: [u8; CHECK_BYTES],
    /// The trainer's event of each slot, once proven; empty when events cannot be shared.
    events: Mutex<Option<Vec<Event>>>,
    lent: LentSlots<Slot>,
}

impl TrainerGpuRing {
    pub(super) async fn create(rings: &Arc<GpuRings>, turn: &Arc<Turn>, source: &SourceWorker, size: RingSize) -> Result<Self, String> {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let ring = source.worker.ring(size.slots, size.slot_bytes, STEP).await.map_err(|error| error.to_string())?;
        let (number, ends, gpu) = (NUMBER.fetch_add(1, Ordering::Relaxed), Ends::default(), source.gpu.clone());
        lock(&rings.0).rings.insert(number, ends.clone());
        let (rings, turn, lent) = (Arc::clone(rings), Arc::clone(turn), LentSlots::default());
        Ok(Self { rings, ends, turn, number, gpu, ring, check: rand::random(), events: Mutex::new(None), lent })
    }

    /// Whether the next publish of its connection can use it as it is.
    pub(super) fn serves(&self, worker: &Worker, largest_bucket: u64) -> bool {
        self.is_of(worker) && self.alive() && self.proven() && self.ring.slot_bytes() >= largest_bucket
    }

    pub(super) fn is_of(&self, worker: &Worker) -> bool {
        self.ring.worker().is(worker)
    }

    pub(super) fn size(&self) -> RingSize {
        RingSize { slots: self.ring.slots(), slot_bytes: self.ring.slot_bytes() }
    }

    /// Whether its worker lives; without it the memory is gone.
    pub(super) fn alive(&self) -> bool {
        self.ring.worker().cause().is_none()
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    fn proven(&self) -> bool {
        lock(&self.events).is_some()
    }

    pub(super) fn announcement(&self) -> GpuRing {
        GpuRing {
            ring: self.number,
            gpu: self.gpu.clone(),
            handle: self.ring.handle().to_base64(),
            bytes: self.ring.bytes(),
            check: STANDARD.encode(self.check),
            proven: self.proven(),
        }
    }

    /// Searches for the check after the trainer's events; returns whether events can be used.
    pub(super) async fn prove(&self, handles: &[String]) -> Result<bool, String> {
        let events = self.import(handles).await;
        let last = self.ring.slots().saturating_sub(1);
        let slot = self.take_all().await?.remove(&last).ok_or("the ring has no slot")?;
        let start = self.ring.slot_bytes().saturating_sub(CHECK_BYTES as u64);
        let part = Part { offset: 0, bytes: CHECK_BYTES as u64, first_word: 0 };
        let after = events.last().cloned();
        let sums = self.ring.worker().digest(slot.at(start), vec![part], after, STEP).await.map_err(|error| error.to_string())?;
        if sums.sums != [gsum64(&self.check)] {
            return Err(format!("the trainer wrote a check into memory on {}, the worker does not find it there", self.gpu));
        }
        let usable = !events.is_empty();
        *lock(&self.events) = Some(events);
        Ok(usable)
    }

    /// The trainer's events; none at all when one of them cannot be opened: then the trainer waits for its copies itself.
    async fn import(&self, handles: &[String]) -> Vec<Event> {
        let mut events = Vec::new();
        if handles.len() != self.ring.slots() as usize {
            return events;
        }
        for handle in handles {
            let Some(handle) = IpcHandle::from_base64(handle) else { return Vec::new() };
            match self.ring.worker().import_event(&handle, STEP).await {
                Ok(event) => events.push(event),
                Err(error) => {
                    tracing::warn!(%error, "events of the trainer cannot be shared: it waits for its copies instead");
                    return Vec::new();
                }
            }
        }
        events
    }

    /// Takes every slot; waits for those that are still read.
    async fn take_all(&self) -> Result<BTreeMap<u32, Slot>, String> {
        let mut taken = BTreeMap::new();
        for _ in 0..self.ring.slots() {
            let slot = self.ring.take(STEP).await.map_err(|error| error.to_string())?;
            taken.insert(slot.index(), slot);
        }
        Ok(taken)
    }

    pub(super) async fn lend_all(&self) -> Result<(), String> {
        self.lent.lend_all(self.take_all().await?);
        Ok(())
    }

    /// Takes what was lent back; what is read stays so until it was read.
    pub(super) fn take_back(&self) {
        self.lent.take_all_back();
    }

    /// A slot that the trainer filled, and its event where that is to be waited for. None when it was not lent, or has no event.
    pub(super) fn filled(&self, slot: u32, event: bool) -> Option<(Slot, Option<Event>)> {
        let after = if event { Some(lock(&self.events).as_ref()?.get(slot as usize)?.clone()) } else { None };
        let slot = self.lent.take(slot)?;
        Some((slot, after))
    }

    /// Lends each slot again that no one reads any more, until this is aborted. The ring was announced in the attempt `since`.
    pub(super) async fn lend_again(self: Arc<Self>, turn: Arc<Turn>, since: u32) {
        loop {
            let Ok(slot) = self.ring.take(TURN).await else {
                if self.alive() {
                    continue;
                }
                return;
            };
            let index = slot.index();
            turn.free(since, index, || self.lent.lend(index, slot));
        }
    }
}

impl Drop for TrainerGpuRing {
    fn drop(&mut self) {
        let (rings, ends, number, turn) = (Arc::clone(&self.rings), self.ends.clone(), self.number, Arc::clone(&self.turn));
        let (ring, events) = (self.ring.clone(), lock(&self.events).take());
        self.lent.take_all_back();
        let worker = ring.worker().clone();
        let freeing = async move {
            if !ends.closed.is_cancelled() && worker.cause().is_none() {
                turn.say(ClientReply::Close { ring: number });
                let _ = timeout(CLOSING, ends.closed.cancelled()).await;
            }
            drop((ring, events));
            lock(&rings.0).rings.remove(&number);
            ends.freed.cancel();
        };
        // Without a runtime the agent is ending, and its worker with it.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(freeing);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

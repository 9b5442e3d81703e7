//! Pinned host memory that bytes pass through on their way between this process and a GPU.
//!
//! A few short areas, used again and again: a bucket passes through them in pieces, each copied by the worker while the one before is read
//! or written here. Decides how much host memory that takes, whatever the length of a bucket. Copies that are to be kept get memory of
//! their own, pinned once and used again for the next version: pinning takes longer than copying.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use super::{cut, pieces};
use weightsync_gpu::worker::{Copy, Event, HostMemory, Slot, Span, Worker, WorkerError};
use weightsync_net::memfd::SharedMemory;

/// Length of an area in bytes.
pub(super) const AREA: u64 = 16 << 20;

/// Areas of one worker.
const AREAS: usize = 4;

/// What is kept lies in memory of this granularity.
const REGION: u64 = 1 << 20;

/// Making an area takes memory, which may have to be swept together first.
const MAKING: Duration = Duration::from_secs(10);

/// The end of a copy to a GPU.
pub(super) type Bringing = BoxFuture<'static, Result<(), WorkerError>>;

/// The areas of one worker.
#[derive(Clone)]
pub struct Staging {
    worker: Worker,
    areas: Arc<Free>,
    permits: Arc<Semaphore>,
    regions: Arc<Free>,
}

/// Places that are lent to no one, and how many bytes there are in all. What is above `limit` bytes, lent ones counted in, is given up.
struct Free {
    places: Mutex<Places>,
    limit: AtomicU64,
}

#[derive(Default)]
struct Places {
    free: Vec<Place>,
    /// Of all places that were made and not given up.
    bytes: u64,
}

struct Place {
    memory: SharedMemory,
    host: HostMemory,
    length: u64,
}

impl Free {
    fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { places: Mutex::default(), limit: AtomicU64::new(limit) })
    }

    /// A place of at least so many bytes, and not of many more. Where there is none, free ones are given up as far as another one of this
    /// length has no room next to them.
    fn take(&self, bytes: u64) -> Option<Place> {
        let mut places = self.places.lock();
        if let Some(fits) = best(places.free.iter().map(|place| place.length), bytes) {
            return Some(places.free.swap_remove(fits));
        }
        let limit = self.limit.load(Ordering::Relaxed);
        while places.bytes.saturating_add(bytes) > limit
            && let Some(place) = places.free.pop()
        {
            places.bytes = places.bytes.saturating_sub(place.length);
        }
        None
    }

    fn made(&self, place: &Place) {
        let mut places = self.places.lock();
        places.bytes = places.bytes.saturating_add(place.length);
    }

    fn give_back(&self, place: Place) {
        let mut places = self.places.lock();
        if places.bytes <= self.limit.load(Ordering::Relaxed) {
            places.free.push(place);
        } else {
            places.bytes = places.bytes.saturating_sub(place.length);
        }
    }
}

/// Lengths that are to be made for copies of `wanted` lengths next to the free ones, the longest first.
fn lacking(mut free: Vec<u64>, wanted: &[u64]) -> Vec<u64> {
    let mut wanted: Vec<u64> = wanted.iter().map(|bytes| bytes.next_multiple_of(REGION)).collect();
    wanted.sort_unstable_by(|one, other| other.cmp(one));
    wanted.retain(|bytes| match best(free.iter().copied(), *bytes) {
        Some(at) => {
            free.swap_remove(at);
            false
        }
        None => *bytes > 0,
    });
    wanted
}

/// Which of these lengths serves best. Buckets of one model differ by a little: were the first that fits taken, a longer one would find none left,
/// and pinning another gigabyte takes longer than the whole update.
fn best(lengths: impl Iterator<Item = u64>, bytes: u64) -> Option<usize> {
    let fit = lengths.enumerate().filter(|(_, length)| (bytes..=bytes.saturating_mul(2)).contains(length));
    fit.min_by_key(|(_, length)| *length).map(|(place, _)| place)
}

pub(super) struct Area {
    place: Option<Place>,
    free: Arc<Free>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Staging {
    /// No area is made before it is needed.
    pub fn new(worker: Worker) -> Self {
        Self { worker, areas: Free::new(u64::MAX), permits: Arc::new(Semaphore::new(AREAS)), regions: Free::new(0) }
    }

    pub(crate) fn worker(&self) -> &Worker {
        &self.worker
    }

    /// How much memory of copies may stay pinned, those that are kept and those that wait for the next version together.
    pub fn reuse(&self, bytes: u64) {
        self.regions.limit.store(bytes, Ordering::Relaxed);
    }

    /// Bytes of memory that is pinned and waits for the next copies.
    pub fn spare(&self) -> u64 {
        self.regions.places.lock().free.iter().map(|place| place.length).sum()
    }

    /// Copies any number of bytes from a GPU into pinned memory of their own, to be kept. The memory goes back when the last cut of the
    /// returned bytes is dropped.
    pub(crate) async fn copy_out(&self, from: Span, bytes: u64, after: Option<Event>, within: Duration) -> Result<Bytes, WorkerError> {
        let length = bytes.next_multiple_of(REGION);
        let place = match self.regions.take(length) {
            Some(place) => place,
            None => self.more(&self.regions, length).await?,
        };
        let region = Area { place: Some(place), free: self.regions.clone(), _permit: None };
        let to = region.span()?;
        let copied = self.worker.copy_now(Copy { from, to, bytes, after, then: None }, within);
        ended(tokio::spawn(async move { copied.await.map(|()| region.bytes(bytes)) })).await
    }

    /// Whether copies lie here that are kept.
    pub fn has_kept(&self) -> bool {
        let places = self.regions.places.lock();
        places.bytes > places.free.iter().map(|place| place.length).sum()
    }

    /// Gives up the memory that waits for the next copies.
    pub fn forget(&self) {
        let mut places = self.regions.places.lock();
        let free: u64 = places.free.drain(..).map(|place| place.length).sum();
        places.bytes = places.bytes.saturating_sub(free);
    }

    /// Lengths of the memory that copies of these lengths need beyond what waits for them. Empty where not all of them have room within
    /// [`reuse`](Self::reuse): a copy from before gives its memory on to the next one then.
    pub fn missing(&self, lengths: &[u64]) -> Vec<u64> {
        let places = self.regions.places.lock();
        let missing = lacking(places.free.iter().map(|place| place.length).collect(), lengths);
        let bytes = missing.iter().fold(places.bytes, |sum, length| sum.saturating_add(*length));
        if bytes <= self.regions.limit.load(Ordering::Relaxed) { missing } else { Vec::new() }
    }

    /// Pins memory of these lengths for the next copies, one after the other, until `stop` is cancelled; `pinned` hears of each.
    ///
    /// # Errors
    /// The worker is gone, or there is no memory. What was pinned before stays.
    pub async fn prepare(&self, lengths: &[u64], stop: &CancellationToken, pinned: impl Fn(u64)) -> Result<(), WorkerError> {
        for length in lengths {
            if stop.is_cancelled() {
                return Ok(());
            }
            // Not dropped in the middle: memory that is pinned for no one would stay so.
            let place = self.more(&self.regions, *length).await?;
            pinned(place.length);
            self.regions.give_back(place);
        }
        Ok(())
    }

    async fn more(&self, places: &Free, bytes: u64) -> Result<Place, WorkerError> {
        let place = make(&self.worker, bytes).await?;
        places.made(&place);
        Ok(place)
    }

    /// An area; waits until one is free.
    pub(super) async fn take(&self) -> Result<Area, WorkerError> {
        // The semaphore is never closed.
        let permit = Arc::clone(&self.permits).acquire_owned().await.ok();
        let place = match self.areas.take(AREA) {
            Some(place) => place,
            None => self.more(&self.areas, AREA).await?,
        };
        Ok(Area { place: Some(place), free: self.areas.clone(), _permit: permit })
    }

    /// Copies `bytes` bytes, at most [`AREA`], from a GPU into an area.
    pub(super) async fn fetch(&self, from: Span, bytes: u64, within: Duration) -> Result<Bytes, WorkerError> {
        let area = self.take().await?;
        let to = area.span()?;
        let copied = self.worker.copy_now(Copy { from, to, bytes, after: None, then: None }, within);
        ended(tokio::spawn(async move { copied.await.map(|()| area.bytes(bytes)) })).await
    }

    /// Writes a few bytes to a GPU; returns when they are there.
    pub async fn write(&self, bytes: Bytes, to: Span, within: Duration) -> Result<(), WorkerError> {
        self.bring(bytes, to, within).await?.await
    }

    /// As [`bring`](Self::bring), for any number of bytes, into a slot from its byte `at` on.
    pub(super) async fn bring_all(&self, bytes: &Bytes, slot: &Slot, at: u64, within: Duration) -> Result<Vec<Bringing>, WorkerError> {
        let mut brought: Vec<Bringing> = Vec::new();
        for (offset, length) in pieces(bytes.len() as u64, AREA) {
            let piece = cut(bytes, offset, length);
            brought.push(Box::pin(self.bring(piece, slot.at(at.saturating_add(offset)), within).await?));
        }
        Ok(brought)
    }

    /// Writes bytes, at most [`AREA`], into an area and has them copied to a GPU. The copy is asked for when this returns; the returned
    /// future is its end.
    pub(super) async fn bring(
        &self,
        bytes: Bytes,
        to: Span,
        within: Duration,
    ) -> Result<impl Future<Output = Result<(), WorkerError>> + Send + use<>, WorkerError> {
        let mut area = self.take().await?;
        let length = bytes.len() as u64;
        // A copy of this length may not block the runtime.
        // Its own task as well: an area that is still written to is not lent again.
        let written = tokio::task::spawn_blocking(move || {
            area.write(&bytes);
            area
        });
        let area = written.await.map_err(|ended| WorkerError::Gone { cause: format!("copying ended early: {ended}") })?;
        let from = area.span()?;
        let copied = self.worker.copy_now(Copy { from, to, bytes: length, after: None, then: None }, within);
        // A task of its own keeps the area until the copy ended, anyone who stops waiting for it.
        Ok(ended(tokio::spawn(async move {
            let copied = copied.await;
            drop(area);
            copied
        })))
    }
}

async fn ended<T>(task: tokio::task::JoinHandle<Result<T, WorkerError>>) -> Result<T, WorkerError> {
    task.await.unwrap_or_else(|ended| Err(WorkerError::Gone { cause: format!("copying ended early: {ended}") }))
}

async fn make(worker: &Worker, bytes: u64) -> Result<Place, WorkerError> {
    let no_memory = |cause: String| WorkerError::Start { cause: format!("no {bytes} bytes of host memory: {cause}") };
    let length = usize::try_from(bytes).map_err(|error| no_memory(error.to_string()))?;
    let made = tokio::task::spawn_blocking(move || SharedMemory::create_writable("weightsync-staging", length)).await;
    let memory = made.map_err(|ended| no_memory(ended.to_string()))?.map_err(|error| no_memory(error.to_string()))?;
    let host = worker.map_host(memory.fd(), bytes, MAKING).await?;
    if let Some(why) = host.unpinned() {
        tracing::warn!(why, "host memory is not pinned: copies to and from the GPU are slower");
    }
    Ok(Place { memory, host, length: bytes })
}

impl Area {
    fn span(&self) -> Result<Span, WorkerError> {
        let place = self.place.as_ref().ok_or(WorkerError::Nonsense { what: "lend an area" })?;
        Ok(place.host.at(0))
    }

    fn write(&mut self, bytes: &[u8]) {
        let to = self.place.as_mut().and_then(|place| place.memory.bytes_mut(0..bytes.len()));
        if let Some(to) = to {
            to.copy_from_slice(bytes);
        }
    }

    /// The first bytes of it; it goes back when the last cut of them is dropped.
    fn bytes(self, bytes: u64) -> Bytes {
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        let all = Bytes::from_owner(self);
        all.slice(..length.min(all.len()))
    }
}

impl AsRef<[u8]> for Area {
    fn as_ref(&self) -> &[u8] {
        let all = |place: &Place| usize::try_from(place.length).ok().map(|length| 0..length);
        self.place.as_ref().and_then(|place| place.memory.bytes(all(place)?)).unwrap_or_default()
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // Before the permit goes, so that anyone who gets the permit finds a place.
        if let Some(place) = self.place.take() {
            self.free.give_back(place);
        }
    }
}

#[cfg(test)]
mod tests;

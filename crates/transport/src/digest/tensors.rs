//! The digests of a version's tensors, off the task that moves the bytes: on one core, blake3 is several times slower than a fast network.
//!
//! Decides what a few threads of this process hash at once: blocks of one tensor, and of later tensors, while more bytes travel. At most
//! [`AHEAD`] blocks for each thread are copied and not hashed yet; a faster caller waits. The faster algorithms are computed at once.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use weightsync_core::weights::{
    BlockValue, DigestAlgorithm, Layout, TREE_BLOCK, TensorHasher, TensorHasherError, block_bytes, tree_digest,
};

/// Most blocks for each thread that wait to be hashed.
const AHEAD: usize = 4;
/// Longest wait for blocks in the threads; each takes about a millisecond.
const LATE: Duration = Duration::from_secs(60);

/// Digests of the tensors of a stream that arrives in order, in parts of any length; see [`TensorHasher`].
pub struct TensorDigests(Inner);

enum Inner {
    /// On the caller's thread.
    Here(Box<TensorHasher>),
    /// On the pool's threads.
    Spread(Spread),
}

impl TensorDigests {
    /// Digests without bytes.
    pub fn new(layout: Arc<Layout>, algorithm: DigestAlgorithm) -> Self {
        match (algorithm, pool()) {
            (DigestAlgorithm::Blake3, Some(pool)) => Self(Inner::Spread(Spread::new(layout, pool))),
            _ => Self(Inner::Here(Box::new(TensorHasher::new(layout, algorithm)))),
        }
    }

    /// Bytes taken so far.
    pub fn position(&self) -> u64 {
        match &self.0 {
            Inner::Here(hasher) => hasher.position(),
            Inner::Spread(spread) => spread.position,
        }
    }

    /// Takes the next part of the stream. Blocks while the threads lag.
    pub fn update(&mut self, part: &[u8]) -> Result<(), TensorHasherError> {
        match &mut self.0 {
            Inner::Here(hasher) => hasher.update(part),
            Inner::Spread(spread) => spread.update(part),
        }
    }

    /// Takes the next `bytes` bytes by the shares that a GPU computed; see [`TensorHasher::add`].
    pub fn add(&mut self, bytes: u64, shares: &[u64]) -> Result<(), TensorHasherError> {
        match &mut self.0 {
            Inner::Here(hasher) => hasher.add(bytes, shares),
            Inner::Spread(_) => Err(TensorHasherError::Shares { what: "the digest of this version is not gsum64" }),
        }
    }

    /// The digests of the complete tensors, in layout order. Blocks until the threads have hashed everything so far.
    pub fn ended(&mut self) -> Result<&[u128], TensorHasherError> {
        match &mut self.0 {
            Inner::Here(hasher) => Ok(hasher.ended()),
            Inner::Spread(spread) => spread.ended(),
        }
    }

    /// The digest of every tensor in layout order, after the whole stream. Blocks as [`ended`](Self::ended) does.
    pub fn finish(self) -> Result<Vec<u128>, TensorHasherError> {
        match self.0 {
            Inner::Here(hasher) => hasher.finish(),
            Inner::Spread(spread) => spread.finish(),
        }
    }
}

struct Spread {
    layout: Arc<Layout>,
    position: u64,
    /// The present tensor, and the number of its present block.
    tensor: usize,
    number: u64,
    block: Vec<u8>,
    done: Vec<u128>,
    pool: &'static Pool,
    work: Arc<Work>,
}

/// The threads' work for one stream.
#[derive(Default)]
struct Work {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Blocks that are not hashed yet.
    open: usize,
    /// Values of the tensors without a digest, the first of them in front.
    values: VecDeque<Vec<Option<BlockValue>>>,
    /// Number of tensors before those.
    taken: usize,
    /// Memory to use again.
    spare: Vec<Vec<u8>>,
}

impl Spread {
    fn new(layout: Arc<Layout>, pool: &'static Pool) -> Self {
        Self { layout, position: 0, tensor: 0, number: 0, block: Vec::new(), done: Vec::new(), pool, work: Arc::default() }
    }

    fn update(&mut self, mut part: &[u8]) -> Result<(), TensorHasherError> {
        let left = self.layout.total_bytes.saturating_sub(self.position);
        if part.len() as u64 > left {
            return Err(TensorHasherError::TooLong { extra: part.len() as u64 - left });
        }
        let layout = self.layout.clone();
        while let Some(entry) = layout.entries.get(self.tensor) {
            let (_, rest) = split(part, entry.offset.saturating_sub(self.position));
            self.position += (part.len() - rest.len()) as u64;
            part = rest;
            if self.position < entry.offset {
                return Ok(());
            }
            let whole = block_bytes(entry.bytes, self.number);
            let (now, rest) = split(part, whole - self.block.len() as u64);
            self.block.extend_from_slice(now);
            self.position += now.len() as u64;
            part = rest;
            if (self.block.len() as u64) < whole {
                return Ok(());
            }
            self.give(entry.bytes)?;
            self.number += 1;
            if block_bytes(entry.bytes, self.number) == 0 {
                (self.tensor, self.number) = (self.tensor + 1, 0);
            }
        }
        self.position += part.len() as u64;
        Ok(())
    }

    /// Passes the complete block to the threads.
    fn give(&mut self, tensor_bytes: u64) -> Result<(), TensorHasherError> {
        let mut state = self.work.state.lock();
        let most = AHEAD * self.pool.threads;
        let late = self.work.changed.wait_while_for(&mut state, |state| state.open >= most, LATE).timed_out();
        if late {
            return Err(TensorHasherError::Late { within: LATE });
        }
        let place = self.tensor - state.taken;
        if state.values.len() <= place {
            state.values.resize_with(place + 1, Vec::new);
        }
        if let Some(values) = state.values.get_mut(place) {
            values.push(None);
        }
        state.open += 1;
        let next = state.spare.pop().unwrap_or_default();
        drop(state);
        let block = std::mem::replace(&mut self.block, next);
        let job = Job { work: self.work.clone(), tensor: self.tensor, tensor_bytes, number: self.number, block };
        self.pool.queue.jobs.lock().push_back(job);
        self.pool.queue.there.notify_one();
        Ok(())
    }

    fn ended(&mut self) -> Result<&[u128], TensorHasherError> {
        // Tensors without bytes that end here are no part of the stream.
        self.update(&[])?;
        let mut state = self.work.state.lock();
        if self.work.changed.wait_while_for(&mut state, |state| state.open > 0, LATE).timed_out() {
            return Err(TensorHasherError::Late { within: LATE });
        }
        while self.done.len() < self.tensor {
            let values: Option<Vec<BlockValue>> = state.values.pop_front().and_then(|values| values.into_iter().collect());
            let digest = values.and_then(|values| tree_digest(&values)).ok_or(TensorHasherError::Shares { what: "a block is missing" })?;
            self.done.push(digest);
            state.taken += 1;
        }
        drop(state);
        Ok(&self.done)
    }

    fn finish(mut self) -> Result<Vec<u128>, TensorHasherError> {
        self.ended()?;
        match self.layout.entries.get(self.done.len()) {
            None => Ok(self.done),
            Some(entry) => Err(TensorHasherError::TooShort {
                tensor: entry.tensor.full_name().into_owned(),
                position: self.position,
                total: self.layout.total_bytes,
            }),
        }
    }
}

/// The first `wanted` bytes of `part`, or all of it, and the rest.
fn split(part: &[u8], wanted: u64) -> (&[u8], &[u8]) {
    let length = usize::try_from(wanted).unwrap_or(usize::MAX).min(part.len());
    part.split_at_checked(length).unwrap_or((part, &[]))
}

/// A block to be hashed.
struct Job {
    work: Arc<Work>,
    tensor: usize,
    tensor_bytes: u64,
    number: u64,
    block: Vec<u8>,
}

impl Job {
    fn run(self) {
        let value = BlockValue::of(self.tensor_bytes, self.number, &self.block);
        let mut block = self.block;
        block.clear();
        let mut state = self.work.state.lock();
        let place = self.tensor.checked_sub(state.taken).and_then(|place| state.values.get_mut(place));
        if let Some(place) = place.and_then(|values| values.get_mut(usize::try_from(self.number).unwrap_or(usize::MAX))) {
            *place = Some(value);
        }
        state.open -= 1;
        if block.capacity() >= TREE_BLOCK {
            state.spare.push(block);
        }
        drop(state);
        self.work.changed.notify_all();
    }
}

/// The hashing threads of this process.
struct Pool {
    threads: usize,
    queue: Arc<Queue>,
}

#[derive(Default)]
struct Queue {
    jobs: Mutex<VecDeque<Job>>,
    there: Condvar,
}

/// One thread for each four cores, at most four. `None` if no thread can be started.
fn pool() -> Option<&'static Pool> {
    static POOL: OnceLock<Option<Pool>> = OnceLock::new();
    let started = POOL.get_or_init(|| {
        let wanted = std::thread::available_parallelism().map_or(1, |cores| cores.get() / 4).clamp(1, 4);
        let queue: Arc<Queue> = Arc::default();
        let threads = (0..wanted).filter(|number| start(*number, queue.clone())).count();
        (threads > 0).then_some(Pool { threads, queue })
    });
    started.as_ref()
}

fn start(number: usize, queue: Arc<Queue>) -> bool {
    let started = std::thread::Builder::new().name(format!("digest-{number}")).spawn(move || {
        loop {
            let mut jobs = queue.jobs.lock();
            queue.there.wait_while(&mut jobs, |jobs| jobs.is_empty());
            let job = jobs.pop_front();
            drop(jobs);
            if let Some(job) = job {
                job.run();
            }
        }
    });
    if let Err(error) = &started {
        tracing::warn!(%error, "a thread that hashes cannot be started");
    }
    started.is_ok()
}

#[cfg(test)]
mod tests;

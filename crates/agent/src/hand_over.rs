//! Hands buckets that lie in slots of this agent's GPU workers to the engine on the same GPUs, and says when a slot is free again.
//!
//! Decides what a slot is for another process (handle, offset, event) and how long it is kept: until the engine has read it, by its own
//! answer or by the event that it records after its copies. A slot whose event never passes is never given out again before the install
//! ends. The engine's state is the adapter's business.

mod checkpoint;
mod memory;

use std::collections::HashMap;
use std::time::Duration;

use tokio::task::JoinSet;

pub(crate) use checkpoint::FeedError;
pub use checkpoint::feed_checkpoint;
pub use memory::{MemoryFeed, feed_memory};

use weightsync_core::protocol::HeldVersion;
use weightsync_core::protocol::worker::Part;
use weightsync_core::weights::Bucket;
use weightsync_engine::{
    DeviceBucket, DeviceInstall, DeviceJob, DevicePlace, Engine, EngineError, InstallError, InstallReport, Left, Released,
};
use weightsync_gpu::worker::{Event, Slot, WorkerError};

/// Longest time to make an event.
const MAKE: Duration = Duration::from_secs(5);

/// What is read of a slot after an event: it passes only when all before it has.
const TOUCH: Part = Part { offset: 0, bytes: 8, first_word: 0 };

/// An install that is fed from slots.
pub(crate) struct HandOver {
    install: Box<dyn DeviceInstall>,
    /// One for each slot of each GPU, made on first use.
    events: HashMap<(usize, u32), Event>,
    /// Slots that the engine may still read.
    reading: JoinSet<Result<(), WorkerError>>,
    silence: Duration,
}

impl HandOver {
    /// Begins an install; nothing is changed before the first bucket.
    pub async fn begin(engine: &dyn Engine, job: &DeviceJob) -> Result<Self, InstallError> {
        let install = engine.begin_device(job).await?;
        Ok(Self { install, events: HashMap::new(), reading: JoinSet::new(), silence: job.silence })
    }

    /// Whether the engine is to be paused before bytes travel; see [`DeviceInstall::holds`].
    pub fn holds(&self) -> bool {
        self.install.holds()
    }

    /// Pauses it.
    pub async fn open(&mut self) -> Result<(), InstallError> {
        self.install.open().await
    }

    /// Hands one bucket over: one slot a GPU, each with all of it from its first byte on. The slots are given back when the engine has read.
    /// `sums` as of [`DeviceBucket::sums`].
    pub async fn bucket(&mut self, bucket: Bucket, slots: Vec<Slot>, sums: Vec<u64>) -> Result<(), InstallError> {
        let mut places = Vec::with_capacity(slots.len());
        let mut events = Vec::with_capacity(slots.len());
        for (number, slot) in slots.iter().enumerate() {
            let event = self.event(number, slot).await;
            places.push(DevicePlace {
                gpu: slot.ring().worker().gpu().to_owned(),
                handle: *slot.ring().handle(),
                allocation_bytes: slot.ring().bytes(),
                offset: slot.offset(),
                event: event.as_ref().and_then(|event| event.handle().copied()),
            });
            events.push(event);
        }
        match self.install.bucket(DeviceBucket { bucket, places, sums }).await? {
            Released::Now => {}
            Released::AfterEvents => {
                for (slot, event) in slots.into_iter().zip(events) {
                    let (silence, worker) = (self.silence, slot.ring().worker().clone());
                    self.reading.spawn(async move {
                        let read = worker.digest(slot.at(0), vec![TOUCH], event, silence).await.map(drop);
                        drop(slot);
                        read
                    });
                }
            }
        }
        // What has passed since. Anyone who gets an error gives the install up by that: nothing is handed over any more.
        while let Some(read) = self.reading.try_join_next() {
            seen(read)?;
        }
        Ok(())
    }

    /// The event of a slot; none where the worker cannot make one, and the engine is asked to copy then.
    async fn event(&mut self, number: usize, slot: &Slot) -> Option<Event> {
        if let Some(event) = self.events.get(&(number, slot.index())) {
            return Some(event.clone());
        }
        match slot.ring().worker().new_event(MAKE).await {
            Ok(event) => {
                self.events.insert((number, slot.index()), event.clone());
                Some(event)
            }
            Err(error) => {
                tracing::warn!(%error, "the engine has to copy each bucket");
                None
            }
        }
    }

    /// The engine takes its last step, once it is known to have read every bucket.
    pub async fn finish(mut self, version: HeldVersion) -> Result<InstallReport, InstallError> {
        while let Some(read) = self.reading.join_next().await {
            if let Err(error) = seen(read) {
                let left = self.install.abandon(&error.to_string()).await;
                return Err(InstallError { left, ..error });
            }
        }
        self.install.finish(version).await
    }

    /// Gives it up: what the engine is left with.
    pub async fn abandon(self, reason: &str) -> Left {
        self.install.abandon(reason).await
    }
}

/// An event that did not pass, or a worker that is gone: what the engine read is not known.
fn seen(read: Result<Result<(), WorkerError>, tokio::task::JoinError>) -> Result<(), InstallError> {
    let cause = match read {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(error)) => error.to_string(),
        Err(ended) => ended.to_string(),
    };
    let what = format!("it is not known whether the engine has read a bucket: {cause}");
    let source = EngineError::Unsupported { what, next_step: "it is fed again in full".into() };
    Err(InstallError { step: "load", left: Left::Mixture, source })
}

//! The leader's end of a stream that engines receive by themselves: which bucket is asked for when, and how the stream ends.
//!
//! The next bucket is read and digested while one is under way. No engine is asked for two things at once, unless all of them queue requests:
//! those are asked for the next bucket as soon as we broadcast the one before, which they are still loading. Never earlier: requests that
//! overtook each other would put bytes into other tensors, and no one would notice. That is why the one before must be long: what fits into
//! NCCL's buffers is broadcast as far as we can see before any engine asked for it. Whatever fails ends all groups.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::sync::oneshot;

use super::engine_round::{EngineStream, failed_call};
use weightsync_core::protocol::{BucketHeader, Receive, StreamFailure};
use weightsync_core::weights::{Bucket, Layout};
use weightsync_transport::nccl::Packer;
use weightsync_transport::{BucketSink, Payload, TransportError};

/// A broadcast of so many bytes can end here only when the others are in it: more than NCCL's buffers of 64 channels hold, twice. One buffer
/// has 4 MiB unless `NCCL_BUFFSIZE` says otherwise (NCCL 2.28).
fn ahead_from() -> u64 {
    let set = std::env::var("NCCL_BUFFSIZE").ok().and_then(|bytes| bytes.parse::<u64>().ok());
    set.unwrap_or(4 << 20).saturating_mul(128)
}

pub(super) struct EngineSink {
    stream: EngineStream,
    layout: Arc<Layout>,
    packer: Packer,
    /// From how many bytes on the next bucket is asked for after a broadcast; none where an engine takes one request at a time.
    ahead_from: Option<u64>,
    /// Whether the next bucket must wait until the last one was answered.
    waits: bool,
    /// Buckets that are under way, by sequence: one, or two whose first was broadcast already.
    rounds: FuturesUnordered<BoxFuture<'static, (u32, Result<(), StreamFailure>)>>,
    /// Comes when the last of them was broadcast; closed when it ended.
    broadcast: Option<oneshot::Receiver<()>>,
    /// The first thing that went wrong, and with which bucket.
    failure: Option<(u32, StreamFailure)>,
    broken_off: bool,
}

impl EngineSink {
    /// Has every engine pause and open what an update needs; they have `pausing` for that. Nothing is broadcast before all did.
    pub(super) async fn open(stream: EngineStream, layout: Arc<Layout>, pausing: Duration) -> Result<Self, TransportError> {
        if let Some(why) = stream.led.broken() {
            return Err(TransportError::Communicator { cause: why });
        }
        let packer = Packer::new(stream.led.worker.clone(), stream.led.staging.clone(), &layout);
        let packer = packer.map_err(|error| TransportError::Communicator { cause: error.to_string() })?;
        let mut asked = stream.ask_all(Receive::Open, pausing);
        let mut ahead = true;
        while let Some(answer) = asked.join_next().await {
            match answer {
                Ok((_, Ok(opened))) => ahead &= opened.ahead,
                Ok((member, Err(error))) => return Err(failed_call(&member, error).into()),
                Err(ended) => return Err(TransportError::Communicator { cause: ended.to_string() }),
            }
        }
        let rounds = FuturesUnordered::new();
        let ahead_from = ahead.then(ahead_from);
        Ok(Self { stream, layout, packer, ahead_from, waits: true, rounds, broadcast: None, failure: None, broken_off: false })
    }

    /// Waits for all buckets that are under way. May be dropped and called again.
    async fn settle(&mut self) -> Result<(), (u32, StreamFailure)> {
        while let Some(ended) = self.rounds.next().await {
            of(ended)?;
        }
        Ok(())
    }

    async fn next_may_go(&mut self) -> Result<(), (u32, StreamFailure)> {
        if self.waits {
            return self.settle().await;
        }
        while self.broadcast.is_some() || self.rounds.len() > 1 {
            tokio::select! {
                biased;
                Some(ended) = self.rounds.next() => of(ended)?,
                () = over(self.broadcast.as_mut()) => self.broadcast = None,
            }
        }
        Ok(())
    }

    async fn bucket(&mut self, header: BucketHeader, payload: Payload) -> Result<(), (u32, StreamFailure)> {
        let sequence = header.sequence;
        let bucket = Bucket { sequence, offset: header.offset, bytes: header.bytes };
        let wire = self.layout.wire(&bucket).map_err(|error| (sequence, StreamFailure::Communicator { cause: error.to_string() }))?;
        let packed = {
            let mut packing = std::pin::pin!(self.packer.pack(&payload, &wire, self.stream.silence));
            loop {
                tokio::select! {
                    biased;
                    packed = &mut packing => break packed,
                    // Those that are under way give back the memory that this one may wait for.
                    Some(ended) = self.rounds.next() => of(ended)?,
                }
            }
        };
        let packed = packed.map_err(|error| (sequence, self.stream.blame(&error)))?;
        self.next_may_go().await?;
        // Of a bucket of several element types the last broadcast is the one that an engine may not have asked for yet.
        let last = wire.last().map_or(0, |wire| wire.bytes);
        self.waits = self.ahead_from.is_none_or(|from| last < from);
        let (sent, broadcast) = oneshot::channel();
        let round = self.stream.clone().round(sequence, packed, sent);
        self.rounds.push(Box::pin(async move { (sequence, round.await) }));
        self.broadcast = Some(broadcast);
        Ok(())
    }

    /// Ends all groups, once the bucket after the one that failed is over: an engine that is left in a broadcast may never come out of it. Of
    /// two that failed, the first one says why. May be dropped and called again.
    async fn fail(&mut self, failed: (u32, StreamFailure)) -> TransportError {
        let mut first = self.failure.get_or_insert(failed).clone();
        while let Some((sequence, ended)) = self.rounds.next().await {
            if let Err(why) = ended
                && sequence < first.0
            {
                first = (sequence, why);
                self.failure = Some(first.clone());
            }
        }
        let error = TransportError::from(first.1);
        if !self.broken_off {
            self.break_off(&error.to_string());
        }
        error
    }

    fn break_off(&mut self, why: &str) {
        self.broken_off = true;
        drop(self.stream.led.break_off(why));
    }
}

fn of((sequence, ended): (u32, Result<(), StreamFailure>)) -> Result<(), (u32, StreamFailure)> {
    ended.map_err(|failure| (sequence, failure))
}

/// Waits until the bucket was broadcast, or ended.
async fn over(broadcast: Option<&mut oneshot::Receiver<()>>) {
    match broadcast {
        Some(broadcast) => drop(broadcast.await),
        None => std::future::pending().await,
    }
}

#[async_trait]
impl BucketSink for EngineSink {
    async fn send(&mut self, header: BucketHeader, payload: Payload, _digest: u128) -> Result<(), TransportError> {
        if let Some(failed) = self.failure.clone() {
            return Err(self.fail(failed).await);
        }
        match self.bucket(header, payload).await {
            Ok(()) => Ok(()),
            Err(failure) => Err(self.fail(failure).await),
        }
    }

    /// Digests are of tensors; engines report none that could be compared.
    fn hashes(&self) -> bool {
        true
    }

    fn takes_device(&self) -> bool {
        true
    }

    async fn failed(&mut self) -> TransportError {
        if let Some(failed) = self.failure.clone() {
            return self.fail(failed).await;
        }
        if let Err(failure) = self.settle().await {
            return self.fail(failure).await;
        }
        let cause = self.stream.led.breaks().await;
        self.fail((u32::MAX, StreamFailure::Communicator { cause })).await
    }

    async fn finish(mut self: Box<Self>) -> Result<(), TransportError> {
        if let Some(failed) = self.failure.clone() {
            return Err(self.fail(failed).await);
        }
        match self.settle().await {
            Ok(()) => Ok(()),
            Err(failure) => Err(self.fail(failure).await),
        }
    }
}

impl Drop for EngineSink {
    /// A stream that was given up in the middle leaves engines in a broadcast; one between two buckets harms no one.
    fn drop(&mut self) {
        let failure = self.failure.take().map(|(_, failure)| TransportError::from(failure).to_string());
        if !self.broken_off && (failure.is_some() || !self.rounds.is_empty()) {
            self.break_off(failure.as_deref().unwrap_or("the stream was given up in the middle of a bucket"));
        }
    }
}

//! The leader's end of a stream whose payloads travel between GPUs: announces a bucket on the chain, enters its broadcast, and says its
//! digest when the GPU computed it.
//!
//! Bytes of this process are copied into a slot first; what lies on the GPU already is sent from where it is. Decides how many broadcasts
//! are under way: as many as there are slots.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::{BoxFuture, try_join_all};
use futures::stream::{FuturesOrdered, StreamExt};
use tokio::sync::OwnedMutexGuard;
use tokio::time::sleep;

use super::communicator::{Communicator, patience};
use super::staging::Bringing;
use super::{BucketSum, PieceSum, cut, pieces};
use crate::tcp::Downstream;
use crate::{BucketSink, DevicePayload, Payload, TransportError};
use weightsync_core::protocol::worker::Part;
use weightsync_core::protocol::{BucketHeader, StreamFailure};
use weightsync_gpu::worker::{Broadcast, Event, Span, Sums, WorkerError};

type UnderWay = BoxFuture<'static, Result<PieceSum, WorkerError>>;

pub(super) struct Sink {
    chain: Downstream,
    communicator: Arc<Communicator>,
    silence: Duration,
    under_way: FuturesOrdered<UnderWay>,
    /// Of the bucket whose broadcasts end now.
    sum: BucketSum,
    failure: Option<StreamFailure>,
    finished: bool,
    _stream: OwnedMutexGuard<()>,
}

/// Where the bytes of a piece come from.
enum From {
    Host(Bytes),
    Device(DevicePayload),
}

impl Sink {
    pub(super) fn new(chain: Downstream, communicator: Arc<Communicator>, silence: Duration, stream: OwnedMutexGuard<()>) -> Self {
        let under_way = FuturesOrdered::new();
        Self { chain, communicator, silence, under_way, sum: BucketSum::default(), failure: None, finished: false, _stream: stream }
    }

    /// Waits for `work` while broadcasts under way end and the chain is listened to.
    async fn during<T>(&mut self, work: impl Future<Output = T>) -> Result<T, StreamFailure> {
        let mut work = pin!(work);
        let communicator = self.communicator.clone();
        let mut breaks = pin!(communicator.breaks());
        loop {
            tokio::select! {
                biased;
                failure = self.chain.failed() => return Err(failure),
                failure = &mut breaks => return Err(failure),
                Some(sent) = self.under_way.next() => match sent {
                    Ok(sent) => self.sent(&sent),
                    Err(error) => return Err(self.cause_of(&error).await),
                },
                done = &mut work => return Ok(done),
            }
        }
    }

    fn sent(&mut self, sent: &PieceSum) {
        if let Some(sum) = self.sum.add(sent) {
            self.chain.digest(sum.into());
        }
    }

    /// Who is at fault for an error of our worker. Anyone who it is may be named by the chain in a moment.
    async fn cause_of(&mut self, error: &WorkerError) -> StreamFailure {
        if let Some(failure) = self.communicator.blame(error) {
            return failure;
        }
        tokio::select! {
            failure = self.chain.failed() => failure,
            () = sleep(patience(self.silence).1) => StreamFailure::Communicator { cause: error.to_string() },
        }
    }

    /// The stream is over for all, and so is the communicator: its ranks may be in different broadcasts.
    fn fail(&mut self, failure: StreamFailure) -> TransportError {
        let failure = self.failure.get_or_insert(failure).clone();
        self.chain.abort(failure.clone());
        self.communicator.break_off(failure.clone());
        failure.into()
    }

    async fn bucket(&mut self, header: BucketHeader, payload: Payload) -> Result<(), StreamFailure> {
        let header = BucketHeader { flags: BucketHeader::CARRIED, ..header };
        let mut announced = false;
        for (offset, bytes) in pieces(header.bytes, self.communicator.slot_bytes()) {
            let from = match &payload {
                Payload::Host(all) => From::Host(cut(all, offset, bytes)),
                Payload::Device(device) => From::Device(device.clone()),
            };
            let (communicator, silence) = (self.communicator.clone(), self.silence);
            let placed = self.during(place(communicator, from, offset, silence)).await?;
            let Placed { spans, after, ready } = match placed {
                Ok(placed) => placed,
                Err(error) => return Err(self.cause_of(&error).await),
            };
            if !std::mem::replace(&mut announced, true) {
                self.chain.head(header);
            }
            let under_way = self.enter(spans, after, ready, offset, bytes, header.bytes);
            self.under_way.push_back(under_way);
        }
        Ok(())
    }

    /// Enters the broadcast of one piece on all our GPUs: the first one sends, the others receive like any member.
    fn enter(&self, spans: Vec<Span>, after: Option<Event>, ready: Ready, offset: u64, bytes: u64, whole: u64) -> UnderWay {
        let (within, _) = patience(self.silence);
        let locals = self.communicator.locals().iter();
        let entered: Vec<_> = locals
            .zip(spans)
            .enumerate()
            .map(|(number, (local, at))| {
                let parts = vec![Part { offset: 0, bytes, first_word: offset / 8 }];
                let (group, root) = (self.communicator.group(), self.communicator.rank());
                let after = after.clone().filter(|_| number == 0);
                local.worker.broadcast_now(Broadcast { group, root, at, bytes, parts, after }, within)
            })
            .collect();
        let (first, last) = (offset == 0, offset.saturating_add(bytes) >= whole);
        Box::pin(async move {
            try_join_all(ready.copies).await?;
            let sums: Vec<Sums> = try_join_all(entered).await?;
            // What the memory came from is given back now.
            drop(ready.lent);
            let sum = sums.first().and_then(|sums| sums.sums.first()).copied();
            sum.map(|sum| PieceSum { first, last, sum }).ok_or(WorkerError::Nonsense { what: "broadcast" })
        })
    }
}

/// What must end before a piece is gone, and what is kept until then.
struct Ready {
    copies: Vec<Bringing>,
    lent: Option<DevicePayload>,
}

/// A piece in memory of our GPUs: on the first one the bytes (or copies that are under way), on the others room for them.
struct Placed {
    spans: Vec<Span>,
    after: Option<Event>,
    ready: Ready,
}

async fn place(communicator: Arc<Communicator>, from: From, offset: u64, silence: Duration) -> Result<Placed, WorkerError> {
    let mut locals = communicator.locals().iter();
    let Some(first) = locals.next() else { return Err(WorkerError::Gone { cause: "there is no GPU worker".into() }) };
    let mut placed = match from {
        From::Device(payload) => {
            let after = payload.after.clone();
            Placed {
                spans: vec![payload.memory.at(payload.offset.saturating_add(offset))],
                after,
                ready: Ready { copies: Vec::new(), lent: Some(payload) },
            }
        }
        From::Host(bytes) => {
            let slot = first.ring.take(silence).await?;
            let copies = first.staging.bring_all(&bytes, &slot, 0, silence).await?;
            Placed { spans: vec![slot.at(0)], after: None, ready: Ready { copies, lent: None } }
        }
    };
    for local in locals {
        placed.spans.push(local.ring.take(silence).await?.at(0));
    }
    Ok(placed)
}

#[async_trait]
impl BucketSink for Sink {
    async fn send(&mut self, header: BucketHeader, payload: Payload, _digest: u128) -> Result<(), TransportError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone().into());
        }
        let sent = self.bucket(header, payload).await;
        sent.map_err(|failure| self.fail(failure))
    }

    fn hashes(&self) -> bool {
        true
    }

    fn takes_device(&self) -> bool {
        true
    }

    async fn failed(&mut self) -> TransportError {
        if let Some(failure) = &self.failure {
            return failure.clone().into();
        }
        let failure = match self.during(std::future::pending::<StreamFailure>()).await {
            Ok(failure) | Err(failure) => failure,
        };
        self.fail(failure)
    }

    async fn finish(mut self: Box<Self>) -> Result<(), TransportError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone().into());
        }
        while !self.under_way.is_empty() {
            let ended = match self.under_way.next().await {
                Some(Ok(sent)) => {
                    self.sent(&sent);
                    Ok(())
                }
                Some(Err(error)) => Err(self.cause_of(&error).await),
                None => Ok(()),
            };
            if let Err(failure) = ended {
                return Err(self.fail(failure));
            }
        }
        self.chain.end();
        let communicator = self.communicator.clone();
        let done = tokio::select! {
            biased;
            done = self.chain.done() => done,
            failure = communicator.breaks() => Err(failure),
        };
        done.map_err(|failure| self.fail(failure))?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        if !self.finished && self.failure.is_none() {
            self.communicator.break_off(StreamFailure::Cancelled);
        }
    }
}

//! Payloads that leave the leader by broadcasts between GPUs.
//!
//! Bytes of this process are copied into a slot first; what lies on the GPU already is sent from where it is. Decides how many broadcasts
//! are under way: as many as there are slots. A stream that fails or is given up ends the communicator: its ranks may be in different
//! broadcasts.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::{BoxFuture, try_join_all};
use futures::stream::{FuturesOrdered, StreamExt};
use tokio::sync::OwnedMutexGuard;

use super::communicator::{Communicator, patience};
use super::cut;
use super::staging::Bringing;
use crate::outgoing::{Blame, Outgoing, Piece, PieceSum, Trouble};
use crate::tcp::Downstream;
use crate::{DevicePayload, Payload};
use weightsync_core::protocol::StreamFailure;
use weightsync_core::protocol::worker::Part;
use weightsync_gpu::worker::{Broadcast, Event, Span, Sums, WorkerError};

pub(super) struct Broadcasting {
    communicator: Arc<Communicator>,
    silence: Duration,
    under_way: FuturesOrdered<BoxFuture<'static, Result<PieceSum, WorkerError>>>,
    /// Whether the stream ended for all members, well or badly.
    over: bool,
    _stream: OwnedMutexGuard<()>,
}

impl Broadcasting {
    pub(super) fn new(communicator: Arc<Communicator>, silence: Duration, stream: OwnedMutexGuard<()>) -> Self {
        Self { communicator, silence, under_way: FuturesOrdered::new(), over: false, _stream: stream }
    }
}

/// What must end before a piece is gone, and what is kept until then.
struct Ready {
    copies: Vec<Bringing>,
    lent: Option<DevicePayload>,
}

/// A piece in memory of our GPUs: on the first one the bytes (or copies that are under way), on the others room for them.
pub(super) struct Placed {
    spans: Vec<Span>,
    after: Option<Event>,
    ready: Ready,
}

async fn place(communicator: Arc<Communicator>, payload: Payload, piece: Piece, silence: Duration) -> Result<Placed, WorkerError> {
    let mut locals = communicator.locals().iter();
    let Some(first) = locals.next() else { return Err(WorkerError::Gone { cause: "there is no GPU worker".into() }) };
    let mut placed = match payload {
        Payload::Device(device) => {
            let after = device.after.clone();
            Placed {
                spans: vec![device.memory.at(device.offset.saturating_add(piece.offset))],
                after,
                ready: Ready { copies: Vec::new(), lent: Some(device) },
            }
        }
        Payload::Host(all) => {
            let slot = first.ring.take(silence).await?;
            let copies = first.staging.bring_all(&cut(&all, piece.offset, piece.bytes), &slot, 0, silence).await?;
            Placed { spans: vec![slot.at(0)], after: None, ready: Ready { copies, lent: None } }
        }
    };
    for local in locals {
        placed.spans.push(local.ring.take(silence).await?.at(0));
    }
    Ok(placed)
}

#[async_trait]
impl Outgoing for Broadcasting {
    type Placed = Placed;

    fn slot_bytes(&self) -> u64 {
        self.communicator.slot_bytes()
    }

    fn place(&self, payload: &Payload, piece: Piece) -> BoxFuture<'static, Result<Placed, WorkerError>> {
        Box::pin(place(self.communicator.clone(), payload.clone(), piece, self.silence))
    }

    /// Enters the broadcast of one piece on all our GPUs: the first one sends, the others receive like any member.
    fn go(&mut self, _: &mut Downstream, Placed { spans, after, ready }: Placed, piece: Piece) -> Option<PieceSum> {
        let (within, _) = patience(self.silence);
        let locals = self.communicator.locals().iter();
        let entered: Vec<_> = locals
            .zip(spans)
            .enumerate()
            .map(|(number, (local, at))| {
                let parts = vec![Part { offset: 0, bytes: piece.bytes, first_word: piece.first_word() }];
                let (group, root) = (self.communicator.group(), self.communicator.rank());
                let after = after.clone().filter(|_| number == 0);
                local.worker.broadcast_now(Broadcast { group, root, at, bytes: piece.bytes, parts, after }, within)
            })
            .collect();
        self.under_way.push_back(Box::pin(async move {
            try_join_all(ready.copies).await?;
            let sums: Vec<Sums> = try_join_all(entered).await?;
            // What the memory came from is given back now.
            drop(ready.lent);
            let sum = sums.first().and_then(|sums| sums.sums.first()).copied();
            sum.map(|sum| piece.summed(sum)).ok_or(WorkerError::Nonsense { what: "broadcast" })
        }));
        None
    }

    async fn progress(&mut self) -> Result<PieceSum, Trouble> {
        tokio::select! {
            biased;
            failure = self.communicator.breaks() => Err(Trouble::Failed(failure)),
            Some(sent) = self.under_way.next() => sent.map_err(Trouble::Worker),
        }
    }

    fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }

    /// The member at fault may be named by the chain in a moment.
    fn blame(&self, error: &WorkerError) -> Blame {
        let named = self.communicator.blame(error).map(Blame::certain);
        named.unwrap_or_else(|| Blame {
            failure: StreamFailure::Communicator { cause: error.to_string() },
            unless_named_within: patience(self.silence).1,
        })
    }

    fn failed(&mut self, failure: &StreamFailure) {
        self.over = true;
        self.communicator.break_off(failure.clone());
    }

    fn ended(&mut self) {
        self.over = true;
    }
}

impl Drop for Broadcasting {
    fn drop(&mut self) {
        if !self.over {
            self.communicator.break_off(StreamFailure::Cancelled);
        }
    }
}

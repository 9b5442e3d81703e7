//! The leader's end of a stream that engines receive by themselves: has every engine enter a bucket, broadcasts it, and watches both.
//!
//! Decides when a bucket went well (every engine answered success *and* our own broadcasts ended) and who is at fault otherwise. An answer and a
//! collective are watched together: an engine that refuses does so without entering the broadcast, so its refusal aborts the group at
//! once, and an engine that says success while nothing was broadcast has a group that does nothing. One bucket is under way at a time, so that
//! no engine is asked for two things at once; the next one is read and digested meanwhile. The first bucket thereby proves the group.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::{BoxFuture, try_join_all};
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::calls::Calls;
use super::engines::{EngineGroupsLed, Led};
use crate::agent::group::refusal;
use crate::protocol::{BucketHeader, MemberName, Receive, ReceiveRequest, ReceiveResponse, RefusalCode, StreamFailure, UpdateId};
use crate::runtime::https::CallError;
use crate::transport::nccl::{PackedBucket, Packer};
use crate::transport::{BucketSink, Payload, TransportError};
use crate::weights::{Bucket, Layout};
use crate::worker::{Broadcast, GRACE, WorkerError};

/// Once an engine said that it received, our broadcast ends within this long, or the engine took no part in it.
const AFTER_SUCCESS: Duration = Duration::from_secs(2);
/// What an agent may take beyond the time that its engine has.
const ANSWER: Duration = Duration::from_secs(2);

/// What all of a stream is about.
#[derive(Clone)]
pub(super) struct EngineStream {
    pub(super) led: Arc<EngineGroupsLed>,
    pub(super) calls: Calls,
    pub(super) update: UpdateId,
    pub(super) me: MemberName,
    /// Longest wait for one bucket.
    pub(super) silence: Duration,
}

/// See [`BucketSink`].
pub(super) struct EngineSink {
    stream: EngineStream,
    layout: Arc<Layout>,
    packer: Packer,
    under_way: Option<BoxFuture<'static, Result<(), StreamFailure>>>,
    failure: Option<StreamFailure>,
    finished: bool,
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
        while let Some(answer) = asked.join_next().await {
            match answer {
                Ok((_, Ok(_))) => {}
                Ok((member, Err(error))) => return Err(failed_call(&member, error).into()),
                Err(ended) => return Err(TransportError::Communicator { cause: ended.to_string() }),
            }
        }
        Ok(Self { stream, layout, packer, under_way: None, failure: None, finished: false })
    }

    /// Waits for the bucket that is under way. May be dropped and called again.
    async fn settle(&mut self) -> Result<(), StreamFailure> {
        let Some(under_way) = self.under_way.as_mut() else { return Ok(()) };
        let ended = under_way.await;
        self.under_way = None;
        ended
    }

    async fn bucket(&mut self, header: BucketHeader, payload: Payload) -> Result<(), StreamFailure> {
        let bucket = Bucket { sequence: header.sequence, offset: header.offset, bytes: header.bytes };
        let wire = self.layout.wire(&bucket).map_err(|error| StreamFailure::Communicator { cause: error.to_string() })?;
        let packed = self.packer.pack(&payload, &wire, self.stream.silence).await;
        let packed = packed.map_err(|error| self.stream.blame(&error))?;
        self.settle().await?;
        self.under_way = Some(Box::pin(self.stream.clone().round(header.sequence, packed)));
        Ok(())
    }

    fn fail(&mut self, failure: StreamFailure) -> TransportError {
        let failure = self.failure.get_or_insert(failure).clone();
        self.under_way = None;
        let error = TransportError::from(failure);
        drop(self.stream.led.break_off(&error.to_string()));
        error
    }
}

/// What is known of one bucket while it is under way.
struct Round {
    /// Groups whose broadcasts have not ended, by number.
    sending: Vec<usize>,
    /// Who said that it received.
    received: Vec<MemberName>,
}

impl EngineStream {
    fn ask_all(&self, what: Receive, within: Duration) -> JoinSet<(MemberName, Result<ReceiveResponse, CallError>)> {
        let mut asked = JoinSet::new();
        for (member, _) in self.led.groups.iter().flat_map(|group| &group.plan.members) {
            let (calls, member) = (self.calls.clone(), member.clone());
            let deadline_ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
            let request = ReceiveRequest { update: self.update.clone(), what, deadline_ms };
            asked.spawn(async move {
                let answer = calls.ask(&member, "/v1/update/receive", &request, within + ANSWER).await;
                (member, answer)
            });
        }
        asked
    }

    /// One bucket: every engine is asked to enter it while we broadcast.
    async fn round(self, sequence: u32, packed: PackedBucket) -> Result<(), StreamFailure> {
        let PackedBucket { broadcasts, copies, held } = packed;
        let within = self.silence.saturating_sub(GRACE).max(self.silence / 2);
        let mut asked = self.ask_all(Receive::Bucket(sequence), self.silence);
        let mut sending: FuturesUnordered<BoxFuture<'static, (Option<usize>, Result<(), WorkerError>)>> = FuturesUnordered::new();
        sending.push(Box::pin(async move { (None, try_join_all(copies).await.map(drop)) }));
        for (number, group) in self.led.groups.iter().enumerate() {
            let (group, worker) = (group.clone(), self.led.worker.clone());
            let parts: Vec<_> = broadcasts.iter().map(|packed| (packed.span.clone(), packed.bytes, packed.after.clone())).collect();
            sending.push(Box::pin(async move {
                let sent = async {
                    group.communicate(within).await?;
                    let enter = |(at, bytes, after)| {
                        let broadcast = Broadcast { group: group.number(), root: 0, at, bytes, parts: Vec::new(), after };
                        worker.broadcast_now(broadcast, within)
                    };
                    // All are asked for at once, in the order of the wire.
                    let entered: Vec<_> = parts.into_iter().map(enter).collect();
                    try_join_all(entered).await.map(drop)
                };
                (Some(number), sent.await)
            }));
        }
        let mut round = Round { sending: (0..self.led.groups.len()).collect(), received: Vec::new() };
        let mut too_late: Option<Instant> = None;
        while !asked.is_empty() || !sending.is_empty() {
            tokio::select! {
                biased;
                why = self.led.breaks() => return Err(StreamFailure::Communicator { cause: why }),
                Some(answer) = asked.join_next() => match answer {
                    Ok((member, Ok(_))) => round.received.push(member),
                    Ok((member, Err(error))) => return Err(failed_call(&member, error)),
                    Err(ended) => return Err(StreamFailure::Communicator { cause: ended.to_string() }),
                },
                Some((group, sent)) = sending.next() => match sent {
                    Ok(()) => round.sending.retain(|number| Some(*number) != group),
                    Err(error) => return Err(self.refused_or(&mut asked, &error).await),
                },
                () = at(too_late) => if let Some(member) = round.idle(&self.led.groups) {
                    return Err(did_nothing(member, sequence));
                },
            }
            // Only as long as somebody is under suspicion.
            too_late = round.idle(&self.led.groups).and_then(|_| too_late.or_else(|| Some(Instant::now() + AFTER_SUCCESS)));
        }
        drop(held);
        Ok(())
    }

    /// Our own part failed. An engine that refused at the same time is the cause, and says so in a moment.
    async fn refused_or(
        &self,
        asked: &mut JoinSet<(MemberName, Result<ReceiveResponse, CallError>)>,
        error: &WorkerError,
    ) -> StreamFailure {
        let refused = async {
            while let Some(answer) = asked.join_next().await {
                if let Ok((member, Err(error))) = answer {
                    return Some(failed_call(&member, error));
                }
            }
            None
        };
        let named = tokio::time::timeout(GRACE, refused).await.ok().flatten();
        named.unwrap_or_else(|| self.blame(error))
    }

    fn blame(&self, error: &WorkerError) -> StreamFailure {
        match error {
            WorkerError::Fault { .. } | WorkerError::NoSlot { .. } => StreamFailure::Communicator { cause: error.to_string() },
            _ => StreamFailure::Lost { peer: self.me.clone(), cause: error.to_string() },
        }
    }
}

impl Round {
    /// An engine that says that it received what was not broadcast. To make a communicator is a rendezvous of all ranks, and nobody can have
    /// received in one that does not stand; where it stands, a short bucket may be there before the others entered.
    fn idle(&self, groups: &[Arc<Led>]) -> Option<&MemberName> {
        self.sending.iter().find_map(|number| {
            let group = groups.get(*number)?;
            let mut members = group.plan.members.iter().map(|(name, _)| name);
            let first = self.received.iter().find(|member| group.plan.offset(member).is_some())?;
            let all = members.all(|member| self.received.contains(member));
            (all || !group.stands()).then_some(first)
        })
    }
}

fn did_nothing(member: &MemberName, sequence: u32) -> StreamFailure {
    let message = format!(
        "its engine says that it received bucket {sequence}, of which nothing was broadcast: its group does nothing (torch 2.15 makes such \
         groups unless TORCH_DIST_USE_NCCL2=0 is in the engine's environment; vLLM with VLLM_DISABLE_PYNCCL=1)"
    );
    StreamFailure::Refused { peer: member.clone(), refusal: refusal(RefusalCode::EngineRefused, message) }
}

fn failed_call(member: &MemberName, error: CallError) -> StreamFailure {
    match error {
        CallError::Refused { refusal, .. } => StreamFailure::Refused { peer: member.clone(), refusal },
        error => StreamFailure::Lost { peer: member.clone(), cause: error.to_string() },
    }
}

/// Waits until then; for ever when there is no such time.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

#[async_trait]
impl BucketSink for EngineSink {
    async fn send(&mut self, header: BucketHeader, payload: Payload, _digest: u128) -> Result<(), TransportError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone().into());
        }
        let sent = self.bucket(header, payload).await;
        sent.map_err(|failure| self.fail(failure))
    }

    /// Digests are of tensors; engines report none that could be compared.
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
        if let Err(failure) = self.settle().await {
            return self.fail(failure);
        }
        let cause = self.stream.led.breaks().await;
        self.fail(StreamFailure::Communicator { cause })
    }

    async fn finish(mut self: Box<Self>) -> Result<(), TransportError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone().into());
        }
        if let Err(failure) = self.settle().await {
            return Err(self.fail(failure));
        }
        self.finished = true;
        Ok(())
    }
}

impl Drop for EngineSink {
    /// A stream that was given up in the middle leaves engines in a broadcast; one between two buckets harms nobody.
    fn drop(&mut self) {
        if !self.finished && self.failure.is_none() && self.under_way.is_some() {
            drop(self.stream.led.break_off("the stream was given up in the middle of a bucket"));
        }
    }
}

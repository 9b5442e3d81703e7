//! One bucket of a stream that engines receive by themselves: every engine enters it, we broadcast, and both are watched together.
//!
//! Decides when a bucket went well (every engine answered success *and* our own broadcasts ended) and who is at fault otherwise. An engine that
//! refuses does so without entering the broadcast, so its refusal aborts its group at once (other groups end the bucket first, which spares
//! their engines a broadcast without an end), and an engine that says success while nothing was broadcast has a group that does nothing. It
//! never decides which bucket is next.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, try_join_all};
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::calls::Calls;
use super::engines::{EngineGroupsLed, Led};
use crate::group::refusal;
use weightsync_core::protocol::{MemberName, Receive, ReceiveRequest, ReceiveResponse, RefusalCode, StreamFailure, UpdateId};
use weightsync_gpu::worker::{Broadcast, GRACE, WorkerError};
use weightsync_net::https::CallError;
use weightsync_transport::nccl::PackedBucket;

/// Once an engine reported that it received, our broadcast ends within this time, or the engine took no part in it.
const AFTER_SUCCESS: Duration = Duration::from_secs(2);

/// What was sent, and into which group; none: it was copied into its place.
type Sent = BoxFuture<'static, (Option<usize>, Result<(), WorkerError>)>;

#[derive(Clone)]
pub(super) struct EngineStream {
    pub(super) led: Arc<EngineGroupsLed>,
    pub(super) calls: Calls,
    pub(super) update: UpdateId,
    pub(super) me: MemberName,
    /// Longest wait for one bucket.
    pub(super) silence: Duration,
}

/// What is known of one bucket while it is under way. A group that fails in our broadcast is aborted at once; the others end this bucket first,
/// because an engine that is left in a broadcast may never come out of it. So does one whose engine fails after our broadcast: it may be in the
/// next one.
struct Round {
    /// Groups that have not ended, by number: whether our broadcasts are under way, and who has not answered.
    open: BTreeMap<usize, (bool, Vec<MemberName>)>,
    received: Vec<MemberName>,
    /// Groups whose broadcast failed here, why, and until when somebody else may be named.
    broken: Vec<(Instant, usize, StreamFailure)>,
    failure: Option<StreamFailure>,
}

impl EngineStream {
    pub(super) fn ask_all(&self, what: Receive, within: Duration) -> JoinSet<(MemberName, Result<ReceiveResponse, CallError>)> {
        let mut asked = JoinSet::new();
        for (member, _) in self.led.groups.iter().flat_map(|group| &group.plan.members) {
            let (calls, member) = (self.calls.clone(), member.clone());
            let deadline_ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
            let request = ReceiveRequest { update: self.update.clone(), what, deadline_ms };
            asked.spawn(async move {
                let answer = calls.ask(&member, &request, within + ReceiveRequest::WITHIN).await;
                (member, answer)
            });
        }
        asked
    }

    /// One bucket: every engine is asked to enter it while we broadcast. `sent` is informed when all of ours is.
    pub(super) async fn round(self, sequence: u32, packed: PackedBucket, sent: oneshot::Sender<()>) -> Result<(), StreamFailure> {
        let mut sent = Some(sent);
        let PackedBucket { broadcasts, copies, held } = packed;
        let within = self.silence.saturating_sub(GRACE).max(self.silence / 2);
        let mut asked = self.ask_all(Receive::Bucket(sequence), self.silence);
        let mut sending: FuturesUnordered<Sent> = FuturesUnordered::new();
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
        let mut round = Round::new(&self.led.groups);
        let mut too_late: Option<Instant> = None;
        while round.is_open() {
            tokio::select! {
                biased;
                why = self.led.breaks() => return Err(StreamFailure::Communicator { cause: why }),
                Some(answer) = asked.join_next() => match answer {
                    Ok((member, Ok(_))) => round.received(member),
                    Ok((member, Err(error))) => {
                        let group = self.led.groups.iter().position(|group| group.plan.offset(&member).is_some());
                        round.fails(&self.led, group, failed_call(&member, error));
                    }
                    Err(ended) => return Err(StreamFailure::Communicator { cause: ended.to_string() }),
                },
                Some((group, ended)) = sending.next() => match (group, ended) {
                    (Some(group), Ok(())) => round.sent(group),
                    (None, Ok(())) => {}
                    (None, Err(error)) => round.fails(&self.led, None, self.blame(&error)),
                    // An engine that refused at the same time is the cause, and says so in a moment.
                    (Some(group), Err(error)) => round.broken.push((Instant::now() + GRACE, group, self.blame(&error))),
                },
                () = at(round.broken.first().map(|(until, ..)| *until)) => {
                    let (_, group, why) = round.broken.remove(0);
                    round.fails(&self.led, Some(group), why);
                },
                () = at(too_late) => if let Some((group, member)) = round.idle(&self.led.groups) {
                    let why = did_nothing(&member, sequence);
                    round.fails(&self.led, Some(group), why);
                },
            }
            if round.is_sent()
                && let Some(sent) = sent.take()
            {
                // No one waits for it after the last bucket.
                let _reported = sent.send(());
            }
            // Only as long as somebody is under suspicion.
            too_late = round.idle(&self.led.groups).and_then(|_| too_late.or_else(|| Some(Instant::now() + AFTER_SUCCESS)));
        }
        drop(held);
        round.failure.map_or(Ok(()), Err)
    }

    pub(super) fn blame(&self, error: &WorkerError) -> StreamFailure {
        match error {
            WorkerError::Fault { .. } | WorkerError::NoSlot { .. } => StreamFailure::Communicator { cause: error.to_string() },
            _ => StreamFailure::Lost { peer: self.me.clone(), cause: error.to_string() },
        }
    }
}

impl Round {
    fn new(groups: &[Arc<Led>]) -> Self {
        let members = |group: &Arc<Led>| (true, group.plan.members.iter().map(|(name, _)| name.clone()).collect());
        Self { open: groups.iter().map(members).enumerate().collect(), received: Vec::new(), broken: Vec::new(), failure: None }
    }

    fn is_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// Whether all of ours was broadcast, and nothing went wrong.
    fn is_sent(&self) -> bool {
        self.failure.is_none() && self.broken.is_empty() && self.open.values().all(|(sending, _)| !sending)
    }

    fn received(&mut self, member: MemberName) {
        for (_, waiting) in self.open.values_mut() {
            waiting.retain(|name| *name != member);
        }
        self.received.push(member);
        self.close();
    }

    fn sent(&mut self, group: usize) {
        if let Some((sending, _)) = self.open.get_mut(&group) {
            *sending = false;
        }
        self.close();
    }

    fn close(&mut self) {
        self.open.retain(|_, (sending, waiting)| *sending || !waiting.is_empty());
    }

    /// The first reason stays. Without a group it is about all of them.
    fn fails(&mut self, led: &EngineGroupsLed, group: Option<usize>, why: StreamFailure) {
        let failed: Vec<usize> = group.map_or_else(|| self.open.keys().copied().collect(), |group| vec![group]);
        let open: Vec<_> = failed.into_iter().filter_map(|group| self.open.remove(&group).map(|(sending, _)| (group, sending))).collect();
        // What a group that failed says later is a consequence.
        if !open.is_empty() {
            self.failure.get_or_insert(why);
        }
        for (group, _) in open.into_iter().filter(|(_, sending)| *sending) {
            led.abort(group);
        }
    }

    /// A group with an engine that says that it received what was not broadcast. To make a communicator is a rendezvous of all ranks, and
    /// no one can have received in one that does not stand; where it stands, a short bucket may be there before the others entered.
    fn idle(&self, groups: &[Arc<Led>]) -> Option<(usize, MemberName)> {
        self.open.iter().filter(|(_, (sending, _))| *sending).find_map(|(number, (_, waiting))| {
            let group = groups.get(*number)?;
            let first = self.received.iter().find(|member| group.plan.offset(member).is_some())?;
            (waiting.is_empty() || !group.stands()).then(|| (*number, first.clone()))
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

pub(super) fn failed_call(member: &MemberName, error: CallError) -> StreamFailure {
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

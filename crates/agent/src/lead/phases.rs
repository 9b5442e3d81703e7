//! The phases of an attempt: begin, transfer, and the two waits for what members say.
//!
//! Each phase ends when [`Table`] says that it may, when a member is lost, or when nothing is heard any more.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::attempt::{Attempt, Stage};
use super::calls::{Answer, Answers, Following};
use super::engine_round::EngineStream;
use super::engine_sink::EngineSink;
use super::fan::Fan;
use super::openings::Openings;
use super::probe::Opening;
use super::stream::{Sending, StreamError};
use super::table::{Failure, Table, Verdict};
use crate::rollout::PAUSING;
use weightsync_core::protocol::{BeginRequest, Call, MemberName, PublishErrorCode, Statement, UpdatePhase, UpdateStatus};
use weightsync_core::weights::{DigestAlgorithm, Layout};
use weightsync_transport::{BucketSink, TransportError};

/// Once enough members opened the update, the others have this long to do so, and never longer than half of what members wait for the first
/// byte: one engine that is stuck cost all of them the attempt when both were equal.
const OPENING_GRACE: Duration = Duration::from_secs(5);

impl Attempt<'_> {
    pub(super) async fn begin(
        &mut self,
        layout: &Arc<Layout>,
        (algorithm, feeding, manual): (DigestAlgorithm, bool, bool),
        known: Option<String>,
        statement: Option<Box<Statement>>,
    ) -> Result<(), Failure> {
        let request = BeginRequest {
            update: self.update(),
            layout: Layout::clone(layout),
            layout_digest: layout.digest(),
            algorithm,
            feeding,
            manual,
            manifest_digest: known,
            statement,
        };
        let answers = self.calls.to_all(&self.members, request, BeginRequest::WITHIN + self.silence * PAUSING);
        self.opened(answers).await
    }

    /// Waits for the answers of all members to a begin, as far as enough of them may come.
    pub(super) async fn opened(&mut self, mut answers: Answers) -> Result<(), Failure> {
        let mut open = self.members.clone();
        let mut grace = None;
        while !open.is_empty() {
            tokio::select! {
                (member, answer) = answers.next() => {
                    self.take(&member, answer);
                    open.retain(|name| *name != member);
                }
                (member, cause) = self.peers.any_lost(&open) => {
                    self.table.lost(&member, &cause);
                    open.retain(|name| *name != member);
                }
                () = at(grace) => {
                    for member in &open {
                        self.table.lost(member, "it gave no answer to the begin in time");
                    }
                    self.calls.abort(std::mem::take(&mut open), self.update(), "too late".into());
                }
            }
            match self.table.after_begin() {
                Verdict::Fail(failure) => return Err(failure),
                Verdict::Enough if grace.is_none() => grace = Some(Instant::now() + OPENING_GRACE.min(self.silence / 2)),
                _ => {}
            }
        }
        self.show();
        Ok(())
    }

    pub(super) async fn transfer(
        &mut self,
        receiving: &[MemberName],
        sending: Sending<'_>,
        following: &mut Following,
        stage: &mut dyn Stage,
    ) -> Result<Vec<u128>, Failure> {
        let silence = self.silence;
        let engines = self.engines(receiving)?;
        let openings = if engines.is_some() { Openings::default() } else { self.openings(receiving) };
        let leader = self.leader;
        let pausing = Duration::from_millis(self.epoch.prepared.policy.update_timeout_ms / 2);
        let layout = sending.layout.clone();
        let sent = async {
            let open = async |(hello, first): Opening| leader.transport.open(hello, &first).await;
            let mut gpus: Vec<Box<dyn BucketSink>> = Vec::new();
            for opening in openings.gpus {
                gpus.push(open(opening).await?);
            }
            let plain = match openings.plain {
                Some(opening) => Some(open(opening).await?),
                None => None,
            };
            let mut sink: Option<Box<dyn BucketSink>> = match (engines, gpus.is_empty()) {
                (Some(stream), _) => Some(Box::new(EngineSink::open(stream, layout, pausing).await?)),
                (None, true) => plain,
                (None, false) if gpus.len() == 1 && plain.is_none() => gpus.pop(),
                (None, false) => Some(Box::new(Fan::new(gpus, plain, sending.staging.clone(), silence))),
            };
            let digests = sending.run(sink.as_mut(), silence).await?;
            if let Some(sink) = sink {
                sink.finish().await?;
            }
            Ok::<_, StreamError>(digests)
        };
        tokio::pin!(sent);
        let peers = self.peers.clone();
        loop {
            let show_at = self.show_at();
            tokio::select! {
                biased;
                sent = &mut sent => return sent.map_err(|error| self.broken(error)),
                (member, cause) = peers.any_lost(receiving) => {
                    self.table.lost(&member, &cause);
                    let message = format!("{member} was lost in the middle: {cause}");
                    return Err(self.failure(PublishErrorCode::NotEnoughReplicas, message, Some(member), true));
                }
                (member, answer) = following.next() => {
                    self.take(&member, answer);
                    self.moved(stage);
                }
                () = at(show_at) => self.show(),
            }
        }
    }

    /// The engines that receive by themselves, where they do. All of them must: a collective needs every rank.
    fn engines(&mut self, receiving: &[MemberName]) -> Result<Option<EngineStream>, Failure> {
        let Some(plan) = self.epoch.engines().filter(|_| !self.view.feeding) else { return Ok(None) };
        let out: Vec<MemberName> = plan.members().into_iter().filter(|member| !receiving.contains(member)).collect();
        let lagging = self.table.behind();
        if let Some(first) = out.first() {
            let why = lagging.iter().find(|(member, _)| member == first).map_or("it takes no part", |(_, why)| why);
            let message = format!("{first} does not receive ({why}), and a broadcast to engines needs every one of the group");
            for member in &out {
                self.leader.core().peer_lost(self.epoch.id(), member, &message);
            }
            return Err(self.failure(PublishErrorCode::NotEnoughReplicas, message, Some(first.clone()), true));
        }
        let gone = || "the groups of this epoch's engines are gone".to_owned();
        let led = self.leader.engines_of(&self.epoch);
        let led = led.ok_or_else(|| self.failure(PublishErrorCode::NotEnoughReplicas, gone(), None, true))?;
        let (calls, update, me) = (self.calls.clone(), self.update(), self.epoch.me().clone());
        Ok(Some(EngineStream { led, calls, update, me, silence: self.silence }))
    }

    /// Waits until members answered what was asked of them, as far as they ever will.
    pub(super) async fn settle(
        &mut self,
        following: &mut Following,
        stage: &mut dyn Stage,
        verdict: impl Fn(&Table) -> Verdict + Send + Sync,
    ) -> Result<(), Failure> {
        let peers = self.peers.clone();
        // Every change extends the wait. Once enough succeeded, silence of the others ends it as well: they lack the version.
        let mut end = Instant::now() + self.silence;
        loop {
            let open: Vec<MemberName> = self.members.iter().filter(|member| !self.table.is_over(member)).cloned().collect();
            let installing = self.view.phase == UpdatePhase::Activate;
            if installing {
                stage.switching(self.table.switching());
            }
            match verdict(&self.table) {
                Verdict::All => return Ok(()),
                Verdict::Fail(failure) => return Err(failure),
                // An engine that is being switched says nothing for as long as it loads: only the whole update's limit ends that.
                Verdict::Wait if installing => end = Instant::now() + self.silence,
                Verdict::Wait | Verdict::Enough => {}
            }
            tokio::select! {
                (member, answer) = following.next() => {
                    self.take(&member, answer);
                    self.moved(stage);
                    end = Instant::now() + self.silence;
                }
                (member, cause) = peers.any_lost(&open) => self.table.lost(&member, &cause),
                () = at(self.show_at()) => self.show(),
                () = sleep_until(end), if !(installing && verdict(&self.table) == Verdict::Wait) => {
                    if verdict(&self.table) == Verdict::Enough {
                        return Ok(());
                    }
                    for member in &open {
                        self.table.lost(member, &format!("nothing was heard of its progress for {:?}", self.silence));
                    }
                }
            }
        }
    }

    /// Sends a message of the attempt to members and takes in what they answer at once.
    pub(super) async fn tell<C: Call<Answer = UpdateStatus>>(&mut self, members: &[MemberName], request: C, deadline: Duration) {
        let mut answers = self.calls.to_all(members, request, deadline);
        let mut open = members.to_vec();
        let peers = self.peers.clone();
        while !open.is_empty() {
            tokio::select! {
                (member, answer) = answers.next() => {
                    self.take(&member, answer);
                    open.retain(|name| *name != member);
                }
                (member, cause) = peers.any_lost(&open) => {
                    self.table.lost(&member, &cause);
                    open.retain(|name| *name != member);
                }
            }
        }
    }

    pub(super) fn take(&mut self, member: &MemberName, answer: Answer) {
        match answer {
            Answer::Status(status) => self.table.observe(member, &status),
            Answer::Refused(refusal) => {
                let opened = self.table.step(member).is_some();
                self.table.refused(member, &refusal);
                // It waits for bytes or for an end that will not come, and could be fed.
                if opened {
                    self.calls.abort(vec![member.clone()], self.update(), refusal.message);
                }
            }
            Answer::Lost(cause) => self.table.lost(member, &cause),
        }
    }

    fn broken(&mut self, error: StreamError) -> Failure {
        match error {
            StreamError::Source(error) => {
                let said = error.publish_error(Some(self.epoch.me()));
                self.failure(said.code, said.message, said.member, false)
            }
            StreamError::Layout(what) => self.failure(PublishErrorCode::Invalid, what, None, false),
            StreamError::Transport(error) => {
                let message = error.to_string();
                if let Some(peer) = error.peer() {
                    self.table.lost(peer, &message);
                    // A member that refused still runs; the coordinator must learn of the others at once. A broadcast to engines needs
                    // every one of them, so the next group is formed without one that refused.
                    let needed = self.epoch.engines().is_some() && !self.view.feeding;
                    if needed || !matches!(error, TransportError::Refused { .. }) {
                        self.leader.core.peer_lost(self.epoch.id(), peer, &message);
                    }
                }
                self.failure(PublishErrorCode::NotEnoughReplicas, message, error.peer().cloned(), true)
            }
        }
    }
}

/// Waits until then; for ever when there is no such time.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

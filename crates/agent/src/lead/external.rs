//! An attempt whose bytes the trainer's own data plane moves: mark every engine, let the trainer work, have the agents prove.
//!
//! All members of the epoch take part or none: a collective that lacks a rank never ends, so one refusal, one loss or one dead engine ends
//! the attempt for all, at once. A replica that the trainer itself reports as failed is the only one without the version.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout_at};

use super::Leader;
use super::attempt::{Attempt, Begun, Brought, Stage};
use super::table::{Failure, Switching, Table};
use crate::external::{Teller, Word};
use crate::group::Epoch;
use weightsync_core::protocol::{
    ExternalBegin, ExternalEnd, ExternalOutcome, HeldVersion, MemberName, PublishErrorCode, ReplicaReport, UpdatePhase,
};
use weightsync_core::weights::Manifest;

pub struct ExternalPlan<'a> {
    pub epoch: Arc<Epoch>,
    /// The version, and what stands for its manifest.
    pub held: HeldVersion,
    pub attempt: u32,
    /// Whether the version is the group's already.
    pub feeding: bool,
    /// What engines must report as their weight version.
    pub engine_version: Option<String>,
    pub deadline: Instant,
    pub words: &'a mut mpsc::UnboundedReceiver<Word>,
    pub tell: &'a Teller,
}

/// No one is asked and no one is reported on the way: the trainer itself moves the bytes.
struct Quiet;

#[async_trait::async_trait]
impl Stage for Quiet {
    fn progress(&mut self, _phase: UpdatePhase, _bytes: u64) {}

    fn streamed(&mut self, _manifest: &Manifest, _held: &HeldVersion) -> Result<(), Failure> {
        Ok(())
    }

    async fn staged(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn switching(&mut self, _known: Switching) {}
}

impl Leader {
    /// Runs an attempt to its end. Dropping the future gives the attempt up.
    pub async fn lead_external(&self, plan: ExternalPlan<'_>) -> Result<Brought, Failure> {
        let epoch = plan.epoch.clone();
        let over = self.core().over(epoch.id());
        let limit = Duration::from_millis(epoch.prepared.policy.update_timeout_ms);
        let deadline = plan.deadline.min(Instant::now() + limit);
        let members = epoch.rollouts();
        let min_ready = epoch.prepared.policy.min_ready;
        let (version, attempt, feeding) = (plan.held.version, plan.attempt, plan.feeding);
        let mut attempt = Attempt::new(self, Begun { epoch: &epoch, version, attempt, feeding, members, min_ready, total_bytes: 0 });
        let outcome = tokio::select! {
            biased;
            () = over.cancelled() => None,
            outcome = timeout_at(deadline, attempt.run_external(plan, deadline)) => Some(outcome),
        };
        let outcome = match outcome {
            Some(Ok(outcome)) => outcome,
            None => {
                let message = format!("epoch {} ended in the middle: {}", epoch.id().epoch, self.core().why_over());
                Err(attempt.failure(PublishErrorCode::Fenced, message, None, true))
            }
            Some(Err(_)) => {
                let open = attempt.open_members();
                let message = format!("version {version} did not end in time; not done: {open}");
                Err(attempt.failure(PublishErrorCode::Timeout, message, None, true))
            }
        };
        attempt.end(outcome.as_ref().err());
        outcome
    }

    /// Says that an epoch is of no use, by a failed update in it: the coordinator makes another one.
    pub fn give_up(&self, epoch: &Arc<Epoch>, version: u64, attempt: u32, reason: &str) {
        let begun = Begun { epoch, version, attempt, feeding: true, members: Vec::new(), min_ready: 1, total_bytes: 0 };
        let mut attempt = Attempt::new(self, begun);
        let failure = attempt.failure(PublishErrorCode::Cancelled, format!("the trainer's own group does not work: {reason}"), None, true);
        attempt.end(Some(&failure));
    }
}

impl Attempt<'_> {
    async fn run_external(&mut self, plan: ExternalPlan<'_>, deadline: Instant) -> Result<Brought, Failure> {
        let ExternalPlan { held, engine_version, words, tell, .. } = plan;
        let quiet = &mut Quiet;
        self.mark_all(&held, deadline).await?;

        self.enter(UpdatePhase::Transfer, quiet);
        let update = self.update();
        let members = self.members.clone();
        let mut following = self.calls.follow(&members, &update);
        tell.open(held.version);
        let reports = self.listen(words, &mut following).await?;

        self.enter(UpdatePhase::Activate, quiet);
        let (done, failed): (Vec<_>, Vec<_>) = members.into_iter().partition(|name| reports.get(name).is_some_and(|report| report.ok));
        for member in failed {
            let reason = reports.get(&member).map_or("the trainer reported nothing of it", |report| report.reason.as_str());
            self.end_one(&member, ExternalOutcome::Failed { reason: reason.to_owned() }).await;
        }
        let end = ExternalEnd { update, outcome: ExternalOutcome::Delivered { engine_version } };
        self.tell(&done, end, ExternalEnd::WITHIN).await;
        self.settle(&mut following, quiet, Table::after_activate).await?;
        self.enter(UpdatePhase::Done, quiet);
        Ok(Brought {
            held,
            bytes: 0,
            installed: self.table.installed(),
            behind: self.table.behind(),
            mixed: self.table.mixed(),
            notes: Vec::new(),
            phases_ms: self.view.phases_ms.clone(),
        })
    }

    /// Marks every engine, or none.
    async fn mark_all(&mut self, held: &HeldVersion, deadline: Instant) -> Result<(), Failure> {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        let statement = self.statement(&held.manifest, "");
        let begin = ExternalBegin { update: self.update(), held: held.clone(), timeout_ms, statement };
        let answers = self.calls.to_all(&self.members, begin, ExternalBegin::WITHIN + self.silence);
        let opened = self.opened(answers).await;
        let refused = self.table.behind_for_good();
        if opened.is_ok() && refused.is_none() {
            return Ok(());
        }
        // No byte was moved: those that were marked are what they were.
        let reason = "not every replica of the epoch could take part".to_owned();
        let end = ExternalEnd { update: self.update(), outcome: ExternalOutcome::Untouched { reason } };
        let marked = self.table.receiving();
        self.tell(&marked, end, ExternalEnd::WITHIN).await;
        if let Some(member) = self.members.iter().find(|member| self.table.is_fenced(member)).cloned() {
            return Err(self.over_at(&member).await);
        }
        opened?;
        let (member, reason) = refused.unwrap_or_else(|| (self.epoch.me().clone(), "it is unknown why".into()));
        Err(self.failure(PublishErrorCode::NotEnoughReplicas, format!("{member} cannot take part: {reason}"), Some(member), true))
    }

    /// Hears the trainer out. A loss, or an engine that ends, ends everything at once.
    async fn listen(
        &mut self,
        words: &mut mpsc::UnboundedReceiver<Word>,
        following: &mut super::calls::Following,
    ) -> Result<BTreeMap<MemberName, ReplicaReport>, Failure> {
        let mut reports: BTreeMap<MemberName, ReplicaReport> = BTreeMap::new();
        let peers = self.peers.clone();
        loop {
            let awaited: Vec<MemberName> =
                self.members.iter().filter(|name| reports.get(*name).is_none_or(|report| report.ok)).cloned().collect();
            let lost = |member: MemberName, cause: &str| {
                let message = format!("{member} was lost in the middle: {cause}");
                Failure {
                    code: PublishErrorCode::NotEnoughReplicas,
                    message,
                    phase: UpdatePhase::Transfer,
                    member: Some(member),
                    again: true,
                    lasting: false,
                }
            };
            tokio::select! {
                biased;
                (member, cause) = peers.any_lost(&awaited) => {
                    self.table.lost(&member, &cause);
                    return Err(lost(member, &cause));
                }
                (member, answer) = following.next() => {
                    self.take(&member, answer);
                    if self.table.is_fenced(&member) {
                        return Err(self.over_at(&member).await);
                    }
                    if awaited.contains(&member) && self.table.is_over(&member) {
                        let cause = self.table.reason(&member).unwrap_or_else(|| "it gave no reason".into());
                        return Err(lost(member, &cause));
                    }
                }
                word = words.recv() => match word {
                    Some(Word::Report(report)) if self.members.contains(&report.replica) => {
                        reports.insert(report.replica.clone(), report);
                    }
                    Some(Word::Report(report)) => {
                        let message = format!("{} is not in epoch {}", report.replica, self.view.id.epoch);
                        return Err(self.failure(PublishErrorCode::Invalid, message, None, true));
                    }
                    Some(Word::Conclude) => return Ok(reports),
                    None => {
                        let message = "the trainer went away in the middle".to_owned();
                        return Err(self.failure(PublishErrorCode::Cancelled, message, None, true));
                    }
                },
            }
        }
    }

    /// The epoch is over at a member, which is not to blame for that. The coordinator is about to inform this member as well, with the cause:
    /// that ends [`Leader::lead_external`], and with it the wait.
    async fn over_at(&mut self, member: &MemberName) -> Failure {
        self.show();
        sleep(self.silence).await;
        let reason = self.table.reason(member).unwrap_or_else(|| "it gave no reason".into());
        self.failure(PublishErrorCode::Fenced, format!("the epoch ended at {member}: {reason}"), None, true)
    }

    async fn end_one(&mut self, member: &MemberName, outcome: ExternalOutcome) {
        let end = ExternalEnd { update: self.update(), outcome };
        self.tell(std::slice::from_ref(member), end, ExternalEnd::WITHIN).await;
    }

    fn open_members(&self) -> String {
        let open = self.members.iter().filter(|member| !self.table.is_over(member));
        open.map(|member| member.0.as_str()).collect::<Vec<_>>().join(", ")
    }
}

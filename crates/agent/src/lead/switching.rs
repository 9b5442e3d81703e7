//! The last phase of an attempt: engines switch, as many at once as [`Waves`] lets.
//!
//! Who waits for its turn serves what it has. When failures took all places, the others are passed over: the attempt ends by what the switched
//! ones did, and the version before stays where it is.

use super::attempt::{Attempt, Stage};
use super::calls::Following;
use super::table::{Failure, Table, Verdict};
use super::waves::{Waiting, Waves};
use weightsync_core::protocol::{ActivateRequest, MemberName, MemberPhase, UpdateId};

impl Attempt<'_> {
    /// Switches all that hold the version, in waves, and waits for them as far as enough may come.
    pub(super) async fn switch(&mut self, following: &mut Following, stage: &mut dyn Stage, update: UpdateId) -> Result<(), Failure> {
        let all_reported = self.tell_in_waves(following, stage, update).await?;
        // Tried again at once, a version that engines do not take would cost as many replicas once more.
        let settled = self.settle(following, stage, Table::after_activate).await;
        settled.map_err(|failure| Failure { again: failure.again && all_reported, ..failure })
    }

    /// Returns when no one is left to be informed; false when some were passed over.
    async fn tell_in_waves(&mut self, following: &mut Following, stage: &mut dyn Stage, update: UpdateId) -> Result<bool, Failure> {
        let limit = self.epoch.prepared.policy.max_unavailable;
        let waiting = self.table.delivered().into_iter().map(|member| Waiting { serves: self.serves(&member), member }).collect();
        let mut waves = Waves::new(waiting, limit);
        loop {
            let due = waves.next(|member| self.table.step(member));
            waves.begin(&due);
            self.table.reported(&due);
            stage.switching(self.table.switching());
            let (proven, others): (Vec<_>, Vec<_>) = due.into_iter().partition(|member| self.agreed.contains(member));
            for (members, agreed) in [(proven, true), (others, false)] {
                self.tell(&members, ActivateRequest { update: update.clone(), agreed }, ActivateRequest::WITHIN).await;
            }
            let left: Vec<MemberName> =
                waves.waiting(|member| self.table.step(member)).into_iter().map(|left| left.member.clone()).collect();
            if left.is_empty() {
                return Ok(true);
            }
            if !waves.is_moving(|member| self.table.step(member)) && waves.next(|member| self.table.step(member)).is_empty() {
                let why = format!(
                    "it was not switched, because {limit} failed to before it, as many as membership.maxUnavailable lets be out of service"
                );
                for member in &left {
                    self.table.passed_over(member, &why);
                }
                self.calls.abort(left, update, why);
                return Ok(false);
            }
            let changed = |table: &Table| {
                let step = |member: &MemberName| table.step(member);
                if waves.is_moving(step) && waves.next(step).is_empty() { Verdict::Wait } else { Verdict::All }
            };
            self.settle(following, stage, changed).await?;
        }
    }

    /// Whether requests go to a member now: what it says of itself, as far as it was heard.
    fn serves(&self, member: &MemberName) -> bool {
        let known = self.peers.watch();
        let known = known.borrow();
        let Some(state) = known.get(member).and_then(|peer| peer.state.as_ref()) else { return true };
        let out = matches!(state.phase, MemberPhase::Dirty | MemberPhase::EngineDown);
        // Before the first version engines serve what they started with.
        !out && state.healthy && (state.installed.is_some() || self.epoch.current().is_none())
    }
}

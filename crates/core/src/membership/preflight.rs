//! Applies the result of the preflight: a rollout that would slow every chain is left out, or reported.
//!
//! The leader's agent measures and orders the chain. Its report is trusted, because it can leave a member out of its stream in any case. A
//! member with a broken edge always leaves the group. One with a slow edge leaves only while `minReady` replicas remain; otherwise it
//! stays, last in the chain.
//!
//! Decides too how often a request for another preflight is followed. A request that comes too soon waits; the newest is never lost.

use crate::protocol::{PoorMember, PreflightReport, Reason, Role};

use super::backoff::Weight;
use super::group::Group;
use super::{Membership, MembershipConfig};

/// Requests for a preflight. A program may write one each second, and each would end an epoch and measure every edge.
#[derive(Debug, Clone, Default)]
pub(super) struct Requests {
    /// When the last one was followed.
    followed_at: Option<u64>,
    /// The newest one, if it came too soon after that.
    waits: Option<String>,
}

impl Membership {
    /// Leaves the present request in force if a new one came too soon; that one is followed later.
    pub(super) fn hold_request(&mut self, config: &mut MembershipConfig) {
        let present = &self.config.policy.transport.preflight_asked;
        let asked = &mut config.policy.transport.preflight_asked;
        self.preflight.waits = None;
        if asked == present {
            return;
        }
        let rest_until = self.preflight.followed_at.map(|at| at.saturating_add(config.preflight_rest_ms));
        if rest_until.is_some_and(|until| self.now < until) {
            self.preflight.waits = Some(std::mem::replace(asked, present.clone()));
        } else {
            self.preflight.followed_at = Some(self.now);
        }
    }

    /// Follows the request that waits, once its time has come.
    pub(super) fn follow_request(&mut self) {
        let Some(at) = self.preflight.followed_at.filter(|_| self.preflight.waits.is_some()) else { return };
        if self.due(at.saturating_add(self.config.preflight_rest_ms))
            && let Some(asked) = self.preflight.waits.take()
        {
            self.preflight.followed_at = Some(self.now);
            self.config.policy.transport.preflight_asked = asked;
            self.backoff.forget_edges();
        }
    }

    /// The measurements of the present group's leader.
    pub(super) fn preflight(&self) -> Option<&PreflightReport> {
        let group = self.group.as_ref()?;
        let states = group.lives.values().filter_map(|life| self.agents.get(life)?.state.as_ref());
        let mut sources = states.filter(|state| state.role == Role::Source);
        sources.find_map(|state| state.preflight.as_deref().filter(|report| report.id == group.id))
    }

    /// Leaves out members that slow all others, after the finished preflight; once for each group.
    pub(super) fn heed_preflight(&mut self) {
        let Some(report) = self.preflight().filter(|report| report.done) else { return };
        let poor = report.arrangement.poor.clone();
        let Some(group) = self.group.as_mut().filter(|group| !group.heeded) else { return };
        group.heeded = true;
        let mut left = usize::try_from(group.rollouts()).unwrap_or(usize::MAX);
        let least = usize::try_from(group.policy.min_ready.max(1)).unwrap_or(usize::MAX);
        let mut out: Vec<PoorMember> = poor.into_iter().filter(|poor| is_rollout(group, poor)).collect();
        // The slowest member is last in the chain, and leaves first.
        out.reverse();
        out.retain(|poor| {
            let goes = poor.broken || left > least;
            left -= usize::from(goes);
            goes
        });
        for poor in out {
            self.strike(&poor.member, Weight::Edge, Reason::BadEdge, &poor.why);
        }
    }

    /// Members of the group that stay in spite of poor edges, and the source if its own edges are poor.
    pub(super) fn poor_members(&self) -> impl Iterator<Item = &PoorMember> {
        let arrangement = self.preflight().filter(|report| report.done).map(|report| &report.arrangement);
        let here = |poor: &&PoorMember| self.group.as_ref().is_some_and(|group| !group.lost.contains_key(&poor.member));
        let poor = arrangement.into_iter().flat_map(|arrangement| arrangement.poor.iter().chain(&arrangement.source));
        poor.filter(here)
    }
}

fn is_rollout(group: &Group, poor: &PoorMember) -> bool {
    group.roster.member(&poor.member).is_some_and(|member| member.role == Role::Rollout) && !group.lost.contains_key(&poor.member)
}

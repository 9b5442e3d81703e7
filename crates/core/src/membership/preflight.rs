//! What follows from the pre-flight of the group: a rollout that every chain would wait for is left out, or named.
//!
//! The leader's agent measures and arranges; it is believed, because it can leave a member out of its stream in any case. A broken edge always costs its member the group. A
//! slow one does only while `minReady` replicas are left; else the member stays, last in the chain.

use crate::protocol::{PoorMember, PreflightReport, Reason, Role};

use super::Membership;
use super::backoff::Weight;
use super::group::Group;

impl Membership {
    /// What the leader of the present group says that it measured.
    pub(super) fn preflight(&self) -> Option<&PreflightReport> {
        let group = self.group.as_ref()?;
        let states = group.lives.values().filter_map(|life| self.agents.get(life)?.state.as_ref());
        let mut sources = states.filter(|state| state.role == Role::Source);
        sources.find_map(|state| state.preflight.as_deref().filter(|report| report.id == group.id))
    }

    /// Leaves out members that hold up all others, by the finished pre-flight of the group; once for each group.
    pub(super) fn heed_preflight(&mut self) {
        let Some(report) = self.preflight().filter(|report| report.done) else { return };
        let poor = report.arrangement.poor.clone();
        let Some(group) = self.group.as_mut().filter(|group| !group.heeded) else { return };
        group.heeded = true;
        let mut left = usize::try_from(group.rollouts()).unwrap_or(usize::MAX);
        let least = usize::try_from(group.policy.min_ready.max(1)).unwrap_or(usize::MAX);
        let mut out: Vec<PoorMember> = poor.into_iter().filter(|poor| is_rollout(group, poor)).collect();
        // The slowest stands last, and goes first.
        out.reverse();
        out.retain(|poor| {
            let goes = poor.broken || left > least;
            left -= usize::from(goes);
            goes
        });
        for poor in out {
            self.strike(&poor.member, Weight::Edge, reason(&poor), &poor.why);
        }
    }

    /// Members of the group that stay though their edges are poor, and the source where its own are.
    pub(super) fn poor_members(&self) -> impl Iterator<Item = (Reason, &PoorMember)> {
        let arrangement = self.preflight().filter(|report| report.done).map(|report| &report.arrangement);
        let here = |poor: &&PoorMember| self.group.as_ref().is_some_and(|group| !group.lost.contains_key(&poor.member));
        let poor = arrangement.into_iter().flat_map(|arrangement| arrangement.poor.iter().chain(&arrangement.source));
        poor.filter(here).map(|poor| (reason(poor), poor))
    }
}

fn reason(poor: &PoorMember) -> Reason {
    if poor.broken { Reason::BrokenEdge } else { Reason::SlowEdge }
}

fn is_rollout(group: &Group, poor: &PoorMember) -> bool {
    group.roster.member(&poor.member).is_some_and(|member| member.role == Role::Rollout) && !group.lost.contains_key(&poor.member)
}

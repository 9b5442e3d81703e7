//! How long a failing member is backed off. Each member has its own count: one crash-looping pod never delays another, and a new pod with
//! the name of a failed one starts with no failures.

use std::collections::{BTreeMap, BTreeSet};

use crate::protocol::{MemberName, Reason};

use super::BackoffConfig;

/// The recorded failures of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Strike {
    /// Failures since the count was last reset.
    pub count: u32,
    /// It may join again then.
    pub until: u64,
    pub reason: Reason,
    pub message: String,
    /// UIDs of the pods that failed.
    pods: BTreeSet<String>,
    /// Since when it has been in a group without a failure.
    stable_since: Option<u64>,
}

impl Strike {
    /// Whether none of the pods that failed is left.
    fn is_of_others(&self, pods: &BTreeSet<String>) -> bool {
        !self.pods.is_empty() && self.pods.is_disjoint(pods)
    }

    /// Whether the preflight found it.
    pub(super) fn is_of_an_edge(&self) -> bool {
        self.reason == Reason::BadEdge
    }
}

/// The cost of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Weight {
    /// It disappeared: the first time its successor may join at once.
    Loss,
    /// It failed a request: it waits from the first time on.
    Failure,
    /// An edge to it is slow or broken, which does not end by itself soon: it waits longest from the first time on.
    Edge,
}

/// A failure of a member.
#[derive(Debug, Clone)]
pub(super) struct Failure<'a> {
    pub member: &'a MemberName,
    /// UIDs of the pods that it had.
    pub pods: BTreeSet<String>,
    pub weight: Weight,
    pub reason: Reason,
    pub message: &'a str,
}

/// All members' failures.
#[derive(Debug, Clone, Default)]
pub(super) struct Backoff {
    members: BTreeMap<MemberName, Strike>,
}

impl Backoff {
    pub(super) fn strike(&mut self, now: u64, config: BackoffConfig, failure: Failure<'_>) {
        let Failure { member, pods, weight, reason, message } = failure;
        let before = self.members.get(member).filter(|strike| !strike.is_of_others(&pods));
        let count = before.map_or(0, |strike| strike.count).saturating_add(1);
        let doublings = match weight {
            Weight::Loss => count.checked_sub(2),
            Weight::Failure => Some(count - 1),
            Weight::Edge => Some(u32::MAX),
        };
        let wait = doublings.map_or(0, |doublings| {
            let factor = 1_u64.checked_shl(doublings).unwrap_or(u64::MAX);
            config.base_ms.saturating_mul(factor).min(config.max_ms)
        });
        let strike = Strike { count, until: now.saturating_add(wait), reason, message: message.to_owned(), pods, stable_since: None };
        self.members.insert(member.clone(), strike);
    }

    /// Edges are about to be measured again: earlier results back off no member any more.
    pub(super) fn forget_edges(&mut self) {
        self.members.retain(|_, strike| !strike.is_of_an_edge());
    }

    /// The failure that keeps a member with these pods out now.
    pub(super) fn holding_off(&self, now: u64, member: &MemberName, pods: &BTreeSet<String>) -> Option<&Strike> {
        self.members.get(member).filter(|strike| now < strike.until && !strike.is_of_others(pods))
    }

    /// Resets members that were in a group for long enough; returns when the next one is due.
    pub(super) fn forgive(&mut self, now: u64, config: BackoffConfig, in_group: impl Fn(&MemberName) -> bool) -> Option<u64> {
        let mut next: Option<u64> = None;
        self.members.retain(|member, strike| {
            if !in_group(member) {
                strike.stable_since = None;
                // Forget a member that never comes back.
                return now < strike.until.saturating_add(config.max_ms.max(config.reset_ms));
            }
            let at = strike.stable_since.get_or_insert(now).saturating_add(config.reset_ms);
            if now < at {
                next = Some(next.map_or(at, |next| next.min(at)));
            }
            now < at
        });
        next
    }

    /// The last recorded failure of a member with these pods.
    pub(super) fn last(&self, member: &MemberName, pods: &BTreeSet<String>) -> Option<&Strike> {
        self.members.get(member).filter(|strike| !strike.is_of_others(pods))
    }
}

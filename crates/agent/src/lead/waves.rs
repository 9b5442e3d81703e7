//! Who is switched when: because of an update, no more replicas are out of service at once than `membership.maxUnavailable` says.
//!
//! Pure. A replica that serves takes a place from the moment that it is asked to switch until its engine confirmed; one whose switch failed
//! keeps its place, so that a version that no engine takes costs as many replicas as the limit and not all. A replica that does not
//! serve anyway takes none.

use std::collections::BTreeSet;

use weightsync_core::protocol::{InstallStep, MemberName};

/// A member that holds the version and waits to be switched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    pub member: MemberName,
    pub serves: bool,
}

#[derive(Debug, Clone)]
pub struct Waves {
    all: Vec<Waiting>,
    begun: BTreeSet<MemberName>,
    /// Replicas that may be out of service at once.
    limit: usize,
}

impl Waves {
    /// No one has begun; `limit` 0 lets all begin at once.
    pub fn new(all: Vec<Waiting>, limit: u32) -> Self {
        let limit = if limit == 0 { usize::MAX } else { usize::try_from(limit).unwrap_or(usize::MAX) };
        Self { all, begun: BTreeSet::new(), limit }
    }

    /// Those that may be asked to switch now; `step` says where a member stands.
    pub fn next(&self, step: impl Fn(&MemberName) -> Option<InstallStep>) -> Vec<MemberName> {
        let out = self.all.iter().filter(|waiting| waiting.serves && self.begun.contains(&waiting.member));
        let taken = out.filter(|waiting| step(&waiting.member) != Some(InstallStep::Installed)).count();
        let mut places = self.limit.saturating_sub(taken);
        let open = self.waiting(&step).into_iter().filter(|waiting| {
            let may = !waiting.serves || places > 0;
            places = places.saturating_sub(usize::from(may && waiting.serves));
            may
        });
        open.map(|waiting| waiting.member.clone()).collect()
    }

    pub fn begin(&mut self, members: &[MemberName]) {
        self.begun.extend(members.iter().cloned());
    }

    /// Whether somebody was informed whose switch has not ended.
    pub fn is_moving(&self, step: impl Fn(&MemberName) -> Option<InstallStep>) -> bool {
        self.begun.iter().any(|member| !step(member).is_some_and(InstallStep::is_final))
    }

    /// Those that were not reported and still could be.
    pub fn waiting(&self, step: impl Fn(&MemberName) -> Option<InstallStep>) -> Vec<&Waiting> {
        let open = |waiting: &&Waiting| !self.begun.contains(&waiting.member) && step(&waiting.member) == Some(InstallStep::Delivered);
        self.all.iter().filter(open).collect()
    }
}

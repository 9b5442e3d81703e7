//! Chooses the agents that are notified when their assignment changes. They then request it at once, instead of seconds later with their
//! next announcement. Until then, a pod outside the group would be ready with start-up weights although a version exists.
//!
//! Pure. An agent that misses the notification gets the assignment with its next announcement.

use std::collections::HashSet;

use weightsync_core::membership::{MemberStanding, MemberView, MembershipView};
use weightsync_core::protocol::{HeldVersion, Hindrance, Incarnation, Returned, Role, Version};

/// The change in the part that all assignments share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CommonChange {
    Nothing,
    /// Another version counts. Members of the group learn it from the update itself, unless its source ended before it could report the
    /// end.
    Version,
    /// Why trainers wait for a group.
    Hindrance,
    /// Which other versions may serve, or whether the object is suspended. Agents learn this only from the assignment.
    Service,
}

/// The part that all assignments of an object share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Common<'a> {
    pub(super) current: Option<&'a HeldVersion>,
    /// The rollback of the group, if there is one.
    pub(super) returned: Option<Returned>,
    /// The newest version in service.
    pub(super) newest: Option<Version>,
    /// Whether the object's pods are released and serve their current weights.
    pub(super) suspended: bool,
    /// Why no group can take a publish.
    pub(super) hindrance: Option<&'a Hindrance>,
}

impl CommonChange {
    pub(super) fn between(before: Common<'_>, now: Common<'_>) -> Self {
        if (before.returned, before.newest, before.suspended) != (now.returned, now.newest, now.suspended) {
            Self::Service
        } else if before.current != now.current {
            Self::Version
        } else if before.hindrance != now.hindrance {
            Self::Hindrance
        } else {
            Self::Nothing
        }
    }

    /// Which of these agents must be notified.
    pub(super) fn concerns<'a>(self, view: &MembershipView, agents: impl Iterator<Item = &'a Incarnation>) -> Vec<Incarnation> {
        let unreported: HashSet<&Incarnation> = match self {
            Self::Nothing => return Vec::new(),
            Self::Hindrance => {
                let members = view.members.iter().filter(|member| member.role != Role::Source);
                members.filter_map(|member| member.incarnation.as_ref()).collect()
            }
            Self::Service => HashSet::new(),
            Self::Version => {
                let current = view.wanted.as_ref().or(view.version.as_ref());
                // A source that led the update to its end reports that itself; its successor knows only its assignment.
                let knows = |member: &MemberView| member.role != Role::Source || member.installed.as_ref() == current;
                let members = view.members.iter().filter(|member| in_group(member.standing) && knows(member));
                members.filter_map(|member| member.incarnation.as_ref()).collect()
            }
        };
        agents.filter(|agent| !unreported.contains(agent)).cloned().collect()
    }
}

fn in_group(standing: MemberStanding) -> bool {
    use MemberStanding as S;
    match standing {
        S::Ready | S::Updating | S::Behind | S::Dirty | S::Unknown => true,
        S::Forming | S::Waiting | S::Out => false,
    }
}

#[cfg(test)]
mod tests;

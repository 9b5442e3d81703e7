//! Which agents are notified that their assignment changed, so that they request it at once instead of with their next announcement,
//! seconds later: until then a pod outside of the group would be ready with start-up weights although there is a version.
//!
//! Pure. Anyone who misses the word hears it with the next announcement; nothing here is relied upon.

use std::collections::HashSet;

use weightsync_core::membership::{MemberStanding, MemberView, MembershipView};
use weightsync_core::protocol::{HeldVersion, Hindrance, Incarnation, Returned, Role, Version};

/// What is new in what goes out with each assignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CommonChange {
    Nothing,
    /// Another version counts. Members of the group know it by the update itself, unless the source that led it ended before it did.
    Version,
    /// Why trainers wait for a group.
    Hindrance,
    /// Which other versions may serve, or whether the object is suspended; agents hear of that by the assignment only.
    Service,
}

/// What goes out with each assignment of an object.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Common<'a> {
    /// The version that counts.
    pub(super) current: Option<&'a HeldVersion>,
    /// Where the group went back to.
    pub(super) returned: Option<Returned>,
    /// The newest version in service.
    pub(super) newest: Option<Version>,
    /// Whether the object's pods are released and serve what they have.
    pub(super) suspended: bool,
    /// Why no group can take what is published.
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

    /// Which of these agents are notified.
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

//! Why no group can take a publish: the causes of the members that are out, and whether waiting can help.
//!
//! Decides nothing about groups: a trainer's agent reports it when a publish ends without an attempt.

use std::collections::BTreeSet;

use crate::protocol::{Hindrance, Reason, Role};

use super::backoff::Strike;
use super::{MemberStanding, MemberView, Membership};

/// Members that the message names at most.
const NAMED: usize = 8;
/// Longest cause of one member, in characters.
const CAUSE: usize = 300;

impl Membership {
    /// None while the group has enough rollouts.
    pub(super) fn hindrance(&self, members: &[MemberView]) -> Option<Hindrance> {
        let needed = usize::try_from(self.config.policy.min_ready.max(1)).unwrap_or(usize::MAX);
        let rollouts = || members.iter().filter(|member| member.role == Role::Rollout);
        let inside = rollouts().filter(|member| is_inside(member.standing)).count();
        if self.group.is_some() && inside >= needed {
            return None;
        }
        if self.suspended || self.deleted {
            return Some(Hindrance { message: "the object is suspended or being deleted".to_owned(), permanent: false });
        }
        let out: Vec<&MemberView> = members.iter().filter(|member| !is_inside(member.standing)).collect();
        let mut causes: Vec<String> = out.iter().take(NAMED).map(|member| self.cause(member)).collect();
        if out.len() > NAMED {
            causes.push(format!("and {} more", out.len() - NAMED));
        }
        let count = rollouts().count();
        if count < needed {
            causes.insert(0, format!("there are {count} rollouts, {needed} are needed"));
        }
        let never = rollouts().filter(|member| !is_inside(member.standing) && self.stays_out(member)).count();
        Some(Hindrance { message: causes.join("; "), permanent: count >= needed && count - never < needed })
    }

    fn cause(&self, member: &MemberView) -> String {
        let (reason, message) = match self.strike_of(member) {
            Some(strike) => (strike.reason, &strike.message),
            None => (member.reason, &member.message),
        };
        let message: String = message.chars().take(CAUSE).collect();
        if message.is_empty() { format!("{}: {reason}", member.name) } else { format!("{}: {reason}: {message}", member.name) }
    }

    /// Whether it can join only after a change of the object, its pods or their images.
    fn stays_out(&self, member: &MemberView) -> bool {
        let reason = self.strike_of(member).map_or(member.reason, |strike| strike.reason);
        matches!(reason, Reason::Unsupported | Reason::SizeMismatch | Reason::PodMismatch)
    }

    /// The last recorded failure of a member, also during its next try.
    fn strike_of(&self, member: &MemberView) -> Option<&Strike> {
        let waits = matches!(member.reason, Reason::BackingOff) || member.standing != MemberStanding::Out;
        let pods: BTreeSet<String> = member.pods.iter().map(|pod| pod.uid.clone()).collect();
        self.backoff.last(&member.name, &pods).filter(|_| waits)
    }
}

fn is_inside(standing: MemberStanding) -> bool {
    use MemberStanding as S;
    match standing {
        S::Ready | S::Updating | S::Behind | S::Dirty | S::Unknown => true,
        S::Forming | S::Waiting | S::Out => false,
    }
}

//! Which pods form a group, in which order, with which ranks.
//!
//! Pure: pods, specs and engine facts in; candidates, a roster and reasons out. Never waits, never asks anybody, and never guesses:
//! what cannot be decided is named.

use serde::{Deserialize, Serialize};

use crate::protocol::{MemberName, PodRef, Role};

/// A member that could take part, in the order of the plan. Ranks are given by [`Roster`](crate::protocol::Roster) only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Candidate {
    /// Stable name.
    pub name: MemberName,
    /// Source or rollout.
    pub role: Role,
    /// Ranks it takes; what the spec says until the engine was asked, and then both agree.
    pub size: u32,
    /// Its pods, head first.
    pub pods: Vec<PodRef>,
    /// Port of its engine in the head pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
}

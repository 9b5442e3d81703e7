//! Names and numbers that identify a group, a member and a version. Decides which of two epochs is newer; nothing else.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Number that a trainer gives to a set of weights; only grows.
pub type Version = u64;

/// The identity of one group. Group names, hello frames and messages carry it.
///
/// A recreated object has another UID and a later creation time, so the two cannot be confused. An old leader has a smaller `term` and
/// cannot have written `epoch` (compare-and-swap on `status.epoch`).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EpochId {
    /// UID of the `WeightSync` object.
    pub weightsync: String,
    /// When that object was created, in ms since 1970: the later one is the newer object.
    pub created: u64,
    /// Transitions of the controller's lease when the epoch was made.
    pub term: u64,
    /// The epoch's number; grows by at least 1 with every group.
    pub epoch: u64,
}

impl EpochId {
    /// Whether `self` replaces `other`: a newer object, or a higher epoch of the same object.
    pub fn supersedes(&self, other: &Self) -> bool {
        if self.weightsync == other.weightsync {
            (self.epoch, self.term) > (other.epoch, other.term)
        } else {
            (self.created, &self.weightsync) > (other.created, &other.weightsync)
        }
    }
}

impl fmt::Display for EpochId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.weightsync, self.term, self.epoch)
    }
}

/// Name of a member, stable while its pods keep their names: `trainer/POD`, `POOL/POD`, `POOL/POD:PORT` or `POOL/GROUP`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MemberName(pub String);

impl MemberName {
    /// The name without the port of an engine: `POOL/POD`. All engines of one pod have one vote, because the pod itself says how many it
    /// has. The controller makes these names.
    pub fn voter(&self) -> &str {
        self.0.split_once(':').map_or(&self.0, |(pod, _)| pod)
    }
}

impl fmt::Display for MemberName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One incarnation of a member's agent. A pod recreated under the same name, or a restarted agent, has another one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Incarnation {
    /// UID of the pod that the agent runs in (on one host: a name that the supervisor gives).
    pub pod_uid: String,
    /// Random text made by the agent process at its start.
    pub instance: String,
}

/// The task of a member in its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The agent of a trainer; it leads updates.
    Source,
    /// The agent of an engine.
    Rollout,
}

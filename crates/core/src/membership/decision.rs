//! The decisions of membership. `coordinator` acts on them in order, without waiting in between: prepares of one epoch are sent in
//! parallel. Holds values only.

use crate::protocol::{CommitRequest, FenceRequest, Incarnation, MemberName, PrepareRequest, Reason, ReleaseRequest};

/// One decision.
#[derive(Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Decision {
    /// Write `status.epoch` by compare-and-swap; report `EpochPersisted`, `PersistFailed` or `PersistConflict`. The same number may be
    /// requested again if no result came: if it is already written, that is success.
    PersistEpoch {
        /// The number; higher than every one before.
        epoch: u64,
    },
    /// Send a prepare; answer with `Prepared` or `PrepareFailed`.
    Prepare { to: Incarnation, request: Box<PrepareRequest> },
    /// Send a commit; answer with `Committed` or `CommitFailed`. `secret` is empty: the sender fills in one secret per epoch.
    Commit { to: Incarnation, member: MemberName, request: Box<CommitRequest> },
    /// Send a fence to each; no answer is needed, the agent's state shows it.
    Fence { to: Vec<Incarnation>, request: FenceRequest },
    /// Send a release to each; no answer is needed, the agent's state shows it.
    Release { to: Vec<Incarnation>, request: ReleaseRequest },
    /// Publish an Event.
    Event { reason: Reason, message: String, member: Option<MemberName>, warning: bool },
    /// Another leader decides now: stop all actions for this object and drop this membership.
    StepDown { message: String },
}

// Written by hand: the commit request carries a secret once the sender filled it in, and is not `Debug` for that reason.
impl std::fmt::Debug for Decision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::PersistEpoch { epoch } => write!(f, "PersistEpoch({epoch})"),
            Self::Prepare { request, .. } => write!(f, "Prepare({}, {})", request.id.epoch, request.member),
            Self::Commit { member, request, .. } => write!(f, "Commit({}, {member})", request.id.epoch),
            Self::Fence { to, request } => write!(f, "Fence({}, {} agents: {})", request.id.epoch, to.len(), request.reason),
            Self::Release { to, request } => write!(f, "Release({}, {} agents: {})", request.id.epoch, to.len(), request.reason),
            Self::Event { reason, message, member, .. } => match member {
                Some(member) => write!(f, "Event({reason}, {member}: {message})"),
                None => write!(f, "Event({reason}: {message})"),
            },
            Self::StepDown { message } => write!(f, "StepDown({message})"),
        }
    }
}

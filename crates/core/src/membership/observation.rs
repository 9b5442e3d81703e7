//! Inputs of membership. Every observation may be late, repeated or from another incarnation of a member. Each carries its sender's
//! [`Incarnation`] and, where it acts on a group, its [`EpochId`], so that stale ones are recognised. Holds values only.

use crate::plan::{Candidate, LeftOut};
use crate::protocol::{Announced, Announcement, EpochId, Incarnation, MemberName, MemberState, PrepareResponse, Refusal, UpdateView};

use super::MembershipConfig;

/// One event, or a complete list.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Observation {
    /// Time passed; also sent when [`next_wakeup`](super::Membership::next_wakeup) is reached.
    Tick,
    Configure(Box<MembershipConfig>),
    /// All members that could take part now, in the order of the plan, and those left out. Always the whole list. Do not pass on a plan
    /// that is refused because of an invalid spec: the working group stays.
    Candidates {
        candidates: Vec<Candidate>,
        left_out: Vec<LeftOut>,
    },
    /// An agent announced itself. It counts once its state is known, which proves that it can be reached.
    Announced(Announcement),
    /// An agent announced an address that is not its pod's. The controller does not connect to it; an incarnation with an earlier correct
    /// announcement stays unchanged.
    AddressRefused {
        announcement: Announcement,
        why: String,
    },
    /// A source announced a version, by a statement that was checked. It comes before the state of the member that presents it.
    Proven(Announced),
    /// The full state of an agent, from its event stream.
    State(Box<MemberState>),
    /// Time of the latest first report of an agent of another object, in ms since 1970. When thousands of agents reconnect after a restart,
    /// the agents of one object need longer than when there are few.
    ComingBack {
        at: u64,
    },
    /// A message from an agent, such as a heartbeat.
    Alive {
        from: Incarnation,
    },
    /// The connection to an agent closed and one attempt to open it again was refused or ran out of time. It may announce itself again.
    AgentLost {
        from: Incarnation,
        cause: String,
    },
    Prepared {
        id: EpochId,
        member: MemberName,
        response: Box<PrepareResponse>,
    },
    /// A member refused to prepare, could not be reached, or did not respond ([`RefusalCode::Timeout`](crate::protocol::RefusalCode)).
    PrepareFailed {
        id: EpochId,
        member: MemberName,
        refusal: Refusal,
    },
    Committed {
        id: EpochId,
        member: MemberName,
        from: Incarnation,
    },
    /// A member refused to commit, could not be reached, or did not respond.
    CommitFailed {
        id: EpochId,
        member: MemberName,
        refusal: Refusal,
    },
    /// This controller persisted the epoch.
    EpochPersisted {
        epoch: u64,
    },
    /// The epoch could not be persisted now (the API server is unavailable).
    PersistFailed {
        epoch: u64,
        message: String,
    },
    /// Another controller wrote the epoch: this one must stop.
    PersistConflict {
        /// Which epoch was to be written. A late result about another epoch than the present one has no meaning: it may have found this
        /// controller's own later write.
        epoch: u64,
        message: String,
    },
    /// A leader's view of an update changed.
    Update {
        from: Incarnation,
        update: Box<UpdateView>,
    },
    /// An agent cannot reach or lost a peer of its epoch.
    PeerLost {
        from: Incarnation,
        id: EpochId,
        peer: MemberName,
        cause: String,
    },
    /// The object is suspended, or not any more.
    Suspend(bool),
    /// The object is being deleted: release all agents permanently.
    Delete,
}

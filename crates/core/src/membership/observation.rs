//! What membership learns from outside. Every observation may be late, doubled or from another life of a member: each names its sender's
//! [`Incarnation`] and, where it acts on a group, its [`EpochId`], so that what is stale can be informed. Holds values only.

use crate::plan::{Candidate, LeftOut};
use crate::protocol::{Announced, Announcement, EpochId, Incarnation, MemberName, MemberState, PrepareResponse, Refusal, UpdateView};

use super::MembershipConfig;

/// One thing that happened, or a whole list that is now so.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Observation {
    /// Time passed; also sent when [`next_wakeup`](super::Membership::next_wakeup) is reached.
    Tick,
    Configure(Box<MembershipConfig>),
    /// All members that could take part now, in the order of the plan, and those left out. Always the whole list. A plan that is refused
    /// because the spec is wrong says nothing about members: do not pass it on, what works stays.
    Candidates {
        candidates: Vec<Candidate>,
        left_out: Vec<LeftOut>,
    },
    /// An agent announced itself. It counts once its state is known, which proves that it can be reached.
    Announced(Announcement),
    /// An agent announced an address that is not its pod's. It is not connected to, and a life that was announced well stays as it is.
    AddressRefused {
        announcement: Announcement,
        why: String,
    },
    /// A source announced a version, by a statement that was checked. It comes before the state of the member that presents it.
    Proven(Announced),
    /// Everything an agent knows of itself, from its event stream.
    State(Box<MemberState>),
    /// Agents of other objects were last heard of for the first time then, in ms since 1970. A controller to which thousands come back after a
    /// restart has not heard of all of its own in the time that suffices for a few.
    ComingBack {
        at: u64,
    },
    /// A line came from an agent, a heartbeat for instance.
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
    /// A member refused to prepare, could not be asked, or gave no answer ([`RefusalCode::Timeout`](crate::protocol::RefusalCode)).
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
    /// A member refused to commit, could not be asked, or gave no answer.
    CommitFailed {
        id: EpochId,
        member: MemberName,
        refusal: Refusal,
    },
    /// The epoch is written, by us.
    EpochPersisted {
        epoch: u64,
    },
    /// The epoch could not be written now (the API server is away).
    PersistFailed {
        epoch: u64,
        message: String,
    },
    /// Another controller wrote the epoch: ours must stop.
    PersistConflict {
        /// Which epoch was to be written. A late answer about another one than is being written now says nothing: our own later write may
        /// have been what it found.
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
    /// The object is being deleted: release everybody, for good.
    Delete,
}

//! The view of membership for status. Holds values only; `report.rs` fills them.

use crate::protocol::{
    EpochId, HeldVersion, Hindrance, Incarnation, MemberFabric, MemberName, PodRef, PreflightReport, ProvenBy, Reason, Received, Returned,
    Role, TransportChoice, UpdateView, Version,
};

/// State of the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum GroupStage {
    /// A controller that started waits for agents before it decides anything. Until then status keeps its members and group: a restart of
    /// the controller makes no replica unready. The version may rise, and is written.
    Adopting,
    /// There is no group, and none is being formed.
    Idle,
    /// A new epoch is being written. The group before it, if any, still works.
    Persisting,
    Preparing,
    Committing,
    Committed,
    Suspended,
    /// The object is being deleted.
    Released,
    /// Another controller decides.
    SteppedDown,
}

/// State of one member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemberStanding {
    /// In the committed group, its engine confirmed the current version (or there is none yet). A source: in the committed group.
    Ready,
    /// As `Ready`, and in an update to a newer version.
    Updating,
    /// In the committed group, lacks the current version.
    Behind,
    /// In the committed group, must be fed in full before it may serve.
    Dirty,
    /// In the committed group, and its engine's version is not known: it is proven or fed before it may serve.
    Unknown,
    /// Takes part in the epoch that is being formed.
    Forming,
    /// Eligible; waits for the next epoch, or until a group is possible.
    Waiting,
    /// Cannot take part.
    Out,
}

impl MemberStanding {
    /// Its name in metrics and on the web page.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Updating => "updating",
            Self::Behind => "behind",
            Self::Dirty => "dirty",
            Self::Unknown => "unknown",
            Self::Forming => "forming",
            Self::Waiting => "waiting",
            Self::Out => "out",
        }
    }
}

/// One member.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct MemberView {
    pub name: MemberName,
    pub role: Role,
    /// Its pods, head first; empty for a member that the plan left out.
    pub pods: Vec<PodRef>,
    /// The agent that represents it.
    pub incarnation: Option<Incarnation>,
    /// First rank in the group (committed or being formed).
    pub rank_offset: Option<u32>,
    /// Ranks it takes.
    pub size: u32,
    pub standing: MemberStanding,
    /// The versions that it keeps complete and verified (delivered); the current one first, if it is among them.
    pub keeps: Vec<HeldVersion>,
    /// Whether it may hold half an update, or its version is unknown, in any state: it must not serve until it is proven or fed.
    pub dirty: bool,
    /// Whether its agent reports that its engine computes nothing although its HTTP front answers.
    pub wedged: bool,
    /// The version that its engine confirmed (installed); `None` while it is dirty.
    pub installed: Option<HeldVersion>,
    /// What shows that its engine holds the bytes of `installed`, if its agent reports that.
    pub proven_by: Option<ProvenBy>,
    pub engine_url: Option<String>,
    /// Latest end of the pause of its engine by WeightSync, in ms since 1970.
    pub paused_until: Option<u64>,
    /// How the last version came that it received.
    pub received: Option<Received>,
    /// What it reads with, where the group travels by reads.
    pub fabric: Option<Box<MemberFabric>>,
    /// When it may join again, in ms of the clock that `step` was given.
    pub retry_at: Option<u64>,
    pub reason: Reason,
    pub message: String,
}

/// A problem.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub struct Degradation {
    pub reason: Reason,
    pub member: Option<MemberName>,
    pub message: String,
}

impl MembershipView {
    pub(super) fn empty() -> Self {
        Self {
            stage: GroupStage::Idle,
            epoch: 0,
            id: None,
            committed: false,
            world_size: 0,
            version: None,
            wanted: None,
            returned: None,
            refused: Vec::new(),
            max_skew: None,
            newest: None,
            feeder: None,
            transport: None,
            preflight: None,
            update: None,
            members: Vec::new(),
            total: 0,
            ready: 0,
            min_ready: 0,
            degraded: Vec::new(),
            hindrance: None,
            released: false,
        }
    }
}

/// All of membership that status shows.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub struct MembershipView {
    pub stage: GroupStage,
    /// The highest epoch that was persisted or seen.
    pub epoch: u64,
    /// Identity of the committed group, or of the one being formed.
    pub id: Option<EpochId>,
    pub committed: bool,
    /// Ranks in the group; 0 without one.
    pub world_size: u32,
    /// The last version that reached `minReady`.
    pub version: Option<HeldVersion>,
    /// The version that every rollout should hold: another one than `version` while the group goes back.
    pub wanted: Option<HeldVersion>,
    /// The rollback or the held version that members receive.
    pub returned: Option<Returned>,
    /// Versions that most replicas refused by their canary, the highest last.
    pub refused: Vec<Version>,
    /// How far versions in service may be apart.
    pub max_skew: Option<Version>,
    /// The newest version in service, if there is such a limit.
    pub newest: Option<Version>,
    /// The feeder of members that lack it.
    pub feeder: Option<MemberName>,
    /// How bytes travel in the committed group.
    pub transport: Option<TransportChoice>,
    /// The result of the committed group's preflight.
    pub preflight: Option<Box<PreflightReport>>,
    /// The latest update of the group, as its leader sees it.
    pub update: Option<UpdateView>,
    /// All members, sources first, in the order of the plan; then those left out by the plan.
    pub members: Vec<MemberView>,
    /// Rollouts, whether in the group or not.
    pub total: u32,
    /// Rollouts that serve the current version in the committed group (any version before the first).
    pub ready: u32,
    pub min_ready: u32,
    /// The problems, sorted.
    pub degraded: Vec<Degradation>,
    /// Why no group can take a publish; none while one can.
    pub hindrance: Option<Hindrance>,
    /// Whether no reachable agent is in an epoch of this object any more: a suspended or deleted object is done with its pods.
    pub released: bool,
}

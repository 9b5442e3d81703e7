//! The inputs of membership at its start: the policies of one object and its restored state. Holds values only.

use crate::protocol::{HeldVersion, UpdatePolicy, Version};

/// When a member outside the group may join it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum JoinPolicy {
    /// As soon as the debounce and a running update allow.
    #[default]
    Immediate,
    /// When the version has risen since it asked; at once while the group has fewer than `minReady` replicas, because then no version
    /// could rise at all.
    NextVersion,
}

/// How long a member that fails waits before it may join again. Each member has its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackoffConfig {
    /// First wait in ms; each further failure doubles it.
    pub base_ms: u64,
    /// Longest wait in ms.
    pub max_ms: u64,
    /// After this time in a group, in ms, the failures of a member are reset.
    pub reset_ms: u64,
}

/// The policies of one object. All times in ms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MembershipConfig {
    /// UID of the object.
    pub weightsync: String,
    /// When the object was created, in ms since 1970.
    pub created: u64,
    /// Policies that members receive with each epoch.
    pub policy: UpdatePolicy,
    /// When members may join.
    pub join: JoinPolicy,
    /// The version that the group goes back to and stays at; `None`: the newest.
    pub target: Option<Version>,
    /// How long a join waits for others, and the least time between a group and the next one that a join causes.
    pub debounce_ms: u64,
    /// Deadline of members for a prepare.
    pub prepare_deadline_ms: u64,
    /// Deadline of members for a commit, all waves together.
    pub commit_deadline_ms: u64,
    /// An agent without a message for this time is silent (three heartbeats).
    pub agent_silence_ms: u64,
    /// After a start with an earlier epoch: how long agents have to announce themselves before anything is decided, from the start and from
    /// the last one that did. Longer than agents take to detect a controller that disappeared silently (a heartbeat, its acknowledgement's
    /// deadline, an announcement: 4.2 s).
    pub adopt_window_ms: u64,
    /// A write of the epoch that failed or got no response is repeated after this time; doubles up to 16 times this.
    pub persist_retry_ms: u64,
    /// A member that leaves in good order waits for a running update at most this long.
    pub leave_grace_ms: u64,
    /// A member that lacks the current version has this long to begin receiving it before a new epoch is made for it; doubles with each
    /// fruitless epoch.
    pub feed_grace_ms: u64,
    /// A fence or a release that an agent's state does not show is sent again after this long.
    pub resend_ms: u64,
    /// The least time between two requests for a preflight that are followed: each makes a new epoch and measures every edge again.
    pub preflight_rest_ms: u64,
    /// The back-off of failing members.
    pub backoff: BackoffConfig,
}

impl MembershipConfig {
    /// Policies with the default times for an object.
    pub fn new(weightsync: impl Into<String>, created: u64, policy: UpdatePolicy) -> Self {
        Self {
            weightsync: weightsync.into(),
            created,
            policy,
            join: JoinPolicy::default(),
            target: None,
            debounce_ms: 1_000,
            prepare_deadline_ms: 5_000,
            commit_deadline_ms: 10_000,
            agent_silence_ms: 3_000,
            adopt_window_ms: 6_000,
            persist_retry_ms: 500,
            leave_grace_ms: 10_000,
            feed_grace_ms: 2_000,
            resend_ms: 1_000,
            preflight_rest_ms: 30_000,
            backoff: BackoffConfig { base_ms: 1_000, max_ms: 300_000, reset_ms: 60_000 },
        }
    }
}

/// The restored state of an object: its status (empty for a new one).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Restored {
    /// Transitions of the controller's lease: 0 on one host.
    pub term: u64,
    /// The highest epoch that was persisted; 0 for a new object.
    pub epoch: u64,
    /// The last version that reached `minReady`, from status. Where only the number is known, `manifest` is empty and the first member
    /// that reports the number completes it.
    pub version: Option<HeldVersion>,
    /// The highest version that ever reached `minReady`, where the group went back from it; 0 where it did not.
    pub highest: Version,
    /// Versions that most replicas refused by their canary.
    pub refused: Vec<Version>,
}

//! The closed list of reasons. Each is a reason of conditions and Events, a field of logs and a label of metrics.
//!
//! A released reason is never renamed, because alerts use it. A new cause gets a new reason.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// The cause of a state or change.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum Reason {
            $($(#[doc = $doc])+ $name,)+
        }

        impl Reason {
            /// All reasons.
            pub const ALL: &'static [Self] = &[$(Self::$name),+];

            /// The name of the reason.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)+
                }
            }

            /// The meaning, for documentation.
            pub const fn meaning(self) -> &'static str {
                match self {
                    $(Self::$name => concat!($($doc),+),)+
                }
            }
        }
    };
}

reasons! {
    /// A group was formed: every member committed the epoch. Or a restarted controller took over a running group without touching it.
    GroupFormed,
    /// A group is being formed: members prepare or commit. Or a controller that started waits for the agents before it decides anything.
    GroupForming,
    /// An epoch was fenced: its members abort it and refuse all messages that carry it.
    GroupFenced,
    /// The member did not prepare or commit the epoch within its deadline, or refused to; the message has the cause.
    FormationFailed,
    /// The policies of the group or `spec.targetVersion` changed; a new epoch carries the change to the members.
    SpecChanged,
    /// The member serves the current version.
    MemberReady,
    /// The member joined an existing group.
    MemberJoined,
    /// The member left, or leaves at the next boundary: its pod is being deleted, has ended, is gone, or is not selected any more.
    MemberLeft,
    /// The member waits to join: for others that could join with it, for the end of the running update, or for the next version
    /// (`membership.join: NextVersion`).
    JoinPending,
    /// A new incarnation of the member's agent, engine or pod replaced the previous one. An engine that restarted does not serve before it
    /// holds the current version.
    MemberRestarted,
    /// The member refused or failed updates repeatedly, or was in one for longer than `update.timeoutSeconds`.
    MemberFailed,
    /// The member failed repeatedly and waits before it may join again; others are not held up.
    BackingOff,
    /// The member takes part in an update, or lacks the current version and is being fed.
    Updating,
    /// An update failed; the version did not move.
    UpdateFailed,
    /// At least minReady replicas serve a higher version than before.
    VersionReached,
    /// Members are being switched to the earlier version in `spec.targetVersion`, or at least minReady replicas serve it.
    RolledBack,
    /// No member keeps the version in `spec.targetVersion`; the message lists the kept versions.
    TargetVersionMissing,
    /// The canary refused a version; the message lists the replicas and what they measured. If most of the checked replicas refused it, the
    /// group returns to the previous version. Otherwise only the replicas that refused it do not serve.
    VersionRefused,
    /// No version was published yet.
    NoVersion,
    /// The member lacks what `spec.transport` requires.
    TransportUnavailable,
    /// The GPU worker process of the member's agent ended, and with it the communicator of the group.
    GpuWorkerLost,
    /// Other members cannot reach the member.
    PeerUnreachable,
    /// The preflight measured every edge to the member as far slower than the others, or an edge to it carries no bytes; the message has the
    /// figures and both members.
    BadEdge,
    /// No agent has announced itself for the member, or its container does not run under an agent although the object has
    /// `agent.launch: Wrap`.
    AgentMissing,
    /// The connection to the member's agent closed and could not be opened again, or the agent sent nothing for as long as three heartbeats.
    AgentLost,
    /// An agent was added to a running pod as an ephemeral container.
    AgentLaunched,
    /// An agent could not be added to a running pod: the API server refused, the pod reached its limit of ephemeral agents, or its annotation
    /// does not allow the Secret that the object names. The message has the cause.
    AgentLaunchFailed,
    /// The member makes a false claim: a role that is not its own, an epoch that no controller wrote, a version that no source announced, or
    /// a token that another process used. The message has the claim. It has no effect.
    ClaimRefused,
    /// The engine does not pass its health probes.
    EngineUnhealthy,
    /// The engine's HTTP front answers, but the engine computes nothing: only a restart of its pod ends that. With
    /// `update.onWedged: RestartPod` the controller deletes the pod.
    EngineWedged,
    /// An install began and did not end well: the replica does not serve until it is fed in full.
    InstallFailed,
    /// It is not proven what the engine holds or that it runs; the message has the cause. Its agent asks the engine until the version is
    /// proven, or the replica is fed.
    EngineUnproven,
    /// The engine or the agent does not support what the spec or this controller requires; the message names it, and what to change.
    Unsupported,
    /// The number of the engine's worker ranks differs from the spec.
    SizeMismatch,
    /// The pod does not fit the spec: the opt-in label `weightsync.dev/role`, the label of its group or the container is missing, two pools
    /// select it, or its agent announced an address that is not the pod's. The message names what.
    PodMismatch,
    /// The place of the pod is unclear: an order lists a name that no pod has, does not list the pod, or uses a label that the pod lacks; or
    /// a group has too many pods or not one head. The message names what.
    OrderMismatch,
    /// The pod is not ready, for another cause than an update: its containers have not all started, or the group of pods that makes the
    /// replica lacks pods.
    PodNotReady,
    /// Another object claims the pod; the message names it.
    PodClaimed,
    /// The spec contradicts itself; the message names the field and what to change.
    InvalidSpec,
    /// No trainer's agent takes part, so no publish is possible.
    NoSource,
    /// Fewer replicas than minReady are in the group.
    BelowMinReady,
    /// No member retains the current version: members that lack it wait for the next one.
    NoFeeder,
    /// The epoch could not be written, or another controller wrote it: this one stops deciding.
    PersistFailed,
    /// The state matches the spec.
    AsWanted,
    /// The object is suspended: its pods are being released, or were released and serve their current weights.
    Suspended,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

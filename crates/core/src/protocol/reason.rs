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
    /// A group was formed: every member committed the epoch.
    GroupFormed,
    /// A restarted controller took over a running group without touching it.
    GroupAdopted,
    /// An epoch was fenced: its members abort it and refuse all messages that carry it.
    GroupFenced,
    /// A group is being formed: members prepare or commit.
    GroupForming,
    /// A controller that started waits for the agents before it decides anything.
    Adopting,
    /// The member serves the current version.
    MemberReady,
    /// The member joined an existing group.
    MemberJoined,
    /// The member left the group in good order.
    MemberLeft,
    /// The member waits for the next epoch, which is delayed so that others can join with it.
    JoinPending,
    /// The member waits until the running update ends.
    WaitsForUpdate,
    /// The member waits for the next version, because of `membership.join: NextVersion`.
    WaitsForNextVersion,
    /// The member lacks what `spec.transport` requires.
    TransportUnavailable,
    /// The GPU worker process of the member's agent ended, and with it the communicator of the group.
    GpuWorkerLost,
    /// The member takes part in an update.
    Updating,
    /// The member lacks the current version and is being fed.
    BeingFed,
    /// At least minReady replicas serve a higher version than before.
    VersionReached,
    /// `spec.targetVersion` changed the version that the group should hold; a new epoch carries the change to the members.
    TargetChanged,
    /// Members are being switched to the version in `spec.targetVersion`.
    RollingBack,
    /// At least minReady replicas serve the earlier version in `spec.targetVersion`.
    RolledBack,
    /// No member keeps the version in `spec.targetVersion`; the message lists the kept versions.
    TargetVersionMissing,
    /// The canary refused a version; the message lists the replicas and what they measured. If most of the checked replicas refused it, the
    /// group returns to the previous version. Otherwise only the replicas that refused it do not serve.
    VersionRefused,
    /// The engine cannot answer the canary; the message names what it lacks.
    CanaryUnavailable,
    /// The policies of the group changed; a new epoch carries them to the members.
    PolicyChanged,
    /// No agent has announced itself for the member.
    AgentMissing,
    /// The releases of the member's agent and this controller have no protocol in common.
    AgentIncompatible,
    /// The member's agent announced an address that is not its pod's; the controller does not connect to it.
    AddressRefused,
    /// The member makes a false claim: a role that is not its own, an epoch that no controller wrote, or a version that no source
    /// announced. The message has the claim. It has no effect.
    ClaimRefused,
    /// The connection to the member's agent closed and could not be opened again.
    AgentLost,
    /// The member's agent sent nothing for as long as three heartbeats.
    AgentSilent,
    /// A new incarnation of the member's agent or pod replaced the previous one.
    AgentRestarted,
    /// The engine does not pass its health probes.
    EngineUnhealthy,
    /// The engine restarted; it does not serve before it holds the current version.
    EngineRestarted,
    /// The engine's HTTP front answers, but the engine computes nothing: only a restart of its pod ends that.
    EngineWedged,
    /// A pod with a wedged engine was deleted, because of `update.onWedged: RestartPod`.
    PodReplaced,
    /// An install began and did not end well: the replica does not serve until it is fed in full.
    InstallFailed,
    /// The last change of the engine ended without proof of what it holds or that it runs. Its agent asks the engine until the version is
    /// proven, or the replica is fed.
    EngineUnproven,
    /// The first version of the engine cannot be compared with its start-up checkpoint; the message has the cause.
    CheckpointUnread,
    /// The number of the engine's worker ranks differs from the spec.
    SizeMismatch,
    /// The member did not prepare within its deadline.
    PrepareTimeout,
    /// The member refused to prepare.
    PrepareRefused,
    /// The engine does not support what the spec requires; the message names it, and what to change.
    Unsupported,
    /// The member did not commit within its deadline.
    CommitTimeout,
    /// The member refused to commit.
    CommitRefused,
    /// Other members cannot reach the member.
    PeerUnreachable,
    /// The preflight measured every edge to the member as far slower than the others; the message has both figures.
    SlowEdge,
    /// The preflight found that an edge to the member does not carry bytes; the message names both members.
    BrokenEdge,
    /// The member refused or failed updates repeatedly.
    UpdateRefused,
    /// An update failed; the version did not move.
    UpdateFailed,
    /// The member was in an update for longer than `update.timeoutSeconds`.
    UpdateStuck,
    /// The member failed repeatedly and waits before it may join again; others are not held up.
    BackingOff,
    /// The pod is being deleted; the member leaves at the next boundary.
    Terminating,
    /// The pod is gone, or not selected any more.
    NotCandidate,
    /// The pod is claimed by another object.
    ClaimedByOther,
    /// The spec is valid, and no older object claims its pods.
    Accepted,
    /// The spec contradicts itself; the message names the field and what to change.
    InvalidSpec,
    /// An older object selects one of the pods; the message names it.
    PodClaimed,
    /// The pod is selected, but lacks the opt-in label `weightsync.dev/role`.
    NotOptedIn,
    /// Two pools select the pod.
    SelectedTwice,
    /// The pod succeeded or failed and never runs again.
    PodEnded,
    /// The pod's containers have not all started.
    PodNotRunning,
    /// The pod is not ready, for another cause than an update.
    PodNotReady,
    /// The pod has no container with the name in the spec.
    ContainerMissing,
    /// The pod lacks the label of its group.
    GroupLabelMissing,
    /// The group of pods that makes the replica lacks pods.
    GroupIncomplete,
    /// The group of pods that makes the replica has more pods than `replica.pods`.
    GroupTooLarge,
    /// No pod of the group, or more than one, is its head.
    HeadUnclear,
    /// The order uses an index or label that the pod lacks.
    OrderKeyMissing,
    /// An explicit order needs names that stay the same when a pod is recreated; this pod's name changes.
    UnstableName,
    /// The explicit order lists a name that no selected pod has.
    UnknownName,
    /// The explicit order does not list the pod.
    NotListed,
    /// No trainer's agent takes part, so no publish is possible.
    NoSource,
    /// No rollout can take part.
    NoRollout,
    /// No member retains the current version: members that lack it wait for the next one.
    NoFeeder,
    /// Fewer replicas than minReady are in the group.
    BelowMinReady,
    /// The epoch could not be written; the group stays unchanged.
    PersistFailed,
    /// Another controller wrote the epoch: this one stops deciding.
    PersistConflict,
    /// No version was published yet.
    NoVersion,
    /// The state matches the spec.
    AsWanted,
    /// Agents of all members can be reached.
    AgentsReachable,
    /// An agent was added to a running pod as an ephemeral container.
    AgentLaunched,
    /// An agent could not be added to a running pod; the message has the cause.
    AgentLaunchFailed,
    /// The object names a Secret for its engines' API key that the pod's annotation `weightsync.dev/api-key-secret` does not name: the pod
    /// gets no agent.
    ApiKeyNotAllowed,
    /// The single-use token of an ephemeral agent was used with two keys: both are refused, and the pod gets a new agent.
    TokenStolen,
    /// The pod reached the limit of ephemeral agents for one pod: recreate the pod, or use the sidecar.
    AgentLaunchesExhausted,
    /// The object has `agent.launch: Wrap`, and the pod was created without that.
    NotWrapped,
    /// The object is suspended: its pods were released.
    Suspended,
    /// The pods were released: they serve their current weights.
    Released,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

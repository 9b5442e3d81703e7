//! The closed list of reasons: the same word is a condition's reason, an Event's reason, a field of logs and a label of metrics.
//!
//! Holds words only. A word is never renamed once released (alerts are written against it); a new cause gets a new word.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Why something is as it is, as one word.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum Reason {
            $($(#[doc = $doc])+ $name,)+
        }

        impl Reason {
            /// All words.
            pub const ALL: &'static [Self] = &[$(Self::$name),+];

            /// The word.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)+
                }
            }

            /// What the word means, for documentation.
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
    /// A restarted controller took a running group over without touching it.
    GroupAdopted,
    /// An epoch was fenced: its members abort it and refuse all that carries it.
    GroupFenced,
    /// A group is being formed: members prepare or commit.
    GroupForming,
    /// A controller that started asks who is there before it decides anything.
    Adopting,
    /// The member serves the current version.
    MemberReady,
    /// The member entered a group that was there before.
    MemberJoined,
    /// The member left the group in good order.
    MemberLeft,
    /// The member waits for the next epoch, which is held back to take others along.
    JoinPending,
    /// The member waits until the running update ends.
    WaitsForUpdate,
    /// The member waits for the next version, as `membership.join: NextVersion` asks.
    WaitsForNextVersion,
    /// `spec.transport` demands what the member does not have.
    TransportUnavailable,
    /// The process that the member's agent drives its GPU with ended, and with it the communicator of the group.
    GpuWorkerLost,
    /// The member takes part in an update.
    Updating,
    /// The member lacks the current version and is brought it.
    BeingFed,
    /// The number of the version that at least minReady replicas serve rose.
    VersionReached,
    /// `spec.targetVersion` changed which version the group should hold; a new epoch carries that to the members.
    TargetChanged,
    /// Members are brought the version that `spec.targetVersion` names.
    RollingBack,
    /// At least minReady replicas serve the earlier version that `spec.targetVersion` names.
    RolledBack,
    /// No one keeps the version that `spec.targetVersion` names; the message lists those that are kept.
    TargetVersionMissing,
    /// The canary refused a version; the message names replicas and what they measured. Refused by most of those that were asked, it is left
    /// for the version before; else only the replicas that refused it do not serve.
    VersionRefused,
    /// The engine cannot be asked what the canary asks; the message says what it lacks.
    CanaryUnavailable,
    /// The rules of the group changed; a new epoch carries them to the members.
    PolicyChanged,
    /// No agent has announced itself for the member.
    AgentMissing,
    /// The member's agent and this controller are of releases that cannot work together.
    AgentIncompatible,
    /// The member's agent announced an address that is not its pod's; the controller does not connect to it.
    AddressRefused,
    /// The member says of itself what cannot be true: a role that is not its own, an epoch that no controller wrote, or a version that no source
    /// announced. The message says which. Nothing follows from the claim.
    ClaimRefused,
    /// The connection to the member's agent closed and could not be opened again.
    AgentLost,
    /// The member's agent sent nothing for as long as three heartbeats.
    AgentSilent,
    /// Another life of the member's agent or pod took its place.
    AgentRestarted,
    /// The engine does not pass its health probes.
    EngineUnhealthy,
    /// Another start of the engine took the place of the one before; it does not serve before it holds the current version.
    EngineRestarted,
    /// The engine's front answers, and the engine computes nothing: only another start of its pod ends that.
    EngineWedged,
    /// A pod whose engine was wedged was deleted, as `update.onWedged` asks.
    PodReplaced,
    /// An install began and did not end well: the replica does not serve until it is fed in full.
    InstallFailed,
    /// The last change of the engine ended without proof of what it holds or that it runs. Its agent asks it, and then it is proven or fed.
    EngineUnproven,
    /// The first version of the engine cannot be compared with the checkpoint that it was started with; the message says why.
    CheckpointUnread,
    /// The engine's worker ranks are not what the spec says.
    SizeMismatch,
    /// The member did not prepare within its deadline.
    PrepareTimeout,
    /// The member refused to prepare.
    PrepareRefused,
    /// The engine cannot do what the spec asks of it; the message says what, and what to change.
    Unsupported,
    /// The member did not commit within its deadline.
    CommitTimeout,
    /// The member refused to commit.
    CommitRefused,
    /// Other members cannot reach the member.
    PeerUnreachable,
    /// The pre-flight found that every edge to the member is far slower than the others; the message has both figures.
    SlowEdge,
    /// The pre-flight found that an edge to the member does not carry bytes; the message names both members.
    BrokenEdge,
    /// The member refused or failed updates repeatedly.
    UpdateRefused,
    /// An update failed; the version did not move.
    UpdateFailed,
    /// The member was in an update for longer than an update may take.
    UpdateStuck,
    /// The member failed repeatedly and waits before it may join again; others are not held up.
    BackingOff,
    /// The pod is being deleted; the member leaves at the next boundary.
    Terminating,
    /// The pod is gone, or not selected any more.
    NotCandidate,
    /// The pod belongs to a newer object.
    ClaimedByOther,
    /// The spec makes sense, and its pods are this object's.
    Accepted,
    /// The spec contradicts itself; the message names the field and what to change.
    InvalidSpec,
    /// An older object selects one of the pods; the message names it.
    PodClaimed,
    /// The pod is selected, but lacks the label `weightsync.dev/role` by which pods consent.
    NotOptedIn,
    /// Two pools select the pod.
    SelectedTwice,
    /// The pod succeeded or failed and never runs again.
    PodEnded,
    /// The pod's containers have not all started.
    PodNotRunning,
    /// The pod is not ready, for a cause that is not an update of ours.
    PodNotReady,
    /// The pod has no container of the name that the spec gives.
    ContainerMissing,
    /// The pod lacks the label that tells its group.
    GroupLabelMissing,
    /// The group of pods that makes the replica lacks pods.
    GroupIncomplete,
    /// The group of pods that makes the replica has more pods than the spec says.
    GroupTooLarge,
    /// No pod of the group, or more than one, is its head.
    HeadUnclear,
    /// The order goes by an index or label that the pod lacks.
    OrderKeyMissing,
    /// An explicit order needs names that outlive a pod, and this pod's does not.
    UnstableName,
    /// The explicit order lists a name that no selected pod has.
    UnknownName,
    /// The explicit order does not list the pod.
    NotListed,
    /// No trainer's agent takes part: no one can publish.
    NoSource,
    /// No rollout can take part.
    NoRollout,
    /// No one retains the current version: members that lack it wait for the next one.
    NoFeeder,
    /// Fewer replicas than minReady are in the group.
    BelowMinReady,
    /// The epoch could not be written; the group stays as it is.
    PersistFailed,
    /// Another controller wrote the epoch: this one stops deciding.
    PersistConflict,
    /// No version was published yet.
    NoVersion,
    /// Everything is as it should be.
    AsWanted,
    /// Agents of all members can be reached.
    AgentsReachable,
    /// An agent was put into a running pod as an ephemeral container.
    AgentLaunched,
    /// An agent could not be put into a running pod; the message says why.
    AgentLaunchFailed,
    /// The object names a Secret for its engines' API key that the pod's annotation `weightsync.dev/api-key-secret` does not name: no agent is
    /// put into the pod.
    ApiKeyNotAllowed,
    /// The single-use token of an ephemeral agent was shown with two keys: both are refused, and the pod gets a new agent.
    TokenStolen,
    /// The pod had as many ephemeral agents as it may have in its life: it needs a new pod, or the sidecar.
    AgentLaunchesExhausted,
    /// The object wants engines and trainer to run below their agents, and the pod was made without that.
    NotWrapped,
    /// The object is suspended: its pods were released.
    Suspended,
    /// The pods were released: they serve what they have.
    Released,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

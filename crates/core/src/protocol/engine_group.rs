//! Groups that the engines themselves join (`delivery: Engine`): a server's ability to join, the composition of a group, and the messages
//! from the source's agent to the engines' agents.
//!
//! Values only. The source's GPU worker is rank 0 and sends. Rollout agents move no weights; they only send HTTP requests to their engine.

use serde::{Deserialize, Serialize};

use super::worker::NcclId;
use super::{EpochId, MemberName, UpdateId};

/// How the ranks of an engine find rank 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Rendezvous {
    /// Through a TCPStore of torch: the communicator is made with the first broadcast (SGLang 0.5.23, LMDeploy 0.18).
    Store,
    /// By the communicator's id in the request: it is made at once, and proven by an all-reduce of one element (vLLM 0.33).
    UniqueId,
}

/// Whether a server can join a group. Its adapter finds this out by requests, never from the server's name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupFacts {
    /// How its ranks find rank 0.
    pub rendezvous: Rendezvous,
    /// Ranks that the whole server takes in a group.
    pub size: u32,
    /// The obstacle, with the option or version that removes it. Empty if it can join.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why_not: String,
}

impl GroupFacts {
    /// A server that cannot join, and why.
    pub fn cannot(why_not: impl Into<String>) -> Self {
        Self { rendezvous: Rendezvous::Store, size: 0, why_not: why_not.into() }
    }
}

/// The groups of an epoch: as few as the engines can share, each with the source's worker as rank 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EngineGroups {
    /// The groups; a bucket goes into one after the other, always in this order.
    pub groups: Vec<EngineGroup>,
}

/// One group that engines join.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EngineGroup {
    /// How its ranks find rank 0.
    pub rendezvous: Rendezvous,
    /// Members in the order of their ranks, with the number of ranks of each; the first rank of the first one is 1.
    pub members: Vec<(MemberName, u32)>,
}

impl EngineGroup {
    /// Ranks in all, the source's included.
    pub fn world(&self) -> u32 {
        self.members.iter().fold(1, |world, (_, size)| world.saturating_add(*size))
    }

    /// First rank of a member.
    pub fn offset(&self, member: &MemberName) -> Option<u32> {
        let at = self.members.iter().position(|(name, _)| name == member)?;
        Some(self.members.iter().take(at).fold(1, |offset, (_, size)| offset.saturating_add(*size)))
    }

    /// Name of the group `number` of an epoch at the engines: no two objects and no two epochs share one. No "/": torch joins keys with it.
    pub fn name(id: &EpochId, number: usize) -> String {
        format!("weightsync-{}-{}-{}-{}-{number}", id.weightsync, id.created, id.term, id.epoch)
    }
}

impl EngineGroups {
    /// The group of a member, with its number.
    pub fn of(&self, member: &MemberName) -> Option<(usize, &EngineGroup)> {
        self.groups.iter().enumerate().find(|(_, group)| group.members.iter().any(|(name, _)| name == member))
    }

    /// All members.
    pub fn members(&self) -> Vec<MemberName> {
        self.groups.iter().flat_map(|group| group.members.iter().map(|(name, _)| name.clone())).collect()
    }
}

/// The rendezvous of a group. Secret: any process that has it can join.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "by", rename_all = "camelCase", rename_all_fields = "camelCase")]
#[allow(missing_docs)]
pub enum GroupPlace {
    /// A bound TCPStore.
    Store {
        /// Address of the source's pod.
        address: String,
        port: u16,
    },
    UniqueId {
        id: NcclId,
    },
}

/// Makes an agent bring its engine into a group of a committing epoch. The engine leaves earlier groups first. The response comes once the
/// engine confirmed that it joined.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub struct EngineJoinRequest {
    pub id: EpochId,
    pub group: String,
    pub place: GroupPlace,
    /// First rank of this engine.
    pub offset: u32,
    pub world: u32,
    /// Deadline for the response, in ms.
    pub deadline_ms: u64,
}

/// The engine confirmed that it joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EngineJoinResponse {
    /// Time to leave earlier groups, in ms.
    pub cleared_ms: u64,
    /// Time of the engine's call, in ms.
    pub joined_ms: u64,
}

/// Makes an agent call its engine for an attempt. The response comes once the engine responded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReceiveRequest {
    /// The attempt.
    pub update: UpdateId,
    /// The call.
    pub what: Receive,
    /// Deadline for the response, in ms.
    pub deadline_ms: u64,
}

/// A call to an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Receive {
    /// Pause, and open a session if the engine needs one. This changes none of its weights.
    Open,
    /// Enter the broadcasts of this bucket of the layout.
    Bucket(u32),
}

/// The engine confirmed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReceiveResponse {
    /// Time of the engine's calls, in ms.
    pub took_ms: u64,
    /// Whether the engine accepts the request for the next bucket while it loads this one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ahead: bool,
}

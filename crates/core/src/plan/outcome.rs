//! What a plan says: who can take part, who cannot and why, and why no group may be formed at all.
//!
//! Every message names the pod or field at fault, with the numbers that differ and what to change.

use serde::{Deserialize, Serialize};

use super::{Candidate, WeightSyncRef};
use crate::protocol::{MemberName, PodRef, Reason, Role};

/// The answer to a [`PlanInput`](super::PlanInput).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    /// Members that could take part: sources first, then rollouts in plan order. Empty when refused, but for
    /// [`PlanRefusal::NoSource`], where the rollouts may still feed each other.
    pub candidates: Vec<Candidate>,
    /// The trainer's other pods, in order: they hand their parts to the source through the client.
    pub followers: Vec<PodRef>,
    /// Who was selected and cannot take part, with the reason.
    pub left_out: Vec<LeftOut>,
    /// Why no update can be made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<PlanRefusal>,
}

impl Plan {
    /// The rollouts among the candidates.
    pub fn rollouts(&self) -> impl Iterator<Item = &Candidate> {
        self.candidates.iter().filter(|candidate| candidate.role == Role::Rollout)
    }

    /// Replicas that the user would count: candidates, and those left out that exist or are expected.
    pub fn replicas(&self) -> usize {
        let left_out = self.left_out.iter().filter(|left_out| left_out.role == Role::Rollout && left_out.code.counts_as_replica());
        self.rollouts().count() + left_out.count()
    }
}

/// A member that was selected and cannot take part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub struct LeftOut {
    /// The name it would have, `trainer/POD` or `POOL/POD`.
    pub who: MemberName,
    pub role: Role,
    /// Its existing pods.
    pub pods: Vec<PodRef>,
    pub code: LeftOutCode,
    pub message: String,
}

/// Why a member is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum LeftOutCode {
    /// Selected, but without the label by which pods consent.
    NotOptedIn,
    /// Two pools select it.
    SelectedTwice,
    /// Succeeded or failed: it never runs again.
    Terminal,
    Terminating,
    /// Its containers have not all started.
    NotRunning,
    /// The caller says it is not fit now.
    NotReady,
    /// It has no container of the name that the spec gives.
    NoContainer,
    GroupLabelMissing,
    GroupIncomplete,
    GroupTooLarge,
    /// No pod of the group, or more than one, is the head.
    HeadUnclear,
    /// The order goes by an index or label that it lacks.
    OrderKeyMissing,
    /// An explicit order needs names that outlive a pod.
    UnstableName,
    /// The explicit order lists a name that no selected pod has.
    UnknownName,
    /// The explicit order does not list it.
    NotListed,
}

impl LeftOutCode {
    /// Whether the spec, a label or a flag must be changed by a person; the others may pass by themselves.
    pub const fn is_refusal(self) -> bool {
        match self {
            Self::NotOptedIn
            | Self::SelectedTwice
            | Self::NoContainer
            | Self::GroupLabelMissing
            | Self::GroupTooLarge
            | Self::HeadUnclear
            | Self::OrderKeyMissing
            | Self::UnstableName
            | Self::UnknownName
            | Self::NotListed => true,
            Self::Terminal | Self::Terminating | Self::NotRunning | Self::NotReady | Self::GroupIncomplete => false,
        }
    }

    /// The word that status, Events and metrics use.
    pub const fn reason(self) -> Reason {
        match self {
            Self::NotOptedIn => Reason::PodMismatch,
            Self::SelectedTwice => Reason::PodMismatch,
            Self::Terminal => Reason::MemberLeft,
            Self::Terminating => Reason::MemberLeft,
            Self::NotRunning => Reason::PodNotReady,
            Self::NotReady => Reason::PodNotReady,
            Self::NoContainer => Reason::PodMismatch,
            Self::GroupLabelMissing => Reason::PodMismatch,
            Self::GroupIncomplete => Reason::PodNotReady,
            Self::GroupTooLarge => Reason::OrderMismatch,
            Self::HeadUnclear => Reason::OrderMismatch,
            Self::OrderKeyMissing => Reason::OrderMismatch,
            Self::UnstableName => Reason::OrderMismatch,
            Self::UnknownName => Reason::OrderMismatch,
            Self::NotListed => Reason::OrderMismatch,
        }
    }

    /// Whether a user who counts replicas would count this one: leftovers of the past and strangers are none.
    pub const fn counts_as_replica(self) -> bool {
        !matches!(self, Self::NotOptedIn | Self::Terminal | Self::Terminating)
    }
}

/// Why no update can be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "code", rename_all_fields = "camelCase")]
#[allow(missing_docs)]
pub enum PlanRefusal {
    /// The spec contradicts itself.
    #[error("{message}")]
    InvalidSpec {
        /// Which field, and what to change.
        message: String,
    },
    /// An older `WeightSync` selects one of the pods: no pod can hold the weights of two trainers.
    #[error("pod {pod} belongs to the older WeightSync {}/{}; change one of the two selectors", by.namespace, by.name)]
    PodClaimed { pod: String, by: WeightSyncRef },
    /// There is no source, or the plan cannot determine which pod it is. Rollouts may still feed each other.
    #[error("{message}")]
    NoSource {
        /// Which pod is missing, unfit, or one of several.
        message: String,
    },
    /// The sum of all sizes is beyond [`MAX_WORLD_SIZE`](super::MAX_WORLD_SIZE).
    #[error("the group would have {ranks} ranks, {max} is the most")]
    WorldTooLarge { ranks: u64, max: u32 },
}

impl PlanRefusal {
    /// The word that status, Events and metrics use.
    pub const fn reason(&self) -> Reason {
        match self {
            Self::InvalidSpec { .. } | Self::WorldTooLarge { .. } => Reason::InvalidSpec,
            Self::PodClaimed { .. } => Reason::PodClaimed,
            Self::NoSource { .. } => Reason::NoSource,
        }
    }
}

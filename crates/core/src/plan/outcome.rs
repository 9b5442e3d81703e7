//! The result of a plan: the members that can take part, the others with their reasons, and why no group may be formed at all.
//!
//! Every message names the pod or field at fault, the numbers that differ, and the required change.

use serde::{Deserialize, Serialize};

use super::{Candidate, WeightSyncRef};
use crate::protocol::{MemberName, PodRef, Reason, Role};

/// The answer to a [`PlanInput`](super::PlanInput).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    /// Members that could take part: sources first, then rollouts in plan order. Empty after a refusal, except for
    /// [`PlanRefusal::NoSource`]: rollouts may still feed each other.
    pub candidates: Vec<Candidate>,
    /// The trainer's other pods, in order: the client passes their parts to the source.
    pub followers: Vec<PodRef>,
    /// Pods and replicas that were selected and cannot take part, with the reasons.
    pub left_out: Vec<LeftOut>,
    /// Why no update is possible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<PlanRefusal>,
}

impl Plan {
    /// The rollouts among the candidates.
    pub fn rollouts(&self) -> impl Iterator<Item = &Candidate> {
        self.candidates.iter().filter(|candidate| candidate.role == Role::Rollout)
    }

    /// Number of replicas for the user: candidates, and existing or expected ones that were left out.
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
    /// Its name as a member: `trainer/POD` or `POOL/POD`.
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
    /// Selected, but without the label of consent.
    NotOptedIn,
    /// Two pools select it.
    SelectedTwice,
    /// Succeeded or failed: it never runs again.
    Terminal,
    Terminating,
    /// Its containers have not all started.
    NotRunning,
    /// The caller reports that it is not fit now.
    NotReady,
    /// Which engines it has is not known: its agent has not reported to this controller.
    NotReported,
    /// More engines of its pod are registered than may take part.
    TooManyEngines,
    /// It has no container with the name in the spec.
    NoContainer,
    GroupLabelMissing,
    GroupIncomplete,
    GroupTooLarge,
    /// The group has no head, or more than one.
    HeadUnclear,
    /// It lacks the index or label that the order uses.
    OrderKeyMissing,
    /// An explicit order needs names that outlive a pod.
    UnstableName,
    /// The explicit order lists a name that no selected pod has.
    UnknownName,
    /// The explicit order does not list it.
    NotListed,
}

impl LeftOutCode {
    /// Whether a person must change the spec, a label or an option; other problems may end by themselves.
    pub const fn is_refusal(self) -> bool {
        match self {
            Self::NotOptedIn
            | Self::SelectedTwice
            | Self::NoContainer
            | Self::TooManyEngines
            | Self::GroupLabelMissing
            | Self::GroupTooLarge
            | Self::HeadUnclear
            | Self::OrderKeyMissing
            | Self::UnstableName
            | Self::UnknownName
            | Self::NotListed => true,
            Self::Terminal | Self::Terminating | Self::NotRunning | Self::NotReady | Self::NotReported | Self::GroupIncomplete => false,
        }
    }

    /// The reason in status, Events and metrics.
    pub const fn reason(self) -> Reason {
        match self {
            Self::NotOptedIn => Reason::PodMismatch,
            Self::SelectedTwice => Reason::PodMismatch,
            Self::Terminal => Reason::MemberLeft,
            Self::Terminating => Reason::MemberLeft,
            Self::NotRunning => Reason::PodNotReady,
            Self::NotReady => Reason::PodNotReady,
            Self::NotReported => Reason::AgentMissing,
            Self::NoContainer => Reason::PodMismatch,
            Self::TooManyEngines => Reason::PodMismatch,
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

    /// Whether it counts as a replica for the user; ended pods and unrelated ones do not.
    pub const fn counts_as_replica(self) -> bool {
        !matches!(self, Self::NotOptedIn | Self::Terminal | Self::Terminating)
    }
}

/// Why no update is possible.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "code", rename_all_fields = "camelCase")]
#[allow(missing_docs)]
pub enum PlanRefusal {
    /// The spec contradicts itself.
    #[error("{message}")]
    InvalidSpec {
        /// The field, and the required change.
        message: String,
    },
    /// An older `WeightSync` selects one of the pods: a pod can hold the weights of one trainer only.
    #[error("pod {pod} belongs to the older WeightSync {}/{}; change one of the two selectors", by.namespace, by.name)]
    PodClaimed { pod: String, by: WeightSyncRef },
    /// There is no source, or the plan cannot determine which pod it is. Rollouts may still feed each other.
    #[error("{message}")]
    NoSource {
        /// The pod that is missing, unfit, or not unique.
        message: String,
    },
    /// The sum of all sizes exceeds [`MAX_WORLD_SIZE`](super::MAX_WORLD_SIZE).
    #[error("the group would have {ranks} ranks, {max} is the most")]
    WorldTooLarge { ranks: u64, max: u32 },
}

impl PlanRefusal {
    /// The reason in status, Events and metrics.
    pub const fn reason(&self) -> Reason {
        match self {
            Self::InvalidSpec { .. } | Self::WorldTooLarge { .. } => Reason::InvalidSpec,
            Self::PodClaimed { .. } => Reason::PodClaimed,
            Self::NoSource { .. } => Reason::NoSource,
        }
    }
}

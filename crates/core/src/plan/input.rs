//! What a plan is made from: the parts of the spec that matter here, the pods as they are, and what is known of their engines.
//!
//! Plain data without Kubernetes types. Holds no rule: whether a pod is fit is decided by the caller ([`PodFacts::unready`]) as far as
//! probes go, since readiness that drops because of an update is no reason to leave a member out, and by the plan for all the rest.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::Selector;
use crate::protocol::PodRef;

/// Identity and age of a `WeightSync`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub struct WeightSyncRef {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    /// When it was created, in ms since 1970.
    pub created: u64,
}

impl WeightSyncRef {
    /// Whether `self` was there before `other`; of two that were made in the same instant, the smaller UID counts as older, so that both
    /// come to the same answer.
    pub fn is_older_than(&self, other: &Self) -> bool {
        (self.created, &self.uid) < (other.created, &other.uid)
    }
}

/// Everything a plan depends on. Equal inputs give equal plans, in whatever order the pods come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanInput {
    /// For whom the plan is made.
    pub weightsync: WeightSyncRef,
    /// How the source is found.
    pub trainer: TrainerSpec,
    /// Rollouts, in the order of the spec.
    pub pools: Vec<PoolSpec>,
    /// All pods of the namespace that could be meant.
    pub pods: Vec<PodFacts>,
    /// Pods that other `WeightSync`s select as well.
    pub claims: Vec<Claim>,
}

/// A pod that another `WeightSync` selects too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// UID of the pod.
    pub pod_uid: String,
    /// Who claims it.
    pub by: WeightSyncRef,
}

/// How the source is found among the trainer's pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainerSpec {
    /// The trainer's pods.
    pub selector: Selector,
    /// Order of the pods; the first is the source.
    pub order: Order,
    /// How many sources: 1 today.
    pub sources: u32,
}

/// A set of rollouts that are alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSpec {
    /// Name of the pool, part of member names.
    pub name: String,
    /// Its pods.
    pub selector: Selector,
    /// Ports of engines in one pod; each is a replica of its own.
    pub ports: Vec<u16>,
    /// Worker ranks of one replica.
    pub ranks: u32,
    /// Set when a replica is more than one pod.
    pub group: Option<GroupSpec>,
    /// Order of the replicas.
    pub order: Order,
}

/// How several pods make one replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupSpec {
    /// Pods of a complete replica.
    pub pods: u32,
    /// Label whose value is the same on all pods of a replica.
    pub label: String,
    /// Labels of the head, where the engine's server and the agent are.
    pub head: BTreeMap<String, String>,
}

/// An order of pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Order {
    /// By the pod's index ([`PodFacts::index`]) if every pod has one. Otherwise rollouts go by name, byte for byte, and there must be exactly
    /// one trainer pod.
    #[default]
    Auto,
    /// By the value of a label: integers by value, other values after them byte by byte. A trainer's must be integers.
    Label(String),
    /// As listed. The list names pods (the head, where a replica is a group), which must have stable names.
    Explicit(Vec<String>),
}

/// How far a pod's life has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PodPhase {
    /// Not all of its containers were started.
    Pending,
    /// Running.
    Running,
    /// Succeeded or failed: never runs again.
    Terminal,
}

/// A pod as a plan sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct PodFacts {
    pub name: String,
    pub uid: String,
    /// Node it runs on, where known.
    pub node: Option<String>,
    /// Its addresses, where it has some by now.
    pub ips: Vec<IpAddr>,
    pub labels: BTreeMap<String, String>,
    /// Name of the container that the pod names for its engine or trainer, if it has no such container.
    pub missing_container: Option<String>,
    pub phase: PodPhase,
    pub terminating: bool,
    /// Index among its siblings: pod-index label, job completion index, or ordinal of a StatefulSet.
    pub index: Option<u32>,
    /// Whether a pod made in its place would have the same name.
    pub stable_name: bool,
    /// Why the caller leaves it out now, as text; `None` when it is fit. The caller knows whether a missing readiness is the pod's own
    /// fault or comes from an update in progress.
    pub unready: Option<String>,
}

impl PodFacts {
    /// The pod as a roster names it.
    pub fn to_ref(&self) -> PodRef {
        PodRef { name: self.name.clone(), uid: self.uid.clone(), node: self.node.clone(), ips: self.ips.clone() }
    }

    /// Whether it runs or will run: neither terminal nor terminating.
    pub fn is_live(&self) -> bool {
        !self.terminating && self.phase != PodPhase::Terminal
    }
}

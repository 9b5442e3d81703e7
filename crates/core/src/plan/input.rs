//! The inputs of a plan: the relevant parts of the spec, the pods, and the known facts about their engines.
//!
//! Plain data without Kubernetes types; contains no rules. The caller decides whether probes make a pod unfit ([`PodFacts::unready`]): lost
//! readiness because of an update is no reason to leave a member out. The plan decides everything else.

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
    /// Whether `self` existed before `other`. Of two that were created in the same instant, the smaller UID counts as older, so that both
    /// decide alike.
    pub fn is_older_than(&self, other: &Self) -> bool {
        (self.created, &self.uid) < (other.created, &other.uid)
    }
}

/// All inputs of a plan. Equal inputs give equal plans, whatever the order of the pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanInput {
    /// The object of the plan.
    pub weightsync: WeightSyncRef,
    /// How the source is found.
    pub trainer: TrainerSpec,
    /// Rollouts, in the order of the spec.
    pub pools: Vec<PoolSpec>,
    /// All pods of the namespace that may be selected.
    pub pods: Vec<PodFacts>,
    /// Pods that other `WeightSync`s select as well.
    pub claims: Vec<Claim>,
}

/// A pod that another `WeightSync` selects too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// UID of the pod.
    pub pod_uid: String,
    /// The object that claims it.
    pub by: WeightSyncRef,
}

/// How the source is found among the trainer's pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainerSpec {
    /// Selects the trainer's pods.
    pub selector: Selector,
    /// Order of the pods; the first is the source.
    pub order: Order,
    /// How many sources: 1 today.
    pub sources: u32,
}

/// A set of similar rollouts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSpec {
    /// Name of the pool, part of member names.
    pub name: String,
    /// Selects its pods.
    pub selector: Selector,
    /// Ports of engines in one pod; each is a replica of its own. Empty if the engines register.
    pub ports: Vec<u16>,
    /// Whether the engines of a pod are those that registered with its agent ([`PodFacts::registered`]).
    pub registered: bool,
    /// At most so many registered engines of a pod take part. None: as many as have GPUs for
    /// their ranks, of those that the pod asks for; all where it asks for none.
    pub max_registered: Option<u32>,
    /// Worker ranks of one replica.
    pub ranks: u32,
    /// Set when a replica is more than one pod.
    pub group: Option<GroupSpec>,
    /// Order of the replicas.
    pub order: Order,
}

/// How several pods form one replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupSpec {
    /// Pods of a complete replica.
    pub pods: u32,
    /// Label with one value on all pods of a replica.
    pub label: String,
    /// Selects the head among its pods, where the engine's server and the agent are.
    pub head: Selector,
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
    /// By a list of pod names (of the heads, if a replica is a group). The pods must have stable names.
    Explicit(Vec<String>),
}

/// Phase of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PodPhase {
    /// Not all of its containers have started.
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
    /// Its node, if known.
    pub node: Option<String>,
    /// Its addresses, if it has some.
    pub ips: Vec<IpAddr>,
    pub labels: BTreeMap<String, String>,
    /// Name of the container that the pod names for its engine or trainer, if it has no such container.
    pub missing_container: Option<String>,
    pub phase: PodPhase,
    pub terminating: bool,
    /// Index among its siblings: pod-index label, job completion index, or ordinal of a StatefulSet.
    pub index: Option<u32>,
    /// Whether a pod that replaces it would have the same name.
    pub stable_name: bool,
    /// Why the caller leaves it out now, as text; `None` if it is fit. The caller knows whether lost readiness is the pod's own fault or
    /// comes from a running update.
    pub unready: Option<String>,
    /// Ports of the engines that registered with its agent, in ascending order. None until the agent reported to this controller: that is
    /// not the same as no engine.
    pub registered: Option<Vec<u16>>,
    /// GPUs that its containers ask for.
    pub gpus: u32,
    /// Why a pending pod makes no progress, as the kubelet or the scheduler reports, with the next step; `None` if neither says so.
    pub stuck: Option<String>,
}

impl PodFacts {
    /// The pod in the form of a roster.
    pub fn to_ref(&self) -> PodRef {
        PodRef { name: self.name.clone(), uid: self.uid.clone(), node: self.node.clone(), ips: self.ips.clone() }
    }

    /// Whether it runs or will run: neither terminal nor terminating.
    pub fn is_live(&self) -> bool {
        !self.terminating && self.phase != PodPhase::Terminal
    }
}

impl PoolSpec {
    /// Ports of the engines of a pod that take part, and of those that are too many. A pod says by itself which engines are registered, so
    /// something else bounds how many count.
    pub fn engines<'a>(&'a self, pod: &'a PodFacts) -> (&'a [u16], &'a [u16]) {
        if !self.registered {
            return (&self.ports, &[]);
        }
        let ports = pod.registered.as_deref().unwrap_or_default();
        let by_gpus = || Some(pod.gpus.checked_div(self.ranks)?.max(1)).filter(|_| pod.gpus > 0);
        let most = self.max_registered.or_else(by_gpus);
        let most = most.map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX));
        ports.split_at_checked(most).unwrap_or((ports, &[]))
    }
}

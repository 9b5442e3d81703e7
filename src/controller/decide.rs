//! The desired state of an object: the plan of its pods, the policies of its group, and the pods whose agents belong to it.
//!
//! Pure: objects and pods in, a decision out. No calls, no writes; equal inputs give equal decisions.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use crate::api::{Discovery, LONGEST_REQUEST, PREFLIGHT_ANNOTATION, Pool, WeightSync, WeightSyncSpec, container_name, pod_facts, validate};
use weightsync_coordinator::Registered;
use weightsync_core::membership::MembershipConfig;
use weightsync_core::plan::{
    Candidate, Claim, LeftOut, Plan, PlanInput, PlanRefusal, PodFacts, PodPhase, PoolSpec, ROLE_LABEL, ROLE_ROLLOUT, ROLE_TRAINER,
    TrainerSpec, part_of, plan,
};
use weightsync_core::protocol::{Assignment, Reason, Role};
use weightsync_core::weights::IgnoredTensors;

/// Time that a join waits for others, so that many new pods need few new groups.
const JOIN_DEBOUNCE_MS: u64 = 1000;

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Decided {
    pub(super) config: MembershipConfig,
    /// The candidates, and the pods that cannot take part.
    pub(super) members: (Vec<Candidate>, Vec<LeftOut>),
    /// UIDs of the pods that it selects, whether it claims them or not.
    pub(super) selected: HashSet<String>,
    /// UIDs of pods whose agents belong to it, with their assignments.
    pub(super) claims: HashMap<String, Assignment>,
    /// Addresses of the selected pods, by UID, as the API server knows them.
    pub(super) addresses: HashMap<String, Vec<IpAddr>>,
    pub(super) suspend: bool,
    /// Why the spec cannot be applied, if so.
    pub(super) refused: Option<(Reason, String)>,
    /// Why no source exists, if so.
    pub(super) no_source: Option<String>,
    /// Members that need an action of the user before they can join, with the reason.
    pub(super) misfits: Vec<(Reason, String)>,
    /// Rollouts, present or expected.
    pub(super) replicas: u32,
}

/// The selectors of an object, converted once for many pods.
pub(super) struct Selection {
    trainer: TrainerSpec,
    pools: Vec<PoolSpec>,
}

impl Selection {
    pub(super) fn of(object: &WeightSync) -> Self {
        Self { trainer: object.spec.trainer.to_plan(), pools: object.spec.plan_pools() }
    }

    /// Whether a pod with these labels opted in, and is selected by the trainer or by a pool.
    pub(super) fn holds(&self, labels: &BTreeMap<String, String>) -> bool {
        part_of(&self.trainer, &self.pools, labels).is_some()
    }
}

/// Decides for `object`, given all readable objects and all opted-in pods of its namespace.
/// `registered` are the engines that registered with agents of the object.
pub(super) fn decide(object: &WeightSync, others: &[&WeightSync], pods: &[&Pod], registered: &Registered) -> Decided {
    let problems = validate(&object.spec);
    // A namespace may hold the pods of hundreds of objects: ignore all other pods.
    let selection = Selection::of(object);
    let mine = pods.iter().filter(|pod| selection.holds(pod.labels()));
    let facts: Vec<PodFacts> = mine
        .map(|pod| PodFacts { registered: engines_of(object, pod, registered), ..pod_facts(pod, container_down(object, pod)) })
        .collect();
    let planned = if problems.is_empty() {
        plan(&PlanInput {
            weightsync: object.plan_ref(),
            trainer: selection.trainer,
            pools: selection.pools,
            pods: facts.clone(),
            claims: claims_of_others(object, others, &facts),
        })
    } else {
        let message = problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        Plan { refusal: Some(PlanRefusal::InvalidSpec { message }), ..Plan::default() }
    };
    let (refused, no_source) = match planned.refusal.as_ref() {
        None => (None, None),
        Some(PlanRefusal::NoSource { message }) => (None, Some(message.clone())),
        Some(refusal @ PlanRefusal::PodClaimed { .. }) => (Some((Reason::PodClaimed, refusal.to_string())), None),
        Some(refusal) => (Some((Reason::InvalidSpec, refusal.to_string())), None),
    };
    let replicas = u32::try_from(planned.replicas()).unwrap_or(u32::MAX);
    let misfits = planned.left_out.iter().filter(|left_out| left_out.code.is_refusal());
    Decided {
        config: config(object, replicas),
        selected: facts.iter().map(|pod| pod.uid.clone()).collect(),
        claims: if refused.is_some() { HashMap::new() } else { claims(object, &facts) },
        addresses: facts.iter().map(|pod| (pod.uid.clone(), pod.ips.clone())).collect(),
        suspend: object.spec.suspend,
        misfits: misfits.map(|left_out| (left_out.code.reason(), left_out.message.clone())).collect(),
        members: (planned.candidates, planned.left_out),
        refused,
        no_source,
        replicas,
    }
}

/// Ports of the engines that registered with the agent of a pod. None until the agent reported to this controller, which it does within
/// seconds: the group of an earlier controller must not be ended because its engines are not known yet.
fn engines_of(object: &WeightSync, pod: &Pod, registered: &Registered) -> Option<Vec<u16>> {
    pool_of(object, pod.labels()).filter(|pool| pool.engine.discovery == Discovery::Registered)?;
    registered.get(&pod.uid()?).cloned()
}

fn config(object: &WeightSync, replicas: u32) -> MembershipConfig {
    let identity = object.plan_ref();
    let mut policy = object.spec.update_policy(replicas);
    let asked = object.annotations().get(PREFLIGHT_ANNOTATION);
    policy.transport.preflight_asked = asked.map_or_else(String::new, |asked| asked.chars().take(LONGEST_REQUEST).collect());
    MembershipConfig {
        join: object.spec.membership.join.policy(),
        target: object.spec.target(),
        debounce_ms: JOIN_DEBOUNCE_MS,
        ..MembershipConfig::new(identity.uid, identity.created, policy)
    }
}

/// The pool that a rollout's pod belongs to: the first that selects it.
fn pool_of<'a>(object: &'a WeightSync, labels: &BTreeMap<String, String>) -> Option<&'a Pool> {
    let consents = labels.get(ROLE_LABEL).is_some_and(|role| role == ROLE_ROLLOUT);
    object.spec.rollouts.iter().find(|pool| consents && pool.selector.to_plan().matches(labels))
}

fn is_trainer(object: &WeightSync, labels: &BTreeMap<String, String>) -> bool {
    labels.get(ROLE_LABEL).is_some_and(|role| role == ROLE_TRAINER) && object.spec.trainer.selector.to_plan().matches(labels)
}

/// The engine's or trainer's container of a pod. `None` for a pod that the object does not select.
pub(super) fn target_container(object: &WeightSync, pod: &Pod) -> Option<String> {
    let selected = is_trainer(object, pod.labels()) || pool_of(object, pod.labels()).is_some();
    if selected { container_name(pod) } else { None }
}

/// Why an engine's container does not run. Readiness is ignored: the sidecar's own probe reports "not ready" until the replica was fed, so
/// a pod that had to be ready first would never be fed. The agent's probes judge the engine's health, with the thresholds of the spec.
fn container_down(object: &WeightSync, pod: &Pod) -> Option<String> {
    pool_of(object, pod.labels())?;
    let container = target_container(object, pod)?;
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    let status = statuses.iter().find(|status| status.name == container)?;
    let state = status.state.as_ref()?;
    let why = match (&state.waiting, &state.terminated) {
        (Some(waiting), _) => waiting.reason.clone().unwrap_or_else(|| "waiting".to_owned()),
        (None, Some(terminated)) => format!("exit code {}", terminated.exit_code),
        (None, None) => return None,
    };
    Some(format!("container {container} does not run ({why})"))
}

/// The pods that other objects select too, with those objects.
fn claims_of_others(object: &WeightSync, others: &[&WeightSync], pods: &[PodFacts]) -> Vec<Claim> {
    let mut claims = Vec::new();
    for other in others.iter().filter(|other| other.metadata.uid != object.metadata.uid) {
        let selection = Selection::of(other);
        let selected = pods.iter().filter(|pod| selection.holds(&pod.labels));
        claims.extend(selected.map(|pod| Claim { pod_uid: pod.uid.clone(), by: other.plan_ref() }));
    }
    claims
}

/// Assignments for the agents of all pods that the object selects, whether they can take part now or not. An agent without one would
/// release its engine in the middle of an update.
fn claims(object: &WeightSync, pods: &[PodFacts]) -> HashMap<String, Assignment> {
    let serve_before_first_version = object.spec.serve_before_first_version();
    let wanted = |role, engines| Assignment {
        role,
        engines,
        registered: false,
        serve_before_first_version,
        current: None,
        returned: None,
        newest: None,
        suspended: false,
        transport: object.spec.transport_policy(),
        hindrance: None,
        ignored: IgnoredTensors::default(),
    };
    let mut claims = HashMap::new();
    let mut seen = BTreeSet::new();
    for pod in pods.iter().filter(|pod| pod.phase != PodPhase::Terminal) {
        let assignment = if is_trainer(object, &pod.labels) {
            wanted(Role::Source, Vec::new())
        } else if let Some(pool) = pool_of(object, &pod.labels) {
            let head = pool.replica.pods == 1 || pool.replica.head().matches(&pod.labels);
            let engines = if head { WeightSyncSpec::engines(pool, pool.to_plan().engines(pod).0) } else { Vec::new() };
            Assignment {
                registered: pool.engine.discovery == Discovery::Registered,
                ignored: pool.engine.ignored(),
                ..wanted(Role::Rollout, engines)
            }
        } else {
            continue;
        };
        if seen.insert(&pod.uid) {
            claims.insert(pod.uid.clone(), assignment);
        }
    }
    claims
}

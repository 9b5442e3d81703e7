//! Makes a plan: checks the spec, assigns pods to its parts, and combines the results of the steps.
//!
//! Decides only two things itself: a younger `WeightSync` gives way to an older one, and a world that is too large is refused.

use std::collections::{BTreeMap, BTreeSet};

use super::order;
use super::replicas::units;
use super::{
    Candidate, LeftOut, LeftOutCode, MAX_WORLD_SIZE, Order, Plan, PlanInput, PlanRefusal, PodFacts, PoolSpec, ROLE_LABEL, ROLE_ROLLOUT,
    ROLE_TRAINER, Selector, TrainerSpec, trainer,
};
use crate::protocol::{MemberName, Role};

/// Most ranks of one replica.
const MAX_REPLICA_RANKS: u32 = 1 << 16;

/// Makes the plan for one `WeightSync`.
pub fn plan(input: &PlanInput) -> Plan {
    if let Err(message) = check_spec(input) {
        return refused(PlanRefusal::InvalidSpec { message });
    }
    let mut pods: Vec<&PodFacts> = input.pods.iter().collect();
    pods.sort_by_key(|pod| (&pod.name, &pod.uid));

    let mut plan = Plan::default();
    let mut taken = BTreeSet::new();
    let trainer_pods = selected(&input.trainer.selector, Role::Source, "trainer", &pods, &mut taken, &mut plan.left_out);
    let pool_pods: Vec<(&PoolSpec, Vec<&PodFacts>)> = input
        .pools
        .iter()
        .map(|pool| (pool, selected(&pool.selector, Role::Rollout, &pool.name, &pods, &mut taken, &mut plan.left_out)))
        .collect();

    let mine = trainer_pods.iter().chain(pool_pods.iter().flat_map(|(_, pods)| pods)).filter(|pod| pod.is_live());
    if let Some(refusal) = older_claim(input, mine.copied()) {
        return refused(refusal);
    }

    let trainer = trainer::find(&input.trainer, &trainer_pods);
    plan.left_out.extend(trainer.left_out);
    plan.followers = trainer.followers.iter().map(|pod| pod.to_ref()).collect();
    plan.candidates.extend(trainer.sources.iter().map(|pod| Candidate {
        name: trainer::member_name(&pod.name),
        role: Role::Source,
        size: 1,
        pods: vec![pod.to_ref()],
        port: None,
    }));
    for (pool, pods) in pool_pods {
        let units = units(pool, &pods, &mut plan.left_out);
        for unit in order::sort(&pool.name, &pool.order, units, &pods, &mut plan.left_out) {
            plan.candidates.push(Candidate {
                name: unit.name,
                role: Role::Rollout,
                size: pool.ranks,
                pods: unit.pods,
                port: Some(unit.port),
            });
        }
    }
    plan.left_out.sort_by(|one, two| (one.role, &one.who, one.code).cmp(&(two.role, &two.who, two.code)));

    let ranks = plan.candidates.iter().map(|candidate| u64::from(candidate.size)).sum();
    if ranks > u64::from(MAX_WORLD_SIZE) {
        plan.candidates.clear();
        plan.refusal = Some(PlanRefusal::WorldTooLarge { ranks, max: MAX_WORLD_SIZE });
    } else if let Some(message) = trainer.missing {
        plan.refusal = Some(PlanRefusal::NoSource { message });
    }
    plan
}

/// The part of a spec that a pod belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part<'a> {
    /// The trainer's part.
    Trainer,
    /// A rollout of this pool.
    Pool(&'a PoolSpec),
}

/// The first part that selects a pod with these labels, if the pod consents; as in [`plan`]. For claims, and for agents that request their
/// assignment.
pub fn part_of<'a>(trainer: &TrainerSpec, pools: &'a [PoolSpec], labels: &BTreeMap<String, String>) -> Option<Part<'a>> {
    match labels.get(ROLE_LABEL)?.as_str() {
        ROLE_TRAINER => trainer.selector.matches(labels).then_some(Part::Trainer),
        ROLE_ROLLOUT => pools.iter().find(|pool| pool.selector.matches(labels)).map(Part::Pool),
        _ => None,
    }
}

fn refused(refusal: PlanRefusal) -> Plan {
    Plan { refusal: Some(refusal), ..Plan::default() }
}

/// Mistakes in the spec itself. The resource's CEL rules find the same ones, but a file of `weightsync local` has no such rules.
fn check_spec(input: &PlanInput) -> Result<(), String> {
    check_order("spec.trainer", &input.trainer.order)?;
    if input.trainer.sources == 0 {
        return Err("spec.trainer: a group needs at least one source".to_owned());
    }
    if input.trainer.selector.is_empty() {
        return Err("spec.trainer.selector is empty, which would mean every pod: name at least one label".to_owned());
    }
    let mut names = BTreeSet::new();
    for pool in &input.pools {
        let field = format!("spec.rollouts {}", pool.name);
        if !names.insert(&pool.name) {
            return Err(format!("{field}: two pools have this name"));
        }
        if pool.name == "trainer" {
            return Err(format!("{field}: this name is the trainer's, choose another"));
        }
        if pool.selector.is_empty() {
            return Err(format!("{field}: selector is empty, which would mean every pod: name at least one label"));
        }
        let ports: BTreeSet<_> = pool.ports.iter().collect();
        if pool.registered {
            if !ports.is_empty() {
                return Err(format!("{field}: its engines register, so it lists no port"));
            }
            if pool.group.is_some() {
                return Err(format!("{field}: a replica of several pods has a port of its own: its engine cannot register"));
            }
        } else if ports.is_empty() || ports.contains(&0) {
            return Err(format!("{field}: an engine needs a port from 1 to 65535"));
        }
        if ports.len() != pool.ports.len() {
            return Err(format!("{field}: a port is listed twice"));
        }
        if let Some(group) = &pool.group {
            if group.pods < 2 {
                return Err(format!("{field}: a group has at least 2 pods"));
            }
            if ports.len() > 1 {
                return Err(format!("{field}: a replica of several pods has one port, on its head; {} are listed", ports.len()));
            }
        }
        check_order(&field, &pool.order)?;
        if !(1..=MAX_REPLICA_RANKS).contains(&pool.ranks) {
            return Err(format!("{field}.ranks: {} is not from 1 to {MAX_REPLICA_RANKS}", pool.ranks));
        }
    }
    Ok(())
}

fn check_order(field: &str, order: &Order) -> Result<(), String> {
    if let Some(name) = order::duplicates(order).first() {
        return Err(format!("{field}.order.names lists {name} twice"));
    }
    match order {
        Order::Explicit(names) if names.is_empty() => Err(format!("{field}.order.names is empty: list the pods, or remove order")),
        Order::Label(label) if label.is_empty() => Err(format!("{field}.order.label is empty: give the key of a label, or remove order")),
        _ => Ok(()),
    }
}

/// The consenting pods of one part of the spec. A pod that two parts select belongs to the first, and is reported.
fn selected<'a>(
    selector: &Selector,
    role: Role,
    part: &str,
    pods: &[&'a PodFacts],
    taken: &mut BTreeSet<&'a str>,
    left_out: &mut Vec<LeftOut>,
) -> Vec<&'a PodFacts> {
    let (wanted, other) = match role {
        Role::Source => (ROLE_TRAINER, ROLE_ROLLOUT),
        Role::Rollout => (ROLE_ROLLOUT, ROLE_TRAINER),
    };
    let mut found = Vec::new();
    for pod in pods.iter().copied().filter(|pod| selector.matches(&pod.labels)) {
        let mut leave_out = |code, message| {
            let who = MemberName(format!("{part}/{}", pod.name));
            left_out.push(LeftOut { who, role, pods: vec![pod.to_ref()], code, message });
        };
        match pod.labels.get(ROLE_LABEL).map(String::as_str) {
            Some(label) if label == wanted => {
                if taken.insert(&pod.uid) {
                    found.push(pod);
                } else {
                    leave_out(
                        LeftOutCode::SelectedTwice,
                        format!("pod {} is selected by {part} and by a pool before it: change one selector", pod.name),
                    );
                }
            }
            // Trainer and rollouts may have the same selector: the role label distinguishes them.
            Some(label) if label == other => {}
            _ => leave_out(
                LeftOutCode::NotOptedIn,
                format!("pod {} is selected, but lacks the label {ROLE_LABEL}={wanted} by which pods consent", pod.name),
            ),
        }
    }
    found
}

fn older_claim<'a>(input: &PlanInput, mine: impl Iterator<Item = &'a PodFacts>) -> Option<PlanRefusal> {
    let mine: Vec<&PodFacts> = mine.collect();
    let conflicts = input.claims.iter().filter(|claim| claim.by.uid != input.weightsync.uid && claim.by.is_older_than(&input.weightsync));
    let conflicts = conflicts.filter_map(|claim| Some((claim, mine.iter().find(|pod| pod.uid == claim.pod_uid)?)));
    let (claim, pod) = conflicts.min_by_key(|(claim, pod)| (claim.by.created, &claim.by.uid, &pod.name))?;
    Some(PlanRefusal::PodClaimed { pod: pod.name.clone(), by: claim.by.clone() })
}

//! Turns the pods of a pool into replicas: one pod, one of several engine ports in a pod, or a group of pods with a head.
//!
//! An incomplete replica is left out: the ranks of its missing pods would never come.

use std::collections::BTreeMap;

use super::{GroupSpec, LeftOut, LeftOutCode, PodFacts, PodPhase, PoolSpec};
use crate::protocol::{MemberName, PodRef, Role};

/// A complete and fit replica.
pub(super) struct Unit<'a> {
    pub(super) name: MemberName,
    pub(super) head: &'a PodFacts,
    pub(super) pods: Vec<PodRef>,
    pub(super) port: u16,
}

/// A replica with its place, independent of the input.
pub(super) struct PlacedUnit {
    pub(super) name: MemberName,
    pub(super) pods: Vec<PodRef>,
    pub(super) port: u16,
}

impl From<Unit<'_>> for PlacedUnit {
    fn from(unit: Unit<'_>) -> Self {
        Self { name: unit.name, pods: unit.pods, port: unit.port }
    }
}

impl Unit<'_> {
    pub(super) fn left_out(self, code: LeftOutCode, message: String) -> LeftOut {
        LeftOut { who: self.name, role: Role::Rollout, pods: self.pods, code, message }
    }
}

/// Why a pod cannot take part now, whatever its group.
pub(super) fn unfit(pod: &PodFacts) -> Option<(LeftOutCode, String)> {
    let name = &pod.name;
    if pod.phase == PodPhase::Terminal {
        return Some((LeftOutCode::Terminal, format!("pod {name} has ended and will not run again")));
    }
    if pod.terminating {
        return Some((LeftOutCode::Terminating, format!("pod {name} is being deleted")));
    }
    if let Some(container) = &pod.missing_container {
        let message = format!("pod {name} has no container {container}, which its annotation weightsync.dev/container names");
        return Some((LeftOutCode::NoContainer, message));
    }
    if pod.phase == PodPhase::Pending {
        let why = pod.stuck.as_ref().map(|stuck| format!(": {stuck}")).unwrap_or_default();
        return Some((LeftOutCode::NotRunning, format!("pod {name} has not started all its containers{why}")));
    }
    pod.unready.as_ref().map(|reason| (LeftOutCode::NotReady, format!("pod {name}: {reason}")))
}

/// The replicas of the pool's pods. Incomplete and unfit ones are added to `left_out`.
pub(super) fn units<'a>(pool: &PoolSpec, pods: &[&'a PodFacts], left_out: &mut Vec<LeftOut>) -> Vec<Unit<'a>> {
    match &pool.group {
        None => single_pods(pool, pods, left_out),
        Some(group) => groups(pool, group, pods, left_out),
    }
}

fn single_pods<'a>(pool: &PoolSpec, pods: &[&'a PodFacts], left_out: &mut Vec<LeftOut>) -> Vec<Unit<'a>> {
    let mut units = Vec::new();
    for pod in pods {
        let (ports, too_many) = pool.engines(pod);
        if ports.is_empty() {
            let (code, message) = unfit(pod).unwrap_or_else(|| no_engine(pod));
            left_out.push(pod_left_out(pool, pod, code, message));
        }
        for port in too_many {
            let unit =
                Unit { name: MemberName(format!("{}/{}:{port}", pool.name, pod.name)), head: pod, pods: vec![pod.to_ref()], port: *port };
            let message = format!(
                "pod {}: {} engines are registered, and {} of a pod take part: correct engine.maxRegistered, or the GPUs that the pod asks for",
                pod.name,
                ports.len() + too_many.len(),
                ports.len()
            );
            left_out.push(unit.left_out(LeftOutCode::TooManyEngines, message));
        }
        for port in ports {
            // A registered engine may get company: its name must not change then.
            let name = match ports {
                [_] if !pool.registered => format!("{}/{}", pool.name, pod.name),
                _ => format!("{}/{}:{port}", pool.name, pod.name),
            };
            let unit = Unit { name: MemberName(name), head: pod, pods: vec![pod.to_ref()], port: *port };
            match unfit(pod) {
                None => units.push(unit),
                Some((code, message)) => left_out.push(unit.left_out(code, message)),
            }
        }
    }
    units
}

/// Why a pod whose engines register has none in the plan.
fn no_engine(pod: &PodFacts) -> (LeftOutCode, String) {
    let name = &pod.name;
    match pod.registered {
        None => (LeftOutCode::NotReported, format!("pod {name}: its agent has not reported yet which engines are registered")),
        Some(_) => (LeftOutCode::NotReady, format!("pod {name}: no engine has registered with its agent (docs/engines.md)")),
    }
}

fn groups<'a>(pool: &PoolSpec, spec: &GroupSpec, pods: &[&'a PodFacts], left_out: &mut Vec<LeftOut>) -> Vec<Unit<'a>> {
    let mut by_group: BTreeMap<&str, Vec<&'a PodFacts>> = BTreeMap::new();
    for pod in pods {
        if let Some(group) = pod.labels.get(&spec.label) {
            by_group.entry(group).or_default().push(pod);
        } else {
            let message = format!("pod {} lacks the label {} of its group", pod.name, spec.label);
            left_out.push(pod_left_out(pool, pod, LeftOutCode::GroupLabelMissing, message));
        }
    }
    let mut units = Vec::new();
    for (group, pods) in by_group {
        let name = MemberName(format!("{}/{group}", pool.name));
        match whole(spec, group, &pods) {
            Ok((head, whole)) => {
                units.extend(pool.ports.first().map(|port| Unit { name, head, pods: whole, port: *port }));
                // Pods of an earlier incarnation of the group are no longer part of it.
                for pod in pods.iter().filter(|pod| !pod.is_live()) {
                    left_out.extend(unfit(pod).map(|(code, message)| pod_left_out(pool, pod, code, message)));
                }
            }
            Err((code, message)) => {
                let pods = pods.iter().map(|pod| pod.to_ref()).collect();
                left_out.push(LeftOut { who: name, role: Role::Rollout, pods, code, message });
            }
        }
    }
    units
}

fn pod_left_out(pool: &PoolSpec, pod: &PodFacts, code: LeftOutCode, message: String) -> LeftOut {
    let who = MemberName(format!("{}/{}", pool.name, pod.name));
    LeftOut { who, role: Role::Rollout, pods: vec![pod.to_ref()], code, message }
}

/// The head and all pods of a group (head first), or what the group lacks.
fn whole<'a>(spec: &GroupSpec, group: &str, pods: &[&'a PodFacts]) -> Result<(&'a PodFacts, Vec<PodRef>), (LeftOutCode, String)> {
    let is_head = |pod: &PodFacts| spec.head.matches(&pod.labels);
    let mut live: Vec<&'a PodFacts> = pods.iter().copied().filter(|pod| pod.is_live()).collect();
    let gone = pods.len() - live.len();
    let wanted = spec.pods as usize;
    if live.is_empty() {
        let ending = pods.iter().any(|pod| pod.terminating && pod.phase != PodPhase::Terminal);
        let code = if ending { LeftOutCode::Terminating } else { LeftOutCode::Terminal };
        return Err((code, format!("all {gone} pods of group {group} are ending or have ended")));
    }
    if live.len() < wanted {
        let ending = if gone > 0 { format!("; {gone} more are ending or have ended") } else { String::new() };
        let message = format!("group {group} has {} of {wanted} pods{ending}", live.len());
        return Err((LeftOutCode::GroupIncomplete, message));
    }
    if live.len() > wanted {
        let message = format!("group {group} has {} pods, replica.pods says {wanted}: correct one of the two", live.len());
        return Err((LeftOutCode::GroupTooLarge, message));
    }
    for pod in &live {
        if let Some(reason) = unfit(pod) {
            return Err(reason);
        }
    }
    let mut heads = live.iter().copied().filter(|pod| is_head(pod));
    let (Some(head), None) = (heads.next(), heads.next()) else {
        let count = live.iter().filter(|pod| is_head(pod)).count();
        let labels: Vec<_> = spec.head.labels.iter().map(|(label, value)| format!("{label}={value}")).collect();
        let message = format!("group {group}: {count} pods have the labels {}, the head must be one", labels.join(", "));
        return Err((LeftOutCode::HeadUnclear, message));
    };
    live.sort_by_key(|pod| (pod.uid != head.uid, pod.index, &pod.name));
    Ok((head, live.iter().map(|pod| pod.to_ref()).collect()))
}

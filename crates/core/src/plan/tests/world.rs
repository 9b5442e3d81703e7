//! Short notations for pods and specs.

use std::collections::BTreeMap;

use crate::plan::{
    GroupSpec, LeftOut, LeftOutCode, Order, Plan, PlanInput, PodFacts, PodPhase, PoolSpec, ROLE_LABEL, Selector, TrainerSpec, WeightSyncRef,
};

pub(super) fn weightsync(name: &str, created: u64) -> WeightSyncRef {
    WeightSyncRef { namespace: "rl".to_owned(), name: name.to_owned(), uid: format!("uid-{name}"), created }
}

pub(super) fn selector(label: &str, value: &str) -> Selector {
    Selector { labels: BTreeMap::from([(label.to_owned(), value.to_owned())]), requirements: Vec::new() }
}

/// A running pod `NAME-INDEX` of a StatefulSet that consents as `role`.
pub(super) fn pod(app: &str, index: u32, role: &str) -> PodFacts {
    let name = format!("{app}-{index}");
    PodFacts {
        uid: format!("uid-{name}"),
        name,
        node: Some("node-0".to_owned()),
        ips: Vec::new(),
        labels: BTreeMap::from([("app".to_owned(), app.to_owned()), (ROLE_LABEL.to_owned(), role.to_owned())]),
        missing_container: None,
        phase: PodPhase::Running,
        terminating: false,
        index: Some(index),
        stable_name: true,
        registered: None,
        gpus: 0,
        stuck: None,
        unready: None,
    }
}

pub(super) fn trainer_pod(index: u32) -> PodFacts {
    pod("trainer", index, "trainer")
}

pub(super) fn actor(index: u32) -> PodFacts {
    pod("actor", index, "rollout")
}

/// Pod `member` of group `group`, head when 0.
pub(super) fn group_pod(group: u32, member: u32) -> PodFacts {
    let mut pod = pod(&format!("actor-{group}"), member, "rollout");
    pod.labels.insert("app".to_owned(), "actor".to_owned());
    pod.labels.insert("group".to_owned(), format!("g{group}"));
    pod.labels.insert("worker".to_owned(), member.to_string());
    pod
}

pub(super) fn grouped(pods: u32) -> PoolSpec {
    PoolSpec { group: Some(GroupSpec { pods, label: "group".to_owned(), head: selector("worker", "0") }), ..pool() }
}

pub(super) fn pool() -> PoolSpec {
    PoolSpec {
        name: "actors".to_owned(),
        selector: selector("app", "actor"),
        ports: vec![8000],
        registered: false,
        max_registered: None,
        ranks: 1,
        group: None,
        order: Order::Auto,
    }
}

/// One trainer pod and these rollouts in one pool.
pub(super) fn world(pool: PoolSpec, rollouts: impl IntoIterator<Item = PodFacts>) -> PlanInput {
    PlanInput {
        weightsync: weightsync("mine", 100),
        trainer: TrainerSpec { selector: selector("app", "trainer"), order: Order::Auto, sources: 1 },
        pools: vec![pool],
        pods: std::iter::once(trainer_pod(0)).chain(rollouts).collect(),
        claims: Vec::new(),
    }
}

pub(super) fn names(plan: &Plan) -> Vec<&str> {
    plan.candidates.iter().map(|candidate| candidate.name.0.as_str()).collect()
}

pub(super) fn left_out(plan: &Plan) -> Vec<(&str, LeftOutCode)> {
    plan.left_out.iter().map(|left_out| (left_out.who.0.as_str(), left_out.code)).collect()
}

/// The only entry about `who`.
pub(super) fn why<'a>(plan: &'a Plan, who: &str) -> &'a LeftOut {
    plan.left_out.iter().find(|left_out| left_out.who.0 == who).unwrap_or_else(|| panic!("{who} is not left out: {plan:?}"))
}

pub(super) fn refusal(plan: &Plan) -> String {
    plan.refusal.as_ref().unwrap_or_else(|| panic!("not refused: {plan:?}")).to_string()
}

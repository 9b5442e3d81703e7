//! Properties of every plan, over random worlds.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::world::{actor, grouped, pool, trainer_pod, weightsync, world};
use crate::plan::{Claim, Order, Plan, PlanInput, PlanRefusal, PodFacts, PodPhase, PoolSpec, plan, roster};
use crate::protocol::Role;

fn order() -> impl Strategy<Value = Order> {
    let listed = Just((0..6).map(|index| format!("actor-{index}")).collect::<Vec<_>>()).prop_shuffle();
    prop_oneof![
        Just(Order::Auto),
        Just(Order::Label("rank".to_owned())),
        (listed, 1_usize..7).prop_map(|(mut names, length)| {
            names.truncate(length);
            Order::Explicit(names)
        }),
    ]
}

fn any_pool() -> impl Strategy<Value = PoolSpec> {
    let ports = prop::sample::subsequence(vec![8000, 8001, 8002], 1..3);
    (order(), ports, 1_u32..7, prop::option::weighted(0.3, 2_u32..4)).prop_map(|(order, ports, ranks, group)| {
        let base = group.map_or_else(pool, grouped);
        let ports = if group.is_some() { vec![8000] } else { ports };
        PoolSpec { ports, ranks, order, ..base }
    })
}

fn any_pod(index: u32) -> impl Strategy<Value = PodFacts> {
    let phase = prop::sample::select(vec![PodPhase::Running, PodPhase::Running, PodPhase::Running, PodPhase::Pending, PodPhase::Terminal]);
    let flags = (prop::bool::weighted(0.1), prop::bool::weighted(0.9), prop::bool::weighted(0.1), prop::bool::weighted(0.9));
    (phase, flags, 0_u32..3, 0_u32..4, prop::bool::weighted(0.95)).prop_map(move |(phase, flags, group, node, consents)| {
        let (terminating, stable_name, unready, indexed) = flags;
        let mut pod = actor(index);
        pod.labels.insert("group".to_owned(), format!("g{group}"));
        pod.labels.insert("worker".to_owned(), (index % 2).to_string());
        pod.labels.insert("rank".to_owned(), (7 * index % 5).to_string());
        if !consents {
            pod.labels.remove(crate::plan::ROLE_LABEL);
        }
        pod.node = (node > 0).then(|| format!("node-{node}"));
        pod.index = indexed.then_some(index);
        PodFacts { phase, terminating, stable_name, unready: unready.then(|| "probe".to_owned()), ..pod }
    })
}

prop_compose! {
    fn any_world()(
        pool in any_pool(),
        rollouts in (0_u32..6).prop_flat_map(|count| (0..count).map(any_pod).collect::<Vec<_>>()),
        trainers in prop::collection::btree_set(0_u32..4, 0..4),
        trainer_node in 0_u32..4,
        sources in 1_u32..3,
        older in prop::bool::weighted(0.05),
    ) -> PlanInput {
        let mut input = world(pool, rollouts);
        input.pods.retain(|pod| pod.name != "trainer-0");
        input.pods.extend(trainers.into_iter().map(|index| PodFacts { node: Some(format!("node-{trainer_node}")), ..trainer_pod(index) }));
        input.trainer.sources = sources;
        if older {
            input.claims.push(Claim { pod_uid: "uid-actor-0".to_owned(), by: weightsync("older", 1) });
        }
        input
    }
}

fn check_ranks(plan: &Plan) -> Result<(), TestCaseError> {
    let roster = roster(&plan.candidates);
    let mut next = 0;
    for member in &roster.members {
        prop_assert_eq!(member.rank_offset, next, "offsets are dense and disjoint");
        prop_assert!(member.size >= 1);
        next += member.size;
    }
    prop_assert_eq!(roster.world_size, next);
    let roles: Vec<_> = roster.members.iter().map(|member| member.role).collect();
    prop_assert!(roles.is_sorted(), "sources hold the first ranks");

    let rollouts: BTreeSet<_> = plan.rollouts().map(|candidate| &candidate.name).collect();
    prop_assert_eq!(roster.chain.len(), rollouts.len());
    prop_assert_eq!(roster.chain.iter().collect::<BTreeSet<_>>(), rollouts);
    // The chain enters each node once: it never returns to a node that it left.
    let node = |name| roster.member(name).and_then(|member| member.pods[0].node.clone());
    let source_node = roster.members.iter().find(|member| member.role == Role::Source).and_then(|member| member.pods[0].node.clone());
    let mut path: Vec<String> = source_node.into_iter().collect();
    path.extend(roster.chain.iter().enumerate().map(|(hop, name)| node(name).unwrap_or_else(|| format!("unknown-{hop}"))));
    path.dedup();
    let count = path.len();
    prop_assert_eq!(path.into_iter().collect::<BTreeSet<_>>().len(), count, "chain {:?}", roster.chain);
    Ok(())
}

fn check_all_are_reported(input: &PlanInput, plan: &Plan) -> Result<(), TestCaseError> {
    if matches!(plan.refusal, Some(PlanRefusal::PodClaimed { .. } | PlanRefusal::InvalidSpec { .. } | PlanRefusal::WorldTooLarge { .. })) {
        prop_assert!(plan.candidates.is_empty());
        return Ok(());
    }
    let members: Vec<_> = plan.candidates.iter().map(|candidate| &candidate.name).collect();
    let left_out: Vec<_> = plan.left_out.iter().map(|left_out| &left_out.who).collect();
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for pod in plan.candidates.iter().flat_map(|candidate| &candidate.pods).chain(plan.left_out.iter().flat_map(|left_out| &left_out.pods))
    {
        *seen.entry(&pod.uid).or_default() += 1;
    }
    for name in &members {
        prop_assert!(!left_out.contains(name), "{} is in and out", name);
    }
    prop_assert_eq!(members.iter().collect::<BTreeSet<_>>().len(), members.len(), "a name stands for one member");
    let ports = input.pools[0].ports.len();
    for pod in input.pods.iter().filter(|pod| pod.labels["app"] == "actor") {
        let times = seen.get(pod.uid.as_str()).copied().unwrap_or(0);
        let consents = pod.labels.contains_key(crate::plan::ROLE_LABEL);
        prop_assert_eq!(times, if consents { ports } else { 1 }, "{} is informed of {} times: {:?}", pod.name, times, plan);
    }
    for entry in &plan.left_out {
        prop_assert!(
            entry.pods.iter().all(|pod| entry.message.contains(&pod.name)) || entry.pods.len() > 1 || entry.message.contains("group")
        );
    }
    prop_assert_eq!(plan.refusal.is_none(), plan.candidates.iter().any(|candidate| candidate.role == Role::Source));
    Ok(())
}

proptest! {
    #[test]
    fn ranks_are_dense_and_chain_enters_each_node_once(input in any_world()) {
        check_ranks(&plan(&input))?;
    }

    #[test]
    fn every_selected_pod_is_in_or_out_with_a_reason(input in any_world()) {
        check_all_are_reported(&input, &plan(&input))?;
    }

    #[test]
    fn the_order_in_which_pods_are_listed_changes_nothing(input in any_world(), seed in any::<u64>()) {
        let mut other = input.clone();
        let count = other.pods.len().max(1);
        other.pods.rotate_left(usize::try_from(seed % 97).unwrap() % count);
        if seed % 2 == 0 {
            other.pods.reverse();
        }
        prop_assert_eq!(plan(&input), plan(&other));
    }

    #[test]
    fn only_fit_members_are_taken(input in any_world()) {
        let pods: BTreeMap<&str, &PodFacts> = input.pods.iter().map(|pod| (pod.uid.as_str(), pod)).collect();
        for candidate in plan(&input).candidates {
            for pod in &candidate.pods {
                let pod = pods[pod.uid.as_str()];
                prop_assert!(pod.is_live() && pod.phase == PodPhase::Running && pod.unready.is_none(), "{:?}", pod);
            }
        }
    }

    #[test]
    fn an_explicit_order_is_never_sorted_again(
        names in Just((0..6).map(|index| format!("actor-{index}")).collect::<Vec<_>>()).prop_shuffle(),
        there in prop::collection::btree_set(0_u32..6, 0..6),
    ) {
        let listed = PoolSpec { order: Order::Explicit(names.clone()), ..pool() };
        let plan = plan(&world(listed, there.iter().copied().map(actor)));
        let got: Vec<String> = plan.rollouts().map(|candidate| candidate.pods[0].name.clone()).collect();
        let expected: Vec<String> = names.into_iter().filter(|name| there.iter().any(|index| *name == format!("actor-{index}"))).collect();
        prop_assert_eq!(got, expected);
    }
}

//! Which trainer pod is the source, and how its absence is reported.

use super::world::{actor, left_out, names, pod, pool, refusal, selector, trainer_pod, weightsync, why, world};
use crate::plan::{Claim, LeftOutCode, Order, Part, PlanInput, PlanRefusal, PodFacts, PodPhase, part_of, plan};
use crate::protocol::Role;

fn trainers(order: Order, pods: impl IntoIterator<Item = PodFacts>) -> PlanInput {
    let mut input = world(pool(), [actor(0)]);
    input.pods.retain(|pod| pod.name != "trainer-0");
    input.pods.extend(pods);
    input.trainer.order = order;
    input
}

fn source(input: &PlanInput) -> String {
    let plan = plan(input);
    assert_eq!(plan.refusal, None, "{plan:?}");
    plan.candidates.iter().find(|candidate| candidate.role == Role::Source).unwrap().name.0.clone()
}

fn labelled(name: &str, rank: &str) -> PodFacts {
    let mut pod = PodFacts { name: name.to_owned(), uid: format!("uid-{name}"), index: None, ..trainer_pod(0) };
    pod.labels.insert("rank".to_owned(), rank.to_owned());
    pod
}

#[test]
fn pod_with_first_ordinal_is_source_and_ten_follows_two() {
    let input = trainers(Order::Auto, [trainer_pod(10), trainer_pod(2), trainer_pod(0)]);
    assert_eq!(source(&input), "trainer/trainer-0");
    let followers: Vec<_> = plan(&input).followers.into_iter().map(|pod| pod.name).collect();
    assert_eq!(followers, ["trainer-2", "trainer-10"]);
}

#[test]
fn a_label_or_a_list_can_give_the_order() {
    let pods = [labelled("a", "2"), labelled("b", "0"), labelled("c", "10")];
    assert_eq!(source(&trainers(Order::Label("rank".to_owned()), pods.clone())), "trainer/b");
    let listed = Order::Explicit(vec!["c".to_owned(), "a".to_owned(), "b".to_owned()]);
    let input = trainers(listed, pods);
    assert_eq!(source(&input), "trainer/c");
    let followers: Vec<_> = plan(&input).followers.into_iter().map(|pod| pod.name).collect();
    assert_eq!(followers, ["a", "b"]);
}

#[test]
fn a_single_pod_without_an_index_needs_no_order() {
    let only = PodFacts { index: None, stable_name: false, ..trainer_pod(0) };
    assert_eq!(source(&trainers(Order::Auto, [only])), "trainer/trainer-0");
}

#[test]
fn several_pods_without_order_are_named_and_none_is_guessed() {
    let pods = [PodFacts { index: None, ..trainer_pod(4) }, PodFacts { index: None, ..trainer_pod(3) }];
    let plan = plan(&trainers(Order::Auto, pods));
    let message = refusal(&plan);
    assert!(message.contains("trainer-3, trainer-4") && message.contains("spec.trainer.order"), "{message}");
    assert_eq!(names(&plan), ["actors/actor-0"], "rollouts may still feed each other");
}

#[test]
fn the_second_pod_never_stands_in_for_the_first() {
    let away = |change: fn(&mut PodFacts)| {
        let mut first = trainer_pod(0);
        change(&mut first);
        first
    };
    let cases: [(Vec<PodFacts>, &str); 5] = [
        (vec![trainer_pod(1)], "no trainer pod has index 0"),
        (vec![away(|pod| pod.terminating = true), trainer_pod(1)], "trainer-0 with index 0 is ending"),
        (vec![away(|pod| pod.phase = PodPhase::Terminal), trainer_pod(1)], "trainer-0 with index 0 is ending"),
        (vec![away(|pod| pod.phase = PodPhase::Pending), trainer_pod(1)], "trainer-0 has not started"),
        (vec![away(|pod| pod.unready = Some("no agent".to_owned())), trainer_pod(1)], "pod trainer-0: no agent"),
    ];
    for (pods, expected) in cases {
        let plan = plan(&trainers(Order::Auto, pods));
        assert!(matches!(plan.refusal, Some(PlanRefusal::NoSource { .. })), "{plan:?}");
        assert!(refusal(&plan).contains(expected), "{} lacks {expected}", refusal(&plan));
        assert!(plan.candidates.iter().all(|candidate| candidate.role == Role::Rollout));
    }
}

#[test]
fn ended_pods_of_a_retried_job_do_not_hide_the_running_one() {
    let ended = |name: &str| PodFacts { name: name.to_owned(), uid: name.to_owned(), phase: PodPhase::Terminal, ..trainer_pod(0) };
    let plan = plan(&trainers(Order::Auto, [ended("trainer-0-abc"), ended("trainer-0-def"), trainer_pod(0)]));
    assert_eq!(plan.refusal, None);
    assert_eq!(names(&plan), ["trainer/trainer-0", "actors/actor-0"]);
    assert_eq!(left_out(&plan), [("trainer/trainer-0-abc", LeftOutCode::Terminal), ("trainer/trainer-0-def", LeftOutCode::Terminal),]);
}

#[test]
fn two_live_pods_with_the_first_index_are_both_named() {
    let twin = PodFacts { name: "trainer-0-twin".to_owned(), uid: "twin".to_owned(), ..trainer_pod(0) };
    let message = refusal(&plan(&trainers(Order::Auto, [trainer_pod(0), twin])));
    assert!(message.contains("2 trainer pods have index 0: trainer-0, trainer-0-twin"), "{message}");
}

/// A StatefulSet with `spec.ordinals.start`.
#[test]
fn trainer_that_counts_from_another_number_needs_a_list() {
    let pods = [trainer_pod(5), trainer_pod(6)];
    assert!(refusal(&plan(&trainers(Order::Auto, pods.clone()))).contains("spec.trainer.order.names"));
    assert_eq!(source(&trainers(Order::Explicit(vec!["trainer-5".to_owned()]), pods)), "trainer/trainer-5");
}

#[test]
fn a_trainer_label_that_is_no_integer_is_refused_with_its_value() {
    let message = refusal(&plan(&trainers(Order::Label("rank".to_owned()), [labelled("a", "zero")])));
    assert!(message.contains("\"zero\"") && message.contains("pod a"), "{message}");
    let message = refusal(&plan(&trainers(Order::Label("other".to_owned()), [labelled("a", "0")])));
    assert!(message.contains("lacks the label other"), "{message}");
}

#[test]
fn an_explicit_list_of_trainer_pods_is_checked_name_by_name() {
    let list = |names: &[&str]| Order::Explicit(names.iter().map(|&name| name.to_owned()).collect());
    let pods = || [trainer_pod(0), trainer_pod(1)];
    let twice = plan(&trainers(list(&["trainer-0", "trainer-1", "trainer-0"]), pods()));
    assert!(matches!(twice.refusal, Some(PlanRefusal::InvalidSpec { .. })), "{twice:?}");
    assert!(refusal(&twice).contains("lists trainer-0 twice"));
    assert!(twice.candidates.is_empty());

    let unknown_first = plan(&trainers(list(&["trianer-0", "trainer-1"]), pods()));
    assert!(refusal(&unknown_first).contains("lists trianer-0"), "{}", refusal(&unknown_first));

    let unknown_later = plan(&trainers(list(&["trainer-0", "trianer-1"]), pods()));
    assert_eq!(unknown_later.refusal, None);
    assert_eq!(left_out(&unknown_later), [("trainer/trainer-1", LeftOutCode::NotListed), ("trainer/trianer-1", LeftOutCode::UnknownName)]);

    let unstable = PodFacts { stable_name: false, ..trainer_pod(1) };
    let message = refusal(&plan(&trainers(list(&["trainer-0", "trainer-1"]), [trainer_pod(0), unstable])));
    assert!(message.contains("trainer-1 gets another name each time"), "{message}");

    let empty = plan(&trainers(list(&[]), pods()));
    assert!(refusal(&empty).contains("names is empty"));
}

#[test]
fn a_pod_takes_part_only_with_its_consent() {
    let mut silent = trainer_pod(0);
    silent.labels.remove("weightsync.dev/role");
    let mut stranger = actor(1);
    stranger.labels.insert("weightsync.dev/role".to_owned(), "banana".to_owned());
    let mut input = trainers(Order::Auto, [silent]);
    input.pods.push(stranger);
    let plan = plan(&input);
    assert!(refusal(&plan).contains("weightsync.dev/role=trainer"), "{}", refusal(&plan));
    assert_eq!(left_out(&plan), [("trainer/trainer-0", LeftOutCode::NotOptedIn), ("actors/actor-1", LeftOutCode::NotOptedIn),]);
    assert_eq!(plan.replicas(), 1, "strangers are no replicas");
}

#[test]
fn a_pod_belongs_to_the_part_that_the_plan_puts_it_in() {
    let mut input = world(pool(), [actor(0)]);
    input.pools.push(crate::plan::PoolSpec { name: "second".to_owned(), ..pool() });
    let part = |pod: &PodFacts| part_of(&input.trainer, &input.pools, &pod.labels);
    assert_eq!(part(&trainer_pod(0)), Some(Part::Trainer));
    assert_eq!(part(&actor(0)), Some(Part::Pool(&input.pools[0])));
    assert_eq!(part(&pod("other", 0, "rollout")), None);
    let mut silent = actor(0);
    silent.labels.remove("weightsync.dev/role");
    assert_eq!(part(&silent), None, "without consent it is no one's");
}

#[test]
fn one_selector_may_match_trainer_and_rollouts_by_role() {
    let mut input = world(pool(), [actor(0)]);
    for pod in &mut input.pods {
        pod.labels.insert("job".to_owned(), "grpo".to_owned());
    }
    input.trainer.selector = selector("job", "grpo");
    input.pools[0].selector = selector("job", "grpo");
    let plan = plan(&input);
    assert_eq!(names(&plan), ["trainer/trainer-0", "actors/actor-0"]);
    assert_eq!(plan.left_out, []);
}

#[test]
fn younger_claimant_of_a_pod_gives_way_naming_the_older() {
    let claim = |by, created| Claim { pod_uid: "uid-actor-1".to_owned(), by: weightsync(by, created) };
    let mut input = world(pool(), [actor(0), actor(1)]);
    input.claims = vec![claim("younger", 101)];
    assert_eq!(plan(&input).refusal, None, "the older one is not disturbed");
    input.claims.push(claim("older", 99));
    let refused = plan(&input);
    let message = refusal(&refused);
    assert!(message.contains("actor-1") && message.contains("rl/older"), "{message}");
    assert!(refused.candidates.is_empty());
}

#[test]
fn two_objects_of_one_instant_have_one_winner() {
    let view = |mine: &str, other: &str| {
        let mut input = world(pool(), [actor(0)]);
        input.weightsync = weightsync(mine, 100);
        input.claims = vec![Claim { pod_uid: "uid-actor-0".to_owned(), by: weightsync(other, 100) }];
        plan(&input).refusal.is_some()
    };
    assert!(!view("a", "b") && view("b", "a"));
}

#[test]
fn claim_on_an_ended_or_unselected_pod_has_no_effect() {
    let ended = PodFacts { phase: PodPhase::Terminal, ..actor(1) };
    let mut input = world(pool(), [actor(0), ended, pod("other", 0, "rollout")]);
    input.claims = ["uid-actor-1", "uid-other-0"].map(|uid| Claim { pod_uid: uid.to_owned(), by: weightsync("older", 1) }).to_vec();
    assert_eq!(plan(&input).refusal, None);
}

#[test]
fn an_empty_selector_is_refused_rather_than_taken_for_every_pod() {
    let mut input = world(pool(), [actor(0)]);
    input.trainer.selector = crate::plan::Selector::default();
    assert!(refusal(&plan(&input)).contains("spec.trainer.selector is empty"));
}

#[test]
fn source_without_the_named_container_is_named() {
    let mut input = world(pool(), [actor(0)]);
    input.pods[0].missing_container = Some("learner".to_owned());
    let plan = plan(&input);
    assert!(refusal(&plan).contains("has no container learner"), "{}", refusal(&plan));
    assert_eq!(why(&plan, "trainer/trainer-0").code, LeftOutCode::NoContainer);
}

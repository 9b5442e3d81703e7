//! How pods become replicas, and their order.

use super::world::{actor, group_pod, grouped, left_out, names, pool, refusal, selector, why, world};
use crate::plan::{LeftOutCode, Operator, Order, PlanRefusal, PodFacts, PodPhase, PoolSpec, Requirement, plan};

#[test]
fn one_pod_is_one_replica() {
    let plan = plan(&world(pool(), [actor(1), actor(0)]));
    assert_eq!(names(&plan), ["trainer/trainer-0", "actors/actor-0", "actors/actor-1"]);
    assert_eq!(plan.candidates[1].port, Some(8000));
    assert_eq!(plan.left_out, []);
    assert_eq!(plan.replicas(), 2);
}

#[test]
fn each_port_of_a_pod_is_a_replica_of_its_own() {
    let plan = plan(&world(PoolSpec { ports: vec![8001, 8000], ..pool() }, [actor(1), actor(0)]));
    assert_eq!(
        names(&plan),
        ["trainer/trainer-0", "actors/actor-0:8000", "actors/actor-0:8001", "actors/actor-1:8000", "actors/actor-1:8001",]
    );
}

#[test]
fn each_registered_engine_of_a_pod_is_a_replica() {
    let registers = PoolSpec { ports: vec![], registered: true, ..pool() };
    let with = |index, registered: &[u16]| PodFacts { registered: Some(registered.to_vec()), ..actor(index) };
    let plan = plan(&world(registers, [with(1, &[9000]), with(0, &[8001, 8002]), with(2, &[])]));
    assert_eq!(names(&plan), ["trainer/trainer-0", "actors/actor-0:8001", "actors/actor-0:8002", "actors/actor-1:9000"]);
    assert_eq!((why(&plan, "actors/actor-2").code, plan.left_out.len()), (LeftOutCode::NotReady, 1));
}

/// A pod says by itself how many engines it has, and each counts for `minReady`.
#[test]
fn registered_engines_beyond_the_bound_take_no_part() {
    let registers = PoolSpec { ports: vec![], registered: true, ..pool() };
    let with = |gpus, ports: &[u16]| PodFacts { registered: Some(ports.to_vec()), gpus, ..actor(0) };
    let left = |spec: PoolSpec, pod: PodFacts| {
        let plan = plan(&world(spec, [pod]));
        plan.left_out.iter().map(|left| (left.who.0.clone(), left.code)).collect::<Vec<_>>()
    };
    let too_many =
        |ports: &[u16]| ports.iter().map(|port| (format!("actors/actor-0:{port}"), LeftOutCode::TooManyEngines)).collect::<Vec<_>>();
    assert_eq!(left(registers.clone(), with(0, &[1, 2, 3])), []);
    assert_eq!(left(registers.clone(), with(2, &[1, 2, 3])), too_many(&[3]));
    assert_eq!(left(PoolSpec { ranks: 2, ..registers.clone() }, with(4, &[1, 2, 3])), too_many(&[3]));
    assert_eq!(left(PoolSpec { ranks: 2, ..registers.clone() }, with(1, &[1, 2])), too_many(&[2]));
    assert_eq!(left(PoolSpec { max_registered: Some(1), ..registers }, with(8, &[1, 2, 3])), too_many(&[2, 3]));
}

#[test]
fn a_group_of_pods_is_one_replica_with_its_head_first() {
    let plan = plan(&world(grouped(2), [group_pod(1, 1), group_pod(0, 1), group_pod(0, 0), group_pod(1, 0)]));
    assert_eq!(names(&plan), ["trainer/trainer-0", "actors/g0", "actors/g1"]);
    let pods: Vec<_> = plan.candidates[1].pods.iter().map(|pod| pod.name.as_str()).collect();
    assert_eq!(pods, ["actor-0-0", "actor-0-1"]);
}

#[test]
fn the_head_stands_first_wherever_its_name_would_stand() {
    let mut spec = grouped(3);
    spec.group.as_mut().unwrap().head = selector("worker", "2");
    let plan = plan(&world(spec, [group_pod(0, 0), group_pod(0, 1), group_pod(0, 2)]));
    let pods: Vec<_> = plan.candidates[1].pods.iter().map(|pod| pod.name.as_str()).collect();
    assert_eq!(pods, ["actor-0-2", "actor-0-0", "actor-0-1"]);
}

#[test]
fn a_group_is_whole_or_left_out_with_the_numbers() {
    let alive = |member| group_pod(0, member);
    let changed = |member, change: fn(&mut PodFacts)| {
        let mut pod = group_pod(0, member);
        change(&mut pod);
        pod
    };
    let cases: [(Vec<PodFacts>, LeftOutCode, &str); 9] = [
        (vec![alive(0)], LeftOutCode::GroupIncomplete, "has 1 of 2 pods"),
        (vec![alive(0), changed(1, |pod| pod.terminating = true)], LeftOutCode::GroupIncomplete, "1 more are ending"),
        (vec![alive(0), alive(1), alive(2)], LeftOutCode::GroupTooLarge, "has 3 pods, replica.pods says 2"),
        (vec![alive(1), alive(2)], LeftOutCode::HeadUnclear, "0 pods have the labels worker=0"),
        (
            vec![alive(0), changed(1, |pod| drop(pod.labels.insert("worker".to_owned(), "0".to_owned())))],
            LeftOutCode::HeadUnclear,
            "2 pods have the labels worker=0",
        ),
        (vec![alive(0), changed(1, |pod| pod.phase = PodPhase::Pending)], LeftOutCode::NotRunning, "actor-0-1 has not started"),
        (vec![alive(0), changed(1, |pod| pod.unready = Some("no heartbeat".to_owned()))], LeftOutCode::NotReady, "actor-0-1: no heartbeat"),
        (
            vec![changed(0, |pod| pod.terminating = true), changed(1, |pod| pod.terminating = true)],
            LeftOutCode::Terminating,
            "all 2 pods of group g0",
        ),
        (
            vec![changed(0, |pod| pod.missing_container = Some("engine".to_owned())), alive(1)],
            LeftOutCode::NoContainer,
            "no container engine",
        ),
    ];
    for (pods, code, text) in cases {
        let plan = plan(&world(grouped(2), pods));
        let entry = why(&plan, "actors/g0");
        assert_eq!(entry.code, code, "{entry:?}");
        assert!(entry.message.contains(text), "{} lacks {text:?}", entry.message);
        assert_eq!(names(&plan), ["trainer/trainer-0"]);
    }
}

#[test]
fn pod_without_the_group_label_is_named() {
    let plan = plan(&world(grouped(2), [actor(0), group_pod(1, 0), group_pod(1, 1)]));
    assert_eq!(left_out(&plan), [("actors/actor-0", LeftOutCode::GroupLabelMissing)]);
    assert_eq!(names(&plan), ["trainer/trainer-0", "actors/g1"]);
}

#[test]
fn unfit_pods_are_left_out_with_their_reason() {
    let pods = [
        actor(0),
        PodFacts { phase: PodPhase::Terminal, ..actor(1) },
        PodFacts { terminating: true, ..actor(2) },
        PodFacts { phase: PodPhase::Pending, ..actor(3) },
        PodFacts { unready: Some("engine answers 503".to_owned()), ..actor(4) },
        PodFacts { missing_container: Some("engine".to_owned()), ..actor(5) },
    ];
    let plan = plan(&world(pool(), pods));
    assert_eq!(names(&plan), ["trainer/trainer-0", "actors/actor-0"]);
    assert_eq!(
        left_out(&plan),
        [
            ("actors/actor-1", LeftOutCode::Terminal),
            ("actors/actor-2", LeftOutCode::Terminating),
            ("actors/actor-3", LeftOutCode::NotRunning),
            ("actors/actor-4", LeftOutCode::NotReady),
            ("actors/actor-5", LeftOutCode::NoContainer),
        ]
    );
    assert!(why(&plan, "actors/actor-4").message.contains("engine answers 503"));
    assert_eq!(plan.replicas(), 4, "ended and ending pods are no replicas any more");
    assert!(why(&plan, "actors/actor-5").code.is_refusal() && !why(&plan, "actors/actor-4").code.is_refusal());
}

#[test]
fn replicas_go_by_ordinal_if_every_pod_has_one_else_by_name() {
    let order = |pods: Vec<PodFacts>| names(&plan(&world(pool(), pods)))[1..].join(" ");
    let pods = || [10, 9, 2].map(actor).to_vec();
    assert_eq!(order(pods()), "actors/actor-2 actors/actor-9 actors/actor-10");
    let with_one_without = [pods(), vec![PodFacts { index: None, ..actor(3) }]].concat();
    assert_eq!(order(with_one_without), "actors/actor-10 actors/actor-2 actors/actor-3 actors/actor-9");
}

#[test]
fn integer_label_values_sort_by_value_before_words() {
    let ranked = |index, value: &str| {
        let mut pod = actor(index);
        pod.labels.insert("rank".to_owned(), value.to_owned());
        pod
    };
    let pods = [ranked(0, "b"), ranked(1, "10"), ranked(2, "9"), ranked(3, "a"), actor(4)];
    let plan = plan(&world(PoolSpec { order: Order::Label("rank".to_owned()), ..pool() }, pods));
    assert_eq!(names(&plan)[1..], ["actors/actor-2", "actors/actor-1", "actors/actor-3", "actors/actor-0"]);
    assert_eq!(left_out(&plan), [("actors/actor-4", LeftOutCode::OrderKeyMissing)]);
}

#[test]
fn an_explicit_order_is_kept_as_given() {
    let listed = Order::Explicit(["actor-2", "actor-0", "actor-1"].map(str::to_owned).to_vec());
    let plan = plan(&world(PoolSpec { order: listed, ..pool() }, [0, 1, 2].map(actor)));
    assert_eq!(names(&plan)[1..], ["actors/actor-2", "actors/actor-0", "actors/actor-1"]);
}

#[test]
fn an_explicit_order_of_groups_lists_their_heads() {
    let listed = Order::Explicit(["actor-1-0", "actor-0-0"].map(str::to_owned).to_vec());
    let pods = [group_pod(0, 0), group_pod(0, 1), group_pod(1, 0), group_pod(1, 1)];
    let plan = plan(&world(PoolSpec { order: listed, ..grouped(2) }, pods));
    assert_eq!(names(&plan)[1..], ["actors/g1", "actors/g0"]);
}

#[test]
fn explicit_order_refuses_bad_and_unstable_names() {
    let explicit = |names: &[&str]| PoolSpec { order: Order::Explicit(names.iter().map(|&name| name.to_owned()).collect()), ..pool() };
    let twice = plan(&world(explicit(&["actor-0", "actor-0"]), [actor(0)]));
    assert!(matches!(twice.refusal, Some(PlanRefusal::InvalidSpec { .. })));
    assert!(refusal(&twice).contains("lists actor-0 twice"), "{}", refusal(&twice));

    let typo = plan(&world(explicit(&["actor-0", "actr-1"]), [actor(0), actor(1)]));
    assert_eq!(left_out(&typo), [("actors/actor-1", LeftOutCode::NotListed), ("actors/actr-1", LeftOutCode::UnknownName)]);
    assert!(typo.left_out.iter().all(|left_out| left_out.code.is_refusal()));
    assert_eq!(names(&typo)[1..], ["actors/actor-0"], "a name that is away must not take the others along");

    let brief = PodFacts { stable_name: false, ..actor(1) };
    let unstable = plan(&world(explicit(&["actor-0", "actor-1"]), [actor(0), brief]));
    assert_eq!(why(&unstable, "actors/actor-1").code, LeftOutCode::UnstableName);
}

#[test]
fn a_listed_pod_that_is_ending_is_not_called_unknown() {
    let listed = Order::Explicit(["actor-0", "actor-1"].map(str::to_owned).to_vec());
    let plan = plan(&world(PoolSpec { order: listed, ..pool() }, [actor(0), PodFacts { terminating: true, ..actor(1) }]));
    assert_eq!(left_out(&plan), [("actors/actor-1", LeftOutCode::Terminating)]);
}

#[test]
fn pools_keep_spec_order_and_pod_of_two_is_named() {
    let mut input = world(PoolSpec { name: "zeta".to_owned(), ..pool() }, [actor(0), actor(1)]);
    input.pools.push(PoolSpec { name: "alpha".to_owned(), selector: selector("tier", "big"), ..pool() });
    let mut both = actor(2);
    both.labels.insert("tier".to_owned(), "big".to_owned());
    let mut second = actor(3);
    second.labels.insert("tier".to_owned(), "big".to_owned());
    second.labels.remove("app");
    input.pods.extend([both, second]);
    let plan = plan(&input);
    assert_eq!(names(&plan)[1..], ["zeta/actor-0", "zeta/actor-1", "zeta/actor-2", "alpha/actor-3"]);
    assert_eq!(left_out(&plan), [("alpha/actor-2", LeftOutCode::SelectedTwice)]);
}

#[test]
fn selectors_mean_what_they_mean_in_kubernetes() {
    let mut selected = selector("app", "actor");
    let values = |values: &[&str]| values.iter().map(|&value| value.to_owned()).collect();
    let mut labels = actor(0).labels;
    assert!(selected.matches(&labels));
    for (operator, without, with_a, with_b) in [
        (Operator::In(values(&["a"])), false, true, false),
        (Operator::NotIn(values(&["a"])), true, false, true),
        (Operator::Exists, false, true, true),
        (Operator::DoesNotExist, true, false, false),
    ] {
        selected.requirements = vec![Requirement { key: "tier".to_owned(), operator }];
        labels.remove("tier");
        assert_eq!(selected.matches(&labels), without, "{selected:?}");
        labels.insert("tier".to_owned(), "a".to_owned());
        assert_eq!(selected.matches(&labels), with_a, "{selected:?}");
        labels.insert("tier".to_owned(), "b".to_owned());
        assert_eq!(selected.matches(&labels), with_b, "{selected:?}");
    }
}

#[test]
fn contradictory_spec_is_refused_before_pods_are_read() {
    let cases: [(PoolSpec, &str); 8] = [
        (PoolSpec { ports: vec![], ..pool() }, "needs a port"),
        (PoolSpec { ports: vec![0], ..pool() }, "needs a port"),
        (PoolSpec { registered: true, ..pool() }, "lists no port"),
        (PoolSpec { ports: vec![], registered: true, ..grouped(2) }, "cannot register"),
        (PoolSpec { ports: vec![1, 1], ..pool() }, "listed twice"),
        (PoolSpec { ports: vec![1, 2], ..grouped(2) }, "has one port"),
        (PoolSpec { name: "trainer".to_owned(), ..pool() }, "the trainer's"),
        (grouped(1), "at least 2 pods"),
    ];
    for (spec, text) in cases {
        let plan = plan(&world(spec, [actor(0)]));
        assert!(refusal(&plan).contains(text), "{} lacks {text:?}", refusal(&plan));
        assert!(plan.candidates.is_empty());
    }
    let mut twins = world(pool(), [actor(0)]);
    twins.pools.push(pool());
    assert!(refusal(&plan(&twins)).contains("two pools"));
}

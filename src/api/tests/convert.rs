//! Spec into inputs of plan and protocol.

use serde_json::{Value, json};

use super::least;
use crate::api::{EngineKind, WeightSync, WeightSyncSpec};
use weightsync_core::plan::{GroupSpec, Operator, Order, Selector};
use weightsync_core::protocol::{EngineAssignment, KvCachePolicy, PausePolicy, TransportWish};

fn object(spec: Value) -> WeightSync {
    let mut object = least();
    for (key, value) in spec.as_object().unwrap() {
        object["spec"][key] = value.clone();
    }
    serde_json::from_value(object).unwrap()
}

fn pool(fields: Value) -> WeightSync {
    let mut pool = least()["spec"]["rollouts"][0].clone();
    for (key, value) in fields.as_object().unwrap() {
        pool[key] = value.clone();
    }
    object(json!({"rollouts": [pool]}))
}

#[test]
fn what_is_left_out_has_the_defaults_that_the_schema_states() {
    let spec = object(json!({})).spec;
    let policy = spec.update_policy(4);
    assert_eq!(policy, weightsync_core::protocol::UpdatePolicy::default());
    assert_eq!((policy.pause, policy.kv_cache), (PausePolicy::Keep, KvCachePolicy::Reset));
    assert_eq!((policy.min_ready, policy.silence_ms, policy.update_timeout_ms), (1, 10_000, 600_000));
    assert_eq!((policy.retain_bytes, policy.bucket_bytes, policy.data_tls), (u64::MAX, 0, true));
    assert_eq!(policy.digest, weightsync_core::protocol::Digest::Blake3);
    assert_eq!((policy.health.period_ms, policy.health.timeout_ms), (2000, 5000));
    assert_eq!((policy.health.failure_threshold, policy.health.success_threshold), (3, 1));
    assert!(spec.serve_before_first_version());
    let pools = spec.plan_pools();
    assert_eq!((pools[0].ports.clone(), pools[0].group.clone(), pools[0].order.clone()), (vec![8000], None, Order::Auto));
    assert_eq!(spec.trainer.to_plan().order, Order::Auto);
    let written: Value = serde_json::to_value(&spec).unwrap();
    assert_eq!(serde_json::from_value::<WeightSyncSpec>(written).unwrap(), spec, "defaults written out mean the same");
}

#[test]
fn min_ready_is_a_number_or_a_share_rounded_up() {
    let of = |min_ready: Value, total| object(json!({"membership": {"minReady": min_ready}})).spec.min_ready(total);
    assert_eq!(of(json!(3), 2), 3, "a number is not cut: a group that is too small is informed");
    assert_eq!(of(json!("2"), 4), 2, "quotes around a number change nothing");
    for (share, total, expected) in [("50%", 4, 2), ("50%", 5, 3), ("1%", 3, 1), ("100%", 7, 7), ("50%", 0, 1)] {
        assert_eq!(of(json!(share), total), expected, "{share} of {total}");
    }
}

#[test]
fn max_unavailable_is_a_number_or_a_share_rounded_down() {
    let of = |most: Value, total| object(json!({"membership": {"maxUnavailable": most}})).spec.update_policy(total).max_unavailable;
    assert_eq!((of(json!(3), 2), of(json!("2"), 4)), (3, 2));
    for (share, total, expected) in [("50%", 5, 2), ("1%", 3, 1), ("100%", 7, 7), ("25%", 0, 1)] {
        assert_eq!(of(json!(share), total), expected, "{share} of {total}");
    }
    assert_eq!(object(json!({})).spec.update_policy(4).max_unavailable, 0);
}

#[test]
fn max_skew_is_converted_and_absent_without_a_value() {
    assert_eq!(object(json!({"membership": {"maxSkew": 0}})).spec.update_policy(1).max_skew, Some(0));
    assert_eq!(object(json!({})).spec.update_policy(1).max_skew, None);
}

#[test]
fn policies_are_carried_over_in_the_agents_units() {
    let spec = object(json!({
        "transport": {"type": "TCP", "tls": false, "bucketMiB": 32},
        "update": {"pause": "Abort", "kvCache": "Keep", "timeoutSeconds": 60, "silenceSeconds": 3, "retainMiB": 5, "digest": "Xxh3"},
        "membership": {"minReady": "50%"},
        "readiness": {"beforeFirstVersion": "Hold"},
    }))
    .spec;
    let policy = spec.update_policy(6);
    assert_eq!((policy.pause, policy.kv_cache, policy.min_ready), (PausePolicy::Abort, KvCachePolicy::Keep, 3));
    assert_eq!((policy.update_timeout_ms, policy.silence_ms, policy.retain_bytes), (60_000, 3000, 5 << 20));
    assert_eq!((policy.bucket_bytes, policy.data_tls), (32 << 20, false));
    assert_eq!(policy.digest, weightsync_core::protocol::Digest::Xxh3);
    assert!(!spec.serve_before_first_version());
}

#[test]
fn rollback_target_and_kept_count_are_converted() {
    let spec = object(json!({"targetVersion": 41, "membership": {"keep": 3}})).spec;
    assert_eq!((spec.target(), spec.update_policy(1).keep), (Some(41), 3));
    let spec = object(json!({})).spec;
    assert_eq!((spec.target(), spec.update_policy(1).keep), (None, 1));
}

#[test]
fn canary_is_converted_to_thousandths_or_none() {
    let canary = json!({"prompt": "Two and two is", "maxTokens": 4, "minLogProb": "-2.5"});
    let policy = object(json!({"membership": {"keep": 2}, "canary": canary})).spec.update_policy(1).canary.unwrap();
    assert_eq!((policy.prompt.as_str(), policy.max_tokens), ("Two and two is", 4));
    assert_eq!((policy.least_log_prob_milli, policy.greatest_log_prob_milli), (-2500, 0));
    let least = object(json!({"canary": {"prompt": "a", "minLogProb": -3}})).spec.update_policy(1).canary.unwrap();
    assert_eq!((least.max_tokens, least.least_log_prob_milli, least.greatest_log_prob_milli), (1, -3000, 0));
    assert_eq!(object(json!({})).spec.update_policy(1).canary, None);
}

#[test]
fn nothing_is_retained_in_an_ephemeral_container() {
    assert_eq!(object(json!({"agent": {"launch": "Ephemeral"}})).spec.update_policy(1).retain_bytes, 0);
}

#[test]
fn pod_group_defaults_to_leader_worker_set_labels() {
    let head = |label: &str, value: &str| Selector { labels: [(label.to_owned(), value.to_owned())].into(), ..Selector::default() };
    let group = |replica: Value| pool(json!({"replica": replica})).spec.plan_pools()[0].group.clone();
    assert_eq!(group(json!({"pods": 1})), None);
    assert_eq!(
        group(json!({"pods": 2})),
        Some(GroupSpec {
            pods: 2,
            label: "leaderworkerset.sigs.k8s.io/group-key".to_owned(),
            head: head("leaderworkerset.sigs.k8s.io/worker-index", "0"),
        })
    );
    let own = group(json!({"pods": 3, "groupLabel": "g", "headLabels": {"role": "head"}})).unwrap();
    assert_eq!((own.label.as_str(), own.head), ("g", head("role", "head")));
}

#[test]
fn orders_sizes_engines_and_selectors_are_carried_over() {
    let object = pool(json!({
        "engine": {"kind": "SGLang", "ports": [30_001, 30_002]},
        "ranks": 8,
        "order": {"names": ["b", "a"]},
        "selector": {"matchLabels": {"app": "x"}, "matchExpressions": [
            {"key": "tier", "operator": "In", "values": ["a", "b"]},
            {"key": "gone", "operator": "DoesNotExist"},
        ]},
    }));
    let spec = &object.spec.plan_pools()[0];
    assert_eq!(spec.ports, [30_001, 30_002]);
    assert_eq!(spec.ranks, 8);
    assert_eq!(spec.order, Order::Explicit(vec!["b".to_owned(), "a".to_owned()]));
    assert_eq!(spec.selector.labels["app"], "x");
    assert_eq!(spec.selector.requirements[0].operator, Operator::In(["a".to_owned(), "b".to_owned()].into()));
    assert_eq!(spec.selector.requirements[1].operator, Operator::DoesNotExist);
    let engines = WeightSyncSpec::engines(&object.spec.rollouts[0], &[]);
    let engine = |port| EngineAssignment { kind: "sglang".to_owned(), port };
    assert_eq!(engines, [engine(30_001), engine(30_002)]);
    let labelled = pool(json!({"order": {"label": "rank"}}));
    assert_eq!(labelled.spec.plan_pools()[0].order, Order::Label("rank".to_owned()));
}

#[test]
fn the_trainers_order_is_carried_over() {
    let order = |order: Value| {
        let trainer = object(json!({"trainer": {"selector": {"matchLabels": {"app": "t"}}, "order": order}})).spec.trainer.to_plan();
        assert_eq!(trainer.sources, 1);
        trainer.order
    };
    assert_eq!(order(json!({"label": "rank"})), Order::Label("rank".to_owned()));
    assert_eq!(order(json!({"names": ["a"]})), Order::Explicit(vec!["a".to_owned()]));
}

#[test]
fn each_engine_kind_has_a_name_and_a_default_port() {
    let engines =
        [("VLLM", "vllm", 8000), ("SGLang", "sglang", 30_000), ("LMDeploy", "lmdeploy", 23_333), ("FastDeploy", "fastdeploy", 8000)];
    assert_eq!(engines.len(), weightsync_engine::ENGINES.len());
    for ((kind, name, port), known) in engines.into_iter().zip(weightsync_engine::ENGINES) {
        let object = pool(json!({"engine": {"kind": kind}}));
        assert_eq!(object.spec.rollouts[0].engine.kind, EngineKind::from(*known));
        assert_eq!(WeightSyncSpec::engines(&object.spec.rollouts[0], &[]), [EngineAssignment { kind: name.to_owned(), port }]);
        assert_eq!(object.spec.plan_pools()[0].ports, [port]);
    }
}

#[test]
fn transport_is_converted_with_one_length_of_buckets() {
    let of = |transport: Value| object(json!({"transport": transport})).spec.update_policy(1);
    for (kind, wish) in
        [("TCP", TransportWish::Tcp), ("NCCL", TransportWish::Nccl), ("GDR", TransportWish::Gdr), ("Auto", TransportWish::Auto)]
    {
        let policy = of(json!({"type": kind, "bucketMiB": 4, "allowTcp": true, "ncclEnv": {"NCCL_DEBUG": "INFO"}}));
        assert_eq!((policy.transport.wish, policy.bucket_bytes, policy.transport.slot_bytes), (wish, 4 << 20, 4 << 20));
        assert!(policy.transport.allow_tcp && policy.transport.environment["NCCL_DEBUG"] == "INFO");
    }
}

#[test]
fn age_and_identity_are_read_from_the_metadata() {
    let mut value = least();
    value["metadata"]["uid"] = json!("u-1");
    value["metadata"]["creationTimestamp"] = json!("1970-01-01T00:00:05Z");
    let reference = serde_json::from_value::<WeightSync>(value).unwrap().plan_ref();
    assert_eq!((reference.namespace.as_str(), reference.name.as_str()), ("rl", "grpo"));
    assert_eq!((reference.uid.as_str(), reference.created), ("u-1", 5000));
}

#[test]
fn preflight_is_auto_unless_it_is_off() {
    use weightsync_core::protocol::Preflight::{Auto, Off};
    for (transport, expected) in [
        (json!({}), Auto),
        (json!({"preflight": "Off"}), Off),
        (json!({"type": "GDR", "preflight": "Off"}), Off),
        (json!({"type": "TCP", "preflight": "Auto"}), Auto),
    ] {
        assert_eq!(object(json!({"transport": transport})).spec.update_policy(1).transport.preflight, expected, "{transport}");
    }
    assert_eq!(object(json!({})).spec.update_policy(1).transport.preflight, Auto);
}

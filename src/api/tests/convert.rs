//! Spec into inputs of plan and protocol.

use serde_json::{Value, json};

use super::least;
use crate::api::{WeightSync, WeightSyncSpec};
use weightsync_core::plan::{GroupSpec, Operator, Order, Parallelism};
use weightsync_core::protocol::{EngineAssignment, KvCachePolicy, PausePolicy};

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
    assert_eq!((policy.pause, policy.kv_cache), (PausePolicy::Keep, KvCachePolicy::Reset));
    assert_eq!((policy.min_ready, policy.silence_ms, policy.update_timeout_ms), (1, 10_000, 600_000));
    assert_eq!((policy.retain_bytes, policy.bucket_bytes, policy.data_tls), (u64::MAX, 0, true));
    assert_eq!(policy.digest, weightsync_core::protocol::Digest::Blake3);
    assert_eq!((policy.health.period_ms, policy.health.timeout_ms), (2000, 5000));
    assert_eq!((policy.health.failure_threshold, policy.health.success_threshold), (3, 1));
    assert_eq!(spec.debounce_ms(), 1000);
    assert!(spec.serve_before_first_version());
    let pools = spec.plan_pools();
    assert_eq!((pools[0].ports.clone(), pools[0].group.clone(), pools[0].order.clone()), (vec![8000], None, Order::Name));
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
        "transport": {"tcp": {"tls": false, "bucketMiB": 32}},
        "update": {"pause": "Abort", "kvCache": "Keep", "timeoutSeconds": 60, "silenceSeconds": 3, "retain": {"hostMiB": 5}, "digest": "Xxh3"},
        "membership": {"minReady": "50%", "debounceSeconds": 7},
        "readiness": {"beforeFirstVersion": "Hold"},
    }))
    .spec;
    let policy = spec.update_policy(6);
    assert_eq!((policy.pause, policy.kv_cache, policy.min_ready), (PausePolicy::Abort, KvCachePolicy::Keep, 3));
    assert_eq!((policy.update_timeout_ms, policy.silence_ms, policy.retain_bytes), (60_000, 3000, 5 << 20));
    assert_eq!((policy.bucket_bytes, policy.data_tls), (32 << 20, false));
    assert_eq!(policy.digest, weightsync_core::protocol::Digest::Xxh3);
    assert_eq!(spec.debounce_ms(), 7000);
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
    let canary = json!({"prompt": "Two and two is", "maxTokens": 4, "minLogProb": "-2.5", "maxLogProb": "-0.063"});
    let policy = object(json!({"membership": {"keep": 2}, "canary": canary})).spec.update_policy(1).canary.unwrap();
    assert_eq!((policy.prompt.as_str(), policy.max_tokens), ("Two and two is", 4));
    assert_eq!((policy.least_log_prob_milli, policy.greatest_log_prob_milli), (-2500, -63));
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
    let group = |replica: Value| pool(json!({"replica": replica})).spec.plan_pools()[0].group.clone();
    assert_eq!(group(json!({"pods": 1})), None);
    assert_eq!(
        group(json!({"pods": 2})),
        Some(GroupSpec {
            pods: 2,
            label: "leaderworkerset.sigs.k8s.io/group-key".to_owned(),
            head_label: "leaderworkerset.sigs.k8s.io/worker-index".to_owned(),
            head_value: "0".to_owned(),
        })
    );
    let own = group(json!({"pods": 3, "groupLabel": "g", "head": {"label": "role", "value": "head"}})).unwrap();
    assert_eq!((own.label.as_str(), own.head_label.as_str(), own.head_value.as_str()), ("g", "role", "head"));
}

#[test]
fn orders_sizes_engines_and_selectors_are_carried_over() {
    let object = pool(json!({
        "engine": {"sglang": {"ports": [30_001, 30_002]}},
        "parallelism": {"tensor": 4, "data": 2, "expert": 8},
        "order": {"by": "Explicit", "names": ["b", "a"]},
        "selector": {"matchLabels": {"app": "x"}, "matchExpressions": [
            {"key": "tier", "operator": "In", "values": ["a", "b"]},
            {"key": "gone", "operator": "DoesNotExist"},
        ]},
    }));
    let spec = &object.spec.plan_pools()[0];
    assert_eq!(spec.ports, [30_001, 30_002]);
    assert_eq!(spec.parallelism, Parallelism { tensor: 4, pipeline: 1, data: 2, expert: 8 });
    assert_eq!(spec.order, Order::Explicit(vec!["b".to_owned(), "a".to_owned()]));
    assert_eq!(spec.selector.labels["app"], "x");
    assert_eq!(spec.selector.requirements[0].operator, Operator::In(["a".to_owned(), "b".to_owned()].into()));
    assert_eq!(spec.selector.requirements[1].operator, Operator::DoesNotExist);
    let engines = WeightSyncSpec::engines(&object.spec.rollouts[0]);
    let engine = |port| EngineAssignment { kind: "sglang".to_owned(), port };
    assert_eq!(engines, [engine(30_001), engine(30_002)]);
    for (by, expected) in [("Ordinal", Order::Ordinal), ("Name", Order::Name)] {
        assert_eq!(pool(json!({"order": {"by": by}})).spec.plan_pools()[0].order, expected);
    }
    let labelled = pool(json!({"order": {"by": "Label", "label": "rank"}}));
    assert_eq!(labelled.spec.plan_pools()[0].order, Order::Label("rank".to_owned()));
}

#[test]
fn the_trainers_order_is_carried_over() {
    let order = |order: Value| {
        let trainer = object(json!({"trainer": {"selector": {"matchLabels": {"app": "t"}}, "order": order}})).spec.trainer.to_plan();
        assert_eq!(trainer.sources, 1);
        (trainer.order, trainer.first_index)
    };
    assert_eq!(order(json!({"by": "Ordinal", "firstIndex": 4})), (Order::Ordinal, 4));
    assert_eq!(order(json!({"by": "Name"})), (Order::Name, 0));
    assert_eq!(order(json!({"by": "Label", "label": "rank"})), (Order::Label("rank".to_owned()), 0));
    assert_eq!(order(json!({"by": "Explicit", "names": ["a"]})), (Order::Explicit(vec!["a".to_owned()]), 0));
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
        (json!({"auto": {}}), Auto),
        (json!({"preflight": "Off"}), Off),
        (json!({"gdr": {}, "preflight": "Off"}), Off),
        (json!({"tcp": {}, "preflight": "Auto"}), Auto),
    ] {
        assert_eq!(object(json!({"transport": transport})).spec.update_policy(1).transport.preflight, expected, "{transport}");
    }
    assert_eq!(object(json!({})).spec.update_policy(1).transport.preflight, Auto);
}

//! Each CEL rule, with an object that keeps it and one that breaks it, and the same words from the rule's twin in code.

use std::collections::BTreeSet;

use kube::core::cel::{ErrorKind, Validator, apply_defaults};
use serde_json::{Value, json};

use super::least;
use crate::api::{WeightSync, schema, validate};
use weightsync_core::protocol::TransportWish;

/// Sets the value at a JSON pointer, making objects on the way.
fn set(object: &mut Value, pointer: &str, value: Value) {
    let mut place = object;
    for part in pointer.split('/').skip(1) {
        place = match part.parse::<usize>() {
            Ok(at) if place.is_array() => &mut place[at],
            _ => &mut place[part],
        };
    }
    *place = value;
}

fn with(changes: &[(&str, Value)]) -> Value {
    let mut object = least();
    for (pointer, value) in changes {
        set(&mut object, pointer, value.clone());
    }
    object
}

/// Messages of the rules that the API server would report.
fn cel(object: &Value) -> Vec<String> {
    match Validator::new().validate(&schema().unwrap(), object, None) {
        Ok(()) => Vec::new(),
        Err(errors) => errors
            .into_vec()
            .into_iter()
            .map(|error| {
                assert_eq!(error.kind, ErrorKind::ValidationFailure, "{error:?}");
                error.message
            })
            .collect(),
    }
}

/// Messages of the rules in code.
fn code(object: &Value) -> Vec<String> {
    let object: WeightSync = serde_json::from_value(object.clone()).unwrap();
    validate(&object.spec).into_iter().map(|problem| problem.message).collect()
}

const POOL: &str = "/spec/rollouts/0";

/// What keeps and what breaks one rule.
struct Case {
    message: &'static str,
    good: Vec<(&'static str, Value)>,
    bad: Vec<(&'static str, Value)>,
}

fn case(message: &'static str, good: &[(&'static str, Value)], bad: &[(&'static str, Value)]) -> Case {
    Case { message, good: good.to_vec(), bad: bad.to_vec() }
}

fn cases() -> Vec<Case> {
    let order = "/spec/rollouts/0/order";
    let trainer = "/spec/trainer/order";
    let engine = "/spec/rollouts/0/engine";
    let selector = "/spec/trainer/selector";
    let key = json!({"kind": "VLLM", "apiKeySecretRef": {"name": "keys", "key": "vllm"}});
    vec![
        case(
            "an empty selector would mean every pod: name at least one label in matchLabels or matchExpressions",
            &[(selector, json!({"matchExpressions": [{"key": "app", "operator": "Exists"}]}))],
            &[(selector, json!({"matchLabels": {}}))],
        ),
        case(
            "values must be given for In and NotIn, and not for Exists and DoesNotExist",
            &[(selector, json!({"matchExpressions": [{"key": "app", "operator": "In", "values": ["a"]}]}))],
            &[(selector, json!({"matchExpressions": [{"key": "app", "operator": "NotIn"}]}))],
        ),
        case(
            "values must be given for In and NotIn, and not for Exists and DoesNotExist",
            &[(selector, json!({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}))],
            &[(selector, json!({"matchExpressions": [{"key": "app", "operator": "Exists", "values": ["a"]}]}))],
        ),
        case(
            "an order goes by a label or by names: give exactly one of order.label and order.names",
            &[(trainer, json!({"label": "rank"}))],
            &[(trainer, json!({}))],
        ),
        case(
            "an order goes by a label or by names: give exactly one of order.label and order.names",
            &[(order, json!({"names": ["b", "a"]}))],
            &[(order, json!({"label": "rank", "names": ["a"]}))],
        ),
        case(
            "order.names must not list a pod twice",
            &[(trainer, json!({"names": ["a"]}))],
            &[(trainer, json!({"names": ["a", "b", "a"]}))],
        ),
        case("order.names must not list a pod twice", &[], &[(order, json!({"names": ["a", "a"]}))]),
        case(
            "the name trainer is taken by the trainer's own pods: choose another",
            &[("/spec/rollouts/0/name", json!("trainers"))],
            &[("/spec/rollouts/0/name", json!("trainer"))],
        ),
        case(
            "delivery Engine moves weights by NCCL only: set transport.type to Auto or NCCL, or delivery to Agent",
            &[("/spec/delivery", json!("Engine")), ("/spec/transport", json!({"type": "NCCL"}))],
            &[("/spec/delivery", json!("Engine")), ("/spec/transport", json!({"type": "TCP"}))],
        ),
        case(
            "delivery Engine moves weights by NCCL only: set transport.type to Auto or NCCL, or delivery to Agent",
            &[("/spec/delivery", json!("Engine")), ("/spec/transport", json!({"bucketMiB": 16}))],
            &[("/spec/delivery", json!("Engine")), ("/spec/transport", json!({"type": "GDR"}))],
        ),
        case(
            "transport GDR works between agents only: set transport.type to Auto, or delivery to Agent",
            &[("/spec/transport", json!({"type": "GDR", "bucketMiB": 16, "allowTcp": true}))],
            &[("/spec/delivery", json!("External")), ("/spec/transport", json!({"type": "GDR"}))],
        ),
        case(
            "SGLang has no pause that lets running requests end: set update.pause to Keep, Abort, AbortAwake or External",
            &[(engine, json!({"kind": "SGLang"})), ("/spec/update", json!({"pause": "Keep"}))],
            &[(engine, json!({"kind": "SGLang"})), ("/spec/update", json!({"pause": "Drain"}))],
        ),
        case(
            "LMDeploy has no pause that lets running requests wait or end: set update.pause to Abort, AbortAwake or External",
            &[(engine, json!({"kind": "LMDeploy"})), ("/spec/update", json!({"pause": "Abort"}))],
            &[(engine, json!({"kind": "LMDeploy"})), ("/spec/update", json!({"pause": "Drain"}))],
        ),
        case(
            "an LMDeploy that joins a group answers while it loads: set update.pause to AbortAwake or External, or delivery to Agent",
            &[(engine, json!({"kind": "LMDeploy"})), ("/spec/update", json!({"pause": "AbortAwake"})), ("/spec/delivery", json!("Engine"))],
            &[(engine, json!({"kind": "LMDeploy"})), ("/spec/update", json!({"pause": "Abort"})), ("/spec/delivery", json!("Engine"))],
        ),
        case(
            "FastDeploy's pause ends requests and empties caches, and it resumes by itself after an update: set update.pause to Abort and update.kvCache to Reset",
            &[(engine, json!({"kind": "FastDeploy"})), ("/spec/update", json!({"pause": "Abort"}))],
            &[(engine, json!({"kind": "FastDeploy"})), ("/spec/update", json!({"pause": "Abort", "kvCache": "Keep"}))],
        ),
        case(
            "a replica of several pods has one engine port, on its head: list one port",
            &[("/spec/rollouts/0/replica/pods", json!(2)), ("/spec/rollouts/0/engine/ports", json!([8001]))],
            &[("/spec/rollouts/0/replica/pods", json!(2)), ("/spec/rollouts/0/engine/ports", json!([8001, 8002]))],
        ),
        case(
            "a replica of several pods has one engine port, on its head: list one port",
            &[(engine, json!({"kind": "SGLang", "ports": [1, 2]}))],
            &[("/spec/rollouts/0/replica/pods", json!(2)), (engine, json!({"kind": "SGLang", "ports": [1, 2]}))],
        ),
        case(
            "engines that register take ports of their own, and a replica is one of them: remove engine.ports and replica.pods",
            &[(engine, json!({"kind": "VLLM", "discovery": "Registered"}))],
            &[(engine, json!({"kind": "VLLM", "discovery": "Registered", "ports": [8001]}))],
        ),
        case(
            "engine.maxRegistered is for engines that register: remove it, or set engine.discovery to Registered",
            &[(engine, json!({"kind": "VLLM", "discovery": "Registered", "maxRegistered": 2}))],
            &[(engine, json!({"kind": "VLLM", "maxRegistered": 2}))],
        ),
        case(
            "engines that register take ports of their own, and a replica is one of them: remove engine.ports and replica.pods",
            &[(engine, json!({"kind": "VLLM", "discovery": "Ports"})), ("/spec/rollouts/0/replica/pods", json!(2))],
            &[(engine, json!({"kind": "VLLM", "discovery": "Registered"})), ("/spec/rollouts/0/replica/pods", json!(2))],
        ),
        case(
            "transport.ncclEnv takes settings of NCCL from a fixed list only, none that loads code or writes files: see the reference",
            &[("/spec/transport", json!({"ncclEnv": {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5"}}))],
            &[("/spec/transport", json!({"type": "NCCL", "ncclEnv": {"NCCL_NET_PLUGIN": "/tmp/evil.so"}}))],
        ),
        case(
            "minReady must be a number from 1 to 99999, or a percentage from \"1%\" to \"100%\"",
            &[("/spec/membership/minReady", json!("50%"))],
            &[("/spec/membership/minReady", json!("0%"))],
        ),
        case(
            "minReady must be a number from 1 to 99999, or a percentage from \"1%\" to \"100%\"",
            &[("/spec/membership/minReady", json!(3))],
            &[("/spec/membership/minReady", json!(0))],
        ),
        case(
            "minReady must be a number from 1 to 99999, or a percentage from \"1%\" to \"100%\"",
            &[("/spec/membership/minReady", json!("100%"))],
            &[("/spec/membership/minReady", json!("half"))],
        ),
        case(
            "minReady must be a number from 1 to 99999, or a percentage from \"1%\" to \"100%\"",
            &[("/spec/membership/minReady", json!("3"))],
            &[("/spec/membership/minReady", json!("03"))],
        ),
        case(
            "minReady must be a number from 1 to 99999, or a percentage from \"1%\" to \"100%\"",
            &[("/spec/membership/minReady", json!(99_999))],
            &[("/spec/membership/minReady", json!("101%"))],
        ),
        case(
            "minReady must be a number from 1 to 99999, or a percentage from \"1%\" to \"100%\"",
            &[],
            &[("/spec/membership/minReady", json!(-1))],
        ),
        case(
            "maxUnavailable must be a number from 1 to 99999, or a percentage from \"1%\" to \"100%\"",
            &[("/spec/membership/maxUnavailable", json!("25%"))],
            &[("/spec/membership/maxUnavailable", json!("0%"))],
        ),
        case(
            "maxUnavailable must be a number from 1 to 99999, or a percentage from \"1%\" to \"100%\"",
            &[("/spec/membership/maxUnavailable", json!(1))],
            &[("/spec/membership/maxUnavailable", json!(0))],
        ),
        case(
            "membership.maxUnavailable needs delivery Agent, where the whole version arrives before engines switch: remove it, or set delivery to Agent",
            &[("/spec/delivery", json!("Agent")), ("/spec/membership/maxUnavailable", json!(1))],
            &[("/spec/delivery", json!("External")), ("/spec/membership/maxUnavailable", json!(1))],
        ),
        case(
            "a log-prob must be a number from -999.999 to 0 with at most three decimals, such as -4 or \"-2.5\"",
            &[("/spec/membership/keep", json!(2)), ("/spec/canary", json!({"prompt": "a", "minLogProb": "-999.999"}))],
            &[("/spec/membership/keep", json!(2)), ("/spec/canary", json!({"prompt": "a", "minLogProb": "-2,5"}))],
        ),
        case(
            "a log-prob must be a number from -999.999 to 0 with at most three decimals, such as -4 or \"-2.5\"",
            &[("/spec/membership/keep", json!(2)), ("/spec/canary", json!({"prompt": "a", "minLogProb": -4}))],
            &[("/spec/membership/keep", json!(2)), ("/spec/canary", json!({"prompt": "a", "minLogProb": 1}))],
        ),
        case(
            "a canary needs an earlier version to go back to: set membership.keep to 2 or more",
            &[("/spec/membership/keep", json!(2)), ("/spec/canary", json!({"prompt": "a", "minLogProb": "-2.5"}))],
            &[("/spec/canary", json!({"prompt": "a", "minLogProb": "-2.5"}))],
        ),
        case(
            "a canary does not work if the trainer feeds or pauses the engines: remove canary, or change delivery and update.pause from External",
            &[("/spec/delivery", json!("External")), ("/spec/update/pause", json!("External"))],
            &[
                ("/spec/delivery", json!("External")),
                ("/spec/membership/keep", json!(2)),
                ("/spec/canary", json!({"prompt": "a", "minLogProb": "-2.5"})),
            ],
        ),
        case(
            "a canary does not work if the trainer feeds or pauses the engines: remove canary, or change delivery and update.pause from External",
            &[],
            &[
                ("/spec/update/pause", json!("External")),
                ("/spec/membership/keep", json!(2)),
                ("/spec/canary", json!({"prompt": "a", "minLogProb": "-2.5"})),
            ],
        ),
        case(
            "update.silenceSeconds must not be longer than update.timeoutSeconds",
            &[("/spec/update", json!({"timeoutSeconds": 10, "silenceSeconds": 10}))],
            &[("/spec/update", json!({"timeoutSeconds": 9}))],
        ),
        case(
            "an ephemeral container's memory is the trainer's, so nothing can be retained there: remove update.retainMiB or choose another \
             agent.launch",
            &[("/spec/agent/launch", json!("Ephemeral")), ("/spec/update/retainMiB", json!(0))],
            &[("/spec/agent/launch", json!("Ephemeral")), ("/spec/update/retainMiB", json!(1))],
        ),
        case(
            "apiKeySecretRef works with agent.launch Ephemeral; an agent that was injected gets the key from the \
             pod's annotation weightsync.dev/api-key-secret, an external agent from its own environment",
            &[("/spec/rollouts/0/engine", key.clone()), ("/spec/agent/launch", json!("Ephemeral"))],
            &[("/spec/rollouts/0/engine", key)],
        ),
    ]
}

#[test]
fn the_least_object_is_valid_in_both_forms() {
    assert_eq!(cel(&least()), Vec::<String>::new());
    assert_eq!(code(&least()), Vec::<String>::new());
}

#[test]
fn each_rule_passes_good_objects_and_refuses_bad_ones() {
    for case in cases() {
        let good = with(&case.good);
        assert_eq!(cel(&good), Vec::<String>::new(), "{good}");
        assert_eq!(code(&good), Vec::<String>::new(), "{good}");
        let bad = with(&case.bad);
        assert_eq!(cel(&bad), [case.message], "{bad}");
        assert_eq!(code(&bad), [case.message], "the rule in code differs: {bad}");
    }
}

#[test]
fn every_rule_of_the_schema_is_among_the_cases() {
    fn collect(schema: &Value, messages: &mut BTreeSet<String>) {
        match schema {
            Value::Object(fields) => {
                for rule in fields.get("x-kubernetes-validations").and_then(Value::as_array).into_iter().flatten() {
                    messages.insert(rule["message"].as_str().expect("a rule without a message for people").to_owned());
                }
                fields.values().for_each(|schema| collect(schema, messages));
            }
            Value::Array(items) => items.iter().for_each(|schema| collect(schema, messages)),
            _ => {}
        }
    }
    let mut messages = BTreeSet::new();
    collect(&schema().unwrap(), &mut messages);
    let covered: BTreeSet<String> = cases().iter().map(|case| case.message.to_owned()).collect();
    assert_eq!(messages, covered);
}

#[test]
fn a_canarys_limits_hold_in_code_too() {
    let object = |canary: Value| with(&[("/spec/membership/keep", json!(2)), ("/spec/canary", canary)]);
    assert_eq!(code(&object(json!({"prompt": "a", "maxTokens": 64, "minLogProb": -999}))), Vec::<String>::new());
    let no_number = "a log-prob must be a number from -999.999 to 0 with at most three decimals, such as -4 or \"-2.5\"";
    let bad = [
        (json!({"prompt": "", "minLogProb": -1}), "it must have 1 to 4096 characters"),
        (json!({"prompt": "a", "maxTokens": 0, "minLogProb": -1}), "it must be from 1 to 64"),
        (json!({"prompt": "a", "maxTokens": 65, "minLogProb": -1}), "it must be from 1 to 64"),
        (json!({"prompt": "a", "minLogProb": -1000}), no_number),
        (json!({"prompt": "a", "minLogProb": 1}), no_number),
        (json!({"prompt": "a", "minLogProb": "-01"}), no_number),
        (json!({"prompt": "a", "minLogProb": "-1.2345"}), no_number),
        (json!({"prompt": "a", "minLogProb": "half"}), no_number),
    ];
    for (canary, message) in bad {
        assert_eq!(code(&object(canary.clone())), [message], "{canary}");
    }
}

/// Limits of single fields are the schema's own; an object from a file must not get around them.
#[test]
fn limits_of_single_fields_hold_in_code_too() {
    let bad = [
        ("/spec/rollouts", json!([])),
        ("/spec/rollouts/0/name", json!("Actors")),
        ("/spec/rollouts/0/replica/headLabels", json!({})),
        ("/spec/rollouts/0/engine/ports", json!([0])),
        ("/spec/rollouts/0/engine/ports", json!([70_000])),
        ("/spec/rollouts/0/engine/ports", json!([1, 1])),
        ("/spec/rollouts/0/engine/tensors", json!({"ignore": ["*"]})),
        ("/spec/rollouts/0/engine/tensors", json!({"ignore": [""]})),
        ("/spec/rollouts/0/engine/tensors", json!({"ignore": ["two words"]})),
        ("/spec/rollouts/0/engine/tensors", json!({"ignore": ["a".repeat(257)]})),
        ("/spec/rollouts/0/engine/tensors", json!({"ignore": ["*.bias", "*.bias"]})),
        ("/spec/rollouts/0/engine/tensors", json!({"ignore": (0..65).map(|number| format!("t{number}")).collect::<Vec<_>>()})),
        ("/spec/rollouts/0/ranks", json!(0)),
        ("/spec/rollouts/0/ranks", json!(65_537)),
        ("/spec/rollouts/0/replica/pods", json!(0)),
        ("/spec/transport/bucketMiB", json!(0)),
        ("/spec/transport/bucketMiB", json!(1025)),
        ("/spec/health/periodSeconds", json!(0)),
        ("/spec/health/timeoutSeconds", json!(301)),
        ("/spec/health/failureThreshold", json!(0)),
        ("/spec/membership/maxSkew", json!(-1)),
        ("/spec/update/timeoutSeconds", json!(100_000)),
        ("/spec/update/silenceSeconds", json!(0)),
        ("/spec/update/retainMiB", json!(-1)),
    ];
    for (pointer, value) in bad {
        let object = with(&[(pointer, value)]);
        assert!(!code(&object).is_empty(), "{object}");
    }
    let mut twins = least();
    let pool = twins.pointer(POOL).cloned().unwrap();
    twins["spec"]["rollouts"].as_array_mut().unwrap().push(pool);
    assert_eq!(code(&twins), ["two pools have this name"]);
}

/// What an API server stores of an object, and what `kubectl apply` of `next` makes of it: both kinds of apply keep fields that the user did not
/// write, and the server fills in defaults again.
fn applied_over(before: &Value, next: &Value) -> Value {
    fn merge(into: &mut Value, from: &Value) {
        match (into, from) {
            (Value::Object(into), Value::Object(from)) => {
                for (field, value) in from {
                    merge(into.entry(field.clone()).or_insert(Value::Null), value);
                }
            }
            (into, from) => *into = from.clone(),
        }
    }
    let mut stored = apply_defaults(&schema().unwrap(), before);
    // A list of pools is given whole; the pools are the same in both.
    merge(&mut stored["spec"]["transport"], &next["spec"]["transport"]);
    if stored["spec"]["transport"].is_null() {
        stored["spec"].as_object_mut().unwrap().remove("transport");
    }
    apply_defaults(&schema().unwrap(), &stored)
}

#[test]
fn transport_that_is_added_later_is_accepted() {
    let without = least();
    for transport in [json!({"type": "TCP"}), json!({"type": "NCCL"}), json!({"type": "Auto"})] {
        let with = with(&[("/spec/transport", transport.clone())]);
        let stored = applied_over(&without, &with);
        assert_eq!(cel(&stored), Vec::<String>::new(), "{transport}");
        assert_eq!(code(&stored), Vec::<String>::new(), "{transport}");
    }
}

#[test]
fn object_without_a_transport_is_automatic() {
    let stored = applied_over(&least(), &least());
    let object: WeightSync = serde_json::from_value(stored.clone()).unwrap();
    assert_eq!(object.spec.transport_policy().wish, TransportWish::Auto);
    let engine = with(&[("/spec/delivery", json!("Engine"))]);
    assert_eq!((cel(&engine), code(&engine)), (Vec::new(), Vec::new()), "a rule about a field that is not there");
}

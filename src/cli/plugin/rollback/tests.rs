use serde_json::{Value, json};

use super::*;

fn object(spec: &Value, status: &Value) -> WeightSync {
    let mut object = json!({
        "apiVersion": "weightsync.dev/v1alpha1", "kind": "WeightSync", "metadata": {"name": "run", "generation": 2},
        "spec": {
            "trainer": {"selector": {"matchLabels": {"app": "trainer"}}},
            "rollouts": [{"name": "actors", "selector": {"matchLabels": {"app": "actor"}}, "engine": {"kind": "VLLM", "ports": [8000]}}],
        },
        "status": status,
    });
    for (field, value) in spec.as_object().unwrap() {
        object["spec"][field] = value.clone();
    }
    serde_json::from_value(object).unwrap()
}

fn member(name: &str, version: i64, retained: &[i64]) -> Value {
    json!({"name": name, "size": 1, "state": "Ready", "reason": "MemberReady", "version": version, "retained": retained})
}

#[test]
fn the_version_that_is_meant_must_be_kept_by_somebody() {
    let members = json!([member("trainer/t", 7, &[7]), member("actors/a", 7, &[7, 5]), member("actors/b", 7, &[7, 4])]);
    let kept = object(&json!({"membership": {"keep": 2}}), &json!({"version": 7, "members": members}));
    assert_eq!(choose(&kept, None).unwrap(), 5);
    assert_eq!(choose(&kept, Some(4)).unwrap(), 4);
    assert_eq!(choose(&kept, Some(7)).unwrap(), 7);
    let error = choose(&kept, Some(6)).unwrap_err().to_string();
    assert!(error.contains("no member keeps version 6") && error.contains("4, 5, 7") && error.contains("keep: 2"), "{error}");
    let canary = json!({"membership": {"keep": 2}, "canary": {"prompt": "p", "minLogProb": -4}});
    let refused = object(&canary, &json!({"version": 7, "members": members, "refused": [5]}));
    assert_eq!(choose(&refused, None).unwrap(), 4, "what the canary refused is passed over");
    assert!(choose(&refused, Some(5)).unwrap_err().to_string().contains("remove spec.canary"));
    let none = object(&json!({}), &json!({"version": 7, "members": [member("actors/a", 7, &[7])]}));
    let error = choose(&none, None).unwrap_err().to_string();
    assert!(error.contains("below 7") && error.contains("keep: 1"), "{error}");
    let suspended = object(&json!({"suspend": true}), &json!({"version": 7}));
    let error = choose(&suspended, None).unwrap_err().to_string();
    assert!(error.contains(r#"kubectl patch ws run --type merge -p '{"spec":{"suspend":false}}' first"#), "{error}");
    assert!(choose(&object(&json!({}), &json!({})), None).unwrap_err().to_string().contains("no version yet"));
}

#[test]
fn it_is_there_when_the_controller_says_so_of_this_generation() {
    let condition = |kind: &str, reason: &str| json!({"type": kind, "status": "True", "reason": reason, "message": "kept are: 7", "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let members = json!([member("trainer/t", 7, &[]), member("actors/a", 5, &[]), member("actors/b", 7, &[])]);
    let at = |generation: i64, version: i64, conditions: &Value| {
        let status = json!({"observedGeneration": generation, "version": version, "members": members, "conditions": conditions});
        progress(&object(&json!({}), &status), 5, Some(2))
    };
    let settled = json!([]);
    assert_eq!(at(1, 5, &settled), Progress::Moving(1, 2));
    assert_eq!(at(2, 7, &settled), Progress::Moving(1, 2));
    assert_eq!(at(2, 5, &json!([condition("Progressing", "Updating")])), Progress::Moving(1, 2), "members are fed");
    assert_eq!(at(2, 5, &settled), Progress::There);
    assert_eq!(at(2, 7, &json!([condition("Degraded", "TargetVersionMissing")])), Progress::Missing("kept are: 7".to_owned()));
}

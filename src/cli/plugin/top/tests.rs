use serde_json::json;

use super::{rows, table};
use crate::api::WeightSync;

fn object(name: &str, members: serde_json::Value) -> WeightSync {
    serde_json::from_value(json!({
        "apiVersion": "weightsync.dev/v1alpha1", "kind": "WeightSync", "metadata": {"name": name, "namespace": "rl"},
        "spec": {
            "trainer": {"selector": {"matchLabels": {"app": "trainer"}}},
            "rollouts": [{"name": "actors", "selector": {"matchLabels": {"app": "actor"}}, "engine": {"kind": "VLLM"}}]
        },
        "status": {"members": members}
    }))
    .unwrap()
}

#[test]
fn slowest_member_of_all_objects_comes_first() {
    let member = |name: &str, rate: i64| {
        json!({"name": name, "size": 1, "state": "Ready", "reason": "MemberReady",
            "lastTransfer": {"version": 7, "from": "trainer/t", "transport": "tcp", "bytes": 2_000_000_000, "milliseconds": 1000, "bytesPerSecond": rate}})
    };
    let source = json!({"name": "trainer/t", "size": 1, "state": "Ready", "reason": "MemberReady"});
    let objects = [
        object("one", json!([source, member("actors/a", 2_000_000_000), member("actors/b", 500_000_000)])),
        object("two", json!([member("actors/a", 1_000_000_000)])),
    ];
    let found = rows(&objects);
    let names: Vec<_> = found.iter().map(|row| (row.object.as_str(), row.member.as_str())).collect();
    assert_eq!(names, [("one", "actors/b"), ("two", "actors/a"), ("one", "actors/a")]);
    let text = table(&found);
    assert!(text.lines().nth(1).unwrap().contains("0.50") && text.contains("trainer/t"), "{text}");
    assert!(table(&rows(&[object("new", json!([]))])).contains("publish one"));
}

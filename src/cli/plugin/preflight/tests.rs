use serde_json::{Value, json};

use super::*;

fn object(transport: &Value, status: &Value) -> WeightSync {
    serde_json::from_value(json!({
        "apiVersion": "weightsync.dev/v1alpha1", "kind": "WeightSync", "metadata": {"name": "run"},
        "spec": {
            "trainer": {"selector": {"matchLabels": {"app": "trainer"}}},
            "rollouts": [{"name": "actors", "selector": {"matchLabels": {"app": "actor"}}, "engine": {"kind": "VLLM", "ports": [8000]}}],
            "transport": transport,
        },
        "status": status,
    }))
    .unwrap()
}

#[test]
fn object_without_edges_is_refused_with_what_to_change() {
    let error = |transport: Value, status: Value| refuse(&object(&transport, &status)).unwrap_err().to_string();
    assert!(error(json!({"preflight": "Off"}), json!({})).contains("set it to Auto"));
    assert!(error(json!({}), json!({"transport": {"name": "nccl", "reason": "r"}})).contains("NCCL"));
    assert!(refuse(&object(&json!({"type": "TCP"}), &json!({}))).is_ok());
}

#[test]
fn table_names_a_slow_edge_and_who_is_left_out() {
    let good = json!({
        "from": "trainer/t", "to": "actors/a", "fromNode": "n1", "toNode": "n2", "verdict": "Good",
        "bytesPerSecond": 1_500_000_000, "roundTripMicroseconds": 210, "mtu": 9000, "clockMilliseconds": -3,
    });
    let slow = json!({"from": "actors/a", "to": "actors/b", "fromNode": "n2", "toNode": "n3", "verdict": "Slow", "message": "a tenth"});
    let preflight = json!({"state": "Done", "transport": "tcp", "measured": 3, "milliseconds": 420, "edges": [slow, good]});
    let out = json!({"name": "actors/c", "size": 1, "state": "Out", "reason": "BadEdge", "message": "no bytes"});
    let object = object(&json!({}), &json!({"preflight": preflight, "members": [out]}));
    let text = table(&object, object.status.as_ref().unwrap().preflight.as_ref().unwrap());
    for words in [
        "n2 > n3",
        "Slow",
        "a tenth",
        "1.50 GB/s",
        "210 us",
        "9000",
        "-3 ms",
        "left out: actors/c (BadEdge): no bytes",
        "3 edges measured in 420 ms",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

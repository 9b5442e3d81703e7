use serde_json::json;

use super::{gigabytes, is_ready, table};
use crate::api::WeightSync;

fn object() -> WeightSync {
    serde_json::from_value(json!({
            "apiVersion": "weightsync.dev/v1alpha1", "kind": "WeightSync", "metadata": {"name": "run", "namespace": "rl"},
            "spec": {
                "trainer": {"selector": {"matchLabels": {"app": "trainer"}}},
                "rollouts": [{"name": "actors", "selector": {"matchLabels": {"app": "actor"}}, "engine": {"kind": "VLLM", "ports": [8000]}}]
            },
            "status": {
                "epoch": 4, "worldSize": 3, "version": 7, "refused": [6, 8], "replicas": {"total": 2, "ready": 1, "display": "1/2"},
                "transport": {"name": "tcp", "reason": "no GPU"},
                "conditions": [
                    {"type": "Ready", "status": "True", "reason": "MemberReady", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"},
                    {"type": "Degraded", "status": "True", "reason": "AgentLost", "message": "actors/b: gone", "lastTransitionTime": "2026-01-01T00:00:00Z"}
                ],
                "members": [
                    {"name": "trainer/t", "rankOffset": 0, "size": 1, "state": "Ready", "reason": "MemberReady"},
                    {"name": "actors/a", "rankOffset": 1, "size": 2, "state": "Ready", "version": 7, "provenBy": "Nothing", "reason": "MemberReady", "retained": [7, 5],
                     "lastTransfer": {"version": 7, "from": "trainer/t", "transport": "gdr", "bytes": 48_600_000_000_i64, "milliseconds": 2000, "bytesPerSecond": 24_300_000_000_i64},
                     "gdr": {"library": "/lib/libnixl_capi.so", "version": "1.5.1", "plugin": "UCX", "transports": ["rc", "cuda_copy"],
                       "devices": [{"memory": "GPU-1", "names": ["mlx5_0:1", "mlx5_1:1"]}, {"memory": "host", "names": ["mlx5_2:1"]}]}},
                    {"name": "actors/b", "size": 2, "state": "Out", "reason": "AgentLost", "message": "the connection closed"}
                ]
            }
        }))
        .unwrap()
}

#[test]
fn status_names_ranks_versions_and_reasons() {
    let text = table(&object());
    assert!(text.contains("rl/run: 1/2 ready, version 7, epoch 4, world size 3, transport tcp (no GPU)"), "{text}");
    assert!(text.contains("Degraded=True AgentLost: actors/b: gone"), "{text}");
    assert!(!text.contains("Ready=True"), "{text}");
    assert!(text.contains("kept versions: 7 (by 1), 5 (by 1)"), "{text}");
    assert!(text.contains("refused by the canary: 8, 6"), "{text}");
    let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(line("actors/a"), "actors/a Ready 1-2 7 not proven 24.30 trainer/t (gdr) MemberReady");
    let last = text.lines().last().unwrap();
    let library = "NIXL 1.5.1 (/lib/libnixl_capi.so), UCX over rc, cuda_copy";
    assert_eq!(last, format!("actors/a reads with {library}; GPU-1: mlx5_0:1, mlx5_1:1; host: mlx5_2:1"));
    assert_eq!(line("actors/b"), "actors/b Out - (2) - - - - AgentLost the connection closed");
    assert!(is_ready(&object()));
}

#[test]
fn gigabytes_have_two_digits_and_are_rounded() {
    for (bytes, shown) in
        [(0, "0.00"), (4_999_999, "0.00"), (5_000_000, "0.01"), (994_999_999, "0.99"), (1_000_000_000, "1.00"), (-1, "0.00")]
    {
        assert_eq!(gigabytes(bytes), shown, "{bytes}");
    }
    assert!(gigabytes(i64::MAX).starts_with("9223372036"));
}

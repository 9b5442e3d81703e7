//! vLLM 0.32 with `VLLM_SERVER_DEV_MODE=1`: every answer here was seen on the real server on CPU.

use serde_json::json;

use super::{Call, call, one_token};

pub(super) fn calls(model: &str, has_key: bool) -> Vec<Call> {
    let rpc = "POST /collective_rpc";
    let version = "POST /update_weight_version";
    let completions = "POST /v1/completions";
    let mut calls = vec![
        call("GET /health", 200),
        call("GET /version", 200),
        call("GET /v1/models", 200).field("/object", json!("list")),
        // The key guards nothing else.
        call("GET /weight_info", 200).without_key(),
        call("GET /is_paused", 200).field("/is_paused", json!(false)),
        call("GET /is_sleeping", 200).field("/is_sleeping", json!(false)),
        call("GET /get_world_size", 200),
        call("GET /get_world_size?include_dp=true", 200),
        call("GET /get_world_size?include_dp=maybe", 400),
        call("GET /pause", 405),
        call("POST /pause?mode=bogus", 400),
        call("POST /pause?mode=keep&clear_cache=perhaps", 400),
        call(rpc, 400),
        call(rpc, 400).body(json!({})),
        call(rpc, 400).body(json!([])),
        call(rpc, 500).body(json!({"method": "no_such_method"})),
        call(rpc, 500).body(json!({"method": "reload_weights", "kwargs": {"nonsense": "x"}})),
        call(version, 400).body(json!({})),
        call(version, 400).body(json!({"new_version": 7})),
        call("POST /reset_prefix_cache?reset_running_requests=perhaps", 400),
        call(completions, 404).body(json!({"model": "another", "prompt": "x"})),
        call(completions, 400).body(json!({"model": model})),
        call(completions, 200).body(one_token(model)),
        call(version, 200).body(json!({"new_version": "7+abc"})).field("/success", json!(true)).disturbs(),
        call("GET /weight_info", 200).field("/weight_version", json!("7+abc")).disturbs(),
        call(version, 200).body(json!({"new_version": "default"})).disturbs(),
    ];
    for mode in ["keep&clear_cache=false", "abort", "wait"] {
        calls.extend([
            call(&format!("POST /pause?mode={mode}"), 200).field("/status", json!("paused")).disturbs(),
            call(&format!("POST /pause?mode={mode}"), 200).disturbs(),
            call("GET /is_paused", 200).field("/is_paused", json!(true)).disturbs(),
            call("GET /health", 200).disturbs(),
            call("POST /resume", 200).field("/status", json!("resumed")).disturbs(),
            call("POST /resume", 200).disturbs(),
            call("GET /is_paused", 200).field("/is_paused", json!(false)).disturbs(),
            call(completions, 200).body(one_token(model)).disturbs(),
        ]);
    }
    calls.extend([
        call("POST /reset_prefix_cache", 200).field("/success", json!(true)).disturbs(),
        call(rpc, 500).body(json!({"method": "reload_weights", "kwargs": {"weights_path": "/nonexistent"}})).disturbs(),
        call(rpc, 200)
            .body(json!({"method": "reload_weights", "kwargs": {"weights_iterator": []}}))
            .field("/results", json!([null]))
            .disturbs(),
        call(completions, 200).body(one_token(model)).disturbs(),
    ]);
    if has_key {
        calls.push(call("GET /v1/models", 401).without_key());
    }
    calls
}

/// Refusals that are the same with and without `--weight-transfer-config`.
pub(super) fn group_calls() -> Vec<Call> {
    let init = "POST /init_weight_transfer_engine";
    vec![
        call(init, 500).body(json!({"init_info": {"nonsense": 1}})),
        call(init, 500).body(json!({"init_info": {}})),
        call("POST /update_weights", 500).body(json!({"update_info": {"names": [], "dtype_names": [], "shapes": []}})),
        call("GET /health", 200),
    ]
}

//! FastDeploy 2.6 with `--dynamic-load-weight --load_strategy ipc_snapshot`, as read in its sources; no server was run.

use serde_json::json;

use super::{Call, call, one_token};

pub(super) fn calls(model: &str, has_key: bool) -> Vec<Call> {
    let completions = "POST /v1/completions";
    let paused = |is: bool| call("GET /v1/is_paused", 200).field("/result/is_paused", json!(is));
    let success = |each: &str| call(each, 200).field("/status", json!("success")).disturbs();
    let mut calls = vec![
        call("GET /health", 200),
        call("GET /v1/models", 200).field("/object", json!("list")),
        paused(false),
        call("GET /v1/pause", 405),
        call("POST /v1/sleep?tags=weights", 400),
        call(completions, 200).body(one_token(model)),
        // Not paused, it must refuse.
        call("POST /v1/update_weights", 500).says("Pause LLM Engine first"),
        // Weights are there: nothing to do.
        call("GET /update_model_weight", 200),
        success("POST /v1/pause"),
        success("POST /v1/pause"),
        paused(true).disturbs(),
        call("POST /v1/update_weights", 400).body(json!({"version": 7})).disturbs(),
        success("POST /v1/resume"),
        success("POST /v1/resume"),
        paused(false).disturbs(),
        success("POST /v1/sleep?tags=weight,kv_cache"),
        paused(true).disturbs(),
        call("GET /health", 304).disturbs(),
        call(completions, 304).body(one_token(model)).disturbs(),
        success("POST /v1/wakeup?tags=weight,kv_cache"),
        // By itself.
        paused(false).disturbs(),
        call("GET /health", 200).disturbs(),
        call("GET /clear_load_weight", 200).disturbs(),
        call("GET /health", 304).disturbs(),
        call("GET /update_model_weight", 200).disturbs(),
        call("GET /health", 200).disturbs(),
        call(completions, 200).body(one_token(model)).disturbs(),
    ];
    if has_key {
        calls.push(call("GET /v1/models", 401).without_key());
    }
    calls
}

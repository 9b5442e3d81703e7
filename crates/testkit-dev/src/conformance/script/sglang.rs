//! SGLang 0.5.23, as read in its wheel (`srt/entrypoints/http_server.py`, `srt/managers/tokenizer_manager.py`); a server of it on CPU passes
//! (`tests/engine/sglang.sh`).

use serde_json::json;

use super::{Call, call, one_token};

pub(super) fn calls(model: &str, has_key: bool) -> Vec<Call> {
    let pause = "POST /pause_generation";
    let resume = "POST /continue_generation";
    let disk = "POST /update_weights_from_disk";
    let version = "POST /update_weight_version";
    let mut calls = vec![
        call("GET /health", 200),
        call("GET /ready", 200),
        call("GET /ping", 200),
        call("GET /server_info", 200),
        call("GET /model_info", 200).field("/is_generation", json!(true)),
        call("GET /pause_generation", 405),
        call(pause, 400).body(json!({"mode": "bogus"})),
        call(disk, 400).body(json!({})),
        call(version, 400).body(json!({})),
        call("POST /v1/completions", 200).body(one_token(model)),
        call("POST /generate", 200).body(json!({"text": "x", "sampling_params": {"max_new_tokens": 1, "temperature": 0}})),
    ];
    for mode in ["in_place", "retract", "abort"] {
        calls.extend([
            call(pause, 200).body(json!({"mode": mode})).field("/status", json!("ok")).disturbs(),
            // Only healthy and not paused.
            call("GET /ready", 503).disturbs(),
            call(resume, 200).body(json!({})).field("/status", json!("ok")).disturbs(),
            call("GET /ready", 200).disturbs(),
        ]);
    }
    calls.extend([
        call("POST /flush_cache", 200).disturbs(),
        call(version, 200).body(json!({"new_version": "7+abc", "abort_all_requests": false})).field("/success", json!(true)).disturbs(),
        call("GET /model_info", 200).field("/weight_version", json!("7+abc")).disturbs(),
        call(disk, 400).body(json!({"model_path": "/nonexistent"})).field("/success", json!(false)).disturbs(),
        // A version moves only with a call that succeeds.
        call(disk, 400).body(json!({"model_path": "/nonexistent", "weight_version": "8"})).disturbs(),
        call("GET /model_info", 200).field("/weight_version", json!("7+abc")).disturbs(),
        call(version, 200).body(json!({"new_version": "default", "abort_all_requests": false})).disturbs(),
        call("POST /v1/completions", 200).body(one_token(model)).disturbs(),
    ]);
    if has_key {
        calls.extend([call("GET /model_info", 401).without_key(), call("GET /ready", 200).without_key()]);
    }
    calls
}

/// Sessions: an update outside one is refused at once, without a word to the group.
pub(super) fn group_calls() -> Vec<Call> {
    let refused = |each: &str| call(each, 400).field("/success", json!(false));
    let update = json!({"names": ["x"], "dtypes": ["bfloat16"], "shapes": [[1]], "group_name": "nobodys"});
    vec![
        call("POST /init_weights_update_group", 400).body(json!({})),
        refused("POST /destroy_weights_update_group").body(json!({"group_name": "nobodys"})),
        refused("POST /end_weight_update").body(json!({})),
        call("POST /begin_weight_update", 400).body(json!({"selector": "nonsense"})),
        refused("POST /update_weights_from_distributed").body(update.clone()).disturbs(),
        call("POST /begin_weight_update", 200).body(json!({})).field("/success", json!(true)).disturbs(),
        refused("POST /begin_weight_update").body(json!({})).disturbs(),
        // A group without members.
        refused("POST /update_weights_from_distributed").body(update).disturbs(),
        call("POST /end_weight_update", 200).body(json!({})).field("/success", json!(true)).disturbs(),
        refused("POST /end_weight_update").body(json!({})).disturbs(),
    ]
}

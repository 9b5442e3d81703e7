//! LMDeploy 0.18 with the PyTorch backend, as read in its wheel and seen on H200 machines.

use serde_json::json;

use super::{Call, call, one_token};

pub(super) fn calls(model: &str, has_key: bool) -> Vec<Call> {
    let completions = "POST /v1/completions";
    let nothing = json!({});
    let mut calls = vec![
        call("GET /health", 200),
        call("GET /is_sleeping", 200).field("/is_sleeping", json!(false)),
        call("GET /update_weights_from_ipc", 200).field("/backend", json!("pytorch")).field("/ready", json!(false)),
        call("GET /distserve/engine_info", 200),
        call("GET /v1/models", 200).field("/object", json!("list")),
        // A JSON content type is wanted even where no body is.
        call("POST /sleep", 400),
        call("POST /sleep?level=3", 400).body(nothing.clone()),
        call(completions, 200).body(one_token(model)),
        call("POST /sleep?level=1", 200).body(nothing.clone()).disturbs(),
        call("GET /is_sleeping", 200).field("/is_sleeping", json!(true)).disturbs(),
        call("GET /health", 200).field("/status", json!("sleeping")).disturbs(),
        call(completions, 503).body(one_token(model)).disturbs(),
        // Buckets are refused while the cache does not sleep alone.
        call("GET /update_weights_from_ipc", 200).field("/ready", json!(false)).disturbs(),
        call("POST /wakeup?tags=weights", 200).body(nothing.clone()).disturbs(),
        call("GET /update_weights_from_ipc", 200).field("/ready", json!(true)).disturbs(),
        call(completions, 503).body(one_token(model)).disturbs(),
        // What does not sleep is woken with success.
        call("POST /wakeup?tags=weights", 200).body(nothing.clone()).disturbs(),
        call("POST /update_weights_from_ipc", 400).body(json!({"zmq_handles": {}})).field("/success", json!(false)).disturbs(),
        call("POST /wakeup?tags=kv_cache", 200).body(nothing).disturbs(),
        call("GET /is_sleeping", 200).field("/is_sleeping", json!(false)).disturbs(),
        call(completions, 200).body(one_token(model)).disturbs(),
    ];
    if has_key {
        calls.extend([call("GET /v1/models", 401).without_key(), call("GET /health", 200).without_key()]);
    }
    calls
}

/// Groups of the Ray executor; there is no session.
pub(super) fn group_calls() -> Vec<Call> {
    let refused = |each: &str| call(each, 400).field("/success", json!(false));
    vec![
        call("POST /init_weights_update_group", 422).body(json!({})),
        refused("POST /update_weights_from_distributed")
            .body(json!({"names": ["x"], "dtypes": ["bfloat16"], "shapes": [[1]], "group_name": "nobodys"})),
        call("GET /health", 200),
    ]
}

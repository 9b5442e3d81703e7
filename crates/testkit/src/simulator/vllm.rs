//! The endpoints of vLLM 0.32.0, with its status codes, bodies and order rules, as seen on the running server (`tests/engine` compares
//! them).
//!
//! Rules kept on purpose: every pause queues new requests (none is refused), `resume` is never an error, the engine's routes are not
//! guarded by the API key, `/health` reports nothing about the engine core, and a reload that failed half-way spoils the next one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use super::GpuOptions;
use super::backend::{self, WeightTransfer};
use super::completions::completions;
use super::core::Pause;
use super::front::Front;
use super::group::vllm::Transfer;
use super::group::{self, Ranks};
use super::served::Served;
use super::vllm_reply::{dead, error, invalid, worker_failed};

/// What guards `/v1` and nothing else (`entrypoints/serve/middleware/authenticate.py`).
pub(super) fn guarded(path: &str) -> bool {
    ["/v1", "/v2", "/inference", "/cohere"].iter().any(|prefix| path.starts_with(prefix))
}

/// The routes; those for weights only in dev mode.
pub(super) fn routes(
    dev_mode: bool,
    gpus: GpuOptions,
    (transfer, draft): (Option<WeightTransfer>, Option<PathBuf>),
    ranks: Arc<Ranks>,
) -> Router<Arc<Front>> {
    let info = server_info(&gpus, transfer.as_ref(), draft.as_deref());
    let session = match &transfer {
        Some(vllms) if ["nccl", "ipc"].contains(&vllms.backend.as_str()) => group::vllm::routes(Transfer::new(ranks, &vllms.backend)),
        ours => backend::routes(ours.as_ref(), &gpus),
    };
    let always = Router::new()
        .route("/health", get(health))
        .route("/version", get(|| async { Json(json!({"version": "0.32.0"})) }))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/v1/completions", post(completions));
    if !dev_mode {
        return always;
    }
    always
        .route("/is_paused", get(is_paused))
        .route("/is_sleeping", get(is_sleeping))
        .route("/sleep", post(sleep))
        .route("/wake_up", post(wake_up))
        .route("/pause", post(pause))
        .route("/resume", post(resume))
        .route("/weight_info", get(weight_info))
        .route("/update_weight_version", post(update_weight_version))
        .route("/get_world_size", get(get_world_size))
        .route("/reset_prefix_cache", post(reset_prefix_cache))
        .route("/reset_encoder_cache", post(|| async { StatusCode::OK }))
        .route("/collective_rpc", post(collective_rpc))
        .route("/server_info", get(|| async { Json(info) }))
        .merge(session)
        .layer(Extension(gpus))
}

/// What the development route says of the server's configuration, as far as anybody asks.
fn server_info(gpus: &GpuOptions, transfer: Option<&WeightTransfer>, draft: Option<&Path>) -> Value {
    let extension = if gpus.checkpoint_engine { "checkpoint_engine.worker.VllmColocateWorkerExtension" } else { "" };
    let transfer = transfer.map(|transfer| json!({"backend": transfer.backend}));
    let speculation = draft.map(|draft| json!({"method": "draft_model", "model": draft, "draft_model_config": {"model": draft}}));
    let parallel = json!({"worker_extension_cls": extension});
    json!({"vllm_config": {"weight_transfer_config": transfer, "parallel_config": parallel, "speculative_config": speculation}})
}

async fn health(State(front): State<Arc<Front>>) -> StatusCode {
    if front.core.state().dead { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }
}

async fn metrics(State(front): State<Arc<Front>>) -> String {
    let (running, (sleep, sleeps)) = {
        let state = front.core.state();
        (state.requests(), state.sleep)
    };
    let asleep = |name: &str, on: bool| {
        format!("vllm:engine_sleep_state{{engine=\"0\",model_name=\"{}\",sleep_state=\"{name}\"}} {}.0\n", front.model, u8::from(on))
    };
    let sleep_state = [asleep("awake", sleep == 0), asleep("weights_offloaded", sleep == 1), asleep("discard_all", sleep == 2)].concat();
    format!(
        "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n\
         # TYPE process_start_time_seconds gauge\n\
         process_start_time_seconds {}\n\
         # TYPE vllm:num_requests_running gauge\n\
         vllm:num_requests_running{{engine=\"0\",model_name=\"{}\"}} {running}.0\n\
         # TYPE vllm:engine_sleep_state gauge\n\
         {sleep_state}\
         # TYPE vllm:sleep_mode_operation_duration_seconds histogram\n\
         vllm:sleep_mode_operation_duration_seconds_count{{operation=\"sleep\"}} {sleeps}.0\n",
        front.started, front.model
    )
}

async fn models(State(front): State<Arc<Front>>) -> Json<Value> {
    let permission = json!({
        "id": "modelperm-0", "object": "model_permission", "created": 0, "allow_create_engine": false, "allow_sampling": true,
        "allow_logprobs": true, "allow_search_indices": false, "allow_view": true, "allow_fine_tuning": false, "organization": "*",
        "group": null, "is_blocking": false,
    });
    let model = json!({
        "id": front.model, "object": "model", "created": 0, "owned_by": "vllm", "root": front.model_directory, "parent": null,
        "max_model_len": front.max_model_len, "permission": [permission],
    });
    Json(json!({"object": "list", "data": [model]}))
}

async fn is_paused(State(front): State<Arc<Front>>) -> Response {
    match front.core.turn().await {
        Ok(_turn) => Json(json!({"is_paused": front.core.state().pause != Pause::Running})).into_response(),
        Err(dead) => self::dead(dead),
    }
}

async fn is_sleeping(State(front): State<Arc<Front>>) -> Response {
    match front.core.turn().await {
        Ok(_turn) => Json(json!({"is_sleeping": front.core.state().pause != Pause::Running})).into_response(),
        Err(dead) => self::dead(dead),
    }
}

#[derive(Deserialize)]
struct SleepQuery {
    level: Option<u8>,
}

/// Level 1 keeps the weights in host memory, level 2 discards them; the label stays the same.
async fn sleep(State(front): State<Arc<Front>>, Query(query): Query<SleepQuery>) -> Response {
    let level = query.level.unwrap_or(1);
    if level > 2 {
        return invalid("query.level", "Input should be less than or equal to 2");
    }
    match front.core.turn().await {
        Ok(_turn) => front.core.change(|state| state.pause = Pause::New),
        Err(dead) => return self::dead(dead),
    }
    front.core.abort_all();
    if let Err(dead) = front.core.drained().await {
        return self::dead(dead);
    }
    front.core.reset_cache();
    if level == 2 {
        front.core.change_served(Served::clear);
    }
    front.core.change(|state| state.sleep = (level, state.sleep.1 + 1));
    Json(json!({"status": "sleeping", "level": level})).into_response()
}

/// What was given up comes back as whatever the memory holds.
async fn wake_up(State(front): State<Arc<Front>>) -> Response {
    match front.core.turn().await {
        Ok(_turn) => front.core.change(|state| (state.sleep.0, state.pause) = (0, Pause::Running)),
        Err(dead) => return self::dead(dead),
    }
    Json(json!({"status": "awake", "tags": null})).into_response()
}

#[derive(Deserialize)]
struct PauseQuery {
    mode: Option<String>,
    clear_cache: Option<String>,
}

async fn pause(State(front): State<Arc<Front>>, Query(query): Query<PauseQuery>) -> Response {
    let mode = query.mode.as_deref().unwrap_or("abort");
    let Ok(clear) = truth(query.clear_cache.as_deref(), true) else {
        return invalid("query.clear_cache", "Input should be a valid boolean");
    };
    let to = match mode {
        "keep" => Pause::All,
        "abort" | "wait" => Pause::New,
        _ => return invalid("query.mode", "Input should be 'abort', 'wait' or 'keep'"),
    };
    match front.core.turn().await {
        Ok(_turn) => front.core.change(|state| state.pause = to),
        Err(dead) => return self::dead(dead),
    }
    if mode == "abort" {
        front.core.abort_all();
    }
    if to == Pause::New
        && let Err(dead) = front.core.drained().await
    {
        return self::dead(dead);
    }
    if clear {
        front.core.preempt_all();
        front.core.reset_cache();
    }
    Json(json!({"status": "paused"})).into_response()
}

async fn resume(State(front): State<Arc<Front>>) -> Response {
    match front.core.turn().await {
        Ok(_turn) => front.core.change(|state| state.pause = Pause::Running),
        Err(dead) => return self::dead(dead),
    }
    Json(json!({"status": "resumed"})).into_response()
}

async fn weight_info(State(front): State<Arc<Front>>) -> Response {
    match front.core.turn().await {
        Ok(_turn) => Json(json!({"weight_version": front.core.state().version})).into_response(),
        Err(dead) => self::dead(dead),
    }
}

async fn update_weight_version(State(front): State<Arc<Front>>, body: Bytes) -> Response {
    let Ok(body) = serde_json::from_slice::<Value>(&body) else { return invalid("body.0", "JSON decode error") };
    let Some(version) = body.get("new_version") else { return invalid("body.new_version", "Field required") };
    let Some(version) = version.as_str() else { return invalid("body.new_version", "Input should be a valid string") };
    match front.core.turn().await {
        Ok(_turn) => front.core.change(|state| version.clone_into(&mut state.version)),
        Err(dead) => return self::dead(dead),
    }
    Json(json!({"success": true, "new_version": version})).into_response()
}

#[derive(Deserialize)]
struct WorldQuery {
    include_dp: Option<String>,
}

async fn get_world_size(State(front): State<Arc<Front>>, Query(query): Query<WorldQuery>) -> Response {
    match truth(query.include_dp.as_deref(), true) {
        Ok(_) => Json(json!({"world_size": front.world_size()})).into_response(),
        Err(()) => invalid("query.include_dp", "Input should be a valid boolean"),
    }
}

#[derive(Deserialize)]
struct ResetQuery {
    reset_running_requests: Option<String>,
    reset_external: Option<String>,
}

async fn reset_prefix_cache(State(front): State<Arc<Front>>, Query(query): Query<ResetQuery>) -> Response {
    let (running, external) = (truth(query.reset_running_requests.as_deref(), false), truth(query.reset_external.as_deref(), false));
    let (Ok(running), Ok(_)) = (running, external) else { return invalid("query", "Input should be a valid boolean") };
    match front.core.turn().await {
        Ok(_turn) => {
            if running {
                front.core.preempt_all();
            }
            Json(json!({"success": front.core.reset_cache()})).into_response()
        }
        Err(dead) => self::dead(dead),
    }
}

async fn collective_rpc(State(front): State<Arc<Front>>, Extension(gpus): Extension<GpuOptions>, body: Bytes) -> Response {
    let bad = |message: &str| error(StatusCode::BAD_REQUEST, "Bad Request", None, message);
    let Ok(body) = serde_json::from_slice::<Value>(&body) else { return bad("JSON decode error: Expecting value") };
    let Some(body) = body.as_object() else { return bad("Request body must be a JSON object") };
    let Some(method) = body.get("method").and_then(Value::as_str) else { return bad("Missing 'method' in request body") };
    let worker = |cause: &str| match front.core.replied(front.world_size(), Err(cause)) {
        Ok(()) => results(&front),
        Err(cause) => worker_failed(&cause),
    };
    let _turn = match front.core.turn().await {
        Ok(turn) => turn,
        Err(dead) => return self::dead(dead),
    };
    if method == "update_weights_from_ipc" && gpus.checkpoint_engine {
        let handles = body.get("args").and_then(|arguments| arguments.get(0));
        if handles.is_none() {
            let what = "VllmColocateWorkerExtension.update_weights_from_ipc() missing 1 required positional argument: 'zmq_handles'";
            return worker(what);
        }
        return match super::lmdeploy::run_workers(&front, &gpus, handles, None).await {
            Ok(()) => all_replied(&front),
            Err(cause) => worker(&cause),
        };
    }
    if method != "reload_weights" {
        return worker(&format!("'CPUWorker' object has no attribute '{method}'"));
    }
    let arguments = body.get("kwargs").and_then(Value::as_object).cloned().unwrap_or_default();
    let known = |name: &&String| !matches!(name.as_str(), "weights_path" | "weights_iterator" | "is_checkpoint_format");
    if let Some(unknown) = arguments.keys().find(known) {
        return worker(&format!("GPUModelRunner.reload_weights() got an unexpected keyword argument '{unknown}'"));
    }
    let loaded = match (arguments.get("weights_iterator").and_then(Value::as_array), arguments.get("weights_path").and_then(Value::as_str))
    {
        (Some(list), _) if list.is_empty() => front.core.load_nothing(),
        (Some(_), _) => return worker("not enough values to unpack (expected 2, got 1)"),
        (None, Some(path)) => front.core.load(PathBuf::from(path)).await,
        (None, None) => front.core.load(PathBuf::from(&front.model_directory)).await,
    };
    match loaded {
        Ok(()) => all_replied(&front),
        Err(cause) => worker(&cause.to_string()),
    }
}

fn results(front: &Front) -> Response {
    Json(json!({"results": vec![Value::Null; front.world_size() as usize]})).into_response()
}

/// The reply to a call that every worker took well.
fn all_replied(front: &Front) -> Response {
    match front.core.replied(front.world_size(), Ok(())) {
        Ok(()) => results(front),
        Err(cause) => worker_failed(&cause),
    }
}

/// A boolean of a query as pydantic reads it.
fn truth(text: Option<&str>, default: bool) -> Result<bool, ()> {
    match text.map(str::to_ascii_lowercase).as_deref() {
        None => Ok(default),
        Some("true" | "1" | "on" | "yes" | "t" | "y") => Ok(true),
        Some("false" | "0" | "off" | "no" | "f" | "n") => Ok(false),
        Some(_) => Err(()),
    }
}

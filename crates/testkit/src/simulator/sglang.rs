//! The endpoints of SGLang 0.5.23 that an agent and a router use, with their order rules, as read in its wheel and run on CPU
//! (`srt/entrypoints/http_server.py`, `srt/managers/tokenizer_manager.py`).
//!
//! Rules kept on purpose: `/health` waits after a pause and then calls the server unhealthy, which `/ping` repeats; a flush is refused
//! while requests hold a cache; an update of a server that is not paused waits for running requests; a failed load is "rolled back" from
//! the new path, and a rollback that fails ends the server (run, also where a file cannot be read); the version moves only with a call that succeeds.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use axum::{Extension, Json, Router};
use http::StatusCode;
use serde_json::{Value, json};

use super::GpuOptions;
use super::completions::completions;
use super::core::Pause;
use super::front::Front;
use super::group::sglang::SglangGroups;
use super::served::LoadError;
use super::sglang_reply::{PauseCondition, bad_request, gone, object};

/// Paths that stay open when a key is set (`srt/utils/auth.py`).
pub(super) fn guarded(path: &str) -> bool {
    !["/health", "/ready", "/metrics"].iter().any(|prefix| path.starts_with(prefix))
}

struct Flags {
    /// Whether a `/health` call failed since the last one that succeeded.
    unhealthy: AtomicBool,
    health_timeout: Duration,
}

pub(super) fn routes(health_timeout: Duration, gpus: GpuOptions, groups: Arc<SglangGroups>) -> Router<Arc<Front>> {
    Router::new()
        .merge(super::group::sglang::routes(groups))
        .route("/health", get(health))
        .route("/health_generate", get(health))
        .route("/ready", get(ready))
        .route("/ping", get(ping))
        .route("/server_info", get(server_info))
        .route("/model_info", get(model_info))
        .route("/pause_generation", post(pause_generation))
        .route("/continue_generation", post(continue_generation))
        .route("/update_weights_from_disk", post(update_weights_from_disk))
        .route("/update_weights_from_ipc", post(update_weights_from_ipc))
        .route("/update_weight_version", post(update_weight_version))
        .route("/flush_cache", any(flush_cache))
        .route("/generate", post(generate))
        .route("/v1/completions", post(completions))
        .layer(Extension(gpus))
        .layer(Extension(PauseCondition::default()))
        .layer(Extension(Arc::new(Flags { unhealthy: AtomicBool::new(false), health_timeout })))
}

async fn health(State(front): State<Arc<Front>>, Extension(flags): Extension<Arc<Flags>>) -> StatusCode {
    let asked = tokio::time::timeout(flags.health_timeout, front.core.generate("", 1)).await;
    let healthy = matches!(asked, Ok(Ok(_)));
    flags.unhealthy.store(!healthy, Ordering::Release);
    if healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn ping(Extension(flags): Extension<Arc<Flags>>) -> StatusCode {
    if flags.unhealthy.load(Ordering::Acquire) { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }
}

async fn ready(State(front): State<Arc<Front>>, Extension(flags): Extension<Arc<Flags>>) -> StatusCode {
    let paused = front.core.state().pause != Pause::Running;
    if paused || flags.unhealthy.load(Ordering::Acquire) { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }
}

async fn server_info(State(front): State<Arc<Front>>) -> Response {
    let Ok(_turn) = front.core.turn().await else { return gone(&front).await };
    let size = front.world_size();
    let speculation = front.core.state().draft.as_ref().map(|_| "EAGLE");
    Json(json!({
        "model_path": front.model_directory, "served_model_name": front.model, "tp_size": size, "pp_size": 1, "dp_size": 1,
        "enable_dp_attention": false, "random_seed": 0, "load_format": "auto", "startup_time": {"e2e": front.started}, "device": "cuda",
        "internal_states": [{"world_size": size}], "speculative_algorithm": speculation, "version": "0.5.23", "frontend": "python",
    }))
    .into_response()
}

async fn model_info(State(front): State<Arc<Front>>) -> Json<Value> {
    Json(json!({
        "model_path": front.model_directory, "served_model_name": front.model, "tokenizer_path": front.model_directory,
        "is_generation": true, "weight_version": front.core.state().version, "load_format": "auto",
    }))
}

async fn pause_generation(State(front): State<Arc<Front>>, Extension(condition): Extension<PauseCondition>, body: Bytes) -> Response {
    let body = match object(&body) {
        Ok(body) => body,
        Err(refusal) => return *refusal,
    };
    let mode = body.get("mode").map_or(Some("abort"), Value::as_str).unwrap_or_default().to_owned();
    let to = match mode.as_str() {
        "abort" => Pause::New,
        "retract" | "in_place" => Pause::All,
        _ => return bad_request("mode must be abort, retract or in_place"),
    };
    {
        let _condition = condition.0.lock().await;
        front.core.change(|state| state.pause = to);
    }
    match mode.as_str() {
        "abort" => {
            front.core.abort_all();
            if front.core.drained().await.is_err() {
                return gone(&front).await;
            }
        }
        "retract" => front.core.preempt_all(),
        _ => {}
    }
    Json(json!({"message": "Generation paused successfully.", "status": "ok"})).into_response()
}

async fn continue_generation(State(front): State<Arc<Front>>, Extension(condition): Extension<PauseCondition>, body: Bytes) -> Response {
    if let Err(refusal) = object(&body) {
        return *refusal;
    }
    let _condition = condition.0.lock().await;
    front.core.change(|state| state.pause = Pause::Running);
    Json(json!({"message": "Generation continued successfully.", "status": "ok"})).into_response()
}

/// Whether a directory has files of weights, whatever is in them.
fn has_weights(directory: &Path) -> bool {
    let mut files = std::fs::read_dir(directory).into_iter().flatten().flatten();
    files.any(|file| file.path().extension().is_some_and(|extension| extension == "safetensors"))
}

async fn update_weights_from_disk(State(front): State<Arc<Front>>, body: Bytes) -> Response {
    let body = match object(&body) {
        Ok(body) => body,
        Err(refusal) => return *refusal,
    };
    let Some(path) = body.get("model_path").and_then(Value::as_str).map(PathBuf::from) else {
        return bad_request("model_path: Field required");
    };
    let on = |name: &str, default: bool| body.get(name).and_then(Value::as_bool).unwrap_or(default);
    let answer = |success: bool, message: String| {
        let status = if success { StatusCode::OK } else { StatusCode::BAD_REQUEST };
        (status, Json(json!({"success": success, "message": message, "num_paused_requests": 0}))).into_response()
    };
    if on("abort_all_requests", false) {
        front.core.abort_all();
    }
    // A server that is not paused waits for its running requests, and lets no new one begin.
    let paused = front.core.state().pause != Pause::Running;
    if !paused {
        front.core.change(|state| state.pause = Pause::New);
        if front.core.drained().await.is_err() {
            return gone(&front).await;
        }
    }
    let Ok(turn) = front.core.turn().await else { return gone(&front).await };
    let loaded = match front.core.load(path.clone()).await {
        Err(LoadError::Unreadable(_)) if !has_weights(&path) => {
            Err(format!("Failed to get weights iterator: Cannot find any model weights with `{}`.", path.display()))
        }
        // A file that is no safetensors, or is cut short, is found out in the middle as well (run).
        Err(LoadError::Unreadable(cause) | LoadError::Halfway(cause) | LoadError::Misfit(cause) | LoadError::Unknown(cause)) => {
            match front.core.load(path).await {
                Ok(()) => Err(format!("Failed to update weights: {cause}.\nRolling back to original weights.")),
                Err(_) => return gone(&front).await,
            }
        }
        Ok(()) => Ok(()),
    };
    let flushed = loaded.is_err() || !on("flush_cache", true) || front.core.reset_cache();
    drop(turn);
    if !paused {
        front.core.change(|state| state.pause = Pause::Running);
    }
    match loaded {
        Err(message) => answer(false, message),
        Ok(()) if !flushed => {
            answer(false, "Weights were updated, but the cache was not flushed because requests are still running or queued.".into())
        }
        Ok(()) => {
            if let Some(version) = body.get("weight_version").and_then(Value::as_str) {
                front.core.change(|state| version.clone_into(&mut state.version));
            }
            answer(true, "Succeeded to update model weights.".into())
        }
    }
}

/// checkpoint-engine's workers; needs the package in the server's environment. No session, and the caches are flushed unless the call
/// forbids it.
async fn update_weights_from_ipc(State(front): State<Arc<Front>>, Extension(gpus): Extension<GpuOptions>, body: Bytes) -> Response {
    let body = match object(&body) {
        Ok(body) => body,
        Err(refusal) => return *refusal,
    };
    let answer = |success: bool, message: String| {
        let status = if success { StatusCode::OK } else { StatusCode::BAD_REQUEST };
        (status, Json(json!({"success": success, "message": message}))).into_response()
    };
    if !gpus.checkpoint_engine {
        return answer(false, "checkpoint-engine is not installed. Please install it with: pip install sglang[checkpoint-engine]".into());
    }
    let Ok(turn) = front.core.turn().await else { return gone(&front).await };
    let loaded = super::lmdeploy::run_workers(&front, &gpus, body.get("zmq_handles"), None).await;
    let flushed = body.get("flush_cache").and_then(Value::as_bool) == Some(false) || front.core.reset_cache();
    drop(turn);
    match loaded {
        Err(cause) => answer(false, cause),
        Ok(()) if !flushed => answer(false, "Weights were updated, but the cache was not flushed".into()),
        Ok(()) => answer(true, "Update weights from IPC completed successfully".into()),
    }
}

async fn update_weight_version(State(front): State<Arc<Front>>, body: Bytes) -> Response {
    let body = match object(&body) {
        Ok(body) => body,
        Err(refusal) => return *refusal,
    };
    let Some(version) = body.get("new_version").and_then(Value::as_str) else { return bad_request("new_version: Field required") };
    if body.get("abort_all_requests").and_then(Value::as_bool).unwrap_or(true) {
        front.core.abort_all();
    }
    let Ok(_turn) = front.core.turn().await else { return gone(&front).await };
    front.core.change(|state| version.clone_into(&mut state.version));
    Json(json!({"success": true, "message": format!("Weight version updated to {version}"), "new_version": version})).into_response()
}

async fn flush_cache(State(front): State<Arc<Front>>) -> Response {
    let Ok(_turn) = front.core.turn().await else { return gone(&front).await };
    if front.core.reset_cache() {
        (StatusCode::OK, "Cache flushed.\nPlease check backend logs for more details.\n").into_response()
    } else {
        (StatusCode::BAD_REQUEST, "Flush cache failed.\n").into_response()
    }
}

async fn generate(State(front): State<Arc<Front>>, body: Bytes) -> Response {
    let body = match object(&body) {
        Ok(body) => body,
        Err(refusal) => return *refusal,
    };
    // What tokens mean is not simulated: all of them are one prompt.
    let prompt = if body.get("input_ids").is_some_and(Value::is_array) { Some("") } else { body.get("text").and_then(Value::as_str) };
    let Some(prompt) = prompt else { return bad_request("the simulator wants \"text\" or \"input_ids\"") };
    let length = body.get("sampling_params").and_then(|params| params.get("max_new_tokens")).and_then(Value::as_u64);
    let length = length.and_then(|length| usize::try_from(length).ok()).unwrap_or(128).min(front.max_model_len);
    let Ok(generated) = front.core.generate(prompt, length).await else { return gone(&front).await };
    let text: String = generated.tokens.iter().map(|token| token.text).collect();
    let ids: Vec<u32> = generated.tokens.iter().map(|token| token.id).collect();
    let logprobs: Vec<Value> = generated.tokens.iter().map(|token| json!([token.logprob, token.id, null])).collect();
    let reason = if generated.aborted {
        json!({"type": "abort", "message": "Abort in waiting queue"})
    } else {
        json!({"type": "length", "length": length})
    };
    let meta = json!({
        "id": "0", "finish_reason": reason, "prompt_tokens": 1, "weight_version": front.core.state().version,
        "completion_tokens": ids.len(), "output_token_logprobs": logprobs,
    });
    Json(json!({"text": text, "output_ids": ids, "meta_info": meta})).into_response()
}

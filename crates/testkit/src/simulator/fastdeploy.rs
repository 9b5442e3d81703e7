//! The endpoints of FastDeploy (control API of 2.6, legacy API, `load_strategy` ipc_snapshot, ipc and rsync) with their order rules, as read in
//! `docs/features/weight_update.md` (25e866cc), `rl/dynamic_weight_manager.py` (49fe57cb: #7951 as merged, and the handle of #8078 and #8079),
//! `engine/common_engine.py`, `entrypoints/openai/api_server.py` and `worker/gpu_model_runner.py` (as stored before #7951), and in the thread
//! of pull request 7472. No server was run.
//!
//! Rules kept on purpose: a control call fails with 500 and the text of the exception; `update_weights` wants a pause and does not resume; a
//! pause ends requests with an error; sleep pauses and wake-up resumes, each by itself; a sleep or wake-up ends at the first tag that has
//! nothing to do and says success; weights alone do not wake up under CUDA graphs while the cache sleeps; a wake-up does not look whether all
//! parameters came; the legacy route does, and does nothing where weights are there; without weights `/health` and inference answer 304; a
//! control call of 60 s is answered with an error while the workers go on; names that the model does not know are passed over; fields of a
//! body that the server does not know (`transfer_mode`, `load_strategy`) are passed over as well.

mod load;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use http::StatusCode;
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Value, json};

use super::GpuOptions;
use super::completions::completions;
use super::core::Pause;
use super::front::Front;

pub(super) use self::load::start_from;

#[derive(Debug, Clone)]
pub struct FastdeployOptions {
    /// `--dynamic-load-weight`.
    pub dynamic_load_weight: bool,
    /// `--load_strategy`: `ipc_snapshot`, `ipc` or `rsync`.
    pub load_strategy: String,
    /// `ENABLE_V1_KVCACHE_SCHEDULER`, which pausing needs.
    pub v1_scheduler: bool,
    /// `FD_ENABLE_V1_UPDATE_WEIGHTS`: the legacy routes pause and resume by themselves.
    pub v1_update_weights: bool,
    pub graphs: bool,
    /// Whether a draft model (MTP) runs in addition to the main one.
    pub mtp: bool,
    /// Folder with a checkpoint for each version that a trainer published by `checkpoint_transfer`. None: the library is not installed.
    pub transfer: Option<PathBuf>,
    /// `FD_USE_GDR_CHECKPOINT_TRANSFER`: weights come as a stream of checkpoint tensors, whatever the strategy, but for a wake-up.
    pub gdr: bool,
    /// First and number of the draft model's layers (`start_layer_index`, `num_nextn_predict_layers`).
    pub mtp_layers: (u32, u32),
    /// `rsync_config.gdr_mtp_chunk_size`.
    pub mtp_chunk: usize,
    /// Where the workers connect for the message of pull request 7472 (`{rank}` is the rank's number); none: the server does not carry it.
    pub async_ipc: Option<String>,
    /// Tensors of a step from memory after which a worker's loader fails.
    pub stops_after: Option<usize>,
    /// What the engine waits for its workers.
    pub worker_timeout: Duration,
}

impl Default for FastdeployOptions {
    fn default() -> Self {
        Self {
            dynamic_load_weight: true,
            load_strategy: "ipc_snapshot".to_owned(),
            v1_scheduler: true,
            v1_update_weights: false,
            graphs: true,
            mtp: false,
            transfer: None,
            gdr: false,
            mtp_layers: (0, 0),
            mtp_chunk: 16,
            async_ipc: None,
            stops_after: None,
            worker_timeout: Duration::from_secs(60),
        }
    }
}

/// What is where in GPU memory.
#[derive(Debug, Clone)]
struct Memory {
    weight_sleeps: bool,
    cache_sleeps: bool,
    graphs: bool,
    mtp_cache: bool,
    /// How often caches were rebuilt, and graphs captured again.
    rebuilt: u32,
    recaptured: u32,
    /// Parameters that hold nothing.
    empty: BTreeSet<String>,
    /// The version of the last `update_weights`.
    version: Option<String>,
    /// The library's handle that the workers keep, and how many they made.
    handle: Option<u32>,
    handles: u32,
    /// Sizes of the chunks in which the draft model got its weights of the last stream.
    mtp_chunks: Vec<usize>,
    /// What each rank's worker saw of the last asynchronous message.
    ranks: Vec<RankSeen>,
}

/// Handles that a worker opened, and the digests of what it cloned from them.
#[derive(Debug, Clone, Default, Serialize)]
struct RankSeen {
    handles: BTreeSet<String>,
    tensors: BTreeMap<String, String>,
}

struct Fastdeploy {
    options: FastdeployOptions,
    gpus: GpuOptions,
    model_directory: PathBuf,
    memory: Mutex<Memory>,
}

impl Fastdeploy {
    /// `is_workers_alive` and the signal of the weights.
    fn serves(&self) -> bool {
        !self.memory.lock().weight_sleeps
    }
}

type Shared = Extension<Arc<Fastdeploy>>;

/// Everything, once there is a key.
pub(super) fn guarded(path: &str) -> bool {
    path.starts_with("/v1")
}

pub(super) fn routes(options: FastdeployOptions, gpus: GpuOptions, model_directory: PathBuf) -> Router<Arc<Front>> {
    let memory = Memory {
        weight_sleeps: false,
        cache_sleeps: false,
        graphs: options.graphs,
        mtp_cache: options.mtp,
        rebuilt: 0,
        recaptured: 0,
        empty: BTreeSet::new(),
        version: None,
        handle: None,
        handles: 0,
        mtp_chunks: Vec::new(),
        ranks: Vec::new(),
    };
    let state = Arc::new(Fastdeploy { options, gpus, model_directory, memory: Mutex::new(memory) });
    Router::new()
        .route("/health", get(health))
        .route("/ping", get(health).post(health))
        .route("/v1/models", get(models))
        .route("/v1/completions", post(complete))
        .route("/v1/pause", post(pause))
        .route("/v1/resume", post(resume))
        .route("/v1/is_paused", get(is_paused))
        .route("/v1/sleep", post(sleep))
        .route("/v1/wakeup", post(wakeup))
        .route("/v1/update_weights", post(update_weights))
        .route("/clear_load_weight", get(clear_load_weight))
        .route("/update_model_weight", get(update_model_weight))
        .route("/simulator/memory", get(memory_report))
        .layer(Extension(state))
}

fn control(method: &str, done: Result<Value, String>) -> Response {
    let (code, status, message, result) = match done {
        Ok(result) => (StatusCode::OK, "success", "Success".to_owned(), result),
        Err(cause) => (StatusCode::INTERNAL_SERVER_ERROR, "error", format!("Failed run control method {method}: {cause}"), Value::Null),
    };
    (code, Json(json!({"request_id": format!("control-{method}"), "status": status, "error_message": message, "result": result})))
        .into_response()
}

fn bad(message: &str) -> Response {
    (StatusCode::BAD_REQUEST, Json(json!({"request_id": "control", "status": "error", "error_message": message, "result": null})))
        .into_response()
}

/// A status of 304 has no body, whatever the server meant to say in it.
fn no_weights() -> Response {
    StatusCode::NOT_MODIFIED.into_response()
}

async fn health(Extension(state): Shared) -> Response {
    if state.serves() { StatusCode::OK.into_response() } else { no_weights() }
}

async fn models(State(front): State<Arc<Front>>, Extension(state): Shared) -> Response {
    if state.options.dynamic_load_weight && !state.serves() {
        return no_weights();
    }
    Json(json!({"object": "list", "data": [{
        "id": front.model, "object": "model", "created": 0, "owned_by": "FastDeploy", "root": front.model_directory, "parent": null,
        "max_model_len": front.max_model_len, "permission": [],
    }]}))
    .into_response()
}

async fn complete(front: State<Arc<Front>>, Extension(state): Shared, body: Bytes) -> Response {
    if state.options.dynamic_load_weight && !state.serves() {
        return no_weights();
    }
    let answered = completions(front, body).await;
    if answered.status() != StatusCode::OK {
        return answered;
    }
    let Ok(body) = axum::body::to_bytes(answered.into_body(), usize::MAX).await else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let answer: Value = serde_json::from_slice(&body).unwrap_or_default();
    if answer.pointer("/choices/0/finish_reason").and_then(Value::as_str) == Some("abort") {
        let error =
            json!({"message": "Request is aborted since LLM Engine is paused.", "type": "internal_error", "param": null, "code": null});
        return (StatusCode::INTERNAL_SERVER_ERROR, Json(json!({"error": error}))).into_response();
    }
    Json(answer).into_response()
}

/// Ends running and waiting requests; new ones wait.
async fn do_pause(front: &Front, state: &Fastdeploy) -> Result<(), String> {
    if !state.options.v1_scheduler {
        return Err("pause only supported in ENABLE_V1_KVCACHE_SCHEDULER".into());
    }
    front.core.change(|core| core.pause = Pause::New);
    front.core.abort_all();
    front.core.drained().await.map_err(|_| "worker may Hanged".to_owned())?;
    front.core.change(|core| core.pause = Pause::All);
    front.core.reset_cache();
    Ok(())
}

fn do_resume(front: &Front) {
    front.core.change(|core| core.pause = Pause::Running);
}

fn is_paused_now(front: &Front) -> bool {
    front.core.state().pause != Pause::Running
}

async fn pause(State(front): State<Arc<Front>>, Extension(state): Shared) -> Response {
    control("pause", do_pause(&front, &state).await.map(|()| Value::Null))
}

async fn resume(State(front): State<Arc<Front>>) -> Response {
    do_resume(&front);
    control("resume", Ok(Value::Null))
}

async fn is_paused(State(front): State<Arc<Front>>) -> Response {
    control("is_paused", Ok(json!({"is_paused": is_paused_now(&front)})))
}

/// `?tags=weight,kv_cache`; both when there are none.
fn tags(query: Option<&str>) -> Result<Vec<&str>, Box<Response>> {
    let named = query.unwrap_or_default().split('&').find_map(|pair| pair.strip_prefix("tags=")).filter(|tags| !tags.is_empty());
    let tags: Vec<&str> = named.map_or_else(|| vec!["weight", "kv_cache"], |tags| tags.split(',').collect());
    match tags.iter().find(|tag| !["weight", "kv_cache"].contains(*tag)) {
        Some(unknown) => Err(Box::new(bad(&format!("Invalid tag: {unknown}, supported tags: weight, kv_cache")))),
        None => Ok(tags),
    }
}

async fn sleep(State(front): State<Arc<Front>>, Extension(state): Shared, RawQuery(query): RawQuery) -> Response {
    let tags = match tags(query.as_deref()) {
        Ok(tags) => tags,
        Err(refusal) => return *refusal,
    };
    if let Err(cause) = do_pause(&front, &state).await {
        return control("sleep", Err(cause));
    }
    load::sleep(&front, &state, &tags);
    control("sleep", Ok(json!([null])))
}

async fn wakeup(State(front): State<Arc<Front>>, Extension(state): Shared, RawQuery(query): RawQuery) -> Response {
    let tags = match tags(query.as_deref()) {
        Ok(tags) => tags.into_iter().map(str::to_owned).collect::<Vec<_>>(),
        Err(refusal) => return *refusal,
    };
    let (engine, of) = (front.clone(), state.clone());
    let woken = within(state.options.worker_timeout, async move { load::wakeup(&engine, &of, &tags).await }).await;
    if woken.is_ok() {
        do_resume(&front);
    }
    control("wakeup", woken.map(|()| json!([null])))
}

/// A wrong type has a form of its own: `{"error", "message"}`.
fn wrong_type(message: &str) -> Response {
    (StatusCode::BAD_REQUEST, Json(json!({"error": "Invalid parameter type", "message": message}))).into_response()
}

/// Takes `version` and `verify_checksum` and nothing else.
async fn update_weights(State(front): State<Arc<Front>>, Extension(state): Shared, body: Bytes) -> Response {
    let body: Value = match serde_json::from_slice(&body) {
        _ if body.is_empty() => json!({}),
        Ok(body) => body,
        Err(error) => return (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    };
    let named = |name: &str| body.get(name).filter(|value| !value.is_null());
    if named("version").is_some_and(|version| !version.is_string()) {
        return wrong_type("version must be a string");
    }
    if named("verify_checksum").is_some_and(|verify| !verify.is_boolean()) {
        return wrong_type("verify_checksum must be a boolean");
    }
    if !is_paused_now(&front) {
        return control("update_weights", Err("Pause LLM Engine first before calling updating weights".into()));
    }
    let version = named("version").and_then(Value::as_str).map(str::to_owned);
    let (engine, of) = (front.clone(), state.clone());
    let work = async move { load::update_weights(&engine, &of, version).await };
    control("update_weights", within(state.options.worker_timeout, work).await)
}

/// The workers continue after the engine's own limit.
async fn within<T: Send + 'static>(limit: Duration, work: impl Future<Output = Result<T, String>> + Send + 'static) -> Result<T, String> {
    let working = tokio::spawn(work);
    match tokio::time::timeout(limit, working).await {
        Ok(done) => done.unwrap_or_else(|error| Err(error.to_string())).map_err(|cause| format!("Call Worker error: {cause}")),
        // The number in the text is not the one that is waited for; it is so in the source.
        Err(_) => Err("Worker Update Weights Timeouted after 600s".into()),
    }
}

const DISABLED: &str = "Dynamic Load Weight Disabled.";

async fn clear_load_weight(State(front): State<Arc<Front>>, Extension(state): Shared) -> Response {
    if !state.options.dynamic_load_weight {
        return (StatusCode::NOT_FOUND, DISABLED).into_response();
    }
    if state.options.v1_update_weights
        && let Err(cause) = do_pause(&front, &state).await
    {
        return (StatusCode::NOT_FOUND, cause).into_response();
    }
    // Without the new control path running requests are dropped by the workers.
    front.core.abort_all();
    load::sleep(&front, &state, &["weight", "kv_cache"]);
    StatusCode::OK.into_response()
}

async fn update_model_weight(State(front): State<Arc<Front>>, Extension(state): Shared) -> Response {
    if !state.options.dynamic_load_weight {
        return (StatusCode::NOT_FOUND, DISABLED).into_response();
    }
    if state.serves() {
        return StatusCode::OK.into_response();
    }
    match load::update_parameters(&front, &state).await {
        Ok(()) => {
            if state.options.v1_update_weights {
                do_resume(&front);
            }
            StatusCode::OK.into_response()
        }
        Err(cause) => {
            tracing::debug!(cause, "the simulated worker failed");
            (StatusCode::NOT_FOUND, "Update model weight timeout").into_response()
        }
    }
}

/// The simulator's own: what is where in GPU memory.
async fn memory_report(Extension(state): Shared) -> Json<Value> {
    let memory = state.memory.lock().clone();
    Json(json!({
        "weight": !memory.weight_sleeps, "kvCache": !memory.cache_sleeps, "graphs": memory.graphs, "mtpCache": memory.mtp_cache,
        "rebuilt": memory.rebuilt, "recaptured": memory.recaptured, "empty": memory.empty, "version": memory.version,
        "handle": memory.handle, "handles": memory.handles, "mtpChunks": memory.mtp_chunks, "ranks": memory.ranks,
    }))
}

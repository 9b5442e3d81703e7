//! The endpoints of LMDeploy 0.18.0 with the PyTorch backend that an agent and a router use, with their order rules, as read in its wheel
//! (`serve/openai/endpoints/management.py`, `serve/core/async_engine.py`, `pytorch/engine/model_agent/agent.py`) and seen on the server.
//!
//! Rules kept on purpose: POST routes want a JSON content type even without a body; nothing pauses but sleep, which ends all requests;
//! inference routes answer 503 while anything sleeps; a wake-up with a tag that does not sleep does nothing and says 200; checkpoint-engine
//! refuses buckets unless the cache sleeps; `/update_weights` exists with the Ray executor only, answers `null`, goes on generating, and
//! serves stale layers until `finished`; a bucket without memory uses what was copied before; and `/health` is what a monitor thought.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{RawQuery, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::future::join_all;
use http::{Method, StatusCode, header};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::completions::completions;
use super::core::Pause;
use super::front::Front;
use super::group::torch::TorchGroups;
use super::served::Served;
use super::tensors::{Rebuilt, Taken, element, field, number, shape, text};
use super::{GpuOptions, unpickle, worker};
use weightsync_torch::pickle::Value as Pickled;

/// Everything but health and the documentation pages.
pub(super) fn guarded(path: &str) -> bool {
    !["/health", "/openapi.json", "/docs"].contains(&path)
}

#[derive(Default)]
struct Sleep(Mutex<BTreeSet<&'static str>>);

impl Sleep {
    fn tags(&self) -> BTreeSet<&'static str> {
        self.0.lock().clone()
    }

    fn set(&self, change: impl FnOnce(&mut BTreeSet<&'static str>)) {
        change(&mut self.0.lock());
    }
}

struct Lmdeploy {
    sleep: Sleep,
    gpus: GpuOptions,
    /// What `/update_weights` copied last.
    cached: tokio::sync::Mutex<Option<Rebuilt>>,
}

type Shared = Extension<Arc<Lmdeploy>>;

pub(super) fn routes(gpus: GpuOptions, groups: TorchGroups) -> Router<Arc<Front>> {
    let groups = super::group::lmdeploy::routes(groups, gpus.ray);
    let state = Arc::new(Lmdeploy { sleep: Sleep::default(), gpus, cached: tokio::sync::Mutex::new(None) });
    Router::new()
        .merge(groups)
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(openapi))
        .route("/v1/models", get(models))
        .route("/v1/completions", post(completions))
        .route("/distserve/engine_info", get(engine_info))
        .route("/is_sleeping", get(is_sleeping))
        .route("/sleep", post(sleep))
        .route("/wakeup", post(wakeup))
        .route("/abort_request", post(abort_request))
        .route("/update_weights", post(update_weights))
        .route("/update_weights_from_ipc", get(status).post(update_weights_from_ipc))
        .layer(middleware::from_fn(before))
        .layer(Extension(state))
}

/// A JSON content type on POST, and no inference while anything sleeps.
async fn before(Extension(state): Shared, request: Request, next: Next) -> Response {
    if request.method() == Method::POST {
        let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        if request.uri().path() != "/abort_request" && !kind.to_ascii_lowercase().starts_with("application/json") {
            return bad("Unsupported Media Type: Only 'application/json' is allowed");
        }
        if request.uri().path() == "/v1/completions" && !state.sleep.tags().is_empty() {
            let message = "Engine is sleeping; call POST /wakeup before inference (e.g. tags=weights&tags=kv_cache).";
            return (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"object": "error", "message": message, "code": 503}))).into_response();
        }
    }
    next.run(request).await
}

pub(super) fn bad(message: &str) -> Response {
    (StatusCode::BAD_REQUEST, Json(json!({"object": "error", "message": message, "code": 400}))).into_response()
}

pub(super) fn failed() -> Response {
    (StatusCode::INTERNAL_SERVER_ERROR, "Internal Server Error").into_response()
}

async fn health(Extension(state): Shared) -> Json<Value> {
    let status = if state.sleep.tags().is_empty() { "healthy" } else { "sleeping" };
    Json(json!({"status": status, "message": ""}))
}

async fn metrics(State(front): State<Arc<Front>>) -> String {
    format!("# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {}\n", front.started)
}

async fn openapi() -> Json<Value> {
    let fields =
        |names: &[&str]| json!({"properties": names.iter().map(|name| ((*name).to_owned(), json!({}))).collect::<serde_json::Map<_, _>>()});
    Json(json!({"openapi": "3.1.0", "info": {"title": "FastAPI", "version": "0.1.0"}, "components": {"schemas": {
        "UpdateParamsRequest": fields(&["serialized_named_tensors", "load_format", "finished"]),
        "UpdateWeightsFromIPCRequest": fields(&["zmq_handles"]),
        "InitWeightsUpdateGroupRequest": fields(&["master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"]),
        "UpdateWeightsFromDistributedRequest": fields(&["names", "dtypes", "shapes", "group_name", "load_format", "finished"]),
        "DestroyWeightsUpdateGroupRequest": fields(&["group_name"]),
        "UpdateWeightsFromIPCStatus": fields(&["ready", "message", "backend", "device_type", "checkpoint_engine_version", "is_sleeping",
            "sleeping_tags", "device_uuids", "worker_ranks"]),
    }}}))
}

async fn models(State(front): State<Arc<Front>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [{"id": front.model, "object": "model", "owned_by": "lmdeploy", "root": front.model}]}))
}

async fn engine_info(State(front): State<Arc<Front>>) -> Json<Value> {
    let info = json!({"tp_size": front.world_size(), "dp_size": 1, "pp_size": null, "ep_size": 1, "dp_rank": 0});
    Json(Value::String(info.to_string()))
}

async fn is_sleeping(Extension(state): Shared) -> Json<Value> {
    Json(json!({"is_sleeping": !state.sleep.tags().is_empty()}))
}

async fn sleep(State(front): State<Arc<Front>>, Extension(state): Shared, RawQuery(query): RawQuery) -> Response {
    let level = query.as_deref().and_then(|query| query.strip_prefix("level=")).unwrap_or("1").to_owned();
    if !matches!(level.as_str(), "1" | "2") {
        return bad("The \"level\" query parameter must be 1 or 2.");
    }
    state.sleep.set(|tags| tags.extend(["weights", "kv_cache"]));
    front.core.abort_all();
    if front.core.drained().await.is_err() {
        return failed();
    }
    let Ok(_turn) = front.core.turn().await else { return failed() };
    if level == "2" {
        front.core.change_served(Served::clear);
    }
    front.core.change(|core| core.pause = Pause::All);
    front.core.reset_cache();
    *state.cached.lock().await = None;
    StatusCode::OK.into_response()
}

async fn wakeup(State(front): State<Arc<Front>>, Extension(state): Shared, RawQuery(query): RawQuery) -> Response {
    let Ok(_turn) = front.core.turn().await else { return failed() };
    let query = query.unwrap_or_default();
    let wanted: Vec<&str> = query.split('&').filter_map(|pair| pair.strip_prefix("tags=")).collect();
    let sleeping = state.sleep.tags();
    let wanted: BTreeSet<&str> = if wanted.is_empty() { sleeping.clone() } else { wanted.into_iter().collect() };
    if wanted.is_subset(&sleeping) {
        state.sleep.set(|tags| tags.retain(|tag| !wanted.contains(tag)));
        if state.sleep.tags().is_empty() {
            front.core.change(|core| core.pause = Pause::Running);
        }
    }
    StatusCode::OK.into_response()
}

async fn abort_request(State(front): State<Arc<Front>>, Extension(state): Shared, body: Bytes) -> Response {
    if !state.gpus.abort_handling {
        return (StatusCode::NOT_IMPLEMENTED, "This server does not support abort requests. Enable with --enable-abort-handling flag.")
            .into_response();
    }
    let Ok(body) = serde_json::from_slice::<Value>(&body) else { return bad("JSON decode error") };
    if body.get("abort_all").and_then(Value::as_bool) == Some(true) {
        front.core.abort_all();
        return StatusCode::OK.into_response();
    }
    bad("Session not found.")
}

async fn status(Extension(state): Shared) -> Json<Value> {
    let tags = state.sleep.tags();
    let ready = tags.contains("kv_cache") && !tags.contains("weights") && state.gpus.checkpoint_engine;
    Json(json!({
        "ready": ready, "message": "", "backend": "pytorch", "device_type": "cuda",
        "checkpoint_engine_version": state.gpus.checkpoint_engine.then_some("0.4.2"), "is_sleeping": !tags.is_empty(), "sleeping_tags": tags,
        "device_uuids": state.gpus.uuids, "worker_ranks": (0..state.gpus.uuids.len()).collect::<Vec<_>>(),
    }))
}

async fn update_weights_from_ipc(State(front): State<Arc<Front>>, Extension(state): Shared, body: Bytes) -> Response {
    let Ok(body) = serde_json::from_slice::<Value>(&body) else { return bad("JSON decode error") };
    let reject = (!state.sleep.tags().contains("kv_cache")).then_some(
        "Engine is not prepared for a checkpoint-engine update. Call POST /sleep and POST /wakeup?tags=weights before updating online.",
    );
    match run_workers(&front, &state.gpus, body.get("zmq_handles"), reject).await {
        Ok(()) => {
            state.sleep.set(|tags| tags.retain(|tag| *tag != "weights"));
            Json(json!({"success": true, "message": "Succeeded to update weights from checkpoint-engine IPC."})).into_response()
        }
        Err(cause) => {
            let message =
                format!("Failed to update weights from checkpoint-engine IPC: {cause}. The model weights may be partially updated");
            (StatusCode::BAD_REQUEST, Json(json!({"success": false, "message": message}))).into_response()
        }
    }
}

/// One worker a GPU, all of which must come to their end.
pub(super) async fn run_workers(front: &Front, gpus: &GpuOptions, handles: Option<&Value>, reject: Option<&str>) -> Result<(), String> {
    let addresses = gpus.uuids.iter().map(|gpu| {
        let address = handles.and_then(|handles| handles.get(gpu)).and_then(Value::as_str);
        address.map(str::to_owned).ok_or_else(|| format!("No checkpoint-engine ZMQ handle for local device {gpu}"))
    });
    let addresses: Vec<String> = addresses.collect::<Result<_, _>>()?;
    let workers = addresses.iter().map(|address| worker::run(&front.core, &gpus.memory, address, reject));
    join_all(workers).await.into_iter().collect()
}

async fn update_weights(State(front): State<Arc<Front>>, Extension(state): Shared, body: Bytes) -> Response {
    let Ok(body) = serde_json::from_slice::<Value>(&body) else { return bad("JSON decode error") };
    if !state.gpus.ray {
        return failed();
    }
    let ranks = match body.get("serialized_named_tensors") {
        Some(Value::Array(ranks)) => ranks.clone(),
        Some(one) => vec![one.clone(); state.gpus.uuids.len()],
        None => return bad("serialized_named_tensors: Field required"),
    };
    if body.get("load_format").and_then(Value::as_str) != Some("flattened_bucket") {
        return failed();
    }
    for rank in 0..state.gpus.uuids.len() {
        let Some(pickle) = ranks.get(rank).and_then(Value::as_str).and_then(|text| STANDARD.decode(text).ok()) else { return failed() };
        let Ok(taken) = flattened(&state, &pickle).await else { return failed() };
        if !taken.is_empty() && front.core.take(taken).await.is_err() {
            return failed();
        }
    }
    if body.get("finished").and_then(Value::as_bool) == Some(true) {
        front.core.finalise();
        *state.cached.lock().await = None;
    }
    Json(Value::Null).into_response()
}

/// The tensors of a flattened bucket, whose places are in elements.
async fn flattened(state: &Lmdeploy, pickle: &[u8]) -> Result<Vec<Taken>, String> {
    let bucket = unpickle::read(pickle).ok_or("UnpicklingError")?;
    let Pickled::List(metadata) = field(&bucket, "metadata")? else { return Err("metadata".into()) };
    if metadata.is_empty() {
        return Ok(Vec::new());
    }
    let mut cached = state.cached.lock().await;
    if let Ok(tensor) = field(&bucket, "flattened_tensor") {
        let rebuilt = Rebuilt::from(tensor, &state.gpus.memory)?;
        // A clone is kept, and is what a later bucket without memory is read from: old bytes by then.
        let clones = field(&bucket, "require_clone") != Ok(&Pickled::Bool(false));
        *cached = Some(if clones { rebuilt.cloned()? } else { rebuilt });
    }
    let tensor = cached.as_ref().ok_or("flattened_tensor is not provided in weights and no cached ipc tensor is available.")?;
    let take = |item: &Pickled| {
        let dtype = element(field(item, "dtype")?)?;
        let element = (tensor.dtype.bits() / 8).max(1);
        if dtype != tensor.dtype {
            return Err("converted to another element type without a word".to_owned());
        }
        tensor.tensor(text(item, "name")?, dtype, shape(field(item, "shape")?)?, number(item, "start_idx")?.saturating_mul(element))
    };
    metadata.iter().map(take).collect()
}

//! The weight groups of SGLang 0.5.23: endpoints, order rules, replies (`srt/managers/scheduler_components/weight_updater.py`,
//! `srt/model_executor/model_runner_components/weight_updater.py`, read in its wheel).
//!
//! Rules kept on purpose: everything runs in the scheduler, so that nothing is generated or answered next to it; an update outside a session is
//! refused without a word to the group, as is a bucket that cannot be cut; an init knows no other rank than itself; an update of a server that
//! is not paused waits for its running requests; the version moves with each call that names one; a cache that cannot be flushed makes a
//! failure of an update that happened; and only the first rank's errors are reported.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Json, Router};
use http::StatusCode;
use serde_json::{Map, Value, json};

use super::super::core::Pause;
use super::super::front::Front;
use super::super::sglang_reply::{PauseCondition, bad_request, gone, object};
use super::super::tensors::Taken;
use super::torch::{Layout, Rendezvous, TorchGroups};
use super::{Announced, Trouble, announced, detached};

const DEFAULT_NAME: &str = "weight_update_group";

pub(in super::super) struct SglangGroups {
    groups: TorchGroups,
    session: parking_lot::Mutex<Option<Session>>,
    /// What the device still has to read after the responses.
    reading: parking_lot::Mutex<Vec<tokio::task::JoinHandle<()>>>,
}

#[derive(Debug, Clone, Copy)]
struct Session {
    loaded: bool,
}

type Shared = Extension<Arc<SglangGroups>>;

impl SglangGroups {
    pub(in super::super) fn new(groups: TorchGroups) -> Arc<Self> {
        Arc::new(Self { groups, session: parking_lot::Mutex::default(), reading: parking_lot::Mutex::default() })
    }

    pub(super) fn ranks(&self) -> &super::Ranks {
        &self.groups.ranks
    }

    /// Something that the device does later, in its order.
    pub(super) fn read_later(&self, reading: tokio::task::JoinHandle<()>) {
        self.reading.lock().push(reading);
    }

    async fn device_idle(&self) {
        let reading = std::mem::take(&mut *self.reading.lock());
        futures::future::join_all(reading).await;
    }
}

pub(in super::super) fn routes(groups: Arc<SglangGroups>) -> Router<Arc<Front>> {
    Router::new()
        .route("/init_weights_update_group", post(init))
        .route("/destroy_weights_update_group", post(destroy))
        .route("/begin_weight_update", post(begin))
        .route("/update_weights_from_distributed", post(update))
        .route("/update_weights_from_tensor", post(super::handles::update))
        .route("/end_weight_update", post(end))
        .layer(Extension(groups))
}

/// `{"success", "message"}`.
pub(in super::super) fn said(success: bool, message: impl Into<String>) -> Response {
    let status = if success { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    (status, Json(json!({"success": success, "message": message.into()}))).into_response()
}

fn body(bytes: &[u8]) -> Result<Map<String, Value>, Box<Response>> {
    object(bytes)
}

async fn init(State(front): State<Arc<Front>>, Extension(state): Shared, bytes: Bytes) -> Response {
    let body = match body(&bytes) {
        Ok(body) => Value::Object(body),
        Err(refusal) => return *refusal,
    };
    let at = match Rendezvous::read(&body, Some(DEFAULT_NAME)) {
        Ok(at) => at,
        Err(field) => return bad_request(&format!("{field}: Field required")),
    };
    let held = Arc::clone(&front);
    detached(&front, async move {
        let Ok(_turn) = held.core.turn().await else { return gone(&held).await };
        match state.groups.init(&at).await {
            Ok(()) => said(true, "Succeeded to initialize custom process group."),
            // The other ranks' words are in their logs.
            Err(ranks) => match ranks.into_iter().next() {
                Some(Err(Trouble::Dead(_))) => gone(&held).await,
                Some(Err(Trouble::Raised(cause))) => said(false, format!("Failed to initialize custom process group: {cause}.")),
                Some(Ok(())) | None => said(true, "Succeeded to initialize custom process group."),
            },
        }
    })
    .await
}

async fn destroy(State(front): State<Arc<Front>>, Extension(state): Shared, bytes: Bytes) -> Response {
    let body = match body(&bytes) {
        Ok(body) => body,
        Err(refusal) => return *refusal,
    };
    let name = body.get("group_name").and_then(Value::as_str).unwrap_or(DEFAULT_NAME).to_owned();
    let held = Arc::clone(&front);
    detached(&front, async move {
        let Ok(_turn) = held.core.turn().await else { return gone(&held).await };
        match state.groups.destroy(&name).await {
            Some(Ok(())) => said(true, "Succeeded to destroy custom process group."),
            Some(Err(Trouble::Raised(cause))) => said(false, format!("Failed to destroy custom process group: {cause}.")),
            Some(Err(Trouble::Dead(_))) => gone(&held).await,
            None => said(false, "The group to be destroyed does not exist."),
        }
    })
    .await
}

async fn begin(State(front): State<Arc<Front>>, Extension(state): Shared, bytes: Bytes) -> Response {
    let body = match body(&bytes) {
        Ok(body) => body,
        Err(refusal) => return *refusal,
    };
    let selector = body.get("selector").map_or(Some("all"), Value::as_str).unwrap_or_default();
    if !["all", "target", "draft"].contains(&selector) {
        return bad_request("selector must be all, target or draft");
    }
    let Ok(_turn) = front.core.turn().await else { return gone(&front).await };
    let mut session = state.session.lock();
    if session.is_some() {
        return said(false, "a weight-update session is already open; call end_weight_update() first");
    }
    *session = Some(Session { loaded: false });
    said(true, "Success")
}

async fn end(State(front): State<Arc<Front>>, Extension(state): Shared) -> Response {
    let Ok(_turn) = front.core.turn().await else { return gone(&front).await };
    state.device_idle().await;
    match state.session.lock().take() {
        None => said(false, "no weight-update session is open; call begin_weight_update() first"),
        Some(session) => {
            if session.loaded {
                front.core.finalise();
            }
            said(true, "Success")
        }
    }
}

async fn update(
    State(front): State<Arc<Front>>,
    Extension(state): Shared,
    Extension(pause): Extension<PauseCondition>,
    bytes: Bytes,
) -> Response {
    let body = match body(&bytes) {
        Ok(body) => body,
        Err(refusal) => return *refusal,
    };
    for field in ["names", "dtypes", "shapes"] {
        if !body.get(field).is_some_and(Value::is_array) {
            return bad_request(&format!("{field}: Field required"));
        }
    }
    let (held, given) = (Arc::clone(&front), body.clone());
    detached(&front, in_session(held, state, pause, body, "update_weights_from_distributed", move |state| distributed(state, given))).await
}

/// What both ways to hand tensors over have in common: whom they wait for, the session, the load, the version, the flush.
pub(in super::super) async fn in_session<F>(
    front: Arc<Front>,
    state: Arc<SglangGroups>,
    pause: PauseCondition,
    body: Map<String, Value>,
    what: &'static str,
    receive: impl FnOnce(Arc<SglangGroups>) -> F + Send,
) -> Response
where
    F: Future<Output = Result<Vec<Taken>, Trouble>> + Send,
{
    let on = |name: &str, default: bool| body.get(name).and_then(Value::as_bool).unwrap_or(default);
    if on("abort_all_requests", false) {
        front.core.abort_all();
    }
    // Who wants to unpause meanwhile waits.
    let condition = pause.0.lock().await;
    let paused = front.core.state().pause != Pause::Running;
    if !paused {
        drop(condition);
        front.core.change(|state| state.pause = Pause::New);
        if front.core.drained().await.is_err() {
            return gone(&front).await;
        }
    }
    let answer = {
        let Ok(_turn) = front.core.turn().await else { return gone(&front).await };
        if state.session.lock().is_none() {
            said(false, format!("{what} must run between begin_weight_update() and end_weight_update()"))
        } else {
            match receive(Arc::clone(&state)).await {
                Err(Trouble::Dead(_)) => return gone(&front).await,
                Err(Trouble::Raised(cause)) => said(false, cause),
                Ok(taken) => load(&front, &state, &body, taken).await,
            }
        }
    };
    if !paused {
        front.core.change(|state| state.pause = Pause::Running);
    }
    answer
}

async fn load(front: &Arc<Front>, state: &SglangGroups, body: &Map<String, Value>, taken: Vec<Taken>) -> Response {
    let reported = front.core.state().faults.load_rank == 0;
    let selector = body.get("selector").and_then(Value::as_str).unwrap_or("all");
    if let Err(cause) = into_models(front, selector, taken).await
        && reported
    {
        let message = format!(
            "Failed to update parameter online: {cause}. The full weights of the ModelRunner are partially updated. \
             Please discard the whole weights."
        );
        return said(false, message);
    }
    if let Some(session) = state.session.lock().as_mut() {
        session.loaded = true;
    }
    let mut message = "Succeeded to update parameter online.".to_owned();
    let version = body.get("weight_version").and_then(Value::as_str).map(str::to_owned);
    if let Some(version) = &version {
        front.core.change(|core| version.clone_into(&mut core.version));
    }
    if body.get("flush_cache").and_then(Value::as_bool).unwrap_or(true) && !front.core.reset_cache() {
        let message = "Weights were updated, but the cache was not flushed because requests are still running or queued. \
                       Retract or finish them, then call /flush_cache.";
        return said(false, message);
    }
    if let Some(version) = version {
        message = format!("{message} Weight version updated to {version}.");
    }
    said(true, message)
}

/// What was received goes into the models that the call names; a server without a draft model has none to name.
async fn into_models(front: &Front, selector: &str, taken: Vec<Taken>) -> Result<(), String> {
    if !["all", "target", "draft"].contains(&selector) {
        return Err(format!("invalid selector '{selector}'; expected 'target', 'draft', or 'all'"));
    }
    if selector != "target" && front.core.state().draft.is_some() {
        front.core.take_draft(taken.clone())?;
    }
    if selector == "draft" { Ok(()) } else { front.core.take(taken).await }
}

async fn distributed(state: Arc<SglangGroups>, body: Map<String, Value>) -> Result<Vec<Taken>, Trouble> {
    let name = body.get("group_name").and_then(Value::as_str).unwrap_or(DEFAULT_NAME).to_owned();
    let received = receive(&state.groups, &name, &Value::Object(body)).await;
    received.map_err(|trouble| match trouble {
        Trouble::Raised(cause) => Trouble::Raised(format!("Failed to receive weights: {cause}")),
        dead @ Trouble::Dead(_) => dead,
    })
}

async fn receive(groups: &TorchGroups, name: &str, body: &Value) -> Result<Vec<Taken>, Trouble> {
    if !groups.has(name).await {
        let names = groups.names().await.iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ");
        let message = format!("Group {name} not in [{names}]. Please call `init_weights_update_group` first.");
        return Err(Trouble::Raised(message));
    }
    let tensors = announced(body, "dtypes").map_err(Trouble::Raised)?;
    match body.get("load_format").and_then(Value::as_str) {
        Some("flattened_bucket") => {
            check_bucket(&tensors).map_err(Trouble::Raised)?;
            groups.receive(name, &tensors, Layout::Bucket).await
        }
        _ => groups.receive(name, &tensors, Layout::Tensors).await,
    }
}

/// What `FlattenedTensorBucket.empty` refuses before the broadcast (`srt/weight_sync/tensor_bucket.py`).
fn check_bucket(tensors: &[Announced]) -> Result<(), String> {
    if tensors.is_empty() {
        return Err("Cannot create empty tensor bucket".to_owned());
    }
    let mut offset = 0_u64;
    for tensor in tensors {
        if !offset.is_multiple_of((tensor.dtype.bits() / 8).max(1)) {
            return Err(format!("Unaligned received tensor {} at byte {offset}", tensor.name));
        }
        offset += tensor.bytes;
    }
    Ok(())
}

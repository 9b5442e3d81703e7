//! The weight groups of LMDeploy 0.18.0 with the Ray executor: endpoints, order rules, replies (`pytorch/engine/model_agent/agent.py`,
//! `pytorch/engine/executor/ray_executor.py`, read in its wheel; what a lost rank 0 does to it was measured on H200).
//!
//! Rules kept on purpose: without Ray every call is 500; init and the HTTP front answer also while the workers are stuck; tensors of several
//! types are refused before the broadcast; layers stay stale until `finished`; every rank's error is reported; and while a worker is stuck in a
//! broadcast nothing is generated and no group destroyed, with `/health` as before.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Router};
use http::StatusCode;
use serde_json::Value;

use super::super::front::Front;
use super::super::lmdeploy::{bad, failed};
use super::sglang::said;
use super::torch::{Layout, Rendezvous, TorchGroups};
use super::{Trouble, announced, detached};

/// What the agent of the model knows of groups.
pub(in super::super) struct LmdeployGroups {
    groups: TorchGroups,
    ray: bool,
}

type Shared = Extension<Arc<LmdeployGroups>>;

pub(in super::super) fn routes(groups: TorchGroups, ray: bool) -> Router<Arc<Front>> {
    Router::new()
        .route("/init_weights_update_group", post(init))
        .route("/update_weights_from_distributed", post(update))
        .route("/destroy_weights_update_group", post(destroy))
        .layer(Extension(Arc::new(LmdeployGroups { groups, ray })))
}

/// pydantic's answer, as LMDeploy's handler of it gives it.
fn missing(field: &str) -> Response {
    let detail = serde_json::json!([{"type": "missing", "loc": ["body", field], "msg": "Field required"}]);
    (StatusCode::UNPROCESSABLE_ENTITY, axum::Json(serde_json::json!({"detail": detail}))).into_response()
}

/// The words of all ranks as one.
fn reduced(what: &str, ranks: &[Result<(), Trouble>], well: &str, ill: impl Fn(&str) -> String) -> Response {
    let words = ranks.iter().enumerate().map(|(rank, said)| match said {
        Ok(()) => format!("rank{rank}: {well}"),
        Err(trouble) => format!("rank{rank}: {}", ill(trouble.text())),
    });
    said(false, format!("{what}: {}", words.collect::<Vec<_>>().join(" | ")))
}

async fn init(State(front): State<Arc<Front>>, Extension(state): Shared, bytes: Bytes) -> Response {
    let Ok(body) = serde_json::from_slice::<Value>(&bytes) else { return bad("JSON decode error") };
    let at = match Rendezvous::read(&body, None) {
        Ok(at) => at,
        Err(field) => return missing(field),
    };
    if !state.ray {
        return failed();
    }
    let held = Arc::clone(&front);
    detached(&front, async move {
        let what = "init_weights_update_group";
        let well = "Succeeded to initialize weights update group.";
        let every = |words: &str| {
            let ranks: Vec<_> = (0..state.groups.ranks.count()).map(|_| Err(Trouble::Raised(words.to_owned()))).collect();
            reduced(what, &ranks, well, str::to_owned)
        };
        if at.name.is_empty() {
            return every("group_name cannot be empty");
        }
        if state.groups.has(&at.name).await {
            return every(&format!("group '{}' already initialized", at.name));
        }
        match state.groups.init(&at).await {
            Ok(()) => said(true, well),
            Err(ranks) if ranks.iter().any(|rank| matches!(rank, Err(Trouble::Dead(_)))) => gone(&held).await,
            Err(ranks) => reduced(what, &ranks, well, |cause| format!("Failed to initialize weights update group: {cause}")),
        }
    })
    .await
}

/// A worker of Ray's died: the server ends.
async fn gone(front: &Front) -> Response {
    front.crash.cancel();
    std::future::pending().await
}

async fn update(State(front): State<Arc<Front>>, Extension(state): Shared, bytes: Bytes) -> Response {
    let Ok(body) = serde_json::from_slice::<Value>(&bytes) else { return bad("JSON decode error") };
    for field in ["names", "dtypes", "shapes"] {
        if !body.get(field).is_some_and(Value::is_array) {
            return missing(field);
        }
    }
    let Some(name) = body.get("group_name").and_then(Value::as_str).map(str::to_owned) else { return missing("group_name") };
    if !state.ray {
        return failed();
    }
    let held = Arc::clone(&front);
    detached(&front, async move {
        // The workers do one thing at a time, and generate nothing meanwhile.
        let Ok(_turn) = held.core.turn().await else { return failed() };
        let what = "update_weights_from_distributed";
        let count = state.groups.ranks.count();
        let refused = |message: String| {
            let ranks: Vec<_> = (0..count).map(|_| Err(Trouble::Raised(message.clone()))).collect();
            reduced(what, &ranks, "", str::to_owned)
        };
        if !state.groups.has(&name).await {
            return refused(format!("group '{name}' not initialized. Call init_weights_update_group first."));
        }
        match carry_out(&held, &state.groups, &name, &body).await {
            Ok(()) => said(true, "Succeeded to update parameter online."),
            Err(Trouble::Dead(_)) => gone(&held).await,
            Err(Trouble::Raised(cause)) => refused(format!(
                "Failed to update parameter online: {cause}. The model weights are partially updated; please discard them and reload."
            )),
        }
    })
    .await
}

async fn carry_out(front: &Front, groups: &TorchGroups, name: &str, body: &Value) -> Result<(), Trouble> {
    let tensors = announced(body, "dtypes").map_err(Trouble::Raised)?;
    if !tensors.is_empty() {
        let layout = match body.get("load_format").and_then(Value::as_str) {
            Some("flattened_bucket") => {
                let mut dtypes = tensors.iter().map(|tensor| tensor.dtype);
                let first = dtypes.next();
                if dtypes.any(|dtype| Some(dtype) != first) {
                    let dtypes: Vec<_> = tensors.iter().map(|tensor| tensor.dtype).collect();
                    return Err(Trouble::Raised(format!("All tensors should have same dtype, but given {dtypes:?}")));
                }
                Layout::Bucket
            }
            _ => Layout::Tensors,
        };
        let taken = groups.receive(name, &tensors, layout).await?;
        front.core.take(taken).await.map_err(Trouble::Raised)?;
    }
    if body.get("finished").and_then(Value::as_bool) == Some(true) {
        front.core.finalise();
    }
    Ok(())
}

async fn destroy(State(front): State<Arc<Front>>, Extension(state): Shared, bytes: Bytes) -> Response {
    let Ok(body) = serde_json::from_slice::<Value>(&bytes) else { return bad("JSON decode error") };
    let Some(name) = body.get("group_name").and_then(Value::as_str).map(str::to_owned) else { return missing("group_name") };
    if !state.ray {
        return failed();
    }
    let held = Arc::clone(&front);
    detached(&front, async move {
        let Ok(_turn) = held.core.turn().await else { return failed() };
        let what = "destroy_weights_update_group";
        match state.groups.destroy(&name).await {
            Some(Ok(())) => said(true, format!("Succeeded to destroy group '{name}'.")),
            Some(Err(Trouble::Dead(_))) => gone(&held).await,
            Some(Err(Trouble::Raised(cause))) => said(false, format!("{what}: rank0: Failed to destroy group: {cause}")),
            None => {
                let ranks: Vec<_> =
                    (0..state.groups.ranks.count()).map(|_| Err(Trouble::Raised(format!("group '{name}' not initialized")))).collect();
                reduced(what, &ranks, "", str::to_owned)
            }
        }
    })
    .await
}

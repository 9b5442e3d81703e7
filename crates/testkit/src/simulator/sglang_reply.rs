//! What all routes of SGLang share: the bodies of its errors, its pause condition, and its end.

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde_json::{Value, json};

use super::front::Front;

/// The tokenizer's `is_pause_cond`: a pause or resume waits for an update that runs while the server is paused.
#[derive(Clone, Default)]
pub(super) struct PauseCondition(pub(super) Arc<tokio::sync::Mutex<()>>);

pub(super) fn bad_request(message: &str) -> Response {
    let body = json!({"object": "error", "message": message, "type": "Bad Request", "param": null, "code": 400});
    (StatusCode::BAD_REQUEST, Json(body)).into_response()
}

/// The scheduler is gone: SGLang ends the whole process tree.
pub(super) async fn gone(front: &Front) -> Response {
    front.crash.cancel();
    std::future::pending().await
}

pub(super) fn object(body: &[u8]) -> Result<serde_json::Map<String, Value>, Box<Response>> {
    serde_json::from_slice(body).map_err(|_| Box::new(bad_request("JSON decode error")))
}

//! The bodies of vLLM's errors, as seen on the running server.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde_json::json;

use super::core::Dead;

/// vLLM's error body.
pub(super) fn error(status: StatusCode, kind: &str, param: Option<&str>, message: &str) -> Response {
    let error = json!({"message": message, "type": kind, "param": param, "code": status.as_u16()});
    (status, Json(json!({"error": error}))).into_response()
}

pub(super) fn invalid(param: &str, message: &str) -> Response {
    error(StatusCode::BAD_REQUEST, "Bad Request", Some(param), &format!("1 validation error:\n  {message}"))
}

pub(super) fn failed(message: &str) -> Response {
    error(StatusCode::INTERNAL_SERVER_ERROR, "InternalServerError", None, message)
}

pub(super) fn worker_failed(cause: &str) -> Response {
    failed(&format!(
        "Call to collective_rpc method failed: Worker failed with error '{cause}', please check the stack trace above for the root cause"
    ))
}

pub(super) fn dead(_: Dead) -> Response {
    failed("EngineCore encountered an issue. See stack trace (above) for the root cause.")
}

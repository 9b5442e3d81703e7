//! `/loglevel` of a status port: `GET` returns the filter, `PUT` changes it (an empty body restores the filter from the start).
//!
//! Responds only to peers on the loopback interface that request localhost: users who may forward a port of the pod, and the pod's own
//! containers.

use std::net::SocketAddr;

use axum::extract::{ConnectInfo, DefaultBodyLimit};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::json;

use super::{LogsError, change, filters};
use crate::health::{asks_for_localhost, is_local};

/// Longest filter in bytes.
const LONGEST: usize = 4096;

pub fn router() -> Router {
    Router::new().route("/loglevel", get(show).put(replace)).layer(DefaultBodyLimit::max(LONGEST))
}

async fn show(ConnectInfo(from): ConnectInfo<SocketAddr>, headers: HeaderMap) -> Response {
    if !(is_local(from) && asks_for_localhost(&headers)) {
        return refused();
    }
    match filters() {
        Some((filter, started)) => Json(json!({"filter": filter, "started": started})).into_response(),
        None => (StatusCode::CONFLICT, LogsError::NotOurs.to_string() + "\n").into_response(),
    }
}

async fn replace(ConnectInfo(from): ConnectInfo<SocketAddr>, headers: HeaderMap, wanted: String) -> Response {
    if !(is_local(from) && asks_for_localhost(&headers)) {
        return refused();
    }
    match change(&wanted) {
        Ok(filter) => Json(json!({"filter": filter})).into_response(),
        Err(error @ (LogsError::NotOurs | LogsError::Again(_))) => (StatusCode::CONFLICT, error.to_string() + "\n").into_response(),
        Err(error) => (StatusCode::UNPROCESSABLE_ENTITY, error.to_string() + "\n").into_response(),
    }
}

fn refused() -> Response {
    let message = "the log level is changed through the loopback interface only: kubectl port-forward POD PORT, \
                   and curl -X PUT --data FILTER http://127.0.0.1:PORT/loglevel\n";
    (StatusCode::FORBIDDEN, message).into_response()
}

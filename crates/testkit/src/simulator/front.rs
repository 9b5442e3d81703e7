//! The HTTP front that both simulated engines share: connections, faults, API keys, and the simulator's own endpoints.
//!
//! Decides what happens to a call before the engine's own rules see it. `/simulator/...` is never spoiled and needs no key:
//! `GET /simulator/digest` (what is served, from the bytes that were read), `GET` and `POST /simulator/faults`, `GET /simulator/calls`.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use http::{StatusCode, header};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::core::{Core, Pause};
use super::faults::{Fault, Faults};
use super::served::Served;
use weightsync_core::weights::digest_hex;

/// Calls that are remembered.
const MOST_CALLS: usize = 10_000;

/// What every handler of a simulated engine knows.
pub(super) struct Front {
    pub(super) core: Arc<Core>,
    pub(super) model: String,
    pub(super) model_directory: String,
    pub(super) max_model_len: usize,
    pub(super) world_size: u32,
    /// Seconds since 1970, as text.
    pub(super) started: String,
    pub(super) api_key: Option<String>,
    /// Paths that the key guards.
    pub(super) guarded: fn(&str) -> bool,
    /// Ends the server at once, connections included.
    pub(super) crash: CancellationToken,
}

impl Front {
    pub(super) fn world_size(&self) -> u32 {
        self.core.state().faults.world_size.unwrap_or(self.world_size)
    }
}

/// Puts the shared parts around an engine's routes.
pub(super) fn around(engine: Router<Arc<Front>>, front: &Arc<Front>) -> Router {
    let engine = engine
        .fallback(|| async { (StatusCode::NOT_FOUND, Json(json!({"detail": "Not Found"}))) })
        .method_not_allowed_fallback(|| async { (StatusCode::METHOD_NOT_ALLOWED, Json(json!({"detail": "Method Not Allowed"}))) })
        .layer(middleware::from_fn_with_state(Arc::clone(front), before_the_engine));
    let own = Router::new()
        .route("/simulator/digest", get(digest))
        .route("/simulator/faults", get(faults).post(set_faults))
        .route("/simulator/calls", get(calls));
    own.merge(engine).with_state(Arc::clone(front))
}

async fn before_the_engine(State(front): State<Arc<Front>>, request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    let fault = {
        let mut state = front.core.state();
        if state.calls.len() < MOST_CALLS {
            state.calls.push(format!("{} {}", request.method(), request.uri()));
        }
        state.faults.of(&path)
    };
    match fault {
        None => {}
        Some(Fault::Answer { status, body }) => {
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            return (status, Json(body)).into_response();
        }
        Some(Fault::Hang) => return std::future::pending().await,
        Some(Fault::LoseReply) => {
            let _lost = next.run(request).await;
            return std::future::pending().await;
        }
        Some(Fault::Disconnect) => {
            let broken = futures::stream::once(async { Err::<Bytes, _>(io::Error::from(io::ErrorKind::ConnectionReset)) });
            return Body::from_stream(broken).into_response();
        }
        Some(Fault::Slow { ms }) => tokio::time::sleep(Duration::from_millis(ms)).await,
        Some(Fault::Crash) => {
            front.crash.cancel();
            return std::future::pending().await;
        }
    }
    if let Some(key) = &front.api_key
        && (front.guarded)(&path)
        && !shows(&request, key)
    {
        return (StatusCode::UNAUTHORIZED, Json(json!({"error": "Unauthorized"}))).into_response();
    }
    next.run(request).await
}

fn shows(request: &Request, key: &str) -> bool {
    let shown = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    shown.and_then(|value| value.strip_prefix("Bearer ")) == Some(key)
}

async fn digest(State(front): State<Arc<Front>>) -> Json<Value> {
    let state = front.core.state();
    let tensors = state.served.tensors();
    Json(json!({
        "digest": digest_hex(state.digest()),
        "draft": state.draft.as_ref().map(Served::tensors),
        "count": tensors.len(),
        "tensors": tensors,
        "version": state.version,
        "requests": state.requests(),
        "paused": state.pause != Pause::Running,
    }))
}

async fn faults(State(front): State<Arc<Front>>) -> Json<Faults> {
    Json(front.core.state().faults.clone())
}

async fn set_faults(State(front): State<Arc<Front>>, body: Bytes) -> Response {
    match serde_json::from_slice::<Faults>(&body) {
        Ok(faults) => {
            front.core.change(|state| state.faults = faults.clone());
            Json(faults).into_response()
        }
        Err(error) => (StatusCode::BAD_REQUEST, Json(json!({"error": error.to_string()}))).into_response(),
    }
}

async fn calls(State(front): State<Arc<Front>>) -> Json<Vec<String>> {
    Json(front.core.state().calls.clone())
}

/// Serves until `stop`; then every connection is aborted with the set that holds them, as when a process dies.
pub(super) async fn serve(listener: TcpListener, router: Router, stop: CancellationToken) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let service = TowerToHyperService::new(router.clone());
                    connections.spawn(async move {
                        let _ended = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection cannot be accepted");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
            Some(_ended) = connections.join_next(), if !connections.is_empty() => {}
        }
    }
}

//! `/healthz`, `/readyz`, `/metrics` and `/loglevel` of a program. Decides nothing by itself: it asks the checks that the program's parts brought.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use parking_lot::RwLock;

use super::logs;
use super::metrics::Metrics;

type Check = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// The checks of a program. Clones share them.
#[derive(Clone, Default)]
pub struct Health {
    live: Arc<RwLock<Vec<(&'static str, Check)>>>,
    ready: Arc<RwLock<Vec<(&'static str, Check)>>>,
}

impl Health {
    /// Adds a check of `/healthz`: an error means that only a restart helps.
    pub fn live_while(&self, name: &'static str, check: impl Fn() -> Result<(), String> + Send + Sync + 'static) {
        self.live.write().push((name, Arc::new(check)));
    }

    /// Adds a check of `/readyz`: an error means that the program cannot serve now.
    pub fn ready_while(&self, name: &'static str, check: impl Fn() -> Result<(), String> + Send + Sync + 'static) {
        self.ready.write().push((name, Arc::new(check)));
    }

    fn not_ready(&self) -> Vec<String> {
        failed(&self.ready)
    }

    fn not_live(&self) -> Vec<String> {
        failed(&self.live)
    }
}

fn failed(checks: &RwLock<Vec<(&'static str, Check)>>) -> Vec<String> {
    let checks = checks.read();
    checks.iter().filter_map(|(name, check)| check().err().map(|cause| format!("{name}: {cause}"))).collect()
}

/// Whether a peer is on the loopback interface: within the pod, or at the other end of a forwarded port.
pub fn is_local(from: SocketAddr) -> bool {
    from.ip().to_canonical().is_loopback()
}

/// The pages, for [`serve_plain`](super::https::serve_plain).
pub fn router(health: Health, metrics: Metrics) -> Router {
    Router::new()
        .route("/healthz", get(|State((health, _)): State<(Health, Metrics)>| async move { page(&health.not_live()) }))
        .route("/readyz", get(|State((health, _)): State<(Health, Metrics)>| async move { page(&health.not_ready()) }))
        .route("/metrics", get(|State((_, metrics)): State<(Health, Metrics)>| async move { exposition(&metrics) }))
        .with_state((health, metrics))
        .merge(logs::router())
}

fn page(failed: &[String]) -> Response {
    if failed.is_empty() {
        return "ok\n".into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, failed.join("\n") + "\n").into_response()
}

fn exposition(metrics: &Metrics) -> Response {
    match metrics.text() {
        Ok(text) => ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[cfg(test)]
mod tests;

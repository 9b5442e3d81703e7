//! `/healthz`, `/readyz`, `/metrics` and `/loglevel` of a program. Decides nothing by itself: it runs the checks that the program's parts
//! registered. Probes have a listener of their own for `/healthz` and `/readyz`, so that strangers on other ports cannot make a pod look
//! dead.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use parking_lot::RwLock;

use super::logs;
use super::metrics::{Metrics, plain};

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

/// Whether a peer is in the pod, or at the other end of a forwarded port: 127.0.0.1 or ::1. Other addresses of the loopback network belong
/// to a mesh's proxy, which forwards requests from elsewhere (Istio: 127.0.0.6).
pub fn is_local(from: SocketAddr) -> bool {
    let ip = from.ip().to_canonical();
    ip == Ipv4Addr::LOCALHOST || ip == Ipv6Addr::LOCALHOST
}

/// Whether a request names this machine. A web site that resolves its name to this address sends that name (DNS rebinding).
pub fn asks_for_localhost(headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name == "localhost" || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The pages, for [`serve_plain`](super::https::serve_plain).
pub fn router(health: Health, metrics: Metrics) -> Router {
    let metrics = Router::new()
        .route("/metrics", get(|State(metrics): State<Metrics>, headers: HeaderMap| async move { exposition(&metrics, &headers) }))
        .with_state(metrics);
    probes(health).merge(metrics).merge(logs::router())
}

/// `/healthz` and `/readyz` alone, for the listener that only probes use.
pub fn probes(health: Health) -> Router {
    Router::new()
        .route("/healthz", get(|State(health): State<Health>| async move { page(&health.not_live()) }))
        .route("/readyz", get(|State(health): State<Health>| async move { page(&health.not_ready()) }))
        .with_state(health)
}

/// Address of the probes for status pages at `status`: the next port, or a free one if `status` has port 0.
pub fn alongside(status: SocketAddr) -> SocketAddr {
    let port = if status.port() == 0 { 0 } else { status.port().checked_add(1).unwrap_or(0) };
    SocketAddr::new(status.ip(), port)
}

fn page(failed: &[String]) -> Response {
    if failed.is_empty() {
        return "ok\n".into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, failed.join("\n") + "\n").into_response()
}

/// OpenMetrics for a scraper that takes it, as Prometheus says in `Accept`; else Prometheus' own text.
fn exposition(metrics: &Metrics, headers: &HeaderMap) -> Response {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let open = accepted.into_iter().any(|value| value.contains("application/openmetrics-text"));
    match metrics.text() {
        Ok(text) if open => ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text).into_response(),
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], plain(&text)).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[cfg(test)]
mod tests;

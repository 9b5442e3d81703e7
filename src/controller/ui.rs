//! The web page of a controller, `/ui`: the members of each group, their versions, why a member is out, and the phases of the last updates.
//! Read-only: three files that are compiled in, and one JSON document.
//!
//! Decides which clients may see it. By default only clients on the pod's loopback interface: `kubectl port-forward`, and so users with the
//! right `pods/portforward`. Names of pods, versions and causes must not be readable by every pod of a cluster.

mod state;

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use axum::{Json, Router};

use super::objects::Objects;
use weightsync_net::health::{asks_for_localhost, is_local};

/// Clients that may see the web page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Ui {
    /// No client: the page is off.
    Off,
    /// Peers on the loopback interface, such as `kubectl port-forward`.
    #[default]
    Local,
    /// All clients of the status port: for use with an authenticating proxy.
    Open,
}

const INDEX: &str = include_str!("ui/index.html");
const SCRIPT: &str = include_str!("ui/app.js");
const STYLE: &str = include_str!("ui/style.css");

/// No external content, nothing inline, in no frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

#[derive(Clone)]
pub(super) struct Page {
    access: Ui,
    pod: Arc<str>,
    objects: Arc<OnceLock<Arc<Objects>>>,
}

impl Page {
    pub(super) fn new(access: Ui, pod: &str) -> Self {
        Self { access, pod: pod.into(), objects: Arc::default() }
    }

    /// This controller leads: from now on it has data to show.
    pub(super) fn lead(&self, objects: &Arc<Objects>) {
        // A process leads at most once.
        let _ = self.objects.set(objects.clone());
    }

    /// The routes; none if the page is off.
    pub(super) fn router(&self) -> Router {
        if self.access == Ui::Off {
            return Router::new();
        }
        let text = |kind: &'static str, body: &'static str| get(move || async move { ([(header::CONTENT_TYPE, kind)], body) });
        Router::new()
            .route("/ui", get(|| async { Redirect::permanent("/ui/") }))
            .route("/ui/", text("text/html; charset=utf-8", INDEX))
            .route("/ui/app.js", text("text/javascript; charset=utf-8", SCRIPT))
            .route("/ui/style.css", text("text/css; charset=utf-8", STYLE))
            .route("/ui/state", get(answer))
            .with_state(self.clone())
            .layer(from_fn_with_state(self.access, guard))
    }
}

async fn answer(State(page): State<Page>) -> Json<state::State> {
    Json(state::State::of(&page.pod, page.objects.get().map(|objects| objects.seen())))
}

async fn guard(State(access): State<Ui>, ConnectInfo(from): ConnectInfo<SocketAddr>, request: Request, next: Next) -> Response {
    let refused = match access {
        Ui::Local => refusal(from, request.headers()),
        Ui::Open | Ui::Off => None,
    };
    let mut response = match refused {
        Some(message) => (StatusCode::FORBIDDEN, message).into_response(),
        None => next.run(request).await,
    };
    let set = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    for (name, value) in set {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Why a peer may not see the page.
fn refusal(from: SocketAddr, headers: &HeaderMap) -> Option<&'static str> {
    if !is_local(from) {
        return Some("the page is shown to this pod only: kubectl port-forward, or ui.access=Open in the chart\n");
    }
    (!asks_for_localhost(headers)).then_some("the page is asked for as localhost\n")
}

#[cfg(test)]
mod tests;

//! The web page of a controller or of `weightsync local`, at `/ui/`: how bytes travelled between members, their versions, why a member is
//! out, the phases of the last updates, and the last events. Read-only: three files that are compiled in, and one JSON document.
//!
//! Decides which clients may see it. A page for the loopback interface is shown to `kubectl port-forward`, and so to users with the right
//! `pods/portforward`. Names of pods, versions and causes must not be readable by every pod of a cluster.

mod history;
mod recent;
mod state;

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use axum::{Json, Router};

pub use history::{Attempt, History, Noted, record};
pub use recent::{RecentEvent, RecentEvents};
pub use state::{PageCondition, PageObject};
use weightsync_net::health::{asks_for_localhost, is_local};

const INDEX: &str = include_str!("page/index.html");
const SCRIPT: &str = include_str!("page/app.js");
const STYLE: &str = include_str!("page/style.css");

/// No external content, nothing inline, in no frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Clients that may see the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Audience {
    /// Peers on the loopback interface that ask for localhost.
    Loopback,
    /// All clients of the port.
    All,
}

/// What the page shows, asked for each time; `None` from a controller that does not lead.
pub type PageObjects = Arc<dyn Fn() -> Option<Vec<PageObject>> + Send + Sync>;

/// The page of one program.
#[derive(Clone)]
#[allow(missing_docs)]
pub struct Page {
    pub audience: Audience,
    /// Name of the pod or the program that serves it.
    pub server: Arc<str>,
    pub objects: PageObjects,
}

impl Page {
    /// The routes of the page.
    pub fn router(self) -> Router {
        let text = |kind: &'static str, body: &'static str| get(move || async move { ([(header::CONTENT_TYPE, kind)], body) });
        let audience = self.audience;
        Router::new()
            .route("/ui", get(|| async { Redirect::permanent("/ui/") }))
            .route("/ui/", text("text/html; charset=utf-8", INDEX))
            .route("/ui/app.js", text("text/javascript; charset=utf-8", SCRIPT))
            .route("/ui/style.css", text("text/css; charset=utf-8", STYLE))
            .route("/ui/state", get(answer))
            .with_state(self)
            .layer(from_fn_with_state(audience, guard))
    }
}

async fn answer(State(page): State<Page>) -> Json<state::State> {
    Json(state::State::of(&page.server, (page.objects)()))
}

async fn guard(State(audience): State<Audience>, ConnectInfo(from): ConnectInfo<SocketAddr>, request: Request, next: Next) -> Response {
    let refused = match audience {
        Audience::Loopback => refusal(from, request.headers()),
        Audience::All => None,
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

/// Now, in ms since 1970.
pub(crate) fn now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;

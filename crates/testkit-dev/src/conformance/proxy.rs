//! A relay between the adapter and the server that spoils one call: the same for simulators and live servers.
//!
//! Decides what becomes of call number n; every other call passes as it is. What it does is harmless to the server by itself: a call is kept
//! from it, or its answer is kept from the adapter.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::{StatusCode, header};
use parking_lot::Mutex;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::ConformanceError;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spoil {
    /// The server dies before it.
    Kill,
    /// Answered with 503, never carried out.
    Refuse,
    /// Answered with 200 and an error inside, never carried out.
    Lie,
    /// Never carried out, never answered.
    Silence,
    /// Carried out, never answered.
    LoseReply,
    /// Rank 0 of its group dies before it; carried out.
    KillSource,
}

impl Spoil {
    /// What can happen to any call.
    pub(super) const ALL: [Self; 5] = [Self::Kill, Self::Refuse, Self::Lie, Self::Silence, Self::LoseReply];

    /// Whether the call may never be answered.
    pub(super) fn is_quiet(self) -> bool {
        matches!(self, Self::Silence | Self::LoseReply | Self::KillSource)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Kill => "the server is killed before",
            Self::Refuse => "503 instead of",
            Self::Lie => "200 with an error inside instead of",
            Self::Silence => "no answer, nothing done for",
            Self::LoseReply => "no answer, but done for",
            Self::KillSource => "rank 0 is killed before",
        }
    }
}

type Kill = Box<dyn Fn() + Send + Sync>;

struct Relay {
    target: String,
    http: reqwest::Client,
    kill: Kill,
    state: Mutex<Calls>,
}

#[derive(Default)]
struct Calls {
    seen: Vec<String>,
    spoil: Option<(usize, Spoil)>,
}

/// A running relay; ends when it is dropped.
pub(super) struct Proxy {
    relay: Arc<Relay>,
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Proxy {
    /// Relays to `target`; `kill` ends the server there, or the source.
    pub(super) async fn start(target: &str, kill: Kill) -> Result<Self, ConformanceError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let relay = Arc::new(Relay { target: target.to_owned(), http: super::client::http()?, kill, state: Mutex::default() });
        let router = Router::new().fallback(pass).with_state(relay.clone());
        let task = tokio::spawn(async move {
            let _ended = axum::serve(listener, router).await;
        });
        Ok(Self { relay, address, task })
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Counts from here; that call is spoiled.
    pub(super) fn begin(&self, spoil: Option<(usize, Spoil)>) {
        *self.relay.state.lock() = Calls { seen: Vec::new(), spoil };
    }

    /// Calls since then, `METHOD /path`.
    pub(super) fn seen(&self) -> Vec<String> {
        self.relay.state.lock().seen.clone()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn pass(State(relay): State<Arc<Relay>>, request: Request) -> Response {
    let spoil = {
        let mut calls = relay.state.lock();
        calls.seen.push(format!("{} {}", request.method(), request.uri().path()));
        let number = calls.seen.len();
        calls.spoil.filter(|(at, _)| at + 1 == number).map(|(_, spoil)| spoil)
    };
    match spoil {
        None => forward(&relay, request).await,
        Some(Spoil::Kill) => {
            (relay.kill)();
            broken()
        }
        Some(Spoil::Refuse) => (StatusCode::SERVICE_UNAVAILABLE, axum::Json(json!({"detail": "Service Unavailable"}))).into_response(),
        Some(Spoil::Lie) => {
            let error = json!({"message": "it did not work", "code": 500});
            axum::Json(json!({"success": true, "status": "success", "results": [null], "error": error})).into_response()
        }
        Some(Spoil::Silence) => std::future::pending().await,
        Some(Spoil::KillSource) => {
            (relay.kill)();
            forward(&relay, request).await
        }
        Some(Spoil::LoseReply) => {
            let _lost = forward(&relay, request).await;
            std::future::pending().await
        }
    }
}

fn broken() -> Response {
    let broken = futures::stream::once(async { Err::<Bytes, _>(std::io::Error::from(std::io::ErrorKind::ConnectionReset)) });
    Body::from_stream(broken).into_response()
}

async fn forward(relay: &Relay, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let Ok(body) = axum::body::to_bytes(body, usize::MAX).await else { return broken() };
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    let mut sent = relay.http.request(parts.method, format!("{}{path}", relay.target));
    for name in [header::CONTENT_TYPE, header::AUTHORIZATION] {
        if let Some(value) = parts.headers.get(&name) {
            sent = sent.header(name, value);
        }
    }
    let Ok(answer) = sent.body(body).send().await else { return broken() };
    let status = answer.status();
    let kind = answer.headers().get(header::CONTENT_TYPE).cloned();
    let Ok(bytes) = answer.bytes().await else { return broken() };
    let mut response = (status, bytes).into_response();
    if let Some(kind) = kind {
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
    }
    response
}

//! Runs a router over TLS or plain TCP. Decides how much and how long a peer may take, and which identities are let in; a refused peer
//! is told so. It never looks into a request.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, DefaultBodyLimit, Request};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, Interest};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::replies::Failed;
use crate::identity::{ClientCertificates, Identity, IdentityError, PeerIdentity};
use weightsync_core::protocol::{Refusal, RefusalCode};

/// Handshakes at once. Of thousands that were all begun at once each took longer than its client waited, and none ended.
const HANDSHAKES: usize = 64;

/// How much and how long a peer may take.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Longest TLS handshake.
    pub handshake: Duration,
    /// Longest wait for the head of a request; also how long an idle connection is kept.
    pub head: Duration,
    /// Longest time until a handler answers; streams may go on after that.
    pub answer: Duration,
    /// Bytes sent but not taken by the peer for this long end the connection.
    pub stalled: Duration,
    /// How long requests may run on after a stop was asked for.
    pub drain: Duration,
    /// Connections at once; more wait to be accepted.
    pub connections: usize,
    /// Longest head of a request in bytes, at least 8192.
    pub head_bytes: usize,
    /// Longest body of a request in bytes.
    pub body_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(5),
            head: Duration::from_secs(15),
            answer: Duration::from_secs(120),
            stalled: Duration::from_secs(15),
            drain: Duration::from_secs(2),
            connections: 512,
            head_bytes: 16 << 10,
            // The layout of a model with 100 000 tensors is about 20 MB of JSON.
            body_bytes: 64 << 20,
        }
    }
}

/// Which peers a TLS server lets in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The controller, and agents of the same `WeightSync` as the server's own certificate.
    Group,
    /// Everybody; handlers that take a [`PeerIdentity`] need a certificate.
    Open,
}

/// Serves `router` over TLS until `cancel`; handlers find the [`PeerIdentity`] and `ConnectInfo<SocketAddr>` in the extensions.
pub async fn serve_https(
    listener: TcpListener,
    identity: Identity,
    access: Access,
    router: Router,
    limits: Limits,
    cancel: CancellationToken,
) -> Result<(), IdentityError> {
    let clients = match access {
        Access::Group => ClientCertificates::Required,
        Access::Open => ClientCertificates::Optional,
    };
    let acceptor = TlsAcceptor::from(identity.server_config(clients)?);
    let router = router.layer(DefaultBodyLimit::max(limits.body_bytes));
    let limits = Arc::new(limits);
    let turns = Arc::new(Semaphore::new(HANDSHAKES));
    accept(listener, limits.clone(), cancel.clone(), move |stream, from| {
        let (acceptor, router, limits, cancel, identity) =
            (acceptor.clone(), router.clone(), limits.clone(), cancel.clone(), identity.clone());
        let turns = turns.clone();
        async move {
            let handshake = async {
                // Whoever says nothing takes no turn.
                stream.ready(Interest::READABLE).await?;
                let _turn = turns.acquire().await;
                // Whoever waited for its turn for too long is gone: no key is computed for it.
                if stream.ready(Interest::READABLE).await?.is_read_closed() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                acceptor.accept(stream).await
            };
            let tls = match timeout(limits.handshake, handshake).await {
                Ok(Ok(tls)) => tls,
                Ok(Err(error)) => return tracing::debug!(%from, %error, "TLS handshake failed"),
                Err(_) => return tracing::debug!(%from, "TLS handshake timed out"),
            };
            let certificate = tls.get_ref().1.peer_certificates().and_then(<[_]>::first);
            let peer = match certificate.map(PeerIdentity::of_certificate).transpose() {
                Ok(peer) => peer,
                Err(error) => return tracing::warn!(%from, %error, "peer refused"),
            };
            let guard = Guard { access, identity, peer };
            connection(tls, from, Some(guard), router, &limits, cancel).await;
        }
    })
    .await;
    Ok(())
}

/// Serves `router` over plain HTTP until `cancel`: health, metrics and the roster only.
pub async fn serve_plain(listener: TcpListener, router: Router, limits: Limits, cancel: CancellationToken) {
    let router = router.layer(DefaultBodyLimit::max(limits.body_bytes));
    let limits = Arc::new(limits);
    accept(listener, limits.clone(), cancel.clone(), move |stream, from| {
        let (router, limits, cancel) = (router.clone(), limits.clone(), cancel.clone());
        async move { connection(stream, from, None, router, &limits, cancel).await }
    })
    .await;
}

async fn accept<F, Fut>(listener: TcpListener, limits: Arc<Limits>, cancel: CancellationToken, serve: F)
where
    F: Fn(TcpStream, SocketAddr) -> Fut,
    Fut: Future<Output = ()> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(limits.connections));
    let mut running = JoinSet::new();
    loop {
        while running.try_join_next().is_some() {}
        let next = async {
            let place = places.clone().acquire_owned().await.ok();
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            () = cancel.cancelled() => break,
            next = next => next,
        };
        match accepted {
            Ok((stream, from)) => {
                set_socket_options(&stream, limits.stalled);
                running.spawn(hold_place(place, serve(stream, from)));
            }
            Err(error) => {
                // Out of file descriptors, or a connection that went away: a loop without a pause would burn a core.
                tracing::warn!(%error, "cannot accept a connection");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
    drop(listener);
    let drained = async { while running.join_next().await.is_some() {} };
    if timeout(limits.drain, drained).await.is_err() {
        tracing::debug!("connections still open after the drain time are cut");
        // Waited for: what their handlers hold is let go by the time that this returns.
        running.shutdown().await;
    }
}

async fn hold_place(place: Option<OwnedSemaphorePermit>, serve: impl Future<Output = ()>) {
    serve.await;
    drop(place);
}

fn set_socket_options(stream: &TcpStream, stalled: Duration) {
    let millis = u32::try_from(stalled.as_millis()).unwrap_or(u32::MAX);
    let options = [
        stream.set_nodelay(true),
        rustix::net::sockopt::set_tcp_user_timeout(stream, millis).map_err(Into::into),
        rustix::net::sockopt::set_socket_keepalive(stream, true).map_err(Into::into),
        rustix::net::sockopt::set_tcp_keepidle(stream, stalled).map_err(Into::into),
    ];
    for error in options.into_iter().filter_map(Result::err) {
        tracing::debug!(%error, "a socket option cannot be set");
    }
}

/// What is known of the peer of one TLS connection.
struct Guard {
    access: Access,
    identity: Identity,
    peer: Option<PeerIdentity>,
}

impl Guard {
    /// Asked for each request: the server's own certificate may have been renewed for another object since the handshake.
    fn refusal(&self) -> Option<Refusal> {
        let allowed = match (self.access, &self.peer, self.identity.own()) {
            (Access::Open, _, _) | (Access::Group, Some(PeerIdentity::Controller), _) => true,
            (Access::Group, Some(PeerIdentity::Agent { weightsync: peer, .. }), Some(PeerIdentity::Agent { weightsync: own, .. })) => {
                *peer == own
            }
            (Access::Group, _, _) => false,
        };
        let message = || format!("{} is not of this server's WeightSync", self.peer.as_ref().map_or_else(String::new, PeerIdentity::uri));
        (!allowed).then(|| Refusal { code: RefusalCode::Forbidden, message: message() })
    }
}

async fn connection<S>(stream: S, from: SocketAddr, guard: Option<Guard>, router: Router, limits: &Limits, cancel: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let guard = Arc::new(guard);
    let longest = limits.answer;
    let service = service_fn(move |request| answer(request, from, guard.clone(), router.clone(), longest));
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.head).max_buf_size(limits.head_bytes.max(8192));
    let mut serving = std::pin::pin!(http.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = cancel.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%from, %error, "connection ended");
    }
}

async fn answer(
    request: hyper::Request<Incoming>,
    from: SocketAddr,
    guard: Arc<Option<Guard>>,
    router: Router,
    longest: Duration,
) -> Result<Response, Infallible> {
    let mut request: Request = request.map(Body::new);
    if let Some(guard) = guard.as_ref() {
        if let Some(refusal) = guard.refusal() {
            tracing::warn!(%from, message = %refusal.message, "peer refused");
            return Ok(Failed(refusal).into_response());
        }
        if let Some(peer) = &guard.peer {
            request.extensions_mut().insert(peer.clone());
        }
    }
    request.extensions_mut().insert(ConnectInfo(from));
    match timeout(longest, router.oneshot(request)).await {
        Ok(answer) => answer,
        Err(_) => Ok((StatusCode::GATEWAY_TIMEOUT, "no answer in time").into_response()),
    }
}

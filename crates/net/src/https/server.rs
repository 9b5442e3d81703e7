//! Runs a router over TLS or plain TCP. Decides when a peer took too long, and which identities are admitted; a refused peer gets an error.
//! [`super::places`] decides which connections are kept. It never reads a request's content.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::{ConnectInfo, DefaultBodyLimit, Request};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, Interest};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::limits::Limits;
use super::places::{Busy, Place, Places};
use super::replies::Failed;
use crate::identity::{ClientCertificates, Identity, IdentityError, KeyDigest, PeerIdentity};
use weightsync_core::protocol::{Refusal, RefusalCode};

/// Most handshakes at once. When thousands were begun at once, each took longer than its client waited, and none ended.
const HANDSHAKES: usize = 64;

/// Which peers a TLS server lets in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The controller, and agents of the same `WeightSync` as the server's own certificate.
    Group,
    /// Any peer. Handlers that take a [`PeerIdentity`] still require a certificate.
    Open,
}

/// Serves `router` over TLS until `cancel`; handlers find the [`PeerIdentity`], the [`KeyDigest`] and `ConnectInfo<SocketAddr>` in the extensions.
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
    accept(listener, limits.clone(), cancel.clone(), move |stream, from, place| {
        let (acceptor, router, limits, cancel, identity) =
            (acceptor.clone(), router.clone(), limits.clone(), cancel.clone(), identity.clone());
        let turns = turns.clone();
        async move {
            let handshake = async {
                // A silent peer gets no handshake slot, and its place is freed first. `ready` alone may report too early.
                let mut byte = [0; 1];
                timeout(limits.first, stream.peek(&mut byte)).await.map_err(|_| io::ErrorKind::TimedOut)??;
                let _busy = place.busy();
                let _turn = turns.acquire().await;
                // A peer that waited too long for its slot has left: compute no key for it.
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
            if peer.is_some() {
                place.known();
            }
            let key = certificate.and_then(|certificate| KeyDigest::of_certificate(certificate).ok());
            let guard = Guard { access, identity, peer, key };
            connection(tls, from, place, Some(guard), router, &limits, cancel).await;
        }
    })
    .await;
    Ok(())
}

/// Serves `router` over plain HTTP until `cancel`: probes, metrics and the roster only.
pub async fn serve_plain(listener: TcpListener, router: Router, limits: Limits, cancel: CancellationToken) {
    let router = router.layer(DefaultBodyLimit::max(limits.body_bytes));
    let limits = Arc::new(limits);
    accept(listener, limits.clone(), cancel.clone(), move |stream, from, place| {
        let (router, limits, cancel) = (router.clone(), limits.clone(), cancel.clone());
        async move { connection(stream, from, place, None, router, &limits, cancel).await }
    })
    .await;
}

async fn accept<F, Fut>(listener: TcpListener, limits: Arc<Limits>, cancel: CancellationToken, serve: F)
where
    F: Fn(TcpStream, SocketAddr, Arc<Place>) -> Fut,
    Fut: Future<Output = ()> + Send + 'static,
{
    let places = Places::new(&limits);
    let mut refused = Refused::default();
    let mut running = JoinSet::new();
    loop {
        while running.try_join_next().is_some() {}
        let accepted = tokio::select! {
            () = cancel.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, from)) => {
                let place = tokio::select! {
                    () = cancel.cancelled() => break,
                    place = places.wait(from.ip()) => place,
                };
                let Ok(place) = place.map(Arc::new) else {
                    refused.count(from);
                    continue;
                };
                set_socket_options(&stream, limits.stalled);
                let served = serve(stream, from, place.clone());
                running.spawn(async move {
                    tokio::select! {
                        () = place.evicted() => tracing::debug!(%from, "another connection took the place of this one"),
                        () = served => {}
                    }
                });
            }
            Err(error) => {
                // No file descriptor is left, or a connection was aborted: a loop without a pause would use a whole core.
                tracing::warn!(%error, "cannot accept a connection");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
    drop(listener);
    let drained = async { while running.join_next().await.is_some() {} };
    if timeout(limits.drain, drained).await.is_err() {
        tracing::debug!("connections still open after the drain time are cut");
        // Awaited, so that their handlers have released everything when this returns.
        running.shutdown().await;
    }
}

/// Connections without a place; logged only from time to time.
#[derive(Default)]
struct Refused {
    connections: u64,
    logged: Option<Instant>,
}

impl Refused {
    fn count(&mut self, from: SocketAddr) {
        self.connections += 1;
        if self.logged.is_none_or(|logged| logged.elapsed() > Duration::from_secs(10)) {
            tracing::warn!(%from, connections = self.connections, "too many connections: closed");
            *self = Self { connections: 0, logged: Some(Instant::now()) };
        }
    }
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

/// The facts about the peer of one TLS connection.
struct Guard {
    access: Access,
    identity: Identity,
    peer: Option<PeerIdentity>,
    key: Option<KeyDigest>,
}

impl Guard {
    /// Checked for each request: the server's certificate may have been renewed for another object since the handshake.
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

async fn connection<S>(
    stream: S,
    from: SocketAddr,
    place: Arc<Place>,
    guard: Option<Guard>,
    router: Router,
    limits: &Limits,
    cancel: CancellationToken,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let guard = Arc::new(guard);
    let longest = limits.answer;
    let asked = CancellationToken::new();
    let first = asked.clone();
    let service = service_fn(move |request| {
        first.cancel();
        let busy = place.busy();
        let answer = answer(request, from, guard.clone(), router.clone(), longest);
        async move { Ok::<_, Infallible>(answer.await.map(|body| Body::new(Served { body, _busy: busy }))) }
    });
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.head).max_buf_size(limits.head_bytes.max(8192));
    let mut serving = std::pin::pin!(http.serve_connection(TokioIo::new(stream), service));
    let mut late = std::pin::pin!(timeout(limits.first, asked.cancelled()));
    let mut waits = true;
    let ended = loop {
        tokio::select! {
            ended = serving.as_mut() => break ended,
            in_time = late.as_mut(), if waits => match in_time {
                Ok(()) => waits = false,
                Err(_) => return tracing::debug!(%from, "no request in time"),
            },
            () = cancel.cancelled() => {
                serving.as_mut().graceful_shutdown();
                break serving.await;
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%from, %error, "connection ended");
    }
}

/// The body of a response: its connection is in use until all of it is sent.
struct Served {
    body: Body,
    _busy: Busy,
}

impl HttpBody for Served {
    type Data = <Body as HttpBody>::Data;
    type Error = <Body as HttpBody>::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

async fn answer(
    request: hyper::Request<Incoming>,
    from: SocketAddr,
    guard: Arc<Option<Guard>>,
    router: Router,
    longest: Duration,
) -> Response {
    let mut request: Request = request.map(Body::new);
    if let Some(guard) = guard.as_ref() {
        if let Some(refusal) = guard.refusal() {
            tracing::warn!(%from, message = %refusal.message, "peer refused");
            return Failed(refusal).into_response();
        }
        if let Some(peer) = &guard.peer {
            request.extensions_mut().insert(peer.clone());
        }
        if let Some(key) = guard.key {
            request.extensions_mut().insert(key);
        }
    }
    request.extensions_mut().insert(ConnectInfo(from));
    match timeout(longest, router.oneshot(request)).await {
        Ok(answer) => answer.into_response(),
        Err(_) => (StatusCode::GATEWAY_TIMEOUT, "no answer in time").into_response(),
    }
}

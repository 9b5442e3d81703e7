//! The TCP data path: a pipelined chain, in which every member forwards a bucket while it still arrives.
//!
//! Each hop is one connection: hello, frames down the chain, replies up (`frame`). Between large machines it has further ones (lanes).
//! Frames are spread over them block by block, so that several cores send, hash and receive (`route`, `inlet`). A running member sends four
//! signs of life in each silence limit, whether bytes move or not. So a silent member is at fault, and not the member before it. The first
//! failure travels in both directions and names the member. This file listens and opens; [`Admission`] decides which streams are admitted.

mod downstream;
mod frame;
mod inlet;
mod lanes;
mod member;
mod pool;
mod route;
mod sink;
mod socket;
mod strangers;
mod writer;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rustls_pki_types::ServerName;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::carrier::Carrying;
use super::{Admission, BucketSink, Transport, TransportError};
use downstream::Alive;
pub(super) use downstream::{Downstream, millis};
use lanes::Meeting;
pub(super) use lanes::default_lanes;
use sink::Sink;
use socket::Opening;
use strangers::Strangers;
use weightsync_core::protocol::{DataHello, MemberName, StreamFailure};

/// Returns the name that a member's certificate must have.
pub type ServerNames = Arc<dyn Fn(&MemberName) -> Option<ServerName<'static>> + Send + Sync>;

/// TLS of the data path, for streams whose hello requests it.
#[derive(Clone)]
#[allow(missing_docs)]
pub struct DataTls {
    pub server: Arc<rustls::ServerConfig>,
    pub client: Arc<rustls::ClientConfig>,
    pub server_name: ServerNames,
}

/// How a member listens and connects.
#[derive(Clone)]
pub struct TcpOptions {
    /// `None` refuses streams that request TLS.
    pub tls: Option<DataTls>,
    /// Most connections without a hello, half as many from one address; the oldest is closed for the next.
    pub max_strangers: usize,
    /// Most admitted streams; more are refused.
    pub max_streams: usize,
    /// Deadline for the first byte of a connection.
    pub first_byte: Duration,
    /// Deadline for the hello of a connection.
    pub hello_timeout: Duration,
    /// Length of a receive buffer in bytes.
    pub receive_buffer: usize,
    /// Receive buffers of one stream: how far a member reads ahead of what it forwarded.
    pub receive_buffers: usize,
    /// Most connections of one stream on one hop; the smaller wish of both ends counts. By default one for each four cores, at most four.
    pub lanes: usize,
    /// Most buckets that a leader may have given to an open chain and that are not sent yet.
    pub buckets_in_flight: usize,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            tls: None,
            max_strangers: 64,
            max_streams: 64,
            first_byte: Duration::from_secs(2),
            hello_timeout: Duration::from_secs(5),
            receive_buffer: 256 << 10,
            receive_buffers: 16,
            lanes: lanes::default_lanes(),
            buckets_in_flight: 3,
        }
    }
}

/// A member on TCP. Dropping it closes its listener and every stream into it.
pub struct TcpTransport {
    address: SocketAddr,
    options: Arc<TcpOptions>,
    carrying: Arc<Carrying>,
    _closed: DropGuard,
}

impl TcpTransport {
    /// Listens on `address` (port 0 takes a free one), so that [`Transport::address`] can be sent to others.
    pub async fn bind(address: SocketAddr, admission: Arc<dyn Admission>, options: TcpOptions) -> Result<Self, TransportError> {
        let io = |source| TransportError::Io { what: format!("cannot listen on {address}"), source };
        Self::on(TcpListener::bind(address).await.map_err(io)?, admission, options)
    }

    /// The same on a listener that is bound already.
    pub fn on(listener: TcpListener, admission: Arc<dyn Admission>, options: TcpOptions) -> Result<Self, TransportError> {
        let io = |source| TransportError::Io { what: "a listener has no address".to_owned(), source };
        let bound = listener.local_addr().map_err(io)?;
        let closed = CancellationToken::new();
        let options = Arc::new(options);
        let carrying: Arc<Carrying> = Arc::default();
        let server = Server {
            admission,
            strangers: Strangers::new(options.max_strangers),
            streams: Arc::new(Semaphore::new(options.max_streams)),
            meeting: Meeting::default(),
            options: options.clone(),
            carrying: carrying.clone(),
            closed: closed.clone(),
        };
        tokio::spawn(closed.clone().run_until_cancelled_owned(server.run(listener)));
        Ok(Self { address: bound, options, carrying, _closed: closed.drop_guard() })
    }
}

impl TcpTransport {
    /// The carriers of payloads outside of the connections.
    pub(super) fn carrying(&self) -> &Carrying {
        &self.carrying
    }

    /// Opens a chain for a leader whose payloads travel outside of it.
    pub(super) async fn open_alongside(&self, hello: DataHello, first: &str) -> Result<Downstream, TransportError> {
        let mut chain = Downstream::start(hello, first.to_owned(), self.options.clone(), Alive::ByItself, StreamFailure::Cancelled);
        chain.admitted().await?;
        Ok(chain)
    }
}

#[async_trait]
impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn address(&self) -> String {
        self.address.to_string()
    }

    async fn open(&self, hello: DataHello, first: &str) -> Result<Box<dyn BucketSink>, TransportError> {
        let chain = self.open_alongside(hello, first).await?;
        Ok(Box::new(Sink::new(chain, self.options.buckets_in_flight)))
    }
}

#[derive(Clone)]
struct Server {
    admission: Arc<dyn Admission>,
    strangers: Strangers,
    streams: Arc<Semaphore>,
    meeting: Meeting,
    options: Arc<TcpOptions>,
    carrying: Arc<Carrying>,
    closed: CancellationToken,
}

impl Server {
    async fn run(self, listener: TcpListener) {
        loop {
            match listener.accept().await {
                Ok((stream, peer)) => self.take(stream, peer),
                Err(error) => {
                    // Most likely no file descriptor is left: others may be closed soon.
                    tracing::warn!(%error, "cannot accept a data connection");
                    sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    fn take(&self, stream: TcpStream, peer: SocketAddr) {
        let expected = self.admission.expects(peer.ip().to_canonical());
        let Some(stranger) = self.strangers.enter(peer.ip(), expected) else {
            return tracing::debug!(%peer, "too many data connections without a hello: closed");
        };
        let server = self.clone();
        tokio::spawn(self.closed.clone().run_until_cancelled_owned(async move {
            let opened = timeout(server.options.hello_timeout, async {
                let mut link = socket::accept(stream, &server.options).await?;
                let opening = socket::read_opening(&mut link).await?;
                Ok::<_, std::io::Error>((link, opening))
            });
            let opened = stranger.evicted().run_until_cancelled_owned(opened).await;
            let Some(opened) = opened else { return tracing::debug!(%peer, "data connection made room for another before its hello") };
            let (link, opening) = match opened {
                Ok(Ok(opened)) => opened,
                Ok(Err(error)) => return tracing::debug!(%peer, %error, "data connection closed before its hello"),
                Err(_) => return tracing::debug!(%peer, "data connection showed no hello in time"),
            };
            drop(stranger);
            match opening {
                Opening::Lane(id, number) => {
                    if !server.meeting.give(&id, number, link) {
                        tracing::warn!(%peer, "data connection for a stream that is not here: closed");
                    }
                }
                Opening::Stream(hello, lanes) => {
                    let stream = server.streams.clone().try_acquire_owned().ok();
                    let lanes = lanes.clamp(1, server.options.lanes.max(1));
                    let doors = member::Doors { admission: &*server.admission, carrying: &server.carrying, meeting: &server.meeting };
                    member::serve(link, *hello, lanes, doors, server.options, stream).await;
                }
            }
        }));
    }
}

#[cfg(test)]
mod tests;

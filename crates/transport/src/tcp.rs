//! The TCP data path: a pipelined chain, where every member forwards a bucket while it still arrives.
//!
//! Each hop is one connection: hello, frames down the chain, answers up (`frame`); between large machines further ones (lanes), over which
//! the frames are laid block by block, so that several cores send, hash and receive (`route`, `inlet`). A member that lives says so four
//! times in each silence, whether bytes move or not, so anyone who is quiet is the one at fault and not the one in front of it. The first
//! failure travels both ways and names the member. This file listens and opens; it never decides who is let in ([`Admission`] does).

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
pub(super) use downstream::Downstream;
use lanes::Meeting;
pub(super) use lanes::default_lanes;
use sink::Sink;
use socket::Opening;
use strangers::Strangers;
use weightsync_core::protocol::{DataHello, MemberName, StreamFailure};

/// Finds the name that a member's certificate must carry.
pub type ServerNames = Arc<dyn Fn(&MemberName) -> Option<ServerName<'static>> + Send + Sync>;

/// TLS of the data path; used for streams whose hello asks for it.
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
    /// None refuses streams that ask for TLS.
    pub tls: Option<DataTls>,
    /// Connections at once that have not shown a hello yet, half as many from one address; the oldest makes room for the next.
    pub max_strangers: usize,
    /// Streams at once that were admitted; more are refused.
    pub max_streams: usize,
    /// A connection must have sent a byte after this long.
    pub first_byte: Duration,
    /// A connection must have shown its hello after this long.
    pub hello_timeout: Duration,
    /// Length of a receive buffer in bytes.
    pub receive_buffer: usize,
    /// Receive buffers of one stream: how far a member reads ahead of what it forwarded.
    pub receive_buffers: usize,
    /// Connections of one stream on one hop, at most; the smaller wish of both ends counts. One for each four cores by default, at most four.
    pub lanes: usize,
    /// Buckets that a leader may have given to an open chain and that are not sent yet.
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

/// A member that is reached over TCP. Dropping it closes its listener and every stream into it.
pub struct TcpTransport {
    address: SocketAddr,
    options: Arc<TcpOptions>,
    carrying: Arc<Carrying>,
    _closed: DropGuard,
}

impl TcpTransport {
    /// Listens on `address` (port 0 takes a free one), so that [`Transport::address`] can be asked to others.
    pub async fn bind(address: SocketAddr, admission: Arc<dyn Admission>, options: TcpOptions) -> Result<Self, TransportError> {
        let io = |source| TransportError::Io { what: format!("cannot listen on {address}"), source };
        let listener = TcpListener::bind(address).await.map_err(io)?;
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
    /// What brings payloads that do not travel in the connections.
    pub(super) fn carrying(&self) -> &Carrying {
        &self.carrying
    }

    /// Opens a chain for a leader whose payloads travel next to it.
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
                    // Out of file descriptors, most likely: others may be closed soon.
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

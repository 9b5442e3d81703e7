//! Connections of the TCP data path: made or accepted, with or without TLS, and their first bytes.
//!
//! A stream begins with the magic, u32 length and the hello (JSON, with the number of connections that the sender would like to use). A
//! further connection of a stream begins with its own magic, 16 bytes that name the stream, and its u32 number from 1 on. Decides socket
//! options and how much of a stranger is read: 4 bytes of magic, a checked length, and a hello that must be complete in time.
//! [`crate::Admission`] decides which streams are admitted.

use std::io;
use std::sync::Arc;

use rustls_pki_types::ServerName;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::frame::StreamId;
use super::{DataTls, TcpOptions};
use weightsync_core::protocol::{DATA_MAGIC, DataHello, MAX_HELLO_BYTES, MemberName};
use weightsync_net::identity::PeerIdentity;

/// Bytes that are read from a socket at once for TLS: rustls asks for 4 KiB at a time (0.23, `DeframerVecBuffer`; read), and each would be a
/// system call.
const READ_AHEAD: usize = 128 << 10;

/// First bytes of a further connection of a stream.
const LANE_MAGIC: [u8; 4] = *b"WSL1";

pub(super) type Reader = Box<dyn AsyncRead + Send + Unpin>;
pub(super) type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// The two directions of a connection.
pub(super) struct Link {
    pub(super) reader: Reader,
    pub(super) writer: Writer,
    pub(super) secured: bool,
    /// Identity in the certificate of the other end, if this end required one.
    pub(super) peer: Option<PeerIdentity>,
}

impl Link {
    fn plain(stream: TcpStream) -> Self {
        let (reader, writer) = stream.into_split();
        Self { reader: Box::new(reader), writer: Box::new(writer), secured: false, peer: None }
    }

    fn secured(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static, peer: Option<PeerIdentity>) -> Self {
        let (reader, writer) = tokio::io::split(stream);
        Self { reader: Box::new(reader), writer: Box::new(writer), secured: true, peer }
    }
}

pub(super) enum Opening {
    /// A stream, and how many connections the sender would like to use for it.
    Stream(Box<DataHello>, usize),
    /// A further connection of a stream that was admitted.
    Lane(StreamId, usize),
}

/// A hello on the wire.
#[derive(Serialize)]
struct Said<'a> {
    #[serde(flatten)]
    hello: &'a DataHello,
    lanes: usize,
}

#[derive(Deserialize)]
struct Heard {
    #[serde(flatten)]
    hello: DataHello,
    #[serde(default)]
    lanes: usize,
}

/// Connects to a member, inside TLS or not.
pub(super) async fn connect(to: &MemberName, tls: bool, address: &str, options: &TcpOptions) -> io::Result<Link> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    if !tls {
        return Ok(Link::plain(stream));
    }
    let tls = options.tls.as_ref().ok_or_else(|| io::Error::other("this member has no TLS configuration"))?;
    let name = (tls.server_name)(to).ok_or_else(|| io::Error::other("its TLS name is not known here"))?;
    Ok(Link::secured(TlsConnector::from(tls.client.clone()).connect(name, stream).await?, None))
}

/// Takes an incoming connection; the first byte distinguishes TLS from plain.
pub(super) async fn accept(stream: TcpStream, options: &TcpOptions) -> io::Result<Link> {
    stream.set_nodelay(true)?;
    // The kernel sizes the socket buffers: fixed sizes were slower on both machines of docs/benchmarks.md.
    let mut first = [0; 1];
    if timeout(options.first_byte, stream.peek(&mut first)).await.map_err(|_| io::ErrorKind::TimedOut)?? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    match (&options.tls, first.first() == DATA_MAGIC.first()) {
        (_, true) => Ok(Link::plain(stream)),
        (Some(tls), false) => {
            let stream = TlsAcceptor::from(tls.server.clone()).accept(BufReader::with_capacity(READ_AHEAD, stream)).await?;
            let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
            // A certificate without an identity proves no sender: the admission refuses it.
            let peer = certificate.and_then(|certificate| PeerIdentity::of_certificate(certificate).ok());
            Ok(Link::secured(stream, peer))
        }
        (None, false) => Err(io::Error::new(io::ErrorKind::InvalidData, "not a data connection")),
    }
}

/// Begins a stream for which this side would like to use so many connections.
pub(super) async fn write_hello(link: &mut Link, hello: &DataHello, lanes: usize) -> io::Result<()> {
    let json = serde_json::to_vec(&Said { hello, lanes }).map_err(io::Error::other)?;
    let length = u32::try_from(json.len()).ok().filter(|length| *length <= MAX_HELLO_BYTES);
    let length = length.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the hello is too long"))?;
    let wire = [&DATA_MAGIC, length.to_le_bytes().as_slice(), &json].concat();
    link.writer.write_all(&wire).await?;
    link.writer.flush().await
}

/// Begins a further connection of a stream.
pub(super) async fn write_lane(link: &mut Link, id: &StreamId, lane: u32) -> io::Result<()> {
    let wire = [&LANE_MAGIC, id.as_slice(), &lane.to_le_bytes()].concat();
    link.writer.write_all(&wire).await?;
    link.writer.flush().await
}

/// Reads the purpose of a connection. Memory grows with the received bytes, not with the claimed length.
pub(super) async fn read_opening(link: &mut Link) -> io::Result<Opening> {
    let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let mut magic = [0; 4];
    link.reader.read_exact(&mut magic).await?;
    if magic == LANE_MAGIC {
        let mut id = StreamId::default();
        link.reader.read_exact(&mut id).await?;
        let lane = link.reader.read_u32_le().await?;
        return Ok(Opening::Lane(id, usize::try_from(lane).unwrap_or(usize::MAX)));
    }
    if magic != DATA_MAGIC {
        return Err(bad("not a data connection"));
    }
    let length = link.reader.read_u32_le().await?;
    if length > MAX_HELLO_BYTES {
        return Err(bad("not a data connection"));
    }
    let mut json = Vec::new();
    (&mut link.reader).take(u64::from(length)).read_to_end(&mut json).await?;
    if json.len() as u64 != u64::from(length) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    // The parser's message could quote the secret.
    let heard: Heard = serde_json::from_slice(&json).map_err(|_| bad("the hello makes no sense"))?;
    Ok(Opening::Stream(Box::new(heard.hello), heard.lanes))
}

impl DataTls {
    /// One name for all members, for a verifier that identifies them by other means.
    pub fn one_name(server: Arc<rustls::ServerConfig>, client: Arc<rustls::ClientConfig>, name: ServerName<'static>) -> Self {
        Self { server, client, server_name: Arc::new(move |_| Some(name.clone())) }
    }
}

//! Connections of the TCP data path: made or accepted, with or without TLS, and the hello at their start.
//!
//! Decides socket options and how much of a stranger is read: 4 bytes of magic, a length that is checked, and a hello that must be whole
//! in time. Never decides who is let in.

use std::io;
use std::sync::Arc;

use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::{DataTls, TcpOptions};
use crate::protocol::{DATA_MAGIC, DataHello, MAX_HELLO_BYTES};

/// The two directions of a connection.
pub(super) struct Link {
    pub(super) reader: Box<dyn AsyncRead + Send + Unpin>,
    pub(super) writer: Box<dyn AsyncWrite + Send + Unpin>,
    /// Whether it is inside TLS.
    pub(super) secured: bool,
}

impl Link {
    fn plain(stream: TcpStream) -> Self {
        let (reader, writer) = stream.into_split();
        Self { reader: Box::new(reader), writer: Box::new(writer), secured: false }
    }

    fn secured(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        let (reader, writer) = tokio::io::split(stream);
        Self { reader: Box::new(reader), writer: Box::new(writer), secured: true }
    }
}

/// Connects to a member; `hello.tls` says how.
pub(super) async fn connect(hello: &DataHello, address: &str, options: &TcpOptions) -> io::Result<Link> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    if !hello.tls {
        return Ok(Link::plain(stream));
    }
    let tls = options.tls.as_ref().ok_or_else(|| io::Error::other("this member has no TLS configuration"))?;
    let name = (tls.server_name)(&hello.to).ok_or_else(|| io::Error::other("its TLS name is not known here"))?;
    Ok(Link::secured(TlsConnector::from(tls.client.clone()).connect(name, stream).await?))
}

/// Takes a connection that came in; tells plain from TLS by its first byte.
pub(super) async fn accept(stream: TcpStream, options: &TcpOptions) -> io::Result<Link> {
    stream.set_nodelay(true)?;
    // Sizes of socket buffers are the kernel's: fixed ones were slower on both machines of docs/benchmarks.md.
    let mut first = [0; 1];
    if stream.peek(&mut first).await? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    match (&options.tls, first.first() == DATA_MAGIC.first()) {
        (_, true) => Ok(Link::plain(stream)),
        (Some(tls), false) => Ok(Link::secured(TlsAcceptor::from(tls.server.clone()).accept(stream).await?)),
        (None, false) => Err(io::Error::new(io::ErrorKind::InvalidData, "not a data connection")),
    }
}

/// Sends the magic and the hello.
pub(super) async fn write_hello(link: &mut Link, hello: &DataHello) -> io::Result<()> {
    let json = serde_json::to_vec(hello).map_err(io::Error::other)?;
    let length = u32::try_from(json.len()).ok().filter(|length| *length <= MAX_HELLO_BYTES);
    let length = length.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the hello is too long"))?;
    let wire = [&DATA_MAGIC, length.to_le_bytes().as_slice(), &json].concat();
    link.writer.write_all(&wire).await?;
    link.writer.flush().await
}

/// Reads the magic and the hello. Memory grows with the bytes that came, not with the length that was said.
pub(super) async fn read_hello(link: &mut Link) -> io::Result<DataHello> {
    let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let mut start = [0; 8];
    link.reader.read_exact(&mut start).await?;
    let (magic, length) = start.split_at(4);
    let length = length.first_chunk().map_or(u32::MAX, |bytes| u32::from_le_bytes(*bytes));
    if magic != DATA_MAGIC || length > MAX_HELLO_BYTES {
        return Err(bad("not a data connection"));
    }
    let mut json = Vec::new();
    (&mut link.reader).take(u64::from(length)).read_to_end(&mut json).await?;
    if json.len() as u64 != u64::from(length) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    // The parser's words could quote the secret.
    serde_json::from_slice(&json).map_err(|_| bad("the hello makes no sense"))
}

impl DataTls {
    /// One name for all members, for a verifier that knows them by other means.
    pub fn one_name(server: Arc<rustls::ServerConfig>, client: Arc<rustls::ClientConfig>, name: ServerName<'static>) -> Self {
        Self { server, client, server_name: Arc::new(move |_| Some(name.clone())) }
    }
}

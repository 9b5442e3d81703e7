//! The data port of a liar: the product's own transport takes the streams, and a small door before it reads each hello.
//!
//! As an honest member it passes on what comes. While it forges, the door takes the rest of the chain out of the hello. Then the liar leads
//! a stream of its own to these members, with one byte of each bucket changed. Never decides when to lie.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, OnceLock};

use ::bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;
use weightsync_core::protocol::{BucketHeader, DATA_MAGIC, DataHello, MAX_HELLO_BYTES, MemberName, Refusal, RefusalCode, UpdateId};
use weightsync_core::weights::bucket_digest;
use weightsync_net::identity::PeerIdentity;
use weightsync_transport::tcp::{TcpOptions, TcpTransport};
use weightsync_transport::{Admission, BucketStore, Fault, Transport, TransportError};

use super::updates::Part;
use super::{Lie, say};

/// Buckets on their way to members that are lied to.
const BUCKETS: usize = 256;

/// Members after this one in a chain, in order, and where they take bytes.
type Rest = Vec<(MemberName, String)>;

/// Where a liar takes bytes.
pub(super) struct Door {
    /// The message to the others.
    pub(super) address: String,
    _task: AbortOnDropHandle<()>,
}

struct Inside {
    part: Part,
    /// The rest of each chain that was taken out of its hello.
    taken: Mutex<HashMap<UpdateId, Rest>>,
    transport: OnceLock<TcpTransport>,
}

impl Door {
    /// Listens at a port of this address.
    pub(super) async fn open(ip: IpAddr, part: Part) -> Self {
        let inside = Arc::new(Inside { part, taken: Mutex::default(), transport: OnceLock::new() });
        let admission = Arc::new(Anybody(inside.clone()));
        let here = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0);
        let transport = TcpTransport::bind(here, admission, TcpOptions::default()).await.unwrap();
        let inner = transport.address();
        assert!(inside.transport.set(transport).is_ok(), "there is one transport");
        let listener = TcpListener::bind((ip, 0)).await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        Self { address, _task: AbortOnDropHandle::new(tokio::spawn(serve(listener, inner, inside))) }
    }
}

async fn serve(listener: TcpListener, inner: String, inside: Arc<Inside>) {
    while let Ok((stream, _)) = listener.accept().await {
        let (inner, inside) = (inner.clone(), inside.clone());
        tokio::spawn(async move {
            if let Err(error) = pass(stream, &inner, &inside).await {
                println!("{}", json!({"stream": error.to_string()}));
            }
        });
    }
}

/// Reads the hello, and has the transport serve the rest.
async fn pass(mut stream: TcpStream, inner: &str, inside: &Inside) -> std::io::Result<()> {
    let mut to = TcpStream::connect(inner).await?;
    for end in [&stream, &to] {
        end.set_nodelay(true)?;
    }
    let mut magic = [0; 4];
    stream.read_exact(&mut magic).await?;
    to.write_all(&magic).await?;
    if magic == DATA_MAGIC {
        let length = stream.read_u32_le().await?.min(MAX_HELLO_BYTES);
        let mut hello = vec![0; usize::try_from(length).unwrap()];
        stream.read_exact(&mut hello).await?;
        let hello = inside.cut(hello);
        to.write_u32_le(u32::try_from(hello.len()).unwrap()).await?;
        to.write_all(&hello).await?;
    }
    copy_bidirectional(&mut stream, &mut to).await.map(|_| ())
}

impl Inside {
    /// Takes the rest of the chain out of a hello, where it is to get other bytes.
    fn cut(&self, wire: Vec<u8>) -> Vec<u8> {
        let Ok(hello) = serde_json::from_slice::<DataHello>(&wire) else { return wire };
        let forges = self.part.tells(Lie::Bytes) || self.part.tells(Lie::Sums);
        if !forges || hello.probe || hello.rest.is_empty() {
            return wire;
        }
        let mut json: Value = serde_json::from_slice(&wire).unwrap();
        json["rest"] = json!([]);
        self.taken.lock().insert(hello.update, hello.rest);
        serde_json::to_vec(&json).unwrap()
    }
}

/// Admits all peers.
struct Anybody(Arc<Inside>);

impl Admission for Anybody {
    fn admit(&self, hello: &DataHello, _: Option<&PeerIdentity>) -> Result<Arc<dyn BucketStore>, Refusal> {
        let rest = self.0.taken.lock().remove(&hello.update);
        let forged = rest.filter(|rest| !rest.is_empty()).map(|rest| {
            let (buckets, taken) = mpsc::channel(BUCKETS);
            let (inside, hello) = (self.0.clone(), hello.clone());
            tokio::spawn(async move {
                let answer = lead(&inside, hello, rest, taken).await.map_or_else(|error| error.to_string(), |()| "taken".to_owned());
                say("it passes on other bytes", &json!(answer));
            });
            buckets
        });
        Ok(Arc::new(Store { inside: self.0.clone(), update: hello.update.clone(), forged: Mutex::new((BytesMut::new(), forged)) }))
    }
}

/// What the members after it should get.
enum Piece {
    Bucket(BucketHeader, Bytes),
    End,
}

/// Sends other bytes, as the member before them in the chain.
async fn lead(inside: &Inside, hello: DataHello, mut rest: Rest, mut pieces: mpsc::Receiver<Piece>) -> Result<(), TransportError> {
    let (to, address) = rest.remove(0);
    let hello = DataHello { from: hello.to.clone(), to, rest, ..hello };
    let Some(transport) = inside.transport.get() else { return Ok(()) };
    let mut sink = transport.open(hello, &address).await?;
    while let Some(piece) = pieces.recv().await {
        match piece {
            Piece::Bucket(header, bytes) => {
                let (mut bytes, right) = (bytes.to_vec(), bucket_digest(&bytes));
                bytes[0] ^= 1;
                let digest = if inside.part.tells(Lie::Sums) { right } else { bucket_digest(&bytes) };
                sink.send(header, Bytes::from(bytes).into(), digest).await?;
            }
            Piece::End => return sink.finish().await,
        }
    }
    // The stream broke before its end: so does this one.
    Ok(())
}

/// Counts what comes, and keeps it only where other bytes are to be made of it.
struct Store {
    inside: Arc<Inside>,
    update: UpdateId,
    forged: Mutex<(BytesMut, Option<mpsc::Sender<Piece>>)>,
}

impl Store {
    fn pass_on(&self, piece: impl FnOnce(&mut BytesMut) -> Piece) -> Result<(), Refusal> {
        let mut forged = self.forged.lock();
        let (bytes, buckets) = &mut *forged;
        let Some(buckets) = buckets else { return Ok(()) };
        let full = |_| Refusal { code: RefusalCode::OutOfSpace, message: "too many buckets at once".into() };
        buckets.try_send(piece(bytes)).map_err(full)
    }
}

impl BucketStore for Store {
    fn write(&self, _: u64, part: &[u8]) -> Result<(), Refusal> {
        let (bytes, buckets) = &mut *self.forged.lock();
        if buckets.is_some() {
            bytes.extend_from_slice(part);
        }
        Ok(())
    }

    fn complete(&self, header: &BucketHeader, _: u128) -> Result<(), Refusal> {
        self.inside.part.received(&self.update, header.bytes);
        self.pass_on(|bytes| Piece::Bucket(*header, bytes.split().freeze()))
    }

    fn end(&self) -> Result<(), Refusal> {
        self.pass_on(|_| Piece::End)
    }

    fn broken(&self, _: Fault<'_>, _: &str) {
        self.forged.lock().1 = None;
    }
}

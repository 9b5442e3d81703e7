//! Measures one edge: sends bytes over a transport, and takes the time until the receiver has confirmed them.
//!
//! Streams grow until one takes long enough to say something, so that a fast edge is not judged by its first round trip, nor a slow one kept busy
//! for minutes. The receiver checks the digest of each bucket as it does in an update. It decides nothing about what is slow.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout_at};

use super::group::refusal;
use weightsync_core::plan::show_bytes;
use weightsync_core::protocol::{BucketHeader, DataHello, EdgeFigures, EdgeOutcome, LONGEST_MEASUREMENT, Refusal, RefusalCode};
use weightsync_core::weights::bucket_digest;
use weightsync_transport::{BucketStore, Fault, Transport, TransportError};

/// Bytes of the first stream; each further one has four times as many.
const FIRST: u64 = 1 << 20;
/// A stream that took this long says enough.
const ENOUGH: Duration = Duration::from_millis(200);
/// Bytes of a bucket, at most.
const BUCKET: usize = 4 << 20;

/// Measures the edge to the one member that `hello` names, at `address`. Ends within `limit`.
pub async fn measure(transport: &dyn Transport, hello: &DataHello, address: &str, limit: Duration) -> EdgeOutcome {
    let (begun, deadline) = (Instant::now(), Instant::now() + limit);
    let block = random();
    let digest = bucket_digest(&block);
    let mut length = FIRST;
    loop {
        let part = usize::try_from(length).map_or(block.len(), |length| length.min(block.len()));
        let bucket = block.slice(..part);
        let digest = if part == block.len() { digest } else { bucket_digest(&bucket) };
        let sent = timeout_at(deadline, stream(transport, hello.clone(), address, (&bucket, digest), length)).await;
        let took = match sent {
            Ok(Ok(took)) => took,
            Ok(Err(error)) => return failed(&error),
            // Of a stream that was cut it is known that it was no faster.
            Err(_) if length > FIRST => begun.elapsed(),
            Err(_) => return EdgeOutcome::Broken { cause: format!("{} did not arrive within {limit:?}", show_bytes(length)) },
        };
        if took >= ENOUGH || length >= LONGEST_MEASUREMENT {
            let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
            let mtu = mtu(address);
            return EdgeOutcome::Verified(EdgeFigures { bytes: length, nanoseconds, round_trip_us: None, mtu, clock_ms: None });
        }
        length = length.saturating_mul(4).min(LONGEST_MEASUREMENT);
    }
}

async fn stream(
    transport: &dyn Transport,
    hello: DataHello,
    address: &str,
    (bucket, digest): (&Bytes, u128),
    length: u64,
) -> Result<Duration, TransportError> {
    let mut sink = transport.open(hello, address).await?;
    let begun = Instant::now();
    let bytes = bucket.len() as u64;
    for (sequence, offset) in (0..).zip((0..length).step_by(bucket.len().max(1))) {
        sink.send(BucketHeader { sequence, flags: 0, offset, bytes }, bucket.clone().into(), digest).await?;
    }
    sink.finish().await?;
    Ok(begun.elapsed())
}

/// What an error says of the edge. A receiver that says no says nothing of the way to it.
fn failed(error: &TransportError) -> EdgeOutcome {
    let cause = error.to_string();
    match error {
        TransportError::Unreachable { .. }
        | TransportError::Lost { .. }
        | TransportError::Silent { .. }
        | TransportError::Corrupt { .. } => EdgeOutcome::Broken { cause },
        TransportError::Refused { .. } | TransportError::Communicator { .. } | TransportError::Cancelled | TransportError::Io { .. } => {
            EdgeOutcome::Unmeasured { cause }
        }
    }
}

/// Bytes that nothing on the way can compress or know.
fn random() -> Bytes {
    let mut block = vec![0; BUCKET];
    blake3::Hasher::new_keyed(&rand::random()).finalize_xof().fill(&mut block);
    block.into()
}

/// The MTU of the way to that address, as the kernel knows it.
fn mtu(address: &str) -> Option<u32> {
    let to: SocketAddr = address.parse().ok()?;
    let own: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0_u16; 8].into() };
    let socket = UdpSocket::bind((own, 0)).ok()?;
    socket.connect(to).ok()?;
    if to.is_ipv4() { rustix::net::sockopt::ip_mtu(&socket).ok() } else { rustix::net::sockopt::ipv6_mtu(&socket).ok() }
}

/// Takes bytes that prove or measure a way, and keeps nothing.
pub struct ProbeStore {
    longest: u64,
}

impl ProbeStore {
    /// Takes at most so many bytes.
    pub fn new(longest: u64) -> Self {
        Self { longest }
    }
}

impl BucketStore for ProbeStore {
    fn write(&self, offset: u64, part: &[u8]) -> Result<(), Refusal> {
        let end = offset.saturating_add(part.len() as u64);
        if end > self.longest {
            return Err(refusal(RefusalCode::Invalid, format!("a probe carries at most {} bytes", self.longest)));
        }
        Ok(())
    }

    fn complete(&self, _header: &BucketHeader, _digest: u128) -> Result<(), Refusal> {
        Ok(())
    }

    fn end(&self) -> Result<(), Refusal> {
        Ok(())
    }

    fn broken(&self, _fault: Fault<'_>, _cause: &str) {}
}

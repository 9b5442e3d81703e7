//! A transport whose bytes arrive as they were not sent, or reach the first member only.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use bytes::Bytes;

use weightsync_core::protocol::*;
use weightsync_transport::tcp::TcpTransport;
use weightsync_transport::{BucketSink, Payload, Transport, TransportError};

/// First four bytes of two 64-byte stripes whose xxh3 does not change when the four bytes after them change by opposite amounts.
const STRIPES: [[u8; 4]; 2] = [[0xb8, 0xfe, 0x6c, 0x39], [0x7c, 0x01, 0x81, 0x2c]];

/// Two tensors of 2048 bytes that differ and have the same xxh3-128 (seed 0): its multiplications are by zero where the stripes lie.
pub fn twins() -> [Vec<u8>; 2] {
    [[5_u32, 5], [6, 4]].map(|changed| {
        let mut bytes: Vec<u8> = (0..2048_u32).map(|at| (at % 251) as u8).collect();
        for (number, (stripe, value)) in STRIPES.iter().zip(changed).enumerate() {
            bytes[64 * number..][..4].copy_from_slice(stripe);
            bytes[64 * number + 4..][..4].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    })
}

/// What goes wrong with the next stream. Each happens once.
#[derive(Default)]
pub struct Wrong {
    /// A byte of one bucket flips after its digest was made. Of [`twins`] the first becomes the second, whose digest is the same.
    pub byte: AtomicBool,
    /// The first member passes nothing on, and confirms the stream.
    pub relay: AtomicBool,
}

pub struct Corrupting {
    pub inner: TcpTransport,
    pub wrong: Arc<Wrong>,
}

struct CorruptingSink {
    inner: Box<dyn BucketSink>,
    wrong: Arc<Wrong>,
}

#[async_trait]
impl Transport for Corrupting {
    fn name(&self) -> &'static str {
        "tcp"
    }
    fn address(&self) -> String {
        self.inner.address()
    }
    async fn open(&self, mut hello: DataHello, first: &str) -> Result<Box<dyn BucketSink>, TransportError> {
        let probe = hello.probe;
        if !probe && self.wrong.relay.swap(false, Ordering::SeqCst) {
            hello.rest.clear();
        }
        let inner = self.inner.open(hello, first).await?;
        if probe {
            return Ok(inner);
        }
        Ok(Box::new(CorruptingSink { inner, wrong: self.wrong.clone() }))
    }
}

#[async_trait]
impl BucketSink for CorruptingSink {
    async fn send(&mut self, header: BucketHeader, data: Payload, digest: u128) -> Result<(), TransportError> {
        let Payload::Host(data) = data else { panic!("on a GPU") };
        let mut data = data.to_vec();
        if self.wrong.byte.swap(false, Ordering::SeqCst) {
            let [honest, forged] = twins();
            if data == honest {
                data = forged;
            } else {
                data[0] ^= 1;
            }
        }
        self.inner.send(header, Bytes::from(data).into(), digest).await
    }
    async fn failed(&mut self) -> TransportError {
        self.inner.failed().await
    }
    async fn finish(self: Box<Self>) -> Result<(), TransportError> {
        self.inner.finish().await
    }
}

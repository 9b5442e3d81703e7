//! A transport whose bytes arrive as they were not sent.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

use weightsync_core::protocol::*;
use weightsync_transport::tcp::TcpTransport;
use weightsync_transport::{BucketSink, Payload, Transport, TransportError};

/// Flips a byte of one bucket on its way, after its digest was made.
pub struct Corrupting {
    pub inner: TcpTransport,
    pub armed: Arc<std::sync::atomic::AtomicBool>,
}

struct CorruptingSink {
    inner: Box<dyn BucketSink>,
    armed: Arc<std::sync::atomic::AtomicBool>,
}

#[async_trait]
impl Transport for Corrupting {
    fn name(&self) -> &'static str {
        "tcp"
    }
    fn address(&self) -> String {
        self.inner.address()
    }
    async fn open(&self, hello: DataHello, first: &str) -> Result<Box<dyn BucketSink>, TransportError> {
        let probe = hello.probe;
        let inner = self.inner.open(hello, first).await?;
        if probe {
            return Ok(inner);
        }
        Ok(Box::new(CorruptingSink { inner, armed: self.armed.clone() }))
    }
}

#[async_trait]
impl BucketSink for CorruptingSink {
    async fn send(&mut self, header: BucketHeader, data: Payload, digest: u128) -> Result<(), TransportError> {
        let Payload::Host(data) = data else { panic!("on a GPU") };
        let mut data = data.to_vec();
        if self.armed.swap(false, std::sync::atomic::Ordering::SeqCst) {
            data[0] ^= 1;
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

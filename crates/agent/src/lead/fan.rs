//! One stream to several chains: members that have ranks get it between GPUs, those on the source's GPU copy it from the source's ring, and others
//! get it over connections.
//!
//! Decides nothing: the stream has ended well when all chains confirmed it, and it is over when one of them failed.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::{select_all, try_join_all};

use weightsync_core::protocol::BucketHeader;
use weightsync_core::weights::bucket_digest;
use weightsync_transport::nccl::Staging;
use weightsync_transport::{BucketSink, Payload, TransportError};

/// All chains.
pub(super) struct Fan {
    /// Those that take what lies on a GPU.
    gpus: Vec<Box<dyn BucketSink>>,
    over_connections: Option<Box<dyn BucketSink>>,
    staging: Option<Staging>,
    silence: Duration,
}

impl Fan {
    pub(super) fn new(
        gpus: Vec<Box<dyn BucketSink>>,
        over_connections: Option<Box<dyn BucketSink>>,
        staging: Option<Staging>,
        silence: Duration,
    ) -> Self {
        Self { gpus, over_connections, staging, silence }
    }
}

/// The bytes on the host, with their xxh3-128.
async fn on_host(payload: Payload, staging: Option<&Staging>, silence: Duration) -> Result<(Bytes, u128), TransportError> {
    let failed = |cause: String| TransportError::Io { what: "copying a bucket to the host".into(), source: std::io::Error::other(cause) };
    let bytes = match payload {
        Payload::Host(bytes) => bytes,
        Payload::Device(device) => device.to_host(staging, silence).await.map_err(|error| failed(error.to_string()))?,
    };
    let hashed = tokio::task::spawn_blocking(move || {
        let digest = bucket_digest(&bytes);
        (bytes, digest)
    });
    hashed.await.map_err(|ended| failed(ended.to_string()))
}

#[async_trait]
impl BucketSink for Fan {
    async fn send(&mut self, header: BucketHeader, data: Payload, digest: u128) -> Result<(), TransportError> {
        let Self { gpus, over_connections, staging, silence } = self;
        let copy = data.clone();
        let plain = async {
            let Some(plain) = over_connections else { return Ok(()) };
            let (bytes, digest) = on_host(copy, staging.as_ref(), *silence).await?;
            plain.send(header, bytes.into(), digest).await
        };
        let between = try_join_all(gpus.iter_mut().map(|sink| sink.send(header, data.clone(), digest)));
        tokio::try_join!(between, plain).map(|_| ())
    }

    fn hashes(&self) -> bool {
        true
    }

    fn takes_device(&self) -> bool {
        self.gpus.iter().all(|sink| sink.takes_device())
    }

    async fn failed(&mut self) -> TransportError {
        let Self { gpus, over_connections, .. } = self;
        let sinks = gpus.iter_mut().chain(over_connections);
        select_all(sinks.map(|sink| sink.failed())).await.0
    }

    async fn finish(self: Box<Self>) -> Result<(), TransportError> {
        let Self { gpus, over_connections, .. } = *self;
        try_join_all(gpus.into_iter().chain(over_connections).map(BucketSink::finish)).await.map(|_| ())
    }
}

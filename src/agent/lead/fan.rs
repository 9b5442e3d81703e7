//! One stream to two chains: members that have ranks get it between GPUs, members without one over connections.
//!
//! Decides nothing: the stream has ended well when both chains confirmed it, and it is over when one of them failed.

use async_trait::async_trait;
use bytes::Bytes;

use std::time::Duration;

use crate::protocol::BucketHeader;
use crate::transport::nccl::Staging;
use crate::transport::{BucketSink, Payload, TransportError};
use crate::weights::bucket_digest;

/// Both chains.
pub(super) struct Fan {
    between_gpus: Box<dyn BucketSink>,
    over_connections: Box<dyn BucketSink>,
    staging: Option<Staging>,
    silence: Duration,
}

impl Fan {
    pub(super) fn new(
        between_gpus: Box<dyn BucketSink>,
        over_connections: Box<dyn BucketSink>,
        staging: Option<Staging>,
        silence: Duration,
    ) -> Self {
        Self { between_gpus, over_connections, staging, silence }
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
        let Self { between_gpus, over_connections, staging, silence } = self;
        let copy = data.clone();
        let plain = async {
            let (bytes, digest) = on_host(copy, staging.as_ref(), *silence).await?;
            over_connections.send(header, bytes.into(), digest).await
        };
        tokio::try_join!(between_gpus.send(header, data, digest), plain).map(|_| ())
    }

    fn hashes(&self) -> bool {
        true
    }

    fn takes_device(&self) -> bool {
        self.between_gpus.takes_device()
    }

    async fn failed(&mut self) -> TransportError {
        tokio::select! {
            failure = self.between_gpus.failed() => failure,
            failure = self.over_connections.failed() => failure,
        }
    }

    async fn finish(self: Box<Self>) -> Result<(), TransportError> {
        let Self { between_gpus, over_connections, .. } = *self;
        tokio::try_join!(between_gpus.finish(), over_connections.finish()).map(|_| ())
    }
}

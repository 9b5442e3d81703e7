//! One stream to several chains: members that have ranks get it between GPUs, those on the source's GPU copy it from the source's ring, and others
//! get it over connections.
//!
//! Decides nothing: the stream has ended well when all chains confirmed it, and it is over when one of them failed. Chains share the slots of
//! one ring, and give them back only while something waits for them: so those that sent their bucket are driven until all have.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::{select_all, try_join_all};
use tokio::sync::Barrier;

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

/// Sends a bucket to one chain, and drives the chain until all have sent theirs.
async fn send(
    sink: &mut dyn BucketSink,
    (header, data, digest): (BucketHeader, Payload, u128),
    all: &Barrier,
) -> Result<(), TransportError> {
    sink.send(header, data, digest).await?;
    tokio::select! {
        _ = all.wait() => Ok(()),
        error = sink.failed() => Err(error),
    }
}

#[async_trait]
impl BucketSink for Fan {
    async fn send(&mut self, header: BucketHeader, data: Payload, digest: u128) -> Result<(), TransportError> {
        let Self { gpus, over_connections, staging, silence } = self;
        let (copy, all) = (data.clone(), Barrier::new(gpus.len() + usize::from(over_connections.is_some())));
        let plain = async {
            let Some(plain) = over_connections else { return Ok(()) };
            let (bytes, digest) = on_host(copy, staging.as_ref(), *silence).await?;
            send(plain.as_mut(), (header, bytes.into(), digest), &all).await
        };
        let between = try_join_all(gpus.iter_mut().map(|sink| send(sink.as_mut(), (header, data.clone(), digest), &all)));
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::{OwnedSemaphorePermit, Semaphore};
    use tokio::time::timeout;

    use super::*;

    /// A chain that keeps the slot of its last bucket until it is driven.
    struct Chain {
        slots: Arc<Semaphore>,
        kept: Option<OwnedSemaphorePermit>,
    }

    #[async_trait]
    impl BucketSink for Chain {
        async fn send(&mut self, _: BucketHeader, _: Payload, _: u128) -> Result<(), TransportError> {
            self.kept = None;
            let slot = self.slots.clone().acquire_owned().await.unwrap();
            self.kept = Some(slot);
            Ok(())
        }

        async fn failed(&mut self) -> TransportError {
            self.kept = None;
            std::future::pending().await
        }

        async fn finish(self: Box<Self>) -> Result<(), TransportError> {
            Ok(())
        }
    }

    /// Three members on one ring stood still until the update's deadline, on a busy machine.
    #[tokio::test(start_paused = true)]
    async fn chain_that_sent_its_bucket_gives_its_slot_to_others() {
        let slots = Arc::new(Semaphore::new(1));
        let chain = || -> Box<dyn BucketSink> { Box::new(Chain { slots: slots.clone(), kept: None }) };
        let mut fan = Fan::new(vec![chain(), chain(), chain()], Some(chain()), None, Duration::from_secs(1));
        for sequence in 0..3 {
            let header = BucketHeader { sequence, offset: 0, bytes: 1, flags: 0 };
            let sent = timeout(Duration::from_secs(1), fan.send(header, Payload::Host(Bytes::from_static(b"x")), 0)).await;
            sent.expect("a chain waits for another one that is not driven").unwrap();
        }
    }
}

//! The leader's end of a TCP chain. Decides only how many buckets may wait to be sent.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::Semaphore;

use super::downstream::Downstream;
use crate::{BucketSink, Payload, TransportError};
use weightsync_core::protocol::BucketHeader;

pub(super) struct Sink {
    chain: Downstream,
    room: Arc<Semaphore>,
}

impl Sink {
    pub(super) fn new(chain: Downstream, buckets: usize) -> Self {
        Self { chain, room: Arc::new(Semaphore::new(buckets.max(1))) }
    }
}

#[async_trait]
impl BucketSink for Sink {
    async fn send(&mut self, header: BucketHeader, data: Payload, digest: u128) -> Result<(), TransportError> {
        let Payload::Host(data) = data else { return Err(TransportError::on_a_gpu()) };
        tokio::select! {
            biased;
            failure = self.chain.failed() => Err(failure.into()),
            permit = self.room.clone().acquire_owned() => {
                // The semaphore is never closed.
                if let Ok(permit) = permit.map(Arc::new) {
                    self.chain.head(header);
                    self.chain.part(data, Some(&permit));
                    self.chain.digest(digest);
                }
                Ok(())
            }
        }
    }

    async fn failed(&mut self) -> TransportError {
        self.chain.failed().await.into()
    }

    async fn finish(mut self: Box<Self>) -> Result<(), TransportError> {
        self.chain.end();
        Ok(self.chain.done().await?)
    }
}

//! Payloads that members read from each other through NIXL (GPU-direct RDMA, or what UCX finds), all else in the TCP chain.
//!
//! The chain stays the control plane: hellos, heads, digests, signs of life, failures and their blame are the same bytes by the same code. Each
//! hello carries what the next member needs to read the sender's slots. Each member reads a piece, offers its own copy to the next member,
//! and only then looks at it: so a version passes along the chain while it still arrives. No member offers memory for writing, and keys end with the
//! epoch: a member that was left out reads nothing any more.

mod receive;
mod ring;
mod send;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;

use self::receive::{Neighbours, Receiver};
pub use self::ring::{FabricRing, RingWanted};
use self::send::Sink;
use super::carrier::{Carrier, Carriers};
use super::nccl::NcclTransport;
use super::{BucketSink, BucketStore, Transport, TransportError};
use weightsync_core::protocol::{DataHello, EpochId, OfferedSlots, Refusal, RefusalCode};

/// A member that is reached as over [`NcclTransport`] and, in epochs that have a ring for it, through NIXL.
pub struct GdrTransport {
    nccl: Arc<NcclTransport>,
    present: Arc<Present>,
}

/// The ring of the present epoch.
#[derive(Default)]
struct Present(Mutex<Option<Arc<FabricRing>>>);

impl Present {
    fn of(&self, epoch: &EpochId) -> Option<Arc<FabricRing>> {
        self.0.lock().clone().filter(|ring| ring.epoch() == epoch)
    }
}

impl GdrTransport {
    /// Over this chain.
    pub fn new(nccl: Arc<NcclTransport>) -> Self {
        let present: Arc<Present> = Arc::default();
        nccl.chain().carrying().reads(Arc::new(Receivers(present.clone())));
        Self { nccl, present }
    }

    /// Takes the ring of an epoch. The one of the epoch before is given up: keys to it fail from now on.
    pub fn enter(&self, ring: Arc<FabricRing>) {
        let before = self.present.0.lock().replace(ring);
        close(before);
    }

    /// Gives the ring up, unless it is already that of another epoch than `epoch`; none for whatever ring there is.
    pub fn leave(&self, epoch: Option<&EpochId>) {
        // In one step: the ring of the next epoch may come meanwhile, and stays.
        let before = self.present.0.lock().take_if(|ring| epoch.is_none_or(|epoch| ring.epoch() == epoch));
        close(before);
    }

    /// What others need to read this member's slots in an epoch; none without a ring for it.
    pub fn memory(&self, epoch: &EpochId) -> Option<OfferedSlots> {
        self.present.of(epoch).map(|ring| ring.memory().clone())
    }
}

fn close(ring: Option<Arc<FabricRing>>) {
    if let Some(ring) = ring {
        ring.close_soon();
    }
}

#[async_trait]
impl Transport for GdrTransport {
    fn name(&self) -> &'static str {
        "gdr"
    }

    fn address(&self) -> String {
        self.nccl.address()
    }

    async fn open(&self, hello: DataHello, first: &str) -> Result<Box<dyn BucketSink>, TransportError> {
        if hello.carried.as_ref().is_none_or(|carried| carried.fabric.is_none()) {
            return self.nccl.open(hello, first).await;
        }
        let gone = || TransportError::Communicator { cause: "its registered memory was given up before this attempt began".to_owned() };
        let ring = self.present.of(&hello.update.epoch).ok_or_else(gone)?;
        let (next, silence) = (hello.to.clone(), Duration::from_millis(hello.silence_ms));
        let chain = self.nccl.chain().open_beside(hello, first).await?;
        Ok(Box::new(Sink::new(chain, ring, next, silence).ok_or_else(gone)?))
    }
}

/// Receives what was announced on chains into this member.
struct Receivers(Arc<Present>);

impl Carriers for Receivers {
    fn receive(&self, hello: &DataHello, _store: &Arc<dyn BucketStore>) -> Result<Box<dyn Carrier>, Refusal> {
        let refuse = |message: &str| Refusal { code: RefusalCode::Internal, message: message.to_owned() };
        let memory = hello.carried.as_ref().and_then(|carried| carried.fabric.clone());
        let memory = memory.ok_or_else(|| refuse("the payloads are not to be read from the sender's memory"))?;
        // It may register them in a moment: a member that commits a little later is asked again.
        let unready =
            || Refusal { code: RefusalCode::WrongPhase, message: "this member has no registered memory for the epoch".to_owned() };
        let ring = self.0.of(&hello.update.epoch).ok_or_else(unready)?;
        let next = hello.rest.first().map(|(name, _)| name.clone());
        let silence = Duration::from_millis(hello.silence_ms);
        Ok(Box::new(Receiver::start(ring, Neighbours { before: hello.from.clone(), memory, next, silence })))
    }
}

#[cfg(test)]
mod tests;

//! Payloads that members read from each other through NIXL (GPU-direct RDMA, or what UCX finds), all else in the TCP chain.
//!
//! The chain stays the control plane: hellos, heads, digests, signs of life, failures and their blame are the same bytes by the same code. Each
//! hello carries what the next member needs to read the sender's slots. Each member reads a piece, offers its own copy to the next member,
//! and only then looks at it: so a version passes along the chain while it still arrives. No member offers memory for writing, and keys end with the
//! epoch: a member that was left out reads nothing any more.

mod gpu;
mod offered;
mod receive;
mod ring;
mod send;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::task::JoinHandle;

pub(crate) use self::gpu::GpuReads;
pub use self::gpu::{GpuSlots, GpuSlotsWanted};
pub(crate) use self::offered::next_taken;
use self::receive::{Neighbours, Receiver};
pub use self::ring::{FabricRing, RingWanted};
use self::send::Offering;
use super::carrier::{Carrier, Carriers};
use super::nccl::{self, Lending, NcclTransport};
use super::{BucketSink, BucketStore, Transport, TransportError};
use weightsync_core::protocol::{DataHello, EpochId, OfferedSlots, Refusal, RefusalCode};

/// A member that is reached as over [`NcclTransport`] and, in epochs that have a ring for it, through NIXL.
pub struct GdrTransport {
    nccl: Arc<NcclTransport>,
    present: Arc<Present>,
    /// Registrations that end.
    closing: Mutex<Vec<JoinHandle<()>>>,
}

/// The slots of a member in one epoch.
#[derive(Clone)]
pub enum Slots {
    /// In host memory.
    Host(Arc<FabricRing>),
    /// In memory of its GPUs.
    Gpu(Arc<GpuSlots>),
}

impl Slots {
    fn epoch(&self) -> &EpochId {
        match self {
            Self::Host(ring) => ring.epoch(),
            Self::Gpu(slots) => slots.communicator().epoch(),
        }
    }

    fn memory(&self) -> &OfferedSlots {
        match self {
            Self::Host(ring) => ring.memory(),
            Self::Gpu(slots) => slots.memory(),
        }
    }

    /// Ends the registration without waiting. A worker that does not end it is killed.
    fn close_soon(self) -> Option<JoinHandle<()>> {
        // Without a runtime the process ends, and its worker with it.
        let runtime = tokio::runtime::Handle::try_current().ok()?;
        Some(runtime.spawn(async move {
            let closed = match &self {
                Self::Host(ring) => ring.close().await,
                Self::Gpu(slots) => slots.close().await,
            };
            let Err(error) = closed else { return };
            tracing::warn!(epoch = %self.epoch(), %error, "registered memory is given up with its worker");
            let cause = "its registered memory could not be given up";
            match &self {
                Self::Host(ring) => ring.kill(cause),
                Self::Gpu(slots) => slots.kill(cause),
            }
        }))
    }
}

/// The slots of the present epoch.
#[derive(Default)]
struct Present(Mutex<Option<Slots>>);

impl Present {
    fn of(&self, epoch: &EpochId) -> Option<Slots> {
        self.0.lock().clone().filter(|slots| slots.epoch() == epoch)
    }
}

impl GdrTransport {
    /// Over this chain.
    pub fn new(nccl: Arc<NcclTransport>) -> Self {
        let present: Arc<Present> = Arc::default();
        nccl.chain().carrying().reads(Arc::new(Receivers(present.clone())));
        Self { nccl, present, closing: Mutex::default() }
    }

    /// Takes the slots of an epoch. Those of the epoch before are given up: keys to them fail from now on.
    pub fn enter(&self, slots: Slots) {
        if let Slots::Gpu(slots) = &slots {
            self.nccl.borrow(slots.communicator().clone());
        }
        let before = self.present.0.lock().replace(slots);
        self.close(before);
    }

    /// Gives the slots up, unless they are already those of another epoch than `epoch`; none for whatever slots there are.
    pub fn leave(&self, epoch: Option<&EpochId>) {
        // In one step: the slots of the next epoch may come meanwhile, and stay.
        let before = self.present.0.lock().take_if(|slots| epoch.is_none_or(|epoch| slots.epoch() == epoch));
        if let Some(Slots::Gpu(slots)) = &before {
            self.nccl.leave(slots.communicator().epoch());
        }
        self.close(before);
    }

    /// Waits until the registrations that were given up have ended: the same rings can be registered for the next epoch then.
    pub async fn settled(&self) {
        let closing = std::mem::take(&mut *self.closing.lock());
        for closed in closing {
            // A task that panicked has ended too.
            let _ = closed.await;
        }
    }

    fn close(&self, slots: Option<Slots>) {
        let mut closing = self.closing.lock();
        closing.retain(|closed| !closed.is_finished());
        closing.extend(slots.and_then(Slots::close_soon));
    }

    /// What others need to read this member's slots in an epoch; none without a ring for it.
    pub fn memory(&self, epoch: &EpochId) -> Option<OfferedSlots> {
        self.present.of(epoch).map(|slots| slots.memory().clone())
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
        let slots = self.present.of(&hello.update.epoch).ok_or_else(gone)?;
        let (next, silence) = (hello.to.clone(), Duration::from_millis(hello.silence_ms));
        let chain = self.nccl.chain().open_alongside(hello, first).await?;
        Ok(match slots {
            Slots::Host(ring) => Box::new(Offering::sink(chain, ring, next, silence).ok_or_else(gone)?),
            Slots::Gpu(slots) => Box::new(Lending::sink(chain, slots.communicator().clone(), next, silence).ok_or_else(gone)?),
        })
    }
}

/// Receives what was announced on chains into this member.
struct Receivers(Arc<Present>);

impl Carriers for Receivers {
    fn receive(&self, hello: &DataHello, store: &Arc<dyn BucketStore>) -> Result<Box<dyn Carrier>, Refusal> {
        let refuse = |message: &str| Refusal { code: RefusalCode::Internal, message: message.to_owned() };
        let memory = hello.carried.as_ref().and_then(|carried| carried.fabric.clone());
        let memory = memory.ok_or_else(|| refuse("the payloads are not to be read from the sender's memory"))?;
        // It may register them in a moment: a member that commits a little later is asked again.
        let unready =
            || Refusal { code: RefusalCode::WrongPhase, message: "this member has no registered memory for the epoch".to_owned() };
        let slots = self.0.of(&hello.update.epoch).ok_or_else(unready)?;
        let next = hello.rest.first().map(|(name, _)| name.clone());
        let silence = Duration::from_millis(hello.silence_ms);
        let neighbours = Neighbours { before: hello.from.clone(), memory, next, silence };
        match slots {
            Slots::Host(ring) => Ok(Box::new(Receiver::start(ring, neighbours))),
            Slots::Gpu(slots) => {
                let communicator = slots.communicator().clone();
                let reads = GpuReads::new(slots, neighbours);
                Ok(Box::new(nccl::Receiver::start(communicator, store.clone(), 0, silence, Some(reads))?))
            }
        }
    }
}

#[cfg(test)]
mod tests;

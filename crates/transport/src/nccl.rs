//! Broadcasts between GPUs: payloads travel in the epoch's communicator, all else in the TCP chain.
//!
//! The chain stays the control plane: hellos, heads, digests, signs of life, failures and their blame are the same bytes by the same code, so
//! a member that dies is found in milliseconds although NCCL never notices. On each head every member has its worker enter the broadcast of that bucket;
//! members that want nothing of a stream take part and drop the bytes, because a collective needs every rank. The first trouble of a stream
//! aborts the communicator on every member: this file never repairs one, and never joins a second one for the same epoch by itself.
//! A member on the source's GPU has no rank: on each head it copies the bytes from the source's ring, which it opened by CUDA IPC.

mod borrow;
mod communicator;
mod lend;
mod pack;
mod receive;
mod send;
mod staging;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

pub use self::borrow::Borrowed;
use self::communicator::Present;
pub use self::communicator::{Communicator, Joining, LocalRank};
pub(crate) use self::lend::Lending;
pub use self::pack::{PackedBucket, Packer};
pub(crate) use self::receive::Receiver;
use self::send::Broadcasting;
pub use self::staging::Staging;
use super::carrier::{Carrier, Carriers};
use super::outgoing::OutgoingSink;
use super::pieces::{cut, pieces};
use super::tcp::TcpTransport;
use super::{BucketSink, BucketStore, Transport, TransportError};
use weightsync_core::protocol::{DataHello, EpochId, Refusal, RefusalCode};
use weightsync_gpu::worker::{Joined, WorkerError};

/// A member that is reached over TCP and, in epochs that have a communicator, by broadcasts between GPUs.
pub struct NcclTransport {
    tcp: TcpTransport,
    present: Arc<Present>,
}

impl NcclTransport {
    /// Over this chain.
    pub fn new(tcp: TcpTransport) -> Self {
        let present: Arc<Present> = Arc::default();
        tcp.carrying().broadcasts(Arc::new(Receivers(present.clone())));
        Self { tcp, present }
    }

    /// The chain that payloads travel next to.
    pub(super) fn chain(&self) -> &TcpTransport {
        &self.tcp
    }

    /// Joins the communicator of an epoch, and proves it with one element. One of another epoch is aborted.
    pub async fn join(&self, joining: Joining) -> Result<(Arc<Communicator>, Joined), WorkerError> {
        self.present.set(None);
        let (communicator, joined) = Communicator::join(joining).await?;
        self.present.set(Some(communicator.clone()));
        Ok((communicator, joined))
    }

    /// Has a member without a rank take part: by the source's ring that it opened, or by reads.
    pub fn borrow(&self, communicator: Arc<Communicator>) {
        self.present.set(Some(communicator));
    }

    /// Closes memory of the source that is open here. Before the next epoch is prepared: its source may free the ring for another one.
    pub fn give_back(&self) {
        self.present.give_back();
    }

    /// The communicator of an epoch.
    pub fn communicator(&self, epoch: &EpochId) -> Option<Arc<Communicator>> {
        self.present.of(epoch)
    }

    /// Aborts the communicator of an epoch; workers and rings stay.
    pub fn leave(&self, epoch: &EpochId) {
        self.present.end(epoch);
    }
}

#[async_trait]
impl Transport for NcclTransport {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn address(&self) -> String {
        self.tcp.address()
    }

    async fn open(&self, hello: DataHello, first: &str) -> Result<Box<dyn BucketSink>, TransportError> {
        let Some(carried) = &hello.carried else { return self.tcp.open(hello, first).await };
        let lent = carried.lent;
        let silence = Duration::from_millis(hello.silence_ms);
        let gone = |cause: &str| TransportError::Communicator { cause: cause.to_owned() };
        let communicator = self.present.of(&hello.update.epoch).ok_or_else(|| gone("it was ended before this attempt began"))?;
        if let Some(broken) = communicator.broken() {
            return Err(broken.into());
        }
        if lent {
            let peer = hello.to.clone();
            let chain = self.tcp.open_alongside(hello, first).await?;
            let lending = Lending::sink(chain, communicator, peer, silence);
            return Ok(Box::new(lending.ok_or_else(|| gone("there is no GPU worker"))?));
        }
        let stream = communicator.stream().ok_or_else(|| gone("it carries another stream"))?;
        let chain = self.tcp.open_alongside(hello, first).await?;
        Ok(Box::new(OutgoingSink::new(chain, Broadcasting::new(communicator, silence, stream))))
    }
}

/// Receives what was announced on chains into this member.
struct Receivers(Arc<Present>);

impl Carriers for Receivers {
    fn receive(&self, hello: &DataHello, store: &Arc<dyn BucketStore>) -> Result<Box<dyn Carrier>, Refusal> {
        let refuse = |message: String| Refusal { code: RefusalCode::Internal, message };
        let carried = hello.carried.as_ref().ok_or_else(|| refuse("the payloads travel in the connection".into()))?;
        let communicator = self.0.of(&hello.update.epoch);
        let communicator = communicator.ok_or_else(|| refuse("there is no communicator of this epoch here".into()))?;
        if let Some(broken) = communicator.broken() {
            return Err(refuse(format!("the communicator of this epoch is over: {}", TransportError::from(broken))));
        }
        if carried.lent != communicator.lender().is_some() {
            return Err(refuse("memory of the source is for members without a rank, broadcasts are for those that have one".into()));
        }
        let silence = Duration::from_millis(hello.silence_ms);
        Ok(Box::new(Receiver::start(communicator, store.clone(), carried.root, silence, None)?))
    }
}

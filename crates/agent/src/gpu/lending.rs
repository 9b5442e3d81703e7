//! The ring of the source's worker, lent to members on the same GPU: offered with a check by the source, opened and proven by the member.
//!
//! Decides what is reported of the memory and that nothing is left of an offer that was not taken. The handle goes to the member's agent only, in a
//! call over mutual TLS. The member closes it when its epoch is over, the source frees its ring without waiting for anybody.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use tokio::time::Instant;

use super::{GRACE, Gpus, Open, left};
use crate::group::{Epoch, refusal};
use crate::locks::lock;
use crate::surroundings::Surroundings;
use weightsync_core::protocol::{LendRequest, LentMemory, Refusal, RefusalCode};
use weightsync_gpu::worker::{Slot, WorkerError};
use weightsync_transport::nccl::{Borrowed, Communicator, LocalRank};

/// Writing a check takes no time, unless the worker hangs.
const CHECK: Duration = Duration::from_secs(2);

/// An offer, and the slot that holds its check: dropped when no one looks for it any more.
pub struct Offer {
    pub memory: LentMemory,
    _check: Slot,
}

impl Gpus {
    /// The ring of this communicator on the first GPU, with a new check in it.
    pub async fn offer(&self, communicator: &Communicator, within: Duration) -> Result<Offer, WorkerError> {
        let none = || WorkerError::Gone { cause: "there is no GPU worker".into() };
        let entry = communicator.locals().first().ok_or_else(none)?;
        let check: [u8; LentMemory::CHECK_BYTES] = rand::random();
        // Others may look for checks of their own.
        let slot = entry.ring.take(within).await?;
        entry.staging.write(Bytes::copy_from_slice(&check), slot.at(0), CHECK).await?;
        let memory = LentMemory {
            gpu: entry.worker.gpu().to_owned(),
            handle: *entry.ring.handle(),
            slots: entry.ring.slots(),
            slot_bytes: entry.ring.slot_bytes(),
            check: STANDARD.encode(check),
            check_at: slot.offset(),
            pid_namespace: own_pid_namespace().await,
        };
        Ok(Offer { memory, _check: slot })
    }

    /// Opens the source's ring for an epoch in which this member has no rank, and closes it when the epoch is over.
    pub async fn borrow(self: &Arc<Self>, epoch: &Arc<Epoch>, request: &LendRequest, deadline: Instant) -> Result<(), Refusal> {
        let internal = |what: String| refusal(RefusalCode::Internal, what);
        let plan = epoch.communicator().filter(|plan| plan.guests.contains(epoch.me()));
        let plan = plan.ok_or_else(|| internal(format!("{} is not to be lent memory in this epoch", epoch.me())))?;
        if (request.memory.slots, request.memory.slot_bytes) != (plan.slots, plan.slot_bytes) {
            return Err(internal("the ring that it was offered is not that of the epoch".into()));
        }
        let open: Vec<Open> = self.state.borrow().open().to_vec();
        let entry = open.iter().find(|entry| entry.gpu.uuid == request.memory.gpu);
        let entry = entry.ok_or_else(|| internal(format!("it has no worker on {}", request.memory.gpu)))?;
        // A worker that hangs is found a grace after its deadline, and that must be in time as well.
        let within = || left(deadline).saturating_sub(GRACE + Duration::from_millis(200)).max(Duration::from_millis(100));
        let namespace = own_pid_namespace().await;
        let borrowed = Borrowed::open(&entry.worker, &request.memory, namespace, within()).await;
        let borrowed = borrowed.map_err(|error| internal(error.to_string()))?;
        let ring = self.ring_of(entry, plan.slots, plan.slot_bytes, within()).await;
        let ring = ring.map_err(|error| internal(format!("there is no room next to it for a ring of this member: {error}")))?;
        *lock(&self.rings) = vec![ring.clone()];
        let local = LocalRank { worker: entry.worker.clone(), ring, staging: entry.staging.clone() };
        let (id, over) = (epoch.id().clone(), self.core.over(epoch.id()));
        self.transport.borrow(Communicator::borrowed(id.clone(), epoch.me().clone(), local, borrowed));
        let transport = self.transport.clone();
        tokio::spawn(async move {
            over.cancelled().await;
            transport.leave(&id);
        });
        tracing::info!(epoch = %epoch.id(), gpu = request.memory.gpu, "opened the source's ring");
        Ok(())
    }
}

/// Inode of this process's PID namespace.
async fn own_pid_namespace() -> Option<u64> {
    let read = tokio::task::spawn_blocking(|| Surroundings::of_this_process().own().pid_namespace);
    read.await.ok().flatten()
}

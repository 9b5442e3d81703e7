//! The source's ring as a member on the same GPU sees it: opened by CUDA IPC, and proven to be the memory that was meant.
//!
//! Decides whether what was opened may be read: the same GPU, the same PID namespace where both are known, all of the announced length, and the
//! lender's random bytes where it wrote them. Anything else is refused with the reason, and the bytes come another way. It is only ever read.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use weightsync_core::protocol::worker::Part;
use weightsync_core::protocol::{LentMemory, LentPiece};
use weightsync_core::weights::gsum64;
use weightsync_gpu::worker::{ImportedMemory, Span, Worker, WorkerError};

#[derive(Debug, thiserror::Error)]
pub enum NotBorrowed {
    #[error("the source's ring is on {theirs}, the worker here is on {ours}")]
    OtherGpu { theirs: String, ours: String },
    #[error(
        "the source's agent is in another PID namespace ({theirs}, this agent is in {own}), and CUDA IPC works within one only: run the agent \
         in the same container (agent.launch: Wrap), or set shareProcessNamespace: true in the pod"
    )]
    Apart { theirs: u64, own: u64 },
    #[error("what the source tells of its ring makes no sense: {0}")]
    Nonsense(&'static str),
    #[error("the source's ring cannot be opened: {0}")]
    Open(#[source] WorkerError),
    #[error("the source's ring cannot be read: {0}")]
    Read(#[source] WorkerError),
    #[error("the source wrote a check into its ring on {gpu}, and it is not found in the memory that was opened here")]
    OtherMemory { gpu: String },
}

/// Memory of the source's worker that is open here; closed when the last copy from it ended and this is dropped.
pub struct Borrowed {
    memory: ImportedMemory,
    slots: u32,
    slot_bytes: u64,
}

impl Borrowed {
    /// Opens and proves it, each step within `within`. `own_pid_namespace` is this process's, where it can be read.
    pub async fn open(worker: &Worker, lent: &LentMemory, own_pid_namespace: Option<u64>, within: Duration) -> Result<Self, NotBorrowed> {
        if worker.gpu() != lent.gpu {
            return Err(NotBorrowed::OtherGpu { theirs: lent.gpu.clone(), ours: worker.gpu().to_owned() });
        }
        if let (Some(theirs), Some(own)) = (lent.pid_namespace, own_pid_namespace)
            && theirs != own
        {
            return Err(NotBorrowed::Apart { theirs, own });
        }
        let bytes = lent.slot_bytes.checked_mul(lent.slots.into()).filter(|bytes| *bytes > 0);
        let bytes = bytes.ok_or(NotBorrowed::Nonsense("its length"))?;
        let check = STANDARD.decode(&lent.check).ok().filter(|check| check.len() == LentMemory::CHECK_BYTES);
        let check = check.ok_or(NotBorrowed::Nonsense("its check"))?;
        let length = check.len() as u64;
        if !lent.check_at.is_multiple_of(8) || lent.check_at.checked_add(length).is_none_or(|end| end > bytes) {
            return Err(NotBorrowed::Nonsense("the place of its check"));
        }
        let memory = worker.import(&lent.handle, bytes, within).await.map_err(NotBorrowed::Open)?;
        let part = Part { offset: 0, bytes: length, first_word: 0 };
        let read = worker.digest(memory.at(lent.check_at), vec![part], None, within).await.map_err(NotBorrowed::Read)?;
        if read.sums != [gsum64(&check)] {
            return Err(NotBorrowed::OtherMemory { gpu: lent.gpu.clone() });
        }
        Ok(Self { memory, slots: lent.slots, slot_bytes: lent.slot_bytes })
    }

    /// Where a piece lies; none when there is no such slot, or it is too short.
    pub(super) fn at(&self, piece: &LentPiece) -> Option<Span> {
        let sound = piece.slot < self.slots && piece.bytes > 0 && piece.bytes <= self.slot_bytes;
        sound.then(|| self.memory.at(u64::from(piece.slot) * self.slot_bytes))
    }
}

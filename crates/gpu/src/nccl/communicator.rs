//! One communicator: begun without blocking, polled, used, aborted. Decides nothing about time; who polls has a deadline.
//!
//! NCCL does not notice a dead peer (nothing in 20 s, NCCL 2.28.9): anyone who knows better aborts. Aborting is the only end: a destroy is a
//! rendezvous that waits for all ranks.

use std::ffi::c_int;
use std::ptr::null_mut;

use super::{Config, IN_PROGRESS, INSTALL, Nccl, Raw, SUCCESS, UniqueId};
use crate::memory::Address;
use crate::{GpuError, Span, Stream};
use weightsync_core::protocol::worker::NcclId;

/// `ncclUint8`.
const UINT8: c_int = 1;
/// `ncclFloat32`.
const FLOAT32: c_int = 7;
/// `ncclSum`.
const SUM: c_int = 0;
/// `NCCL_SHRINK_ABORT`.
const SHRINK_ABORT: c_int = 1;

/// Whether a call of a non-blocking communicator is through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    Ready,
    UnderWay,
}

/// A communicator, from the call that begins it on.
pub struct Communicator {
    nccl: &'static Nccl,
    raw: Raw,
    rank: u32,
    world: u32,
    aborted: bool,
}

// SAFETY: NCCL allows calls from any thread, one at a time; `&mut` and ownership say that it is one.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Begins to join a group; [`progress`](Self::progress) returns whether it has joined.
    pub fn begin(nccl: &'static Nccl, id: &NcclId, rank: u32, world: u32) -> Result<Self, GpuError> {
        let mut raw = null_mut();
        let mut config = Config::non_blocking();
        // SAFETY: NCCL writes one pointer and copies the configuration before it returns.
        let code =
            unsafe { (nccl.functions.comm_init_rank_config)(&raw mut raw, signed(world)?, UniqueId(id.0), signed(rank)?, &raw mut config) };
        let begun = nccl.check("ncclCommInitRankConfig", code, null_mut());
        if raw.is_null() {
            // No other rank was asked yet: what is wrong is this library on this driver. A CUDA newer than the driver's is found here.
            begun.map_err(|error| GpuError::NoNccl { cause: format!("{} begins no communicator: {error}: {INSTALL}", nccl.path) })?;
            return Err(GpuError::Invalid { what: "ncclCommInitRankConfig gave no communicator".into() });
        }
        // From here on a failure aborts it.
        let communicator = Self { nccl, raw, rank, world, aborted: false };
        begun.map(|_| communicator)
    }

    pub fn rank(&self) -> u32 {
        self.rank
    }

    pub fn world(&self) -> u32 {
        self.world
    }

    /// Whether the last call is through, or the error that NCCL met in its own threads.
    pub fn progress(&self) -> Result<Progress, GpuError> {
        let mut state = SUCCESS;
        // SAFETY: the communicator is alive; writes one integer.
        let code = unsafe { (self.nccl.functions.comm_get_async_error)(self.raw, &raw mut state) };
        self.nccl.check("ncclCommGetAsyncError", code, self.raw)?;
        self.nccl.check("NCCL", state, self.raw)
    }

    /// Begins a broadcast in place. An event may be recorded after it only when [`progress`](Self::progress) is ready: before, the
    /// work may not be in the stream yet, and the event would fire early. The span must be kept until the work is done or aborted.
    pub fn broadcast(&mut self, at: &Span, root: u32, stream: &Stream) -> Result<Progress, GpuError> {
        if root >= self.world {
            return Err(GpuError::Invalid { what: format!("rank {root} sends in a group of {}", self.world) });
        }
        let Address::Device(address) = at.address() else {
            return Err(GpuError::Invalid { what: "host memory is not broadcast".into() });
        };
        let buffer = address as *mut std::ffi::c_void;
        // SAFETY: the span lies in GPU memory that the caller keeps; communicator and stream are alive.
        let code = unsafe { (self.nccl.functions.broadcast)(buffer, buffer, at.length(), UINT8, signed(root)?, self.raw, stream.raw()) };
        self.nccl.check("ncclBroadcast", code, self.raw)
    }

    /// Begins to sum the 32-bit floats of a span over all ranks, in place. As of [`broadcast`](Self::broadcast) otherwise.
    pub fn sum_floats(&mut self, at: &Span, stream: &Stream) -> Result<Progress, GpuError> {
        let Address::Device(address) = at.address() else {
            return Err(GpuError::Invalid { what: "host memory is not summed".into() });
        };
        let (buffer, count) = (address as *mut std::ffi::c_void, at.length() / 4);
        // SAFETY: the span lies in GPU memory that the caller keeps; communicator and stream are alive.
        let code = unsafe { (self.nccl.functions.all_reduce)(buffer, buffer, count, FLOAT32, SUM, self.raw, stream.raw()) };
        self.nccl.check("ncclAllReduce", code, self.raw)
    }

    /// Begins a group without some ranks. With `revoke` this one was revoked before and is ready again; without, NCCL aborts it inside.
    pub fn shrink(&mut self, without: &[u32], revoked: bool) -> Result<Shrinking, GpuError> {
        let lacking = || GpuError::NoNccl { cause: format!("{} ({}) lacks ncclCommShrink", self.nccl.path, self.nccl.version) };
        let shrink = self.nccl.functions.comm_shrink.ok_or_else(lacking)?;
        if without.is_empty() || without.iter().any(|rank| *rank >= self.world || *rank == self.rank) {
            return Err(GpuError::Invalid {
                what: format!("a group of {} cannot go on without {without:?} in rank {}", self.world, self.rank),
            });
        }
        let mut without = without.to_vec();
        without.sort_unstable();
        without.dedup();
        let world = self.world.saturating_sub(u32::try_from(without.len()).unwrap_or(self.world));
        let rank = self.rank - u32::try_from(without.iter().filter(|rank| **rank < self.rank).count()).unwrap_or(0);
        let ranks = without.iter().map(|rank| signed(*rank)).collect::<Result<Vec<_>, _>>()?;
        // NCCL's own thread writes the new handle later, also when we gave up waiting: this memory is never freed.
        let into: &'static mut Raw = Box::leak(Box::new(null_mut()));
        let config: &'static mut Config = Box::leak(Box::new(Config::non_blocking()));
        let ranks: &'static mut [c_int] = Vec::leak(ranks);
        let into: *mut Raw = into;
        let count = signed(u32::try_from(ranks.len()).unwrap_or(u32::MAX))?;
        let flags = if revoked { 0 } else { SHRINK_ABORT };
        // SAFETY: the communicator is alive; everything that NCCL may read or write later is never freed.
        let code = unsafe { shrink(self.raw, ranks.as_mut_ptr(), count, into, config, flags) };
        self.nccl.check("ncclCommShrink", code, self.raw)?;
        Ok(Shrinking { into, rank, world })
    }

    /// Begins to revoke it: work under way ends without peers.
    pub fn revoke(&mut self) -> Result<Progress, GpuError> {
        let lacking = || GpuError::NoNccl { cause: format!("{} ({}) lacks ncclCommRevoke", self.nccl.path, self.nccl.version) };
        let revoke = self.nccl.functions.comm_revoke.ok_or_else(lacking)?;
        // SAFETY: the communicator is alive.
        self.nccl.check("ncclCommRevoke", unsafe { revoke(self.raw, 0) }, self.raw)
    }

    /// The communicator that a shrink made, once it is there.
    pub fn shrunk(&self, shrinking: &Shrinking) -> Result<Option<Self>, GpuError> {
        // SAFETY: the memory is never freed; NCCL's thread writes it once, as a whole word.
        let raw = unsafe { std::ptr::read_volatile(shrinking.into) };
        if raw.is_null() {
            self.progress()?;
            return Ok(None);
        }
        Ok(Some(Self { nccl: self.nccl, raw, rank: shrinking.rank, world: shrinking.world, aborted: false }))
    }

    /// Aborts it, whatever it is doing. Takes 0.5 s where a peer is gone; goes to a thread of its own.
    pub fn abort(mut self) -> Result<(), GpuError> {
        self.abort_once()
    }

    fn abort_once(&mut self) -> Result<(), GpuError> {
        if self.aborted {
            return Ok(());
        }
        self.aborted = true;
        // SAFETY: the communicator is alive, and never used again.
        match unsafe { (self.nccl.functions.comm_abort)(self.raw) } {
            IN_PROGRESS => Ok(()),
            code => self.nccl.check("ncclCommAbort", code, null_mut()).map(|_| ()),
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if let Err(error) = self.abort_once() {
            tracing::warn!(%error, "a communicator could not be aborted");
        }
    }
}

/// A group without some ranks, on its way.
pub struct Shrinking {
    into: *mut Raw,
    rank: u32,
    world: u32,
}

// SAFETY: the memory is never freed, and read as a volatile word.
unsafe impl Send for Shrinking {}

fn signed(number: u32) -> Result<c_int, GpuError> {
    c_int::try_from(number).map_err(|_| GpuError::Invalid { what: format!("{number} is no rank") })
}

//! Where the buckets of an attempt go, and what all of these places have in common.
//!
//! Decides nothing: each receiver decides by itself what arrived.

use std::sync::Arc;

use super::device::DeviceReceiver;
use super::external::Watched;
use super::group::GroupReceiver;
use super::memory::MemoryReceiver;
use super::receive::Receiver;
use super::state::Takes;
use weightsync_core::protocol::HeldVersion;
use weightsync_transport::BucketStore;

/// Where an attempt's buckets go.
#[derive(Clone)]
pub(super) enum Arriving {
    /// Into the files of a version.
    Files(Arc<Receiver>),
    /// Into the engine, from GPU memory.
    Device(Arc<DeviceReceiver>),
    /// Into the engine, by its own group.
    Group(Arc<GroupReceiver>),
    /// Nowhere that we see: the user's own data plane moves this version.
    External(Watched, HeldVersion),
    /// Into the engine, through a ring of shared memory.
    Memory(Arc<MemoryReceiver>),
}

impl Arriving {
    /// Who takes what comes over the data path; none where nothing does.
    pub(super) fn store(&self) -> Option<Arc<dyn BucketStore>> {
        match self {
            Self::Files(receiver) => Some(receiver.clone()),
            Self::Device(receiver) => Some(receiver.clone()),
            Self::Memory(receiver) => Some(receiver.clone()),
            Self::Group(_) | Self::External(..) => None,
        }
    }

    pub(super) fn discard(&self, reason: &str) {
        match self {
            Self::Files(receiver) => receiver.discard(),
            Self::Device(receiver) => receiver.discard(reason),
            Self::Group(receiver) => receiver.discard(reason),
            Self::External(watched, _) => watched.discard(reason),
            Self::Memory(receiver) => receiver.discard(reason),
        }
    }

    /// Has an engine that took the buckets take its last step; `agreed` where its own checksums are those of other replicas. False when they
    /// lie in files, or no one is there any more to do so.
    pub(super) fn finish(&self, held: &HeldVersion, agreed: bool) -> bool {
        match self {
            Self::Files(_) | Self::External(..) => false,
            Self::Device(receiver) => receiver.finish(held.clone(), agreed),
            Self::Memory(receiver) => receiver.finish(held.clone(), agreed),
            Self::Group(receiver) => receiver.finish(held.clone(), agreed),
        }
    }

    pub(super) fn takes(&self) -> Takes {
        match self {
            Self::Files(_) => Takes::Files,
            Self::Device(_) | Self::Memory(_) | Self::Group(_) => Takes::Engine,
            Self::External(..) => Takes::External,
        }
    }

    /// Whether the engine takes the buckets while they come.
    pub(super) fn feeds(&self) -> bool {
        self.takes() == Takes::Engine
    }
}

//! Feeding an engine from shared host memory: its own workers read the buckets where the agent has them.
//!
//! The third route into an engine, in addition to a directory ([`super::Engine::install`]) and GPU memory ([`super::device`]), under the
//! same rules. Workers check digests of the bytes that they load, while the engine still serves: it is paused once it begins to load. The
//! adapters and the agent decide which server may be fed like this, and how much memory is shared.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::{InstallError, InstallReport, InstallTerms, Left};
use weightsync_core::protocol::HeldVersion;
use weightsync_core::weights::{BlockHasher, Layout, Section, TensorSpec, digest_hex};

/// Memory that the agent shares with the workers of an engine. Workers map it privately: they never change it.
#[derive(Debug)]
pub struct HostMemory {
    /// A memfd, or a file whose bytes do not change until the install ended.
    pub file: OwnedFd,
    /// Its length in bytes.
    pub bytes: u64,
}

impl HostMemory {
    /// The first `bytes` bytes of a file, opened again read-only: the receiver cannot change the bytes of others.
    pub fn of(file: &impl AsRawFd, bytes: u64) -> std::io::Result<Self> {
        let opened = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        Ok(Self { file: opened.into(), bytes })
    }
}

/// The algorithm of the digest that a worker checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostDigest {
    /// xxh3-128, 32 hex digits: as in the manifest, for a worker with the package xxhash.
    Xxh3_128,
    /// blake3, 64 hex digits: every worker of vLLM has it.
    Blake3,
}

impl HostDigest {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Xxh3_128 => "xxh3-128",
            Self::Blake3 => "blake3",
        }
    }

    /// The digest of a tensor's bytes.
    pub fn of(self, bytes: &[u8]) -> String {
        let mut hasher = self.hasher();
        hasher.update(bytes);
        hasher.finish()
    }

    /// A hasher for bytes in parts.
    pub fn hasher(self) -> HostHasher {
        match self {
            Self::Xxh3_128 => HostHasher::Xxh3(Box::default()),
            Self::Blake3 => HostHasher::Blake3(Box::default()),
        }
    }
}

pub enum HostHasher {
    Xxh3(Box<BlockHasher>),
    Blake3(Box<blake3::Hasher>),
}

impl HostHasher {
    /// Takes the next part, of any length.
    pub fn update(&mut self, part: &[u8]) {
        match self {
            Self::Xxh3(hasher) => hasher.update(part),
            Self::Blake3(hasher) => drop(hasher.update(part)),
        }
    }

    /// The digest of all parts, as workers write it.
    pub fn finish(self) -> String {
        match self {
            Self::Xxh3(mut hasher) => digest_hex(hasher.take()),
            Self::Blake3(hasher) => hasher.finalize().to_hex().to_string(),
        }
    }
}

/// A version that will come as buckets in shared memory.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct HostJob {
    pub terms: InstallTerms,
    pub layout: Arc<Layout>,
    pub memory: Arc<HostMemory>,
    /// Longest time of one bucket, and of the engine's last step.
    pub silence: Duration,
}

/// A whole tensor in the shared memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostTensor {
    /// Name, type and shape.
    pub spec: TensorSpec,
    /// First byte in the memory.
    pub offset: u64,
    /// Length in bytes, at least 1.
    pub bytes: u64,
    /// Its digest, as [`HostInstall::digest`] says.
    pub digest: String,
}

/// Complete, checked tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostBucket {
    /// 0, 1, 2, ... in the order in which they are passed.
    pub sequence: u32,
    /// Whether workers copy the tensors when they take them, so that the place may be used again. Otherwise it must not change until the
    /// install ended: vLLM keeps views of tensors until all tensors of a layer have arrived.
    pub copy: bool,
    /// The tensors, of one section.
    pub tensors: Vec<HostTensor>,
}

impl HostBucket {
    /// The model of its tensors, the same for all.
    pub(crate) fn section(&self) -> Section {
        self.tensors.first().map_or(Section::Model, |tensor| tensor.spec.section)
    }
}

/// An install in progress. Dropping it abandons it: the engine's state is then as after [`abandon`](Self::abandon).
#[async_trait]
pub trait HostInstall: Send {
    /// The digest algorithm for buckets, which all workers can compute.
    fn digest(&self) -> HostDigest;

    /// Sends a bucket's description to the workers. The engine continues to serve, and the workers check the bucket meanwhile. After an
    /// error the install has ended, and the engine's state in the error is final.
    async fn bucket(&mut self, bucket: HostBucket) -> Result<(), InstallError>;

    /// Makes the engine load the described buckets, and returns when every worker took the next one, with their number so far. The first
    /// call pauses and marks the engine.
    async fn taken(&mut self, more_than: u32) -> Result<u32, InstallError>;

    /// All buckets were described and match the manifest: the engine takes its last step and runs. Errors as of [`super::Engine::install`].
    async fn finish(self: Box<Self>, version: HeldVersion) -> Result<InstallReport, InstallError>;

    /// Abandons it; returns the engine's state.
    async fn abandon(self: Box<Self>, reason: &str) -> Left;
}

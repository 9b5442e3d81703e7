//! Feeding an engine from shared host memory: its own workers read the buckets where the agent has them.
//!
//! The third route into an engine, in addition to a directory ([`super::Engine::install`]) and GPU memory ([`super::device`]), under the
//! same rules. Workers check digests over the very bytes that they load, and do so while the engine still serves: it is paused from the
//! moment that it begins to load. Decides nothing about who may be fed so, or how much memory is shared; the adapters and the agent say
//! that.

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
    /// A memfd, or a file whose bytes stay as they are until the install ended.
    pub file: OwnedFd,
    /// Its length in bytes.
    pub bytes: u64,
}

impl HostMemory {
    /// The first `bytes` bytes of a file, opened again read-only: the receiver cannot change what others read.
    pub fn of(file: &impl AsRawFd, bytes: u64) -> std::io::Result<Self> {
        let opened = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        Ok(Self { file: opened.into(), bytes })
    }
}

/// How the digest of a tensor is written that a worker checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostDigest {
    /// xxh3-128, 32 hex digits: the manifest's own, for a worker that has the package xxhash.
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

    /// For bytes that come in parts.
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
    /// One bucket, and the engine's last step, must not take longer.
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

/// Tensors that arrived whole and were checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostBucket {
    /// 0, 1, 2, ... in the order in which they are handed over.
    pub sequence: u32,
    /// Workers copy the tensors when they take them, and the place may be used again then. Else it must stay as it is until the install
    /// ended: vLLM keeps views of tensors until all of a layer has arrived.
    pub copy: bool,
    /// The tensors, of one section.
    pub tensors: Vec<HostTensor>,
}

impl HostBucket {
    /// The model that its tensors are for: all of them for the same.
    pub(crate) fn section(&self) -> Section {
        self.tensors.first().map_or(Section::Model, |tensor| tensor.spec.section)
    }
}

/// An install that is under way. Dropping it is giving it up: the engine is then held as after [`abandon`](Self::abandon).
#[async_trait]
pub trait HostInstall: Send {
    /// How the digests of buckets must be written: all workers can compute it.
    fn digest(&self) -> HostDigest;

    /// Sends a bucket's description to the workers. The engine continues to serve, and the workers check the bucket meanwhile. After an
    /// error the install ended, and what the error says of the engine is final.
    async fn bucket(&mut self, bucket: HostBucket) -> Result<(), InstallError>;

    /// Makes the engine load the described buckets, and returns when every worker took the next one: how many were taken so far. The first
    /// call pauses and marks the engine.
    async fn taken(&mut self, more_than: u32) -> Result<u32, InstallError>;

    /// All buckets were described and match the manifest: the engine takes its last step and runs. Errors as of [`super::Engine::install`].
    async fn finish(self: Box<Self>, version: HeldVersion) -> Result<InstallReport, InstallError>;

    /// Gives it up: what the engine is left with.
    async fn abandon(self: Box<Self>, reason: &str) -> Left;
}

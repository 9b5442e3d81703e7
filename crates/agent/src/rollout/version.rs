//! A version that lies complete and verified in a directory, and how it is read back.
//!
//! Only [`super::receive`] makes one, after coverage and digests agreed. It can be hashed again (before it is loaded a second time, long
//! after it was received) and read as a stream, to feed others; reading never changes it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::version_dir::VersionDir;
use crate::archive::Archived;
use crate::version_source::{SourceError, VersionSource};
use weightsync_core::protocol::HeldVersion;
use weightsync_core::weights::safetensors::SafetensorsPlan;
use weightsync_core::weights::{Bucket, DigestAlgorithm, EntryPart, Layout, Manifest, PartHasher, parse_digest_hex};
use weightsync_engine::{HostBucket, HostDigest, HostMemory, HostTensor};
use weightsync_transport::{Payload, TensorDigests};

/// Bytes that are read at once to be hashed.
const PART: u64 = 1 << 20;

/// A version in a directory; the directory is removed with it.
#[derive(Debug)]
pub struct Version {
    pub held: HeldVersion,
    pub manifest: Manifest,
    pub(super) layout: Arc<Layout>,
    pub(super) plan: SafetensorsPlan,
    pub(super) files: Vec<File>,
    pub(super) dir: VersionDir,
    /// Whether an engine was given it since its bytes were compared.
    pub(super) given: AtomicBool,
}

impl Version {
    /// Where it lies, as this process sees it.
    pub fn dir(&self) -> &VersionDir {
        &self.dir
    }

    /// Notes that an engine is given it. True the first time: the bytes were compared just before.
    pub(super) fn is_given_first(&self) -> bool {
        !self.given.swap(true, Ordering::Relaxed)
    }

    /// Hashes all tensors again; an error names the first one that is not what was received. Blocks.
    pub fn check(&self) -> Result<(), String> {
        let mut hasher = TensorDigests::new(self.layout.clone(), self.manifest.algorithm);
        for bucket in self.layout.buckets() {
            let bytes = self.read(&bucket).map_err(|error| error.to_string())?;
            hasher.update(&bytes).map_err(|error| error.to_string())?;
        }
        let digests = hasher.finish().map_err(|error| error.to_string())?;
        self.manifest.compare(&digests).map_err(|error| error.to_string())
    }

    /// Its one file, as memory that can be shared.
    pub(super) fn memory(&self) -> Result<HostMemory, String> {
        let [file] = self.files.as_slice() else { return Err(format!("the version lies in {} files", self.files.len())) };
        let bytes = file.metadata().map_err(|error| error.to_string())?.len();
        HostMemory::of(file, bytes).map_err(|error| format!("the version's file cannot be shared: {error}"))
    }

    /// The whole tensors of a part of the stream, where they lie in the file. Blocks while it hashes, where the manifest's own digests will
    /// not do: each tensor is compared with the manifest then, so that what is reported is of the bytes that were received.
    pub(super) fn host_bucket(&self, bucket: &Bucket, digest: HostDigest) -> Result<HostBucket, String> {
        let mut tensors = Vec::new();
        for part in self.layout.parts(bucket.offset, bucket.bytes) {
            let stream = part.entry.offset;
            let place = self.plan.segments(&self.layout, stream, part.entry.bytes).next();
            let offset = place.filter(|place| place.bytes == part.entry.bytes).ok_or("a tensor is torn")?.file_offset;
            let digest = self.digest_as(&part, offset, digest)?;
            tensors.push(HostTensor { spec: part.entry.tensor.clone(), offset, bytes: part.entry.bytes, digest });
        }
        Ok(HostBucket { sequence: bucket.sequence, copy: false, tensors })
    }

    fn digest_as(&self, part: &EntryPart<'_>, offset: u64, digest: HostDigest) -> Result<String, String> {
        let name = part.entry.tensor.full_name();
        let known = self.manifest.tensor_digests.get(part.index).ok_or("the manifest has too few digests")?;
        if digest == HostDigest::Xxh3_128 && self.manifest.algorithm == DigestAlgorithm::Xxh3_128 {
            return Ok(known.clone());
        }
        let file = self.files.first().ok_or("the version has no file")?;
        // The manifest has the first half of what the worker is reported, where both are blake3.
        let same = digest == HostDigest::Blake3 && self.manifest.algorithm == DigestAlgorithm::Blake3;
        let (mut own, mut reported) = (PartHasher::new(self.manifest.algorithm), digest.hasher());
        let mut buffer = vec![0; usize::try_from(part.entry.bytes.min(PART)).unwrap_or_default()];
        let mut at = 0;
        while at < part.entry.bytes {
            let length = usize::try_from((part.entry.bytes - at).min(PART)).unwrap_or_default();
            let piece = buffer.get_mut(..length).unwrap_or_default();
            file.read_exact_at(piece, offset + at).map_err(|error| format!("tensor {name} cannot be read back: {error}"))?;
            if !same {
                own.update(piece);
            }
            reported.update(piece);
            at += length as u64;
        }
        let reported = reported.finish();
        let agrees = if same { reported.starts_with(known.as_str()) } else { Some(own.take()) == parse_digest_hex(known) };
        if agrees { Ok(reported) } else { Err(format!("tensor {name} is not what was received")) }
    }

    /// Reads it as a stream, from the first byte.
    pub fn source(self: &Arc<Self>) -> Box<dyn VersionSource> {
        Box::new(VersionReader { version: self.clone(), next: 0 })
    }

    fn read(&self, bucket: &Bucket) -> Result<Vec<u8>, SourceError> {
        let length = usize::try_from(bucket.bytes).unwrap_or(usize::MAX);
        // A bucket is as long as its layout says, which was checked; gaps between tensors stay zero.
        let mut bytes = vec![0; length];
        for segment in self.plan.segments(&self.layout, bucket.offset, bucket.bytes) {
            let start = usize::try_from(segment.in_part).unwrap_or(usize::MAX);
            let end = start.saturating_add(usize::try_from(segment.bytes).unwrap_or(usize::MAX));
            let (Some(part), Some(file)) = (bytes.get_mut(start..end), self.files.get(segment.file)) else {
                return Err(SourceError::Nonsense { what: "the plan of a version's files does not fit its layout".into() });
            };
            file.read_exact_at(part, segment.file_offset).map_err(|cause| SourceError::Io {
                what: format!("version {} cannot be read back", self.held.version),
                cause: cause.to_string(),
            })?;
        }
        Ok(bytes)
    }
}

impl Archived for Version {
    fn held(&self) -> &HeldVersion {
        &self.held
    }

    fn memory(&self) -> u64 {
        self.plan.total_bytes()
    }
}

struct VersionReader {
    version: Arc<Version>,
    next: u32,
}

#[async_trait]
impl VersionSource for VersionReader {
    fn layout(&self) -> &Layout {
        &self.version.layout
    }

    fn repeatable(&self) -> bool {
        true
    }

    async fn next(&mut self, silence: Duration) -> Result<Option<(Bucket, Payload)>, SourceError> {
        let Some(bucket) = self.version.layout.bucket(self.next) else { return Ok(None) };
        let version = self.version.clone();
        let read = tokio::task::spawn_blocking(move || version.read(&bucket));
        let bytes = match tokio::time::timeout(silence, read).await {
            Ok(Ok(bytes)) => bytes?,
            Ok(Err(ended)) => return Err(SourceError::Nonsense { what: format!("reading a version ended early: {ended}") }),
            Err(_) => return Err(SourceError::Silent { silence }),
        };
        self.next += 1;
        Ok(Some((bucket, Bytes::from(bytes).into())))
    }

    async fn restart(&mut self, _reason: &str) -> Result<(), SourceError> {
        self.next = 0;
        Ok(())
    }

    async fn released(&mut self) {}
}

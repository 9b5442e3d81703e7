//! A version that lies complete and verified in a directory, and how it is read back.
//!
//! Only [`super::receive`] makes one, after coverage and digests agreed. It can be hashed again (before it is loaded a second time, long
//! after it was received) and read as a stream, to feed others; reading never changes it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::version_dir::VersionDir;
use crate::agent::version_source::{SourceError, VersionSource};
use crate::protocol::HeldVersion;
use crate::transport::Payload;
use crate::weights::safetensors::SafetensorsPlan;
use crate::weights::{Bucket, Layout, Manifest, TensorHasher};

/// A version in a directory; the directory is removed with it.
#[derive(Debug)]
pub struct Version {
    /// Its number and the digest of its manifest.
    pub held: HeldVersion,
    /// Names, places and digests of its tensors.
    pub manifest: Manifest,
    pub(super) layout: Arc<Layout>,
    pub(super) plan: SafetensorsPlan,
    pub(super) files: Vec<File>,
    pub(super) dir: VersionDir,
}

impl Version {
    /// Where it lies, as this process sees it.
    pub fn dir(&self) -> &VersionDir {
        &self.dir
    }

    /// Hashes all tensors again; an error names the first one that is not what was received. Blocks.
    pub fn check(&self) -> Result<(), String> {
        let mut hasher = TensorHasher::new(self.layout.clone(), self.manifest.algorithm);
        for bucket in self.layout.buckets() {
            let bytes = self.read(&bucket).map_err(|error| error.to_string())?;
            hasher.update(&bytes).map_err(|error| error.to_string())?;
        }
        let digests = hasher.finish().map_err(|error| error.to_string())?;
        self.manifest.compare(&digests).map_err(|error| error.to_string())
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

/// Reads a version that lies in a directory.
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

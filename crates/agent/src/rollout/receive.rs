//! Takes the stream of one attempt and writes every part at its final place in the files of a version.
//!
//! Decides whether the version is complete: every byte of the layout written once, in order, and every tensor's digest as the manifest
//! says. Until [`Receiver::conclude`] says so, what lies in the directory is nothing. It never touches the engine.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use tokio::time::Instant;

use super::version::Version;
use super::version_dir::VersionDir;
use crate::group::refusal;
use crate::locks::lock;
use crate::space::Reservation;
use weightsync_core::protocol::{BucketHeader, FinishRequest, HeldVersion, Refusal, RefusalCode, UpdateId};
use weightsync_core::weights::safetensors::SafetensorsPlan;
use weightsync_core::weights::{Bucket, Coverage, DigestAlgorithm, Layout, Manifest, TensorHasherError, digest_hex, parse_digest_hex};
use weightsync_transport::{BucketStore, Fault, TensorDigests, Transfer};

/// Who hears how the stream goes.
pub trait Listener: Send + Sync {
    fn moving(&self);
    /// So many bytes were received and checked.
    fn received(&self, update: &UpdateId, bytes: u64);
    /// How all bytes came; [`streamed`](Self::streamed) follows.
    fn measured(&self, update: &UpdateId, transfer: &Transfer);
    fn streamed(&self, update: &UpdateId, took_ms: u64) -> Result<(), Refusal>;
    fn broken(&self, update: &UpdateId, fault: Fault<'_>, cause: &str);
}

pub struct Receiver {
    update: UpdateId,
    layout: Arc<Layout>,
    algorithm: DigestAlgorithm,
    plan: SafetensorsPlan,
    begun: Instant,
    listener: Box<dyn Listener>,
    arriving: Mutex<Option<Arriving>>,
}

struct Arriving {
    dir: VersionDir,
    files: Vec<File>,
    hasher: TensorDigests,
    coverage: Coverage,
    /// Room for what did not come yet.
    room: Option<Reservation>,
}

impl Receiver {
    /// Makes the files, headers first. Their length is set, their bytes are not there yet.
    pub fn create(
        update: UpdateId,
        layout: Arc<Layout>,
        algorithm: DigestAlgorithm,
        plan: SafetensorsPlan,
        dir: VersionDir,
        listener: Box<dyn Listener>,
    ) -> std::io::Result<Self> {
        let mut files = Vec::with_capacity(plan.files.len());
        for planned in &plan.files {
            let mut options = OpenOptions::new();
            // The engine may run as another user.
            let mut file = options.create_new(true).read(true).write(true).mode(0o644).open(dir.path().join(&planned.name))?;
            file.write_all(&planned.header)?;
            file.set_len(planned.bytes)?;
            files.push(file);
        }
        if let Some((name, json)) = &plan.index {
            std::fs::write(dir.path().join(name), json)?;
        }
        let hasher = TensorDigests::new(layout.clone(), algorithm);
        let coverage = Coverage::new(layout.total_bytes);
        let arriving = Mutex::new(Some(Arriving { dir, files, hasher, coverage, room: None }));
        Ok(Self { update, layout, algorithm, plan, begun: Instant::now(), listener, arriving })
    }

    /// Gives the room up bit by bit, as it is used.
    #[must_use]
    pub fn within(self, room: Reservation) -> Self {
        if let Some(arriving) = lock(&self.arriving).as_mut() {
            arriving.room = Some(room);
        }
        self
    }

    /// Lets the directory go; nothing is taken any more.
    pub fn discard(&self) {
        lock(&self.arriving).take();
    }

    /// Compares coverage and digests with what the leader sent; the version if all agree, else why not.
    pub fn conclude(&self, request: &FinishRequest) -> Result<Version, String> {
        let Some(arrived) = lock(&self.arriving).take() else { return Err("nothing was received".into()) };
        let manifest = agree(&self.update, &self.layout, self.algorithm, || arrived.hasher.finish(), &arrived.coverage, request)?;
        let digest = manifest.digest();
        let held = HeldVersion { version: self.update.version, manifest: digest };
        Ok(Version {
            held,
            manifest,
            layout: self.layout.clone(),
            plan: self.plan.clone(),
            files: arrived.files,
            dir: arrived.dir,
            given: AtomicBool::new(false),
        })
    }

    fn write_segments(&self, arriving: &Arriving, offset: u64, part: &[u8]) -> std::io::Result<()> {
        for segment in self.plan.segments(&self.layout, offset, part.len() as u64) {
            let start = usize::try_from(segment.in_part).unwrap_or(usize::MAX);
            let end = start.saturating_add(usize::try_from(segment.bytes).unwrap_or(usize::MAX));
            let (Some(bytes), Some(file)) = (part.get(start..end), arriving.files.get(segment.file)) else {
                return Err(std::io::Error::other("the plan of the files does not fit the layout"));
            };
            file.write_all_at(bytes, segment.file_offset)?;
        }
        Ok(())
    }
}

/// The bucket of the layout that a header speaks of.
pub(super) fn cut_as_laid_out(layout: &Layout, header: &BucketHeader) -> Result<Bucket, Refusal> {
    let known = layout.bucket(header.sequence).filter(|bucket| (bucket.offset, bucket.bytes) == (header.offset, header.bytes));
    known.ok_or_else(|| refusal(RefusalCode::LayoutMismatch, format!("bucket {} is not cut as the layout says", header.sequence)))
}

/// Notes bytes that came; refuses those that do not follow the ones before, which end at `position`.
pub(super) fn in_order(coverage: &mut Coverage, position: u64, offset: u64, bytes: u64) -> Result<(), Refusal> {
    if offset != position {
        return Err(invalid(format!("bytes from {offset} on came, those from {position} on were expected")));
    }
    coverage.record(offset, bytes).map_err(invalid)
}

pub(super) fn invalid(error: impl std::fmt::Display) -> Refusal {
    refusal(RefusalCode::Invalid, error.to_string())
}

/// The manifest of what arrived, if coverage and digests are what the leader says; else why not.
pub(super) fn agree(
    update: &UpdateId,
    layout: &Arc<Layout>,
    algorithm: DigestAlgorithm,
    computed: impl FnOnce() -> Result<Vec<u128>, TensorHasherError>,
    coverage: &Coverage,
    request: &FinishRequest,
) -> Result<Manifest, String> {
    coverage.check(layout).map_err(|error| error.to_string())?;
    let computed = computed().map_err(|error| error.to_string())?;
    let manifest = Manifest::new(update.version, Layout::clone(layout), algorithm, &computed).map_err(|error| error.to_string())?;
    let said: Vec<u128> = request.tensor_digests.iter().map(|hex| parse_digest_hex(hex).unwrap_or_default()).collect();
    manifest.compare(&said).map_err(|error| error.to_string())?;
    if request.tensor_digests != computed.iter().copied().map(digest_hex).collect::<Vec<_>>() {
        return Err("a tensor digest of the manifest is not 32 lower-case hex digits".into());
    }
    let digest = manifest.digest();
    if digest != request.manifest_digest {
        return Err(format!("the manifest is {} by the leader and {digest} by what arrived", request.manifest_digest));
    }
    Ok(manifest)
}

impl Receiver {
    fn take(&self, offset: u64, part: &[u8]) -> Result<(), Refusal> {
        let mut arriving = lock(&self.arriving);
        let Some(arriving) = arriving.as_mut() else {
            return Err(refusal(RefusalCode::WrongPhase, "the attempt is over here"));
        };
        in_order(&mut arriving.coverage, arriving.hasher.position(), offset, part.len() as u64)?;
        arriving.hasher.update(part).map_err(invalid)?;
        self.write_segments(arriving, offset, part).map_err(|error| {
            let full = matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded);
            let code = if full { RefusalCode::OutOfSpace } else { RefusalCode::Internal };
            refusal(code, format!("{} cannot be written: {error}", arriving.dir.path().display()))
        })
    }
}

impl BucketStore for Receiver {
    fn write(&self, offset: u64, part: &[u8]) -> Result<(), Refusal> {
        self.take(offset, part)?;
        // Without our lock: the listener takes the one under which `discard` is called, and the two would wait for each other for ever.
        self.listener.moving();
        Ok(())
    }

    fn complete(&self, header: &BucketHeader, _digest: u128) -> Result<(), Refusal> {
        cut_as_laid_out(&self.layout, header)?;
        if let Some(room) = lock(&self.arriving).as_ref().and_then(|arriving| arriving.room.as_ref()) {
            room.used(header.bytes);
        }
        self.listener.received(&self.update, header.offset.saturating_add(header.bytes));
        Ok(())
    }

    fn measured(&self, transfer: &Transfer) {
        self.listener.measured(&self.update, transfer);
    }

    fn end(&self) -> Result<(), Refusal> {
        let took_ms = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.listener.streamed(&self.update, took_ms)
    }

    fn broken(&self, fault: Fault<'_>, cause: &str) {
        self.listener.broken(&self.update, fault, cause);
    }
}

#[cfg(test)]
mod tests;

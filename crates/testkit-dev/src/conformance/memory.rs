//! Weights as buckets in GPU memory, for the ways that take them so: laid into the files of the stand-in driver where the engine is simulated.
//!
//! Decides where each bucket lies; a bucket is laid down whole before it is handed over, and spoiled as soon as it was released, so that an
//! engine that reads later than it says is found.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use weightsync_core::protocol::HeldVersion;
use weightsync_core::protocol::worker::{IpcHandle, Opaque};
use weightsync_core::weights::safetensors::Checkpoint;
use weightsync_core::weights::{Layout, gsum64};
use weightsync_engine::{DeviceBucket, DeviceInstall, DevicePlace, EngineError, InstallError, InstallReport, Left, Released};

const SLOTS: u64 = 2;

#[derive(Debug)]
pub(super) struct Memory {
    folder: PathBuf,
    gpus: Vec<String>,
}

impl Memory {
    pub(super) fn new(folder: PathBuf, gpus: Vec<String>) -> Self {
        Self { folder, gpus }
    }

    /// Hands a whole version over, bucket by bucket.
    pub(super) async fn feed(
        &self,
        mut install: Box<dyn DeviceInstall>,
        layout: &Layout,
        checkpoint: &Checkpoint,
        held: HeldVersion,
    ) -> Result<InstallReport, InstallError> {
        let own = |cause: std::io::Error| InstallError {
            step: "load",
            left: Left::Mixture,
            source: EngineError::Unsupported {
                what: format!("the suite's own memory failed: {cause}"),
                next_step: "look at its disk".into(),
            },
        };
        let slot_bytes = layout.largest_bucket().next_multiple_of(64).max(64);
        let name = format!("ring-{}", uuid::Uuid::new_v4().simple());
        let rings: Vec<(String, File)> = self
            .gpus
            .iter()
            .enumerate()
            .map(|(number, _)| ring(&self.folder, &name, number, slot_bytes))
            .collect::<Result<_, _>>()
            .map_err(own)?;
        for bucket in layout.buckets() {
            let (mut bytes, mut sums) = (vec![0; usize::try_from(bucket.bytes).unwrap_or(0)], Vec::new());
            for part in layout.parts(bucket.offset, bucket.bytes) {
                let start = usize::try_from(part.in_range).unwrap_or(0);
                let end = start.saturating_add(usize::try_from(part.bytes).unwrap_or(0));
                if let Some(into) = bytes.get_mut(start..end) {
                    checkpoint.read_tensor(part.index, part.in_tensor, into).map_err(|error| own(std::io::Error::other(error)))?;
                    sums.push(gsum64(into));
                }
            }
            let offset = u64::from(bucket.sequence) % SLOTS * slot_bytes;
            let mut places = Vec::new();
            for ((file_name, file), gpu) in rings.iter().zip(&self.gpus) {
                file.write_all_at(&bytes, offset).map_err(own)?;
                places.push(DevicePlace {
                    gpu: gpu.clone(),
                    handle: handle(file_name, SLOTS * slot_bytes),
                    allocation_bytes: SLOTS * slot_bytes,
                    offset,
                    event: None,
                });
            }
            let released = install.bucket(DeviceBucket { bucket, places, sums }).await?;
            if released == Released::Now {
                let spoiled = vec![0xdd; bytes.len()];
                rings.iter().try_for_each(|(_, file)| file.write_all_at(&spoiled, offset)).map_err(own)?;
            }
        }
        install.finish(held).await
    }
}

fn ring(folder: &Path, name: &str, number: usize, slot_bytes: u64) -> std::io::Result<(String, File)> {
    let name = format!("{name}-{number}");
    let file = OpenOptions::new().create_new(true).read(true).write(true).open(folder.join(&name))?;
    file.set_len(SLOTS * slot_bytes)?;
    Ok((name, file))
}

/// The stand-in driver's form of a handle.
fn handle(name: &str, bytes: u64) -> IpcHandle {
    let mut handle = [0; 64];
    for (to, from) in handle.iter_mut().zip(format!("fakegpu:memory:{name}:{bytes}").bytes()) {
        *to = from;
    }
    Opaque(handle)
}

//! GPU memory of other processes, as the stand-in driver of the tests keeps it: in files.
//!
//! A handle names a file and a length (`fakegpu:memory:FILE:BYTES`, tests/fakegpu/ipc.cpp). Decides what a simulated worker reads when it
//! opens such a handle; a file that is gone, or a range beyond it, is the error that a driver gives.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

#[derive(Debug, Clone)]
pub(super) struct GpuMemory {
    folder: Option<PathBuf>,
}

impl GpuMemory {
    pub(super) fn new(folder: Option<PathBuf>) -> Self {
        Self { folder }
    }

    pub(super) fn is_there(&self) -> bool {
        self.folder.is_some()
    }

    /// Folder in which ranks of a group hold their lock files (tests/fakegpu/group.cpp).
    pub(super) fn groups(&self) -> Option<PathBuf> {
        Some(self.folder.as_deref()?.parent()?.join("groups"))
    }

    /// Opens what a handle names; with two bytes of torch in front or without.
    pub(super) fn open(&self, handle: &[u8]) -> Result<Opened, String> {
        let invalid = || "CUDA error: invalid argument".to_owned();
        let folder = self.folder.as_deref().ok_or_else(|| "CUDA error: no CUDA-capable device is detected".to_owned())?;
        let handle = if handle.len() == 66 { handle.get(2..).unwrap_or_default() } else { handle };
        if handle.len() != 64 {
            return Err(invalid());
        }
        let text: Vec<u8> = handle.iter().copied().take_while(|byte| *byte != 0).collect();
        let text = String::from_utf8(text).map_err(|_| invalid())?;
        let (name, bytes) = text.strip_prefix("fakegpu:memory:").and_then(|rest| rest.rsplit_once(':')).ok_or_else(invalid)?;
        let plain = Path::new(name).components().count() == 1 && !name.starts_with('.');
        let bytes: u64 = bytes.parse().map_err(|_| invalid())?;
        let file = plain.then(|| File::open(folder.join(name)).ok()).flatten().ok_or_else(invalid)?;
        Ok(Opened { source: Source::File(file), bytes })
    }
}

/// Memory that was opened, or a copy that was made of it.
#[derive(Debug)]
pub(super) struct Opened {
    source: Source,
    bytes: u64,
}

#[derive(Debug)]
enum Source {
    File(File),
    Copy(Vec<u8>),
}

impl Opened {
    pub(super) fn read(&self, offset: u64, bytes: u64) -> Result<Vec<u8>, String> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err("start + length exceeds the storage".to_owned());
        }
        let illegal = |error: String| format!("CUDA error: an illegal memory access was encountered ({error})");
        let length = usize::try_from(bytes).map_err(|error| error.to_string())?;
        match &self.source {
            Source::File(file) => {
                let mut read = vec![0; length];
                file.read_exact_at(&mut read, offset).map_err(|error| illegal(error.to_string()))?;
                Ok(read)
            }
            Source::Copy(copy) => {
                let start = usize::try_from(offset).map_err(|error| error.to_string())?;
                copy.get(start..start.saturating_add(length)).map(<[u8]>::to_vec).ok_or_else(|| illegal("beyond the copy".into()))
            }
        }
    }

    /// The same bytes as they are now, whatever becomes of the memory.
    pub(super) fn copy(&self) -> Result<Self, String> {
        Ok(Self { source: Source::Copy(self.read(0, self.bytes)?), bytes: self.bytes })
    }
}

//! torch's counters of tensors that another process reads: the one exact word that a reader has let a tensor go.
//!
//! A reader of torch 2.9 to 2.15 synchronises its stream when it drops a tensor that it had opened, and then takes one off an `int64` in a
//! file of `/dev/shm` (`torch/csrc/CudaIPCTypes.cpp`; tried on 2.9.0 and 2.15.0 with a file made by hand). Decides which slot of the file
//! is used and when a slot is read. A reader that does not see the file reports nothing at all, so a waiting caller needs a deadline.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Counters in a file of torch's.
const SLOTS: u64 = 10_000;
/// First byte of the counters; before them is the number of processes that map the file.
const FIRST: u64 = 64;

/// Where POSIX shared memory lies.
pub const SHARED_MEMORY: &str = "/dev/shm";

/// Which counter a reader takes one off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counter {
    /// Name of the file as `shm_open` takes it: `/` and a word.
    pub name: String,
    /// Its number in the file.
    pub slot: u64,
}

/// A file of counters; removed when it is dropped.
#[derive(Debug)]
pub struct Counters {
    file: File,
    path: PathBuf,
    name: String,
    next: u64,
}

impl Counters {
    /// Creates one in a folder ([`SHARED_MEMORY`]) that the reader sees too, for a reader of any user.
    pub fn create(folder: &Path) -> io::Result<Self> {
        let word = format!("weightsync-{}", uuid::Uuid::new_v4().simple());
        let path = folder.join(&word);
        let file = OpenOptions::new().create_new(true).read(true).write(true).mode(0o600).open(&path)?;
        let counters = Self { file, path, name: format!("/{word}"), next: 0 };
        counters.file.set_len(FIRST + 8 * SLOTS)?;
        // The umask must not keep the engine's user out.
        counters.file.set_permissions(Permissions::from_mode(0o666))?;
        counters.file.write_all_at(&1_i32.to_le_bytes(), 0)?;
        Ok(counters)
    }

    /// A counter for one tensor and one reader, set to 1. A slot is used again after ten thousand others.
    pub fn take(&mut self) -> io::Result<Counter> {
        let slot = self.next % SLOTS;
        self.next += 1;
        self.file.write_all_at(&1_i64.to_le_bytes(), FIRST + 8 * slot)?;
        Ok(Counter { name: self.name.clone(), slot })
    }

    /// Whether its reader has let the tensor go.
    pub fn is_read(&self, counter: &Counter) -> io::Result<bool> {
        let mut number = [0; 8];
        self.file.read_exact_at(&mut number, FIRST + 8 * (counter.slot % SLOTS))?;
        Ok(i64::from_le_bytes(number) <= 0)
    }
}

impl Drop for Counters {
    fn drop(&mut self) {
        // A reader that has it open keeps it; the name must not stay.
        let _removed = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests;

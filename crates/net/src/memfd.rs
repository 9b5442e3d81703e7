//! A run of shared memory without a path. The agent makes and seals it; each side (a trainer, a GPU worker) maps it once.
//!
//! The size is sealed, so that no side can shrink it: a shrunk mapping would kill the reader by SIGBUS. This file knows addresses and
//! lengths. Its users decide the content of each range, and when a side may write it.
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// Shared memory, mapped for as long as this value lives.
pub struct SharedMemory {
    fd: OwnedFd,
    base: NonNull<u8>,
    length: usize,
    writable: bool,
}

// SAFETY: the mapping belongs to this value alone, stays at its place until drop, and no method hands out more than its borrow allows.
unsafe impl Send for SharedMemory {}
// SAFETY: shared access only reads; writing needs `&mut self`.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// New zeroed memory of `length` bytes, mapped for reading. All pages are allocated now and charged to this process. So a lack of
    /// memory is an error here, and not a signal in the middle of an update.
    pub fn create(name: &str, length: usize) -> io::Result<Self> {
        Self::map(Self::make(name, length)?, 0, length, false)
    }

    /// As [`create`](Self::create), mapped for reading and writing.
    pub fn create_writable(name: &str, length: usize) -> io::Result<Self> {
        Self::map(Self::make(name, length)?, 0, length, true)
    }

    fn make(name: &str, length: usize) -> io::Result<OwnedFd> {
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let bytes = u64::try_from(length).map_err(|_| io::ErrorKind::InvalidInput)?;
        rustix::fs::ftruncate(&fd, bytes)?;
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, bytes)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(fd)
    }

    /// Memory that the other side made, mapped for reading and writing. Refused if it is shorter than `length` or could shrink.
    pub fn attach(fd: OwnedFd, length: usize) -> io::Result<Self> {
        let size = usize::try_from(rustix::fs::fstat(&fd)?.st_size).unwrap_or(0);
        if size < length {
            let what = format!("the shared memory has {size} bytes, {length} were announced");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        if !rustix::fs::fcntl_get_seals(&fd)?.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the shared memory is not sealed against shrinking"));
        }
        Self::map(fd, 0, length, true)
    }

    /// Maps a part of the same memory: `length` bytes from `offset` on, for reading and writing. The offset is a multiple of the page size.
    /// The caller must keep several parts disjoint.
    pub fn part(&self, offset: usize, length: usize) -> io::Result<Self> {
        if offset.checked_add(length).is_none_or(|end| end > self.length) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the part lies beyond the shared memory"));
        }
        let from = u64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        Self::map(self.fd.try_clone()?, from, length, true)
    }

    fn map(fd: OwnedFd, offset: u64, length: usize, writable: bool) -> io::Result<Self> {
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at a place that the kernel chooses aliases nothing of ours; length and descriptor were checked above.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, &fd, offset)? };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { fd, base, length, writable })
    }

    /// The descriptor to pass to the other side.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Bytes of a range, or `None` if it is not inside.
    ///
    /// The other process must not write there meanwhile. If it does anyway, it breaks only its own version, not this process. The digest
    /// that travels with a bucket is computed from the bytes that are sent, and every receiver computes it again.
    pub fn bytes(&self, range: Range<usize>) -> Option<&[u8]> {
        let length = range.end.checked_sub(range.start).filter(|_| range.end <= self.length)?;
        // SAFETY: the range lies inside a mapping that lives as long as `self` and cannot shrink (sealed); bytes have no invalid value.
        Some(unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(range.start), length) })
    }

    /// Bytes of a range for writing, or `None` if it is not inside or was mapped for reading only.
    pub fn bytes_mut(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        let length = range.end.checked_sub(range.start).filter(|_| range.end <= self.length && self.writable)?;
        // SAFETY: as above, mapped for writing, and `&mut self` excludes every other reference of this process.
        Some(unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(range.start), length) })
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and no slice of it outlives `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
        if let Err(error) = unmapped {
            tracing::warn!(%error, "shared memory could not be unmapped");
        }
    }
}

//! Memory that the GPU reads and writes: its own, another process's, mapped host memory, and small scratch for digests.
//!
//! Decides whether a range lies inside. A [`Span`] keeps its memory alive, so what is copied or broadcast cannot be freed under it as long
//! as anyone who asked for it keeps the span until an event after the work fired.

use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::driver::{Driver, OUT_OF_MEMORY, from_ipc, to_ipc};
use super::{Device, GpuError};
use weightsync_core::protocol::worker::IpcHandle;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`; the only flag there is, and it must be given.
const LAZY_PEER_ACCESS: u32 = 1;
/// `CU_MEMHOSTREGISTER_PORTABLE`.
const PORTABLE: u32 = 1;

#[derive(Clone, Copy)]
pub(super) enum Address {
    Device(u64),
    Host(NonNull<c_void>),
}

impl Address {
    pub(super) fn number(self) -> u64 {
        match self {
            Self::Device(address) => address,
            Self::Host(base) => base.as_ptr() as u64,
        }
    }
}

/// A run of memory. Clones share it; it is given up with the last one.
#[derive(Clone)]
pub struct Memory(Arc<Block>);

struct Block {
    address: Address,
    bytes: u64,
    kind: Kind,
}

#[derive(Clone, Copy)]
enum Kind {
    Own(&'static Driver),
    Imported(&'static Driver),
    /// Also who has it registered, where that is so.
    Mapped {
        registered: Option<&'static Driver>,
    },
    Pinned(&'static Driver),
}

// SAFETY: addresses are only handed to the driver, or read and written through methods that borrow.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Memory {
    fn new(address: Address, bytes: u64, kind: Kind) -> Self {
        Self(Arc::new(Block { address, bytes, kind }))
    }

    /// A new block on the GPU (`cuMemAlloc`: what legacy CUDA IPC can share), with what lay there before.
    pub fn allocate(device: &Device, bytes: u64) -> Result<Self, GpuError> {
        let driver = device.driver();
        let mut address = 0;
        // SAFETY: writes one address.
        match unsafe { (driver.mem_alloc)(&raw mut address, length(bytes)?) } {
            OUT_OF_MEMORY => return Err(GpuError::OutOfMemory { what: "cuMemAlloc_v2", bytes }),
            code => driver.check("cuMemAlloc_v2", code)?,
        }
        Ok(Self::new(Address::Device(address), bytes, Kind::Own(driver)))
    }

    /// Another process's allocation on the same GPU, of at least `least` bytes.
    pub fn import(device: &Device, handle: &IpcHandle, least: u64) -> Result<Self, GpuError> {
        let driver = device.driver();
        let (mut address, mut base, mut size) = (0, 0, 0_usize);
        // SAFETY: writes one address; a handle that means nothing is an error.
        let code = unsafe { (driver.ipc_open_mem_handle)(&raw mut address, to_ipc(handle), LAZY_PEER_ACCESS) };
        driver.check("cuIpcOpenMemHandle_v2", code)?;
        let mut memory = Block { address: Address::Device(address), bytes: 0, kind: Kind::Imported(driver) };
        // SAFETY: the address is one that the driver just gave; writes an address and a length.
        let code = unsafe { (driver.mem_get_address_range)(&raw mut base, &raw mut size, address) };
        driver.check("cuMemGetAddressRange_v2", code)?;
        memory.bytes = (size as u64).saturating_sub(address.saturating_sub(base));
        if memory.bytes < least {
            let what = format!("the imported memory has {} bytes, {least} were announced", memory.bytes);
            return Err(GpuError::Invalid { what });
        }
        Ok(Self(Arc::new(memory)))
    }

    /// Maps a memfd that is sealed against shrinking, and registers it with the driver where a GPU is open. Also gives why it is not
    /// registered, when it is not: copies go through the driver's own buffers then.
    pub fn map(device: Option<&Device>, memfd: OwnedFd, bytes: u64) -> Result<(Self, Option<GpuError>), GpuError> {
        let invalid = |what: String| GpuError::Invalid { what };
        let io = |error: rustix::io::Errno| invalid(format!("the shared memory cannot be mapped: {error}"));
        let size = u64::try_from(rustix::fs::fstat(&memfd).map_err(io)?.st_size).unwrap_or(0);
        if size < bytes || bytes == 0 {
            return Err(invalid(format!("the shared memory has {size} bytes, {bytes} were announced")));
        }
        if !rustix::fs::fcntl_get_seals(&memfd).map_err(io)?.contains(SealFlags::SHRINK) {
            return Err(invalid("the shared memory is not sealed against shrinking".into()));
        }
        let length = length(bytes)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place that the kernel chooses aliases nothing of ours; length and descriptor were checked above.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, &memfd, 0) }.map_err(io)?;
        let host = NonNull::new(base).ok_or_else(|| invalid("the shared memory was mapped at 0".into()))?;
        let register = |driver: &'static Driver| {
            // SAFETY: the range is mapped, and stays so until it is unregistered.
            let code = unsafe { (driver.mem_host_register)(base, length, PORTABLE) };
            driver.check("cuMemHostRegister_v2", code).map(|()| driver)
        };
        let no_gpu = GpuError::NoGpu { cause: "no GPU was opened".into() };
        let registered = device.ok_or(no_gpu).and_then(|device| register(device.driver()));
        let (registered, unpinned) = match registered {
            Ok(driver) => (Some(driver), None),
            Err(error) => (None, Some(error)),
        };
        Ok((Self::new(Address::Host(host), bytes, Kind::Mapped { registered }), unpinned))
    }

    /// What another process opens it with. Own GPU memory only.
    pub fn handle(&self) -> Result<IpcHandle, GpuError> {
        let (Address::Device(address), Kind::Own(driver)) = (self.0.address, self.0.kind) else {
            return Err(GpuError::Invalid { what: "only the worker's own GPU memory has a handle".into() });
        };
        let mut handle = super::driver::Ipc([0; 64]);
        // SAFETY: the address is alive; writes 64 bytes.
        let code = unsafe { (driver.ipc_get_mem_handle)(&raw mut handle, address) };
        driver.check("cuIpcGetMemHandle", code)?;
        Ok(from_ipc(handle))
    }

    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    pub fn in_host_memory(&self) -> bool {
        matches!(self.0.address, Address::Host(_))
    }

    /// First byte, as a number: in host memory and on a GPU.
    pub fn address(&self) -> u64 {
        self.0.address.number()
    }

    /// A range of it, checked.
    pub fn span(&self, offset: u64, bytes: u64) -> Result<Span, GpuError> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.0.bytes) {
            return Err(GpuError::Invalid { what: format!("bytes {offset} to {offset} + {bytes} of a memory of {}", self.0.bytes) });
        }
        Ok(Span { memory: self.clone(), offset, bytes })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: no one has the memory any more: spans keep it, and who asked for work keeps spans until the work is done. Errors are
        // those of earlier work, reported there.
        unsafe {
            match (self.kind, self.address) {
                (Kind::Own(driver), Address::Device(address)) => drop((driver.mem_free)(address)),
                (Kind::Imported(driver), Address::Device(address)) => drop((driver.ipc_close_mem_handle)(address)),
                (Kind::Pinned(driver), Address::Host(base)) => drop((driver.mem_free_host)(base.as_ptr())),
                (Kind::Mapped { registered }, Address::Host(base)) => {
                    if let Some(driver) = registered {
                        let _ = (driver.mem_host_unregister)(base.as_ptr());
                    }
                    if let Err(error) = rustix::mm::munmap(base.as_ptr(), usize::try_from(self.bytes).unwrap_or(0)) {
                        tracing::warn!(%error, "host memory could not be unmapped");
                    }
                }
                (Kind::Own(_) | Kind::Imported(_), Address::Host(_)) | (Kind::Mapped { .. } | Kind::Pinned(_), Address::Device(_)) => {}
            }
        }
    }
}

fn length(bytes: u64) -> Result<usize, GpuError> {
    usize::try_from(bytes).map_err(|_| GpuError::Invalid { what: format!("{bytes} bytes are more than memory can have") })
}

/// A range of memory; keeps the memory.
#[derive(Clone)]
pub struct Span {
    memory: Memory,
    offset: u64,
    bytes: u64,
}

impl Span {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A range of it, checked.
    pub fn part(&self, offset: u64, bytes: u64) -> Result<Self, GpuError> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(GpuError::Invalid { what: format!("bytes {offset} to {offset} + {bytes} of a range of {}", self.bytes) });
        }
        Ok(Self { memory: self.memory.clone(), offset: self.offset + offset, bytes })
    }

    pub fn in_host_memory(&self) -> bool {
        matches!(self.memory.0.address, Address::Host(_))
    }

    pub(super) fn length(&self) -> usize {
        // Lies inside memory, whose length is one.
        usize::try_from(self.bytes).unwrap_or(0)
    }

    pub(super) fn address(&self) -> Address {
        match self.memory.0.address {
            Address::Device(base) => Address::Device(base + self.offset),
            Address::Host(base) => {
                // SAFETY: the offset was checked to lie inside the mapping.
                Address::Host(unsafe { base.byte_add(usize::try_from(self.offset).unwrap_or(0)) })
            }
        }
    }
}

/// A little pinned host memory, which kernels read and write, with as much GPU memory next to it, for what cannot.
pub struct Scratch {
    host: Memory,
    device: Memory,
}

impl Scratch {
    /// `bytes` of each.
    pub fn new(device: &Device, bytes: u64) -> Result<Self, GpuError> {
        let driver = device.driver();
        let mut base = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let code = unsafe { (driver.mem_host_alloc)(&raw mut base, length(bytes)?, PORTABLE) };
        driver.check("cuMemHostAlloc", code)?;
        let base = NonNull::new(base).ok_or(GpuError::OutOfMemory { what: "cuMemHostAlloc", bytes })?;
        let host = Memory::new(Address::Host(base), bytes, Kind::Pinned(driver));
        Ok(Self { host, device: Memory::allocate(device, bytes)? })
    }

    pub fn bytes(&self) -> u64 {
        self.host.bytes()
    }

    pub fn host(&self, offset: u64, bytes: u64) -> Result<Span, GpuError> {
        self.host.span(offset, bytes)
    }

    pub fn device(&self, offset: u64, bytes: u64) -> Result<Span, GpuError> {
        self.device.span(offset, bytes)
    }

    /// Writes to the host memory. Nothing that the GPU still reads may be there: `&mut` and an event that fired say so.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), GpuError> {
        let span = self.host.span(offset, bytes.len() as u64)?;
        if let Address::Host(to) = span.address() {
            // SAFETY: the range lies inside pinned memory that only this value has.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr().cast(), bytes.len()) };
        }
        Ok(())
    }

    /// Reads the host memory, after an event that fired.
    pub fn read(&self, offset: u64, bytes: u64) -> Result<Vec<u8>, GpuError> {
        let span = self.host.span(offset, bytes)?;
        let mut read = vec![0; span.length()];
        if let Address::Host(from) = span.address() {
            // SAFETY: the range lies inside pinned memory; the GPU wrote it before the event that the caller saw fire.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().cast(), read.as_mut_ptr(), read.len()) };
        }
        Ok(read)
    }
}

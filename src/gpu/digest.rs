//! gsum64 of parts of GPU memory, by a kernel that the driver compiles when it is loaded. Decides how many threads share a part.
//!
//! It reads at the speed of the memory (256 MiB in 76 us on an H200), so every bucket is digested, always. The sums that it gives are
//! those of [`crate::weights::gsum64`] on the CPU.

use std::ffi::c_void;
use std::sync::Arc;

use super::driver::{Driver, Handle};
use super::memory::Address;
use super::{Device, Event, GSUM64, GpuError, Scratch, Span, Stream};
use crate::protocol::worker::Part;

const THREADS: u32 = 512;
/// Blocks in all.
const BLOCKS: u64 = 32;
/// A thread block has at least this much to read, in bytes.
const LEAST_PER_BLOCK: u64 = 64 << 10;
/// Most parts of one launch: `gridDim.y`.
const MOST_PARTS: usize = 65_535;

/// Bytes of a part as the kernel reads it.
const PART: u64 = 24;
/// Bytes of a sum.
const SUM: u64 = 8;

/// The loaded kernel.
pub struct Digester {
    driver: &'static Driver,
    function: Handle,
    blocks: u64,
    threads: u32,
}

// SAFETY: a function of a loaded module may be launched from any thread; the module is never unloaded.
unsafe impl Send for Digester {}
// SAFETY: as above.
unsafe impl Sync for Digester {}

/// A digest on its way: the sums are there when [`done`](Self::done) fired.
pub struct Digesting {
    scratch: Scratch,
    parts: u64,
    /// Fires behind the sums.
    pub done: Arc<Event>,
}

impl Digester {
    /// Loads the kernel.
    pub fn load(device: &Device) -> Result<Self, GpuError> {
        let driver = device.driver();
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the text ends with a zero; each call writes one pointer.
        unsafe {
            driver.check("cuModuleLoadData", (driver.module_load_data)(&raw mut module, GSUM64.as_ptr().cast()))?;
            let code = (driver.module_get_function)(&raw mut function, module, c"gsum64".as_ptr());
            driver.check("cuModuleGetFunction", code)?;
        }
        let read = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
        let threads = read("WEIGHTSYNC_TRY_THREADS").and_then(|threads| u32::try_from(threads).ok()).unwrap_or(THREADS);
        Ok(Self { driver, function, blocks: read("WEIGHTSYNC_TRY_BLOCKS").unwrap_or(BLOCKS), threads })
    }

    /// Scratch bytes for so many parts.
    pub fn scratch_bytes(parts: usize) -> u64 {
        parts as u64 * (PART + SUM)
    }

    /// Digests parts of `at` on `stream`, behind `after`. What does not need to wait for `after` is given to the stream before it.
    pub fn start(
        &self,
        stream: &Stream,
        after: Option<&Event>,
        at: &Span,
        parts: &[Part],
        mut scratch: Scratch,
    ) -> Result<Digesting, GpuError> {
        let Address::Device(base) = at.address() else {
            return Err(GpuError::Invalid { what: "host memory is not digested by the GPU".into() });
        };
        if parts.len() > MOST_PARTS {
            return Err(GpuError::Invalid { what: format!("{} parts to digest, at most {MOST_PARTS} at once", parts.len()) });
        }
        for part in parts {
            at.part(part.offset, part.bytes)?;
            if !(base + part.offset).is_multiple_of(8) {
                return Err(GpuError::Invalid { what: format!("a part to digest begins at byte {}, not at a multiple of 8", part.offset) });
            }
        }
        let count = parts.len() as u64;
        let table: Vec<u8> = parts.iter().flat_map(|part| [part.offset, part.bytes, part.first_word]).flat_map(u64::to_le_bytes).collect();
        scratch.write(0, &table)?;
        let table_on_gpu = scratch.device(0, count * PART)?;
        let sums_on_gpu = scratch.device(count * PART, count * SUM)?;
        stream.copy(&table_on_gpu, &scratch.host(0, count * PART)?)?;
        stream.fill(&sums_on_gpu, 0)?;
        if let Some(after) = after {
            stream.wait_for(after)?;
        }
        self.launch(stream, base, &table_on_gpu, &sums_on_gpu, parts)?;
        stream.copy(&scratch.host(count * PART, count * SUM)?, &sums_on_gpu)?;
        Ok(Digesting { scratch, parts: count, done: stream.record_new()? })
    }

    fn launch(&self, stream: &Stream, base: u64, table: &Span, sums: &Span, parts: &[Part]) -> Result<(), GpuError> {
        let (Address::Device(mut table), Address::Device(mut sums)) = (table.address(), sums.address()) else {
            return Err(GpuError::Invalid { what: "the kernel's arguments are not on the GPU".into() });
        };
        let mut base = base;
        let longest = parts.iter().map(|part| part.bytes).max().unwrap_or(0);
        let count = parts.len() as u64;
        let blocks = (longest / LEAST_PER_BLOCK).clamp(1, (self.blocks / count.max(1)).max(1));
        let (blocks, count) = (u32::try_from(blocks).unwrap_or(1), u32::try_from(count).unwrap_or(0));
        let mut arguments: [*mut c_void; 3] = [(&raw mut base).cast(), (&raw mut table).cast(), (&raw mut sums).cast()];
        // SAFETY: the kernel takes three 64-bit arguments, which the driver copies before it returns; every part lies inside the span, and
        // the table and the sums have room for all parts.
        let code = unsafe {
            (self.driver.launch_kernel)(
                self.function,
                blocks,
                count,
                1,
                self.threads,
                1,
                1,
                0,
                stream.raw(),
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.driver.check("cuLaunchKernel", code)
    }
}

impl Digesting {
    /// The sums, when [`done`](Self::done) fired, and the scratch for the next digest.
    pub fn finish(self) -> Result<(Vec<u64>, Scratch), GpuError> {
        let bytes = self.scratch.read(self.parts * PART, self.parts * SUM)?;
        let (words, _) = bytes.as_chunks::<8>();
        Ok((words.iter().map(|word| u64::from_le_bytes(*word)).collect(), self.scratch))
    }
}

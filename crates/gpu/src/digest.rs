//! gsum64 of parts of GPU memory, by a kernel that the driver compiles when it is loaded. Decides how the parts are shared among thread
//! blocks: few of them, each with as much to read, so that broadcasts go on next to it.
//!
//! 256 MiB take 0.63 ms on an H200, less than their broadcast, so every bucket is digested, always. The sums that it gives are
//! those of [`weightsync_core::weights::gsum64`] on the CPU.

use std::ffi::c_void;
use std::sync::Arc;

use super::driver::{Driver, Handle};
use super::memory::Address;
use super::{Device, Event, GSUM64, GpuError, Scratch, Span, Stream};
use weightsync_core::protocol::worker::Part;

const THREADS: u32 = 1024;
/// About so many blocks have work at once. NCCL's next kernel finds room on a multiprocessor only where no block of ours is: next to the
/// digest of every bucket of 256 MiB torch's broadcasts to 3 GPUs reach 0.95 of their speed with 16 and with 12 blocks, 0.987 with 10 and
/// with 8, whatever and however these read (4 H200, docs/benchmarks.md); with 10 a digest still takes less time than a broadcast.
const BLOCKS: u64 = 10;
/// Bytes that a block reads at least.
const LEAST_PER_BLOCK: u64 = 256 << 10;
/// Most pieces of one launch: `gridDim.y`.
const MOST_PIECES: usize = 65_535;

/// Bytes of a piece as the kernel reads it.
const PIECE: u64 = 24;
/// Bytes of a sum.
const SUM: u64 = 8;

pub struct Digester {
    driver: &'static Driver,
    function: Handle,
}

// SAFETY: a function of a loaded module may be launched from any thread; the module is never unloaded.
unsafe impl Send for Digester {}
// SAFETY: as above.
unsafe impl Sync for Digester {}

/// A digest on its way: the sums are there when [`done`](Self::done) fired.
pub struct Digesting {
    scratch: Scratch,
    parts: usize,
    /// The part of each piece.
    owners: Vec<usize>,
    /// Fires after the sums.
    pub done: Arc<Event>,
}

impl Digester {
    pub fn load(device: &Device) -> Result<Self, GpuError> {
        let driver = device.driver();
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the text ends with a zero; each call writes one pointer.
        unsafe {
            driver.check("cuModuleLoadData", (driver.module_load_data)(&raw mut module, GSUM64.as_ptr().cast()))?;
            let code = (driver.module_get_function)(&raw mut function, module, c"gsum64".as_ptr());
            driver.check("cuModuleGetFunction", code)?;
        }
        Ok(Self { driver, function })
    }

    pub fn scratch_bytes(parts: usize) -> u64 {
        (parts as u64 + BLOCKS) * (PIECE + SUM)
    }

    /// Digests parts of `at`, after what the stream holds. The kernel reads and writes `scratch` in host memory by itself: no copy engine is
    /// in it, after whose long copies the sums of a few kilobytes would wait.
    pub fn start(&self, stream: &Stream, at: &Span, parts: &[Part], mut scratch: Scratch) -> Result<Digesting, GpuError> {
        let Address::Device(base) = at.address() else {
            return Err(GpuError::Invalid { what: "host memory is not digested by the GPU".into() });
        };
        for part in parts {
            at.part(part.offset, part.bytes)?;
            if !(base + part.offset).is_multiple_of(8) {
                return Err(GpuError::Invalid { what: format!("a part to digest begins at byte {}, not at a multiple of 8", part.offset) });
            }
        }
        let (owners, pieces): (Vec<usize>, Vec<Part>) = pieces(parts).into_iter().unzip();
        if pieces.len() > MOST_PIECES {
            return Err(GpuError::Invalid { what: format!("{} parts to digest are too many at once", parts.len()) });
        }
        let count = pieces.len() as u64;
        let fields = pieces.iter().flat_map(|piece| [piece.offset, piece.bytes, piece.first_word]);
        let mut table_and_sums: Vec<u8> = fields.flat_map(u64::to_le_bytes).collect();
        // A kernel that wrote nothing must not leave the sums of the bucket before: zeros are no digest of anybody's.
        table_and_sums.resize(pieces.len().saturating_mul(usize::try_from(PIECE + SUM).unwrap_or(0)), 0);
        scratch.write(0, &table_and_sums)?;
        let (table, sums) = (scratch.host(0, count * PIECE)?, scratch.host(count * PIECE, count * SUM)?);
        self.launch(stream, base, &table, &sums, count)?;
        Ok(Digesting { scratch, parts: parts.len(), owners, done: stream.record_new()? })
    }

    fn launch(&self, stream: &Stream, base: u64, table: &Span, sums: &Span, pieces: u64) -> Result<(), GpuError> {
        let (Address::Host(table), Address::Host(sums)) = (table.address(), sums.address()) else {
            return Err(GpuError::Invalid { what: "the kernel's arguments are not in host memory".into() });
        };
        // Pinned memory has the same address on every GPU (CUDA driver API, unified addressing).
        let (mut base, mut table, mut sums) = (base, table.as_ptr().expose_provenance() as u64, sums.as_ptr().expose_provenance() as u64);
        let pieces = u32::try_from(pieces).unwrap_or(0);
        let mut arguments: [*mut c_void; 3] = [(&raw mut base).cast(), (&raw mut table).cast(), (&raw mut sums).cast()];
        // SAFETY: the kernel takes three 64-bit arguments, which the driver copies before it returns; every part lies inside the span, and
        // the table and the sums are pinned memory with room for all parts, which `Digesting` keeps until its event fired.
        let code = unsafe {
            (self.driver.launch_kernel)(
                self.function,
                1,
                pieces,
                1,
                THREADS,
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
        let count = self.owners.len() as u64;
        let bytes = self.scratch.read(count * PIECE, count * SUM)?;
        let (words, _) = bytes.as_chunks::<8>();
        let mut sums = vec![0_u64; self.parts];
        for (owner, word) in self.owners.iter().zip(words) {
            if let Some(sum) = sums.get_mut(*owner) {
                *sum = sum.wrapping_add(u64::from_le_bytes(*word));
            }
        }
        Ok((sums, self.scratch))
    }
}

/// Cuts parts into pieces of about equal length, one a thread block; each with the part that it belongs to. Sums of pieces add up.
fn pieces(parts: &[Part]) -> Vec<(usize, Part)> {
    let total = parts.iter().fold(0_u64, |total, part| total.saturating_add(part.bytes));
    // Whole pages: pieces begin at whole words.
    let longest = total.div_ceil(BLOCKS).max(LEAST_PER_BLOCK).next_multiple_of(4096);
    let mut pieces = Vec::with_capacity(parts.len());
    for (owner, part) in parts.iter().enumerate() {
        let mut done = 0;
        while done < part.bytes || done == 0 {
            let bytes = (part.bytes - done).min(longest);
            pieces.push((owner, Part { offset: part.offset + done, bytes, first_word: part.first_word.wrapping_add(done / 8) }));
            done += bytes;
            if bytes == 0 {
                break;
            }
        }
    }
    pieces
}

#[cfg(test)]
mod tests;

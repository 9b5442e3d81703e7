//! The driver, NCCL, NIXL, GPU memory and the digest kernel, opened at run time, and the [`worker`]: the only crate full of unsafe code.
//!
//! All but the agent's handle of a worker is used by the worker process alone. Decides which device and which library are used, and turns every failure into an error with the
//! function's name and the library's own words. It never waits without an end: what takes long is asked for and polled, and who polls has
//! a deadline. It never calls `cuStreamSynchronize` or `cuCtxSynchronize`, never destroys a communicator (abort only), never unloads a
//! library. Results are integers: a newer library may return codes that no list here has.
//!
//! # Functions of `libcuda.so.1`
//!
//! All are needed; one that is missing is an error that names it.
//!
//! | what | symbols |
//! |---|---|
//! | start | `cuInit`, `cuDriverGetVersion`, `cuGetErrorName`, `cuGetErrorString` |
//! | devices | `cuDeviceGetCount`, `cuDeviceGet`, `cuDeviceGetName`, `cuDeviceGetUuid_v2`, `cuDeviceGetPCIBusId`, `cuDeviceTotalMem_v2`, `cuDeviceCanAccessPeer`, `cuDeviceGetP2PAttribute`, `cuDevicePrimaryCtxRetain`, `cuCtxSetCurrent` |
//! | memory | `cuMemGetInfo_v2`, `cuMemAlloc_v2`, `cuMemFree_v2`, `cuMemGetAddressRange_v2`, `cuMemHostAlloc`, `cuMemFreeHost`, `cuMemHostRegister_v2`, `cuMemHostUnregister` |
//! | copies | `cuMemcpyHtoDAsync_v2`, `cuMemcpyDtoHAsync_v2`, `cuMemcpyDtoDAsync_v2`, `cuMemsetD8Async` |
//! | streams, events | `cuStreamCreateWithPriority`, `cuStreamDestroy_v2`, `cuStreamWaitEvent`, `cuEventCreate`, `cuEventRecord`, `cuEventQuery`, `cuEventDestroy_v2` |
//! | between processes | `cuIpcGetMemHandle`, `cuIpcOpenMemHandle_v2`, `cuIpcCloseMemHandle`, `cuIpcGetEventHandle`, `cuIpcOpenEventHandle` |
//! | digest | `cuModuleLoadData`, `cuModuleGetFunction` (`gsum64`), `cuLaunchKernel` |
//!
//! # Functions of `libnccl.so.2`
//!
//! | | symbols |
//! |---|---|
//! | needed | `ncclGetVersion`, `ncclGetUniqueId`, `ncclCommInitRankConfig`, `ncclCommGetAsyncError`, `ncclCommAbort`, `ncclBroadcast`, `ncclGetErrorString` |
//! | used where present | `ncclGetLastError`, `ncclCommShrink` (2.27), `ncclCommRevoke` (2.28) |
//!
//! # Functions of `libnixl_capi.so`
//!
//! All are needed, each with the prefix `nixl_capi_`: see `nixl.rs`. Read in NIXL 1.4.0 (`src/bindings/rust/wrapper.h`), run with 1.5.1.
//!
//! # The kernel
//!
//! `gsum64(const u8* base, const Part* parts, u64* sums)`, `Part { u64 offset, u64 bytes, u64 first_word }`, launched with a grid of
//! (1, number of parts, 1): adds the gsum64 of `parts[blockIdx.y]` to `sums[blockIdx.y]`. `parts` and `sums` are
//! GPU memory, `offset` is a multiple of 8.

#[allow(unsafe_code)]
mod device;
#[allow(unsafe_code)]
mod digest;
#[allow(unsafe_code)]
mod driver;
mod error;
#[allow(unsafe_code)]
mod library;
#[allow(unsafe_code)]
mod links;
#[allow(unsafe_code)]
mod memory;
#[allow(unsafe_code)]
mod nccl;
#[allow(unsafe_code)]
mod nixl;
#[allow(unsafe_code)]
mod stream;
pub mod worker;

use device::{Device, devices};
use digest::{Digester, Digesting};
use driver::version as driver_version;
use error::GpuError;
use links::links;
use memory::{Memory, Scratch, Span};
use nccl::{Communicator, Nccl, Progress, Shrinking};
use nixl::{Nixl, NixlAgent, Transfer};
use stream::{Event, Stream};

/// The PTX of the digest kernel.
const GSUM64: &std::ffi::CStr = match std::ffi::CStr::from_bytes_with_nul(concat!(include_str!("gsum64.ptx"), "\0").as_bytes()) {
    Ok(text) => text,
    Err(_) => c"",
};

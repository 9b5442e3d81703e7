//! NCCL: the library that was found, and communicators that never block and are never destroyed, only aborted.
//!
//! Why not a crate: they look for `libnccl.so` and never for `libnccl.so.2`, panic when it is missing, and type results as enums, for
//! which a newer library's code is undefined behaviour.

mod communicator;
mod find;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::Path;

pub use communicator::{Communicator, Progress, Shrinking};

use super::GpuError;
use super::library::{functions, loaded_from, open};
use weightsync_core::protocol::worker::{NcclFacts, NcclId, Opaque};

type Code = c_int;
type Raw = *mut c_void;

const SUCCESS: Code = 0;
/// `ncclInProgress`: a call of a non-blocking communicator goes on in a thread of NCCL's.
const IN_PROGRESS: Code = 7;

/// The oldest that takes [`Config`]'s layout.
const OLDEST: Version = Version(21700);

/// What helps where there is none, or one that does not fit the driver.
const INSTALL: &str = "put the package nvidia-nccl-cu12 or nvidia-nccl-cu13, as the driver's CUDA is, into the agent's container, or name the \
                       library by WEIGHTSYNC_NCCL";

/// `ncclUniqueId`; travels by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId([u8; 128]);

/// `ncclConfig_t` as of NCCL 2.17: 48 bytes. A newer library copies `size` bytes and fills in the rest, since it looks at `version`
/// (nccl.h 2.27.5 and 2.30.7; seen with 2.28.9).
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

const _: () = assert!(size_of::<Config>() == 48);

impl Config {
    fn non_blocking() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 22_203,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

functions! {
    /// libnccl (nccl.h).
    struct Functions {
        needed {
            get_version = "ncclGetVersion" fn(*mut c_int) -> Code;
            get_unique_id = "ncclGetUniqueId" fn(*mut UniqueId) -> Code;
            comm_init_rank_config = "ncclCommInitRankConfig" fn(*mut Raw, c_int, UniqueId, c_int, *mut Config) -> Code;
            comm_get_async_error = "ncclCommGetAsyncError" fn(Raw, *mut Code) -> Code;
            comm_abort = "ncclCommAbort" fn(Raw) -> Code;
            all_reduce = "ncclAllReduce" fn(*const c_void, *mut c_void, usize, c_int, c_int, Raw, *mut c_void) -> Code;
            broadcast = "ncclBroadcast" fn(*const c_void, *mut c_void, usize, c_int, c_int, Raw, *mut c_void) -> Code;
            get_error_string = "ncclGetErrorString" fn(Code) -> *const c_char;
        }
        optional {
            get_last_error = "ncclGetLastError" fn(Raw) -> *const c_char;
            comm_shrink = "ncclCommShrink" fn(Raw, *mut c_int, c_int, *mut Raw, *mut Config, c_int) -> Code;
            comm_revoke = "ncclCommRevoke" fn(Raw, c_int) -> Code;
        }
    }
}

/// A version as `ncclGetVersion` gives it: 22809 for 2.28.9.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0 / 10_000, self.0 / 100 % 100, self.0 % 100)
    }
}

pub struct Nccl {
    functions: Functions,
    path: String,
    version: Version,
}

/// Writes out the lines of NCCL's log that still lie in libc's buffers.
pub fn flush_log() {
    // SAFETY: null means all output streams.
    unsafe { libc::fflush(std::ptr::null_mut()) };
}

impl Nccl {
    /// Loads the library at `path`, or the first that is found and can be used: next to the Python of this environment (the engine's torch),
    /// then in the system. Never unloaded; call it once.
    pub fn load(path: Option<&Path>) -> Result<&'static Self, GpuError> {
        let mut tried = Vec::new();
        for candidate in find::candidates(path) {
            match Self::load_one(&candidate) {
                Ok(nccl) => return Ok(Box::leak(Box::new(nccl))),
                Err(cause) => tried.push(format!("{}: {cause}", candidate.display())),
            }
        }
        Err(GpuError::NoNccl { cause: format!("{}: {INSTALL}", tried.join("; ")) })
    }

    fn load_one(path: &Path) -> Result<Self, String> {
        let library = open(path)?;
        let functions = Functions::find(&library)?;
        library.keep();
        let mut version = 0;
        // SAFETY: writes one integer.
        let code = unsafe { (functions.get_version)(&raw mut version) };
        let version = Version(u32::try_from(version).unwrap_or(0));
        if code != SUCCESS || version < OLDEST {
            return Err(format!("version {version}, needed is {OLDEST} or newer"));
        }
        Ok(Self { functions, path: loaded_from(path), version })
    }

    pub fn facts(&self) -> NcclFacts {
        NcclFacts { path: self.path.clone(), version: self.version.0, lacks: self.functions.lacks() }
    }

    pub fn unique_id(&self) -> Result<NcclId, GpuError> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: writes 128 bytes.
        self.check("ncclGetUniqueId", unsafe { (self.functions.get_unique_id)(&raw mut id) }, std::ptr::null_mut())?;
        Ok(Opaque(id.0))
    }

    /// A code as an error, with the library's words. `IN_PROGRESS` is none.
    fn check(&self, function: &'static str, code: Code, communicator: Raw) -> Result<Progress, GpuError> {
        if code == SUCCESS {
            return Ok(Progress::Ready);
        }
        if code == IN_PROGRESS {
            return Ok(Progress::UnderWay);
        }
        let words = |pointer: *const c_char| {
            if pointer.is_null() {
                return String::new();
            }
            // SAFETY: NCCL gives constant texts, and for the last error one that lives as long as the library.
            unsafe { CStr::from_ptr(pointer) }.to_string_lossy().trim().replace('\n', " ")
        };
        // SAFETY: takes any code.
        let text = words(unsafe { (self.functions.get_error_string)(code) });
        // SAFETY: takes a communicator that is alive, or null.
        let last = self.functions.get_last_error.map(|get| words(unsafe { get(communicator) })).unwrap_or_default();
        Err(GpuError::Nccl { function, code, text, last })
    }
}

#[cfg(test)]
mod tests;

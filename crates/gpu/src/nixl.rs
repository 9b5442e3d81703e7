//! NIXL: its C interface (`libnixl_capi.so`), opened at run time. Decides whether a library can be used, and which of NIXL's codes are errors.
//!
//! Why not the crate `nixl-sys`: it needs g++ and libclang to build, and stops the process where the library is missing. Calls may block or hang: the
//! worker makes them in one thread of its own. The C interface folds most of NIXL's codes into one (-2) and keeps NIXL's words to itself: those
//! go to the log of the process, and errors here say what each failed step means.

mod agent;
mod find;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;

pub use agent::{NixlAgent, Transfer};

use super::GpuError;
use super::library::{functions, loaded_from, open};

type Code = c_int;
type Raw = *mut c_void;

const SUCCESS: Code = 0;
/// `NIXL_CAPI_IN_PROG`.
const IN_PROGRESS: Code = 1;
/// `NIXL_CAPI_MEM_DRAM`.
const DRAM: c_int = 0;
/// `NIXL_CAPI_MEM_VRAM`.
const VRAM: c_int = 1;
/// `NIXL_CAPI_XFER_OP_READ`.
const READ: c_int = 0;
/// `NIXL_CAPI_THREAD_SYNC_RW`: NIXL's own progress thread uses the agent too.
const SYNC_RW: c_int = 2;

/// NIXL's backend that is used.
pub const PLUGIN: &CStr = c"UCX";

/// `nixl_capi_agent_config_t`.
#[repr(C)]
pub(super) struct Config {
    progress_thread: bool,
    listen_thread: bool,
    listen_port: c_int,
    thread_sync: c_int,
    workers: c_uint,
    progress_delay_us: u64,
    listen_delay_us: u64,
    telemetry: bool,
}

functions! {
    /// libnixl_capi (wrapper.h). Objects that a function creates are its caller's; descriptor lists and parameters are copied by the functions that
    /// take them. A null object is an error, never a crash.
    struct Functions {
        needed {
            create_agent = "nixl_capi_create_configured_agent" fn(*const c_char, *const Config, *mut Raw) -> Code;
            destroy_agent = "nixl_capi_destroy_agent" fn(Raw) -> Code;
            get_plugin_params = "nixl_capi_get_plugin_params" fn(Raw, *const c_char, *mut Raw, *mut Raw) -> Code;
            destroy_mem_list = "nixl_capi_destroy_mem_list" fn(Raw) -> Code;
            mem_list_size = "nixl_capi_mem_list_size" fn(Raw, *mut usize) -> Code;
            mem_list_get = "nixl_capi_mem_list_get" fn(Raw, usize, *mut c_int) -> Code;
            mem_type_to_string = "nixl_capi_mem_type_to_string" fn(c_int, *mut *const c_char) -> Code;
            create_params = "nixl_capi_create_params" fn(*mut Raw) -> Code;
            params_add = "nixl_capi_params_add" fn(Raw, *const c_char, *const c_char) -> Code;
            destroy_params = "nixl_capi_destroy_params" fn(Raw) -> Code;
            create_backend = "nixl_capi_create_backend" fn(Raw, *const c_char, Raw, *mut Raw) -> Code;
            destroy_backend = "nixl_capi_destroy_backend" fn(Raw) -> Code;
            create_opt_args = "nixl_capi_create_opt_args" fn(*mut Raw) -> Code;
            opt_args_add_backend = "nixl_capi_opt_args_add_backend" fn(Raw, Raw) -> Code;
            destroy_opt_args = "nixl_capi_destroy_opt_args" fn(Raw) -> Code;
            create_reg_dlist = "nixl_capi_create_reg_dlist" fn(c_int, *mut Raw) -> Code;
            reg_dlist_add_desc = "nixl_capi_reg_dlist_add_desc" fn(Raw, usize, usize, u64, *const c_void, usize) -> Code;
            destroy_reg_dlist = "nixl_capi_destroy_reg_dlist" fn(Raw) -> Code;
            register_mem = "nixl_capi_register_mem" fn(Raw, Raw, Raw) -> Code;
            deregister_mem = "nixl_capi_deregister_mem" fn(Raw, Raw, Raw) -> Code;
            get_local_md = "nixl_capi_get_local_md" fn(Raw, *mut *mut c_void, *mut usize) -> Code;
            load_remote_md = "nixl_capi_load_remote_md" fn(Raw, *const c_void, usize, *mut *mut c_char) -> Code;
            invalidate_remote_md = "nixl_capi_invalidate_remote_md" fn(Raw, *const c_char) -> Code;
            create_xfer_dlist = "nixl_capi_create_xfer_dlist" fn(c_int, *mut Raw) -> Code;
            xfer_dlist_add_desc = "nixl_capi_xfer_dlist_add_desc" fn(Raw, usize, usize, u64) -> Code;
            destroy_xfer_dlist = "nixl_capi_destroy_xfer_dlist" fn(Raw) -> Code;
            create_xfer_req = "nixl_capi_create_xfer_req" fn(Raw, c_int, Raw, Raw, *const c_char, *mut Raw, Raw) -> Code;
            post_xfer_req = "nixl_capi_post_xfer_req" fn(Raw, Raw, Raw) -> Code;
            get_xfer_status = "nixl_capi_get_xfer_status" fn(Raw, Raw) -> Code;
            release_xfer_req = "nixl_capi_release_xfer_req" fn(Raw, Raw) -> Code;
            destroy_xfer_req = "nixl_capi_destroy_xfer_req" fn(Raw) -> Code;
        }
        optional {}
    }
}

/// The library. Never unloaded.
pub struct Nixl {
    functions: Functions,
    path: String,
    version: Option<String>,
    cuda: Option<u32>,
}

impl Nixl {
    /// Loads the library at `path`, or the first that is found and can be used: in the Python packages of this environment, those for the driver's
    /// CUDA first, then in the system. `driver` is the CUDA version that the driver speaks, e.g. 13000.
    pub fn load(path: Option<&Path>, driver: Option<u32>) -> Result<&'static Self, GpuError> {
        let mut tried = Vec::new();
        for candidate in find::candidates(path, driver.map(|version| version / 1000)) {
            match Self::load_one(&candidate) {
                Ok(nixl) => return Ok(Box::leak(Box::new(nixl))),
                Err(cause) => tried.push(format!("{}: {cause}", candidate.display())),
            }
        }
        let major = driver.map_or(12, |version| version / 1000);
        let next = format!("install the Python package nixl-cu{major}, or name the path of its libnixl_capi.so");
        Err(GpuError::NoFabric { cause: format!("{}; {next}", tried.join("; ")) })
    }

    fn load_one(path: &Path) -> Result<Self, String> {
        let library = open(path)?;
        let functions = Functions::find(&library)?;
        library.keep();
        let path = loaded_from(path);
        let (version, cuda) = (find::version(Path::new(&path)), find::cuda_major(Path::new(&path)));
        Ok(Self { functions, path, version, cuda })
    }

    /// File, as it was found or named.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Version of the Python package that the library lies in.
    pub fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// CUDA major that it was built for, as its folder says.
    pub fn cuda(&self) -> Option<u32> {
        self.cuda
    }
}

/// What NIXL answered to a step, when that is an error.
fn check(code: Code, failed: impl FnOnce() -> String) -> Result<(), GpuError> {
    if code == SUCCESS {
        return Ok(());
    }
    Err(GpuError::Fabric { what: format!("{} (NIXL: {code}; its own words are in the log of the worker)", failed()) })
}

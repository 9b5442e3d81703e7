//! libcuda's functions, and its codes as errors. Decides nothing else.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::sync::OnceLock;

use super::GpuError;
use super::library::{functions, open};
use weightsync_core::protocol::worker::{IpcHandle, Opaque};

pub(super) type Code = c_int;
pub(super) type Address = u64;
pub(super) type Handle = *mut c_void;

pub(super) const SUCCESS: Code = 0;
pub(super) const OUT_OF_MEMORY: Code = 2;
pub(super) const NOT_READY: Code = 600;

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Uuid(pub [u8; 16]);

/// `CUipcMemHandle` and `CUipcEventHandle`; both travel by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Ipc(pub [c_char; 64]);

pub(super) fn to_ipc(handle: &IpcHandle) -> Ipc {
    Ipc(handle.0.map(|byte| c_char::from_ne_bytes([byte])))
}

pub(super) fn from_ipc(handle: Ipc) -> IpcHandle {
    Opaque(handle.0.map(|byte| byte.to_ne_bytes()[0]))
}

functions! {
    /// libcuda (cuda.h of CUDA 12; the names with `_v2` are those that 11.4 to 13.x export).
    struct Driver {
        needed {
            init = "cuInit" fn(c_uint) -> Code;
            driver_get_version = "cuDriverGetVersion" fn(*mut c_int) -> Code;
            get_error_name = "cuGetErrorName" fn(Code, *mut *const c_char) -> Code;
            get_error_string = "cuGetErrorString" fn(Code, *mut *const c_char) -> Code;
            device_get_count = "cuDeviceGetCount" fn(*mut c_int) -> Code;
            device_get = "cuDeviceGet" fn(*mut c_int, c_int) -> Code;
            device_get_name = "cuDeviceGetName" fn(*mut c_char, c_int, c_int) -> Code;
            device_get_uuid = "cuDeviceGetUuid_v2" fn(*mut Uuid, c_int) -> Code;
            device_get_bus = "cuDeviceGetPCIBusId" fn(*mut c_char, c_int, c_int) -> Code;
            device_total_mem = "cuDeviceTotalMem_v2" fn(*mut usize, c_int) -> Code;
            device_can_access_peer = "cuDeviceCanAccessPeer" fn(*mut c_int, c_int, c_int) -> Code;
            device_get_p2p_attribute = "cuDeviceGetP2PAttribute" fn(*mut c_int, c_int, c_int, c_int) -> Code;
            primary_context_retain = "cuDevicePrimaryCtxRetain" fn(*mut Handle, c_int) -> Code;
            context_set_current = "cuCtxSetCurrent" fn(Handle) -> Code;
            mem_get_info = "cuMemGetInfo_v2" fn(*mut usize, *mut usize) -> Code;
            mem_alloc = "cuMemAlloc_v2" fn(*mut Address, usize) -> Code;
            mem_free = "cuMemFree_v2" fn(Address) -> Code;
            mem_get_address_range = "cuMemGetAddressRange_v2" fn(*mut Address, *mut usize, Address) -> Code;
            mem_host_alloc = "cuMemHostAlloc" fn(*mut *mut c_void, usize, c_uint) -> Code;
            mem_free_host = "cuMemFreeHost" fn(*mut c_void) -> Code;
            mem_host_register = "cuMemHostRegister_v2" fn(*mut c_void, usize, c_uint) -> Code;
            mem_host_unregister = "cuMemHostUnregister" fn(*mut c_void) -> Code;
            memcpy_host_to_device = "cuMemcpyHtoDAsync_v2" fn(Address, *const c_void, usize, Handle) -> Code;
            memcpy_device_to_host = "cuMemcpyDtoHAsync_v2" fn(*mut c_void, Address, usize, Handle) -> Code;
            memcpy_device_to_device = "cuMemcpyDtoDAsync_v2" fn(Address, Address, usize, Handle) -> Code;
            memset_8 = "cuMemsetD8Async" fn(Address, u8, usize, Handle) -> Code;
            stream_create = "cuStreamCreateWithPriority" fn(*mut Handle, c_uint, c_int) -> Code;
            stream_destroy = "cuStreamDestroy_v2" fn(Handle) -> Code;
            stream_wait_event = "cuStreamWaitEvent" fn(Handle, Handle, c_uint) -> Code;
            event_create = "cuEventCreate" fn(*mut Handle, c_uint) -> Code;
            event_record = "cuEventRecord" fn(Handle, Handle) -> Code;
            event_query = "cuEventQuery" fn(Handle) -> Code;
            event_destroy = "cuEventDestroy_v2" fn(Handle) -> Code;
            ipc_get_mem_handle = "cuIpcGetMemHandle" fn(*mut Ipc, Address) -> Code;
            ipc_open_mem_handle = "cuIpcOpenMemHandle_v2" fn(*mut Address, Ipc, c_uint) -> Code;
            ipc_close_mem_handle = "cuIpcCloseMemHandle" fn(Address) -> Code;
            ipc_get_event_handle = "cuIpcGetEventHandle" fn(*mut Ipc, Handle) -> Code;
            ipc_open_event_handle = "cuIpcOpenEventHandle" fn(*mut Handle, Ipc) -> Code;
            module_load_data = "cuModuleLoadData" fn(*mut Handle, *const c_void) -> Code;
            module_get_function = "cuModuleGetFunction" fn(*mut Handle, Handle, *const c_char) -> Code;
            launch_kernel = "cuLaunchKernel" fn(Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void) -> Code;
        }
        optional {}
    }
}

/// Loads the driver once and starts it. Later calls give the same answer.
pub(super) fn driver() -> Result<&'static Driver, GpuError> {
    static DRIVER: OnceLock<Result<Driver, GpuError>> = OnceLock::new();
    DRIVER.get_or_init(start).as_ref().map_err(Clone::clone)
}

/// The CUDA version that the driver speaks, e.g. 13000; none where there is no driver.
pub(super) fn version() -> Option<u32> {
    let driver = driver().ok()?;
    let mut version = 0;
    // SAFETY: writes one integer.
    driver.check("cuDriverGetVersion", unsafe { (driver.driver_get_version)(&raw mut version) }).ok()?;
    u32::try_from(version).ok()
}

fn start() -> Result<Driver, GpuError> {
    let library = open(Path::new("libcuda.so.1")).map_err(|cause| GpuError::NoDriver { cause })?;
    let driver = Driver::find(&library).map_err(|cause| GpuError::NoDriver { cause: format!("libcuda.so.1: {cause}: it is too old") })?;
    library.keep();
    // SAFETY: the flags must be 0.
    let code = unsafe { (driver.init)(0) };
    match driver.check("cuInit", code) {
        Ok(()) => Ok(driver),
        // cuda.h: 100 is CUDA_ERROR_NO_DEVICE.
        Err(error) if code == 100 => Err(GpuError::NoGpu { cause: format!("no GPU is visible to this process: {error}") }),
        Err(error) => Err(GpuError::NoDriver { cause: error.to_string() }),
    }
}

impl Driver {
    /// A code as an error, with the driver's words.
    pub(super) fn check(&self, function: &'static str, code: Code) -> Result<(), GpuError> {
        if code == SUCCESS {
            return Ok(());
        }
        let words = |get: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text = std::ptr::null();
            // SAFETY: the driver writes a pointer to a constant text, or null for a code that it does not know.
            unsafe {
                if get(code, &raw mut text) != SUCCESS || text.is_null() {
                    return String::new();
                }
                CStr::from_ptr(text).to_string_lossy().into_owned()
            }
        };
        Err(GpuError::Cuda { function, code, name: words(self.get_error_name), text: words(self.get_error_string) })
    }
}

//! One agent of NIXL with the backend UCX: one region of memory that peers may read, the peers whose memory goes into it, and READs under way.
//!
//! Why one agent a region: UCX over TCP copies for a reader any address that the reader names, and looks at no key (UCX 1.23 with NIXL 1.5.1, run: a READ
//! of memory that had been deregistered gave its bytes, and one of unmapped memory ended the process that was read). With its agent a region's
//! sockets and queues go too, so that nothing reads it any more whatever the transport. An agent stays in the thread that made it.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr::{null, null_mut};
use std::rc::Rc;

use rustix::process::{Resource, getrlimit};
use weightsync_core::protocol::worker::{FabricMetadata, RemotePlace};

use super::{Config, DRAM, IN_PROGRESS, Nixl, PLUGIN, READ, Raw, SUCCESS, SYNC_RW, VRAM, check};
use crate::{GpuError, Memory, Span};

/// The progress thread sleeps until something happens, at most this long: 0 would keep a core busy.
const PROGRESS_US: u64 = 1000;

/// What the backend gets. Without peer error handling a READ from a peer that died would never end.
const PARAMETERS: [(&CStr, &CStr); 1] = [(c"ucx_error_handling_mode", c"peer")];

/// An agent of NIXL. Dropping it closes everything that it has, once no [`Transfer`] of it is left.
pub struct NixlAgent(Rc<Inner>);

struct Inner {
    nixl: &'static Nixl,
    agent: Raw,
    backend: Raw,
    options: Raw,
    registered: Option<Registered>,
}

struct Registered {
    list: Raw,
    _memory: Memory,
}

impl NixlAgent {
    /// Starts an agent of that name, which no other may have that its peers know.
    pub fn start(nixl: &'static Nixl, name: &str) -> Result<Self, GpuError> {
        let name = CString::new(name).map_err(|_| GpuError::Invalid { what: "the name of a fabric holds a zero byte".into() })?;
        let config = Config {
            progress_thread: true,
            listen_thread: false,
            listen_port: 0,
            thread_sync: SYNC_RW,
            workers: 1,
            progress_delay_us: PROGRESS_US,
            listen_delay_us: PROGRESS_US,
            telemetry: false,
        };
        let mut inner = Inner { nixl, agent: null_mut(), backend: null_mut(), options: null_mut(), registered: None };
        let functions = &nixl.functions;
        // SAFETY: name and configuration live through the call; writes one pointer.
        let code = unsafe { (functions.create_agent)(name.as_ptr(), &raw const config, &raw mut inner.agent) };
        check(code, || "NIXL makes no agent".into())?;
        let mut parameters = null_mut();
        // SAFETY: writes one pointer.
        check(unsafe { (functions.create_params)(&raw mut parameters) }, || "NIXL makes no parameters".into())?;
        // SAFETY: texts that end with a zero byte, which are copied; the parameters are alive until they are destroyed below.
        let created = unsafe {
            for (key, value) in PARAMETERS {
                let _ = (functions.params_add)(parameters, key.as_ptr(), value.as_ptr());
            }
            let created = (functions.create_backend)(inner.agent, PLUGIN.as_ptr(), parameters, &raw mut inner.backend);
            let _ = (functions.destroy_params)(parameters);
            created
        };
        check(created, || {
            "NIXL's backend UCX does not start: look whether the listed transports and devices exist here (ucx_info -d), and whether they can \
             report the end of a peer, which posix and sysv cannot"
                .into()
        })?;
        // SAFETY: writes one pointer; then both are alive.
        let options = unsafe {
            match (functions.create_opt_args)(&raw mut inner.options) {
                SUCCESS => (functions.opt_args_add_backend)(inner.options, inner.backend),
                code => code,
            }
        };
        check(options, || "NIXL takes no options".into())?;
        Ok(Self(Rc::new(inner)))
    }

    /// Parameters that the backend gets in addition to UCX's environment.
    pub fn parameters() -> BTreeMap<String, String> {
        PARAMETERS.iter().map(|(key, value)| (key.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())).collect()
    }

    /// Kinds of memory that the plugin takes, in NIXL's words. An error when there is no such plugin.
    pub fn memory_kinds(&self) -> Result<Vec<String>, GpuError> {
        let functions = &self.0.nixl.functions;
        let (mut list, mut parameters, mut count) = (null_mut(), null_mut(), 0);
        // SAFETY: writes two pointers, which are ours then.
        let code = unsafe { (functions.get_plugin_params)(self.0.agent, PLUGIN.as_ptr(), &raw mut list, &raw mut parameters) };
        check(code, || "NIXL says nothing of its plugin UCX".into())?;
        // SAFETY: the list is alive until it is destroyed; each call writes one value; the texts are constants of the library.
        unsafe {
            let _ = (functions.destroy_params)(parameters);
            let _ = (functions.mem_list_size)(list, &raw mut count);
            let kinds = (0..count).filter_map(|index| {
                let (mut kind, mut text) = (0, null());
                let known = (functions.mem_list_get)(list, index, &raw mut kind) == SUCCESS
                    && (functions.mem_type_to_string)(kind, &raw mut text) == SUCCESS
                    && !text.is_null();
                known.then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
            });
            let kinds = kinds.collect();
            let _ = (functions.destroy_mem_list)(list);
            Ok(kinds)
        }
    }

    /// Registers memory, and gives what peers need to read it. Once in the agent's life. `device` is the ordinal of the GPU that the memory is on, which
    /// is current in this thread; `driver` the CUDA version that its driver speaks.
    pub fn register(&mut self, memory: &Memory, device: Option<u32>, driver: Option<u32>) -> Result<FabricMetadata, GpuError> {
        let inner = Rc::get_mut(&mut self.0).filter(|inner| inner.registered.is_none());
        let inner = inner.ok_or_else(|| GpuError::Invalid { what: "this agent of NIXL has a region".into() })?;
        let (nixl, functions) = (inner.nixl, &inner.nixl.functions);
        let length = usize::try_from(memory.bytes()).unwrap_or(0);
        let address = usize::try_from(memory.address()).unwrap_or(0);
        let mut list = null_mut();
        // SAFETY: writes one pointer.
        let code = unsafe { (functions.create_reg_dlist)(kind(device), &raw mut list) };
        check(code, || "NIXL makes no list of memory".into())?;
        // SAFETY: the list is alive, and so is the memory: who registered keeps it until it is deregistered.
        let code = unsafe {
            let _ = (functions.reg_dlist_add_desc)(list, address, length, device.unwrap_or(0).into(), null(), 0);
            (functions.register_mem)(inner.agent, list, inner.options)
        };
        if code != SUCCESS {
            // SAFETY: made above, and nothing refers to it.
            let _ = unsafe { (functions.destroy_reg_dlist)(list) };
            check(code, || refused(memory.bytes(), device.is_some(), nixl.cuda, driver, &nixl.path))?;
        }
        inner.registered = Some(Registered { list, _memory: memory.clone() });
        inner.metadata()
    }

    /// Takes a peer's metadata, and gives the name in it.
    pub fn add_peer(&self, metadata: &FabricMetadata) -> Result<String, GpuError> {
        let (nixl, bytes) = (self.0.nixl, metadata.bytes());
        let mut name = null_mut();
        // SAFETY: the bytes live through the call; writes a pointer to a text that is ours to free.
        let code = unsafe { (nixl.functions.load_remote_md)(self.0.agent, bytes.as_ptr().cast(), bytes.len(), &raw mut name) };
        check(code, || {
            "NIXL takes no metadata of this peer: the peer is gone, or none of its transports is listed here too, or it has another NIXL"
                .into()
        })?;
        if name.is_null() {
            return Err(GpuError::Fabric { what: "NIXL names no peer".into() });
        }
        // SAFETY: a text that ends with a zero byte, made by `strdup`.
        unsafe {
            let text = CStr::from_ptr(name).to_string_lossy().into_owned();
            libc::free(name.cast());
            Ok(text)
        }
    }

    /// Forgets a peer. No error when NIXL forgot it before, as it does when a peer's connection ends.
    pub fn remove_peer(&self, name: &str) {
        if let Ok(name) = CString::new(name) {
            // SAFETY: a text that ends with a zero byte.
            let _ = unsafe { (self.0.nixl.functions.invalidate_remote_md)(self.0.agent, name.as_ptr()) };
        }
    }

    /// Begins a READ from a peer into memory that this agent registered on `device`. The caller keeps `to` until the transfer has ended.
    pub fn read(&self, peer: &str, from: RemotePlace, to: &Span, device: Option<u32>) -> Result<Transfer, GpuError> {
        let (nixl, functions) = (self.0.nixl, &self.0.nixl.functions);
        let name = CString::new(peer).map_err(|_| GpuError::Invalid { what: "the name of a peer holds a zero byte".into() })?;
        let (local, remote) = (to.address().number(), from.address);
        let local = List::new(nixl, kind(device), local, to.length(), device.unwrap_or(0))?;
        let remote = List::new(nixl, kind(from.device), remote, to.length(), from.device.unwrap_or(0))?;
        let mut transfer = Transfer { inner: Rc::clone(&self.0), request: null_mut() };
        // SAFETY: lists and name live through the call, and are copied; writes one pointer.
        let code = unsafe {
            let (agent, options) = (self.0.agent, self.0.options);
            (functions.create_xfer_req)(agent, READ, local.list, remote.list, name.as_ptr(), &raw mut transfer.request, options)
        };
        check(code, || {
            let place = from.device.map_or_else(|| "host memory".into(), |gpu| format!("GPU {gpu}"));
            let (bytes, address) = (to.bytes(), from.address);
            format!(
                "the peer {peer} is gone, or has not registered the {bytes} bytes at {address:#x} of its {place}: ask it for its metadata again"
            )
        })?;
        // SAFETY: both are alive.
        let code = unsafe { (functions.post_xfer_req)(self.0.agent, transfer.request, self.0.options) };
        if code != IN_PROGRESS {
            check(code, || lost(peer))?;
        }
        Ok(transfer)
    }
}

impl Inner {
    fn metadata(&self) -> Result<FabricMetadata, GpuError> {
        let (mut data, mut length) = (null_mut(), 0);
        // SAFETY: writes a pointer to memory that is ours to free, and its length.
        let code = unsafe { (self.nixl.functions.get_local_md)(self.agent, &raw mut data, &raw mut length) };
        check(code, || "NIXL writes no metadata".into())?;
        if data.is_null() {
            return Err(GpuError::Fabric { what: "NIXL wrote no metadata".into() });
        }
        // SAFETY: NIXL gave that many bytes, made by `malloc`.
        let bytes = unsafe {
            let bytes = std::slice::from_raw_parts(data.cast::<u8>().cast_const(), length).to_vec();
            libc::free(data);
            bytes
        };
        let what = format!("NIXL wrote {length} bytes of metadata, more than peers take");
        FabricMetadata::new(bytes).ok_or(GpuError::Fabric { what })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let functions = &self.nixl.functions;
        // SAFETY: each was made by NIXL or is null, which is an error without use; no transfer of the agent is left, because each keeps it.
        unsafe {
            if let Some(Registered { list, .. }) = &self.registered {
                let _ = (functions.deregister_mem)(self.agent, *list, self.options);
                let _ = (functions.destroy_reg_dlist)(*list);
            }
            let _ = (functions.destroy_opt_args)(self.options);
            let _ = (functions.destroy_backend)(self.backend);
            let _ = (functions.destroy_agent)(self.agent);
        }
    }
}

/// A READ that was begun. Dropping it cancels it, but bytes may arrive until its agent is gone.
pub struct Transfer {
    inner: Rc<Inner>,
    request: *mut c_void,
}

impl Transfer {
    /// Whether all bytes are here.
    pub fn is_done(&self, peer: &str) -> Result<bool, GpuError> {
        let nixl = self.inner.nixl;
        // SAFETY: both are alive.
        match unsafe { (nixl.functions.get_xfer_status)(self.inner.agent, self.request) } {
            IN_PROGRESS => Ok(false),
            code => check(code, || lost(peer)).map(|()| true),
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        let functions = &self.inner.nixl.functions;
        // SAFETY: the request is NIXL's, or null, which is an error without use. One that NIXL does not release is kept.
        unsafe {
            if (functions.release_xfer_req)(self.inner.agent, self.request) == SUCCESS {
                let _ = (functions.destroy_xfer_req)(self.request);
            }
        }
    }
}

/// A list of one descriptor.
struct List {
    nixl: &'static Nixl,
    list: Raw,
}

impl List {
    fn new(nixl: &'static Nixl, kind: c_int, address: u64, length: usize, device: u32) -> Result<Self, GpuError> {
        let mut list = null_mut();
        // SAFETY: writes one pointer.
        check(unsafe { (nixl.functions.create_xfer_dlist)(kind, &raw mut list) }, || "NIXL makes no list".into())?;
        let made = Self { nixl, list };
        let address = usize::try_from(address).unwrap_or(0);
        // SAFETY: the list is alive; NIXL compares the range with what is registered before it uses it.
        let code = unsafe { (nixl.functions.xfer_dlist_add_desc)(list, address, length, device.into()) };
        check(code, || "NIXL takes no range".into())?;
        Ok(made)
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: made by NIXL, which copies it where it takes it.
        let _ = unsafe { (self.nixl.functions.destroy_xfer_dlist)(self.list) };
    }
}

fn kind(device: Option<u32>) -> c_int {
    if device.is_some() { VRAM } else { DRAM }
}

fn lost(peer: &str) -> String {
    format!("the peer {peer} is gone, or cannot be reached over the listed transports")
}

/// Why NIXL may refuse memory, and what to change.
fn refused(bytes: u64, on_gpu: bool, built_for: Option<u32>, driver: Option<u32>, path: &str) -> String {
    let what = format!("NIXL does not register {bytes} bytes of {} memory", if on_gpu { "GPU" } else { "host" });
    let driver = driver.map(|version| version / 1000);
    if let (true, Some(built_for), Some(driver)) = (on_gpu, built_for, driver)
        && built_for != driver
    {
        return format!("{what}: {path} was built for CUDA {built_for}, and the driver is of CUDA {driver}: install nixl-cu{driver}");
    }
    let transports = on_gpu.then(|| {
        "list cuda_copy and cuda_ipc among the transports, and look whether the CUDA runtime that this NIXL was built for is installed"
            .to_owned()
    });
    let locked = getrlimit(Resource::Memlock).current.map(|limit| {
        format!(
            "this process may lock {limit} bytes of memory (RLIMIT_MEMLOCK): where the transport is RDMA, raise the limit (ulimit -l) or add \
             IPC_LOCK"
        )
    });
    std::iter::once(what).chain(transports).chain(locked).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests;
